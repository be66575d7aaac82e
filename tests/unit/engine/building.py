"""Builds programs in this process, as an engine does."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

import gradrule as gr
from gradrule.v1 import override_pb2, program_pb2
from gradrule_server.engine.build import build
from gradrule_server.engine.program import BuiltProgram
from gradrule_server.graphs import Limits
from gradrule_server.link.messages import CallShape
from gradrule_server.link.v1 import link_pb2
from gradrule_server.preparation.prepare import Prepared, prepare
from gradrule_server.preparation.references import ResolvedRule
from gradrule_server.rules.catalogue import BUILTINS
from tests.stores import no_blobs

# TensorFlow's functions have names for the whole process, so programs that are built in one must not share any.
NAMESPACES = map("gr{}".format, itertools.count())


class Builtins:
    """Resolves rules of the catalogue, without a registry."""

    def fetch(self, names: Iterable[str]) -> None:
        """Does nothing: all rules are known."""

    def resolve(self, name: str) -> ResolvedRule:
        """Returns the rule. Raises `KeyError` for an unknown name."""
        return ResolvedRule(name, BUILTINS[name].content)


def prepared(
    graph: gr.Graph,
    overrides: Mapping[str, str] | None = None,
    call: CallShape | None = None,
    limits: Limits | None = None,
    **derivative: Any,
) -> Prepared:
    """Prepares a program that fetches y. `derivative`: `vjp=Vjp(…)` or another kind of derivative."""
    spec = program_pb2.ProgramSpec(fetches=["y"], **derivative)
    spec.graph.serialized = graph.to_bytes()
    spec.overrides.extend(
        override_pb2.GradientOverride(rule=rule, selector=override_pb2.Selector(op_type=op_type))
        for op_type, rule in (overrides or {}).items()
    )
    return prepare(spec, call or CallShape(), Builtins(), limits or Limits(), no_blobs(), next(NAMESPACES))


def split(program: Prepared) -> BuiltProgram:
    """Returns the program, built in two parts."""
    request = link_pb2.CompileRequest()
    request.CopyFrom(program.request)
    request.split = True
    return build(request)


def arguments(program: Prepared, built: BuiltProgram, feeds: Mapping[str, Any]) -> list[tf.Tensor]:
    """Returns the arguments of the built function: feeds, then the params of the overrides."""
    values = {(item.rule, item.name): item.value.number for item in program.table.params.call_settings({}, range(1000))}
    fed = [tf.constant(feeds[item.name], item.dtype) for item in built.inputs]
    return fed + [tf.constant(values[item.rule, item.name], tf.float64) for item in built.params]
