"""Makes graphs that are equal in every name and differ in numbers: their results identify their caller."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import gradrule as gr
from gradrule.v1 import graph_pb2, tensor_pb2
from tests.service import raw
from tests.service.graph_defs import load_graph

RULE = "SharedRule"
PROGRAM = "shared-program"
LABEL = "SharedLabel"
_FLOAT = graph_pb2.AttrValue(type=tensor_pb2.DT_FLOAT)
_SCALAR = graph_pb2.AttrValue(shape=tensor_pb2.TensorShape())


@dataclass(frozen=True)
class Caller:
    """Holds three numbers that no other caller has, and an optional token."""

    number: int
    token: str | None = None

    @property
    def factor(self) -> float:
        """Returns the factor of its function."""
        return 1.0 + self.number

    @property
    def weight(self) -> float:
        """Returns its variable's initial value."""
        return 1000.0 + self.number

    @property
    def slope(self) -> float:
        """Returns the factor of its rule."""
        return 3.0 + 2.0 * self.number

    @property
    def expression(self) -> str:
        """Returns its rule."""
        return f"{self.slope} * dy"

    def output(self, value: float, weight: float | None = None) -> float:
        """Returns y for x = value."""
        return value * self.factor * (self.weight if weight is None else weight)

    def gradient(self, grad_y: float = 1.0) -> float:
        """Returns dy/dx under the caller's rule."""
        return grad_y * self.slope * self.factor * self.weight


@cache
def graph(caller: Caller) -> gr.Graph:
    """Makes y = shared(identity(x)) · w, where `shared` multiplies by the caller's factor; `more` adds 1 to w."""
    function = graph_pb2.Function(
        signature=graph_pb2.OpSignature(
            name="shared",
            input_arg=[graph_pb2.OpSignature.ArgDef(name="v", type=tensor_pb2.DT_FLOAT)],
            output_arg=[graph_pb2.OpSignature.ArgDef(name="out", type=tensor_pb2.DT_FLOAT)],
        ),
        node_def=[
            _constant("factor", caller.factor),
            raw.node("product", "Mul", "v", "factor:output:0", T=_FLOAT),
        ],
        ret={"out": "product:z:0"},
    )
    shared_name = graph_pb2.AttrValue(s=b"w")
    message = raw.graph(
        raw.placeholder(),
        raw.node("through", "Identity", "x", T=_FLOAT),
        raw.node("call", "shared", "through"),
        raw.node("w", "VarHandleOp", dtype=_FLOAT, shape=_SCALAR, shared_name=shared_name),
        _constant("start", caller.weight),
        raw.node("w/Assign", "AssignVariableOp", "w", "start", dtype=_FLOAT),
        raw.node("w/Read", "ReadVariableOp", "w", dtype=_FLOAT),
        raw.node("y", "Mul", "call", "w/Read", T=_FLOAT),
        _constant("one", 1.0),
        raw.node("more", "AssignAddVariableOp", "w", "one", dtype=_FLOAT),
        raw.node("w/After", "ReadVariableOp", "w", "^more", dtype=_FLOAT),
        functions=[function],
    )
    return load_graph(message)


def _constant(name: str, value: float) -> graph_pb2.Node:
    return raw.node(name, "Const", value=graph_pb2.AttrValue(tensor=raw.tensor(value)), dtype=_FLOAT)


def difference(what: str, caller: Caller, got: Any, wanted: float, callers: int) -> str:
    """Returns what is wrong and whose number it is; empty if the values agree."""
    value = float(np.asarray(got).ravel()[0])
    if np.isclose(value, wanted, rtol=1e-5):
        return ""
    ratio = value / wanted if wanted else 0.0
    owners = [
        other
        for other in (Caller(number) for number in range(callers) if number != caller.number)
        if any(
            np.isclose(ratio, theirs / own, rtol=1e-5)
            for theirs, own in (
                (other.factor, caller.factor),
                (other.weight, caller.weight),
                (other.slope, caller.slope),
                (other.output(1.0), caller.output(1.0)),
                (other.gradient(), caller.gradient()),
            )
        )
    ]
    whose = f", which is caller {owners[0].number}'s" if owners else ""
    return f"caller {caller.number}: {what} is {value}, not {wanted}{whose}"
