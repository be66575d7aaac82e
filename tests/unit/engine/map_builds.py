"""Builds the programs of override maps as an engine does, and runs them: results as arrays, or the error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import gradrule as gr
from gradrule._builder.rules import param_value
from gradrule._messages.request_messages import program_spec
from gradrule.v1 import evaluate_pb2
from gradrule_server.engine.build import build
from gradrule_server.engine.program import BuiltProgram
from gradrule_server.errors import GradruleError
from gradrule_server.graphs import Limits
from gradrule_server.link.messages import CallShape
from gradrule_server.preparation.prepare import Prepared, prepare
from gradrule_server.preparation.references import ResolvedRule
from tests.service.map_sequences import Map, same_bits
from tests.stores import no_blobs
from tests.unit.engine.building import NAMESPACES, Builtins

_DERIVATIVES = {
    "jacobian": evaluate_pb2.DERIVATIVE_JACOBIAN,
    "hvp": evaluate_pb2.DERIVATIVE_HVP,
    "jvp": evaluate_pb2.DERIVATIVE_JVP,
}


class Rules(Builtins):
    """Resolves rules of the catalogue and TensorFlow's own gradients."""

    def resolve(self, name: str) -> ResolvedRule:
        """Returns the rule. Raises `KeyError` for an unknown name."""
        return super().resolve(name.removeprefix("builtin/"))


@dataclass
class Outcome:
    """What a program gives: errors by reason, message and node, or results and what the build says of itself."""

    errors: list[Any]
    results: list[Any]
    description: dict[str, Any]

    def differences(self, other: Outcome) -> list[str]:
        """Returns what differs, bit by bit; nothing if all is equal."""
        if self.errors != other.errors:
            return [f"errors {self.errors} and {other.errors}"]
        found = [
            f"{name}: {value} and {other.description[name]}"
            for name, value in self.description.items()
            if value != other.description[name]
        ]
        if len(self.results) != len(other.results):
            return [*found, f"{len(self.results)} and {len(other.results)} results"]
        for index, (one, two) in enumerate(zip(self.results, other.results, strict=True)):
            if not same_bits(one, two):
                found.append(f"result {index}: {one} and {two}")
        return found


def prepared_map(graph: gr.Graph, item: Map) -> Prepared:
    """Prepares the program of a map. Raises `GradruleError`."""
    spec, _ = program_spec(graph, item.arguments)
    shape = CallShape(
        grad_ys=frozenset(item.grad_ys),
        derivative=_DERIVATIVES.get(item.kind, evaluate_pb2.DERIVATIVE_UNSPECIFIED),
        tangents=frozenset(item.vectors if item.kind == "jvp" else ()),
        vectors=frozenset(item.vectors if item.kind == "hvp" else ()),
        stacked_grad_ys=item.kind == "stacked",
    )
    return prepare(spec, shape, Rules(), Limits(), no_blobs(), next(NAMESPACES))


def outcome(graph: gr.Graph, feeds: dict[str, Any], item: Map) -> Outcome:
    """Builds the program of a map and runs it."""
    try:
        program = prepared_map(graph, item)
        built = build(program.request)
        results = [np.asarray(result) for result in built.run(_arrays(program, built, feeds, item))]
    except GradruleError as cause:
        return _refused(cause)
    return Outcome([], results, description(built))


def _refused(cause: GradruleError) -> Outcome:
    return Outcome([(one.reason, one.message, one.node) for one in cause.findings], [], {})


def _arrays(program: Prepared, built: BuiltProgram, feeds: dict[str, Any], item: Map) -> list[Any]:
    given = {
        label: {name: param_value(name, value) for name, value in values.items()}
        for label, values in item.params.items()
    }
    settings = program.table.params.call_settings(given, range(1000))
    values = {(one.rule, one.name): one.value.number for one in settings}
    return [
        *(feeds[one.name] for one in built.inputs),
        *(item.grad_ys[one.name] for one in built.grad_ys),
        *(item.vectors[one.name] for one in built.directions),
        *(np.float64(values[one.rule, one.name]) for one in built.params),
    ]


def description(built: BuiltProgram) -> dict[str, Any]:
    """Returns what a build says of itself: statuses, nodes with default gradients, layout, types and shapes."""
    return {
        "statuses": built.statuses,
        "default_gradient_nodes": built.default_gradient_nodes,
        "without": [one.SerializeToString() for one in built.without_gradient],
        "made": built.made,
        "layout": built.layout,
        "small": built.small,
        "unused": built.unused,
        "specs": {name: [one.SerializeToString() for one in specs] for name, specs in built.specs.items()},
    }
