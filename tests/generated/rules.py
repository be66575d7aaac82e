"""Rules of generated overrides: the text for the server, and the same in Python for the interpreter.

Every rule here turns zeros into zeros. A loop or branch gives zeros where nothing was connected, and the interpreter,
which runs one op after the other, has no gradient there at all: for such rules only the two are one computation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradrule as gr
from gradrule.v1 import graph_pb2
from tests.generated.tape import Gradients, Value, absolute, as_value, cast, cos, sum_to, total, where

REGISTERED = "GeneratedHalfWindow"
REGISTERED_EXPRESSION = "where(abs(x) <= 1.5, 0.5 * dy, 0)"


@dataclass
class Site:
    """Where a rule is asked. own: the op's own gradients, zeros where there are none."""

    xs: Sequence[Value]
    ys: Sequence[Value]
    dys: Sequence[Value]
    own: Callable[[], list[Value]]
    params: Mapping[str, float]

    def each(self, formula: Callable[[int], Value]) -> Gradients:
        return [formula(index) if x.is_float else None for index, x in enumerate(self.xs)]

    def first(self, value: Value) -> Gradients:
        return [value, *[None] * (len(self.xs) - 1)]

    def dy_of(self, index: int) -> Value:
        """The output's gradient that `dy` means in `each`."""
        return self.dys[index] if len(self.ys) == len(self.xs) else self.dys[0]


@dataclass(frozen=True)
class Rule:
    """text: an expression, a rule's name, or a description of a graph. kind: inline, name, graph or default.

    arity: "one" (one input of a float type), "two" (two of the shape of the output), "any" (any number and shapes),
    "like" (any number, the first of the output's type and shape), "same" (as many outputs as inputs, shape by shape).
    per_sample: whether examples on axis 0 keep apart.
    """

    text: str
    python: Callable[[Site], Gradients]
    arity: str = "one"
    kind: str = "inline"
    params: Mapping[str, float] = field(default_factory=dict)
    per_sample: bool = True

    @property
    def name(self) -> str:
        """As resolutions name it."""
        return "inline" if self.kind in ("inline", "graph") else self.text

    @property
    def is_default(self) -> bool:
        return self.kind == "default"

    def served(self) -> Any:
        """As the client takes it."""
        if self.kind == "graph":
            return gr.Rule(graph=_cosine_graph())
        return gr.Rule(self.text, params=dict.fromkeys(self.params) or None) if self.kind == "inline" else self.text


def _cosine_graph() -> bytes:
    """dy * cos(x) for any element type: no node names one."""
    graph = graph_pb2.Graph()
    graph.node.add(name="x", op="Placeholder")
    graph.node.add(name="dy", op="Placeholder")
    graph.node.add(name="cos", op="Cos", input=["x"])
    graph.node.add(name="dx", op="Mul", input=["dy", "cos"])
    return graph.SerializeToString()


def _one(formula: Callable[[Site, Value, Value], Value]) -> Callable[[Site], Gradients]:
    def rule(site: Site) -> Gradients:
        index = next(index for index, x in enumerate(site.xs) if x.is_float)
        found: Gradients = [None] * len(site.xs)
        found[index] = formula(site, site.xs[index], site.dys[0])
        return found

    return rule


def _window(half: float, factor: float) -> Callable[[Site], Gradients]:
    return _one(lambda site, x, dy: where(abs(x.data) <= half, factor * dy, as_value(0 * x.data)))


def _mean(x: Value) -> Value:
    return total(x) / x.data.size


def _same_type(value: float, like: Value) -> Value:
    return as_value(like.data.dtype.type(value))


RULES = [
    Rule("5 * dy", _one(lambda site, x, dy: 5 * dy)),
    Rule("where(abs(x) <= 1, dy, 0)", _window(1.0, 1.0)),
    Rule(
        "where(x > 0 and dy > 0, dy, 0)",
        _one(lambda site, x, dy: where((x.data > 0) & (dy.data > 0), dy, as_value(0 * x.data))),
    ),
    Rule("dy * y - dy", _one(lambda site, x, dy: dy * site.ys[0] - dy)),
    Rule("0.5 * default", _one(lambda site, x, dy: 0.5 * site.own()[next(i for i, v in enumerate(site.xs) if v is x)])),
    Rule("dy * mean(x)", _one(lambda site, x, dy: dy * _mean(x))),
    Rule(
        "dy / (1 + sum(dy * dy, axis='sample'))",
        _one(lambda site, x, dy: dy / (1 + total(dy * dy, 1, keepdims=True))),
    ),
    Rule("dy / (1 + sum(dy * dy))", _one(lambda site, x, dy: dy / (1 + total(dy * dy))), per_sample=False),
    Rule(
        "alpha * dy",
        _one(lambda site, x, dy: _same_type(site.params["alpha"], dy) * dy),
        params={"alpha": -0.75},
    ),
    Rule(
        "gain * dy / (beta + abs(x))",
        _one(
            lambda site, x, dy: (
                _same_type(site.params["gain"], dy) * dy / (_same_type(site.params["beta"], x) + absolute(x))
            )
        ),
        params={"beta": 1.25, "gain": 2.0},
    ),
    Rule(REGISTERED, _window(1.5, 0.5), kind="name"),
    Rule("Identity", _one(lambda site, x, dy: dy), kind="name"),
    Rule("dy * cos(x), as a graph", _one(lambda site, x, dy: dy * cos(x)), kind="graph", per_sample=False),
    Rule("Tanh", _one(lambda site, x, dy: dy * (1 - site.ys[0] * site.ys[0])), kind="name"),
    Rule("(dy * x1, dy * x0)", lambda site: [site.dys[0] * site.xs[1], site.dys[0] * site.xs[0]], "two"),
    Rule("(None, dy * x0)", lambda site: [None, site.dys[0] * site.xs[0]], "two"),
    Rule(
        "(gain * dy, -dy)",
        lambda site: [_same_type(site.params["gain"], site.dys[0]) * site.dys[0], -site.dys[0]],
        "two",
        params={"gain": 1.5},
    ),
    Rule("(sum(dy) * x0, dy)", lambda site: [total(site.dys[0]) * site.xs[0], site.dys[0]], "two", per_sample=False),
    Rule("each(0.5 * default)", lambda site: site.each(lambda index: 0.5 * site.own()[index]), "any"),
    Rule("each(default * 3)", lambda site: site.each(lambda index: site.own()[index] * 3), "any"),
    Rule("first(default - 0.25 * default)", lambda site: site.first(0.75 * site.own()[0]), "like"),
    Rule("first(2 * dy0)", lambda site: site.first(2 * site.dys[0]), "like"),
    Rule("first(dy0 * x)", lambda site: site.first(site.dys[0] * site.xs[0]), "like"),
    Rule("each(dy * x)", lambda site: site.each(lambda index: site.dy_of(index) * site.xs[index]), "same"),
    Rule("default", lambda site: list(site.own()), "any", kind="default"),
]
DEFAULT = RULES[-1]
WRONG_ARITY = Rule("(dy, dy, dy, dy, dy, dy, dy, dy, dy)", lambda site: [], "none")

__all__ = ["DEFAULT", "REGISTERED", "REGISTERED_EXPRESSION", "RULES", "WRONG_ARITY", "Rule", "Site", "cast", "sum_to"]
