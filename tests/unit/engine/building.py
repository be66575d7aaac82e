"""Builds programs in this process, as an engine does."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

import gradrule as gr
from gradrule.common import op_definitions
from gradrule.v1 import override_pb2, program_pb2
from gradrule_server.engine.build import build
from gradrule_server.engine.derivatives import SPARSE, split_tensors
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
    """Resolves rules of the catalogue and names of op types, without a registry."""

    def fetch(self, names: Iterable[str]) -> None:
        """Does nothing: all rules are known."""

    def resolve(self, name: str) -> ResolvedRule:
        """Returns the rule. Raises `KeyError` for an unknown name."""
        return ResolvedRule(name, None if op_definitions.find(name) else BUILTINS[name].content)


def prepared(
    graph: gr.Graph,
    overrides: Mapping[str, str] | None = None,
    call: CallShape | None = None,
    limits: Limits | None = None,
    **derivative: Any,
) -> Prepared:
    """Prepares a program that fetches y. `derivative`: `vjp=Vjp(…)` or another kind of derivative.

    `overrides`: by op type, the name of a rule or an expression.
    """
    spec = program_pb2.ProgramSpec(fetches=["y"], **derivative)
    spec.graph.serialized = graph.to_bytes()
    for op_type, rule in (overrides or {}).items():
        override = spec.overrides.add(selector=override_pb2.Selector(op_type=op_type))
        if rule.isidentifier():
            override.rule = rule
        else:
            override.definition.expression = rule
    return prepare(spec, call or CallShape(), Builtins(), limits or Limits(), no_blobs(), next(NAMESPACES))


def split(program: Prepared) -> BuiltProgram:
    """Returns the program, built in two parts."""
    request = link_pb2.CompileRequest()
    request.CopyFrom(program.request)
    request.split = True
    return build(request)


def run_forward(built: BuiltProgram, arguments: Sequence[Any]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Runs the forward part of a program in two parts; returns the outputs, and the tensors that it saves."""
    results = built.call.on_device(arguments)
    return results[: len(built.outputs)], results[len(built.outputs) :]


def arguments(program: Prepared, built: BuiltProgram, feeds: Mapping[str, Any]) -> list[tf.Tensor]:
    """Returns the arguments of the built function: feeds, then the params of the overrides."""
    values = {(item.rule, item.name): item.value.number for item in program.table.params.call_settings({}, range(1000))}
    fed = [tf.constant(feeds[item.name], item.dtype) for item in built.inputs]
    return fed + [tf.constant(values[item.rule, item.name], tf.float64) for item in built.params]


def differentiate(
    graph: gr.Graph, feeds: Mapping[str, Any], grad_y: Any, overrides: Mapping[str, str] | None = None
) -> tuple[Any, dict[str, Any]]:
    """Returns y, and the gradient of y by each feed, pulled back from `grad_y`; None for an x without one."""
    vjp = program_pb2.Vjp(ys=["y"], xs=list(feeds))
    program = prepared(graph, overrides, CallShape(grad_ys=frozenset({"y"})), vjp=vjp)
    built = build(program.request)
    given = arguments(program, built, feeds)
    count = len(built.inputs)
    y, *rest = built.function(*given[:count], tf.constant(grad_y, built.grad_ys[0].dtype), *given[count:])
    found: dict[str, Any] = {}
    for (name,), form, tensors in split_tensors(built.layout, rest):
        slices = tf.IndexedSlices(*tensors) if form == SPARSE else None
        found[name] = (
            tf.convert_to_tensor(slices).numpy() if slices is not None else tensors[0].numpy() if tensors else None
        )
    return y.numpy(), found
