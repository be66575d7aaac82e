"""Makes numbered cases: a random program, values, a request and overrides; each rule for the server and in Python.

Every rule maps zeros to zeros: a loop or branch returns zeros where nothing is connected, while the flat computation
has
no node there. Only for such rules both compute the same.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from tests.service import nested_reference
from tests.service.nested_graphs import tensor_name
from tests.service.nested_programs import BINARY, UNARY, Place, Program, generate, places
from tests.service.nested_reference import Pull, ReferenceResult

CASES = 300
REGISTERED = "NestedHalfWindow"
REGISTERED_EXPRESSION = "where(abs(x) <= 1.5, 0.5 * dy, 0)"


@dataclass(frozen=True)
class Rule:
    """Holds a rule. text: an expression or a name. kind: inline, name, graph or default. params: with their values."""

    text: str
    python: Pull
    kind: str = "inline"
    params: Mapping[str, float] = field(default_factory=dict)

    def for_client(self) -> Any:
        """Returns the rule as the client accepts it."""
        if self.kind == "graph":
            return gr.Rule(graph=_cosine_graph())
        if self.kind in ("name", "default"):
            return self.text
        return gr.Rule(self.text, params=dict.fromkeys(self.params) or None)


def _cosine_graph() -> gr.Graph:
    g = gr.Graph()
    x, dy = g.placeholder("x", "float64", None), g.placeholder("dy", "float64", None)
    g.op("Mul", g.op("Cos", x), dy, name="dx")
    return g


def _window(half: float, factor: float) -> Pull:
    def window(xs: Any, y: Any, dy: Any, own: Any) -> list[Any]:
        return [tf.where(tf.abs(xs[0]) <= half, factor * dy, tf.zeros_like(dy))]

    return window


def _own(xs: Any, y: Any, dy: Any, own: Callable[[], list[Any]]) -> list[Any]:
    return own()


UNARY_RULES = [
    Rule("5 * dy", lambda xs, y, dy, own: [5.0 * dy]),
    Rule("where(abs(x) <= 1, dy, 0)", _window(1.0, 1.0)),
    Rule("where(x > 0, maximum(dy, 0), 0)", lambda xs, y, dy, own: [tf.nn.relu(dy) * tf.cast(xs[0] > 0, dy.dtype)]),
    Rule("dy * y - dy", lambda xs, y, dy, own: [dy * (y - 1.0)]),
    Rule("0.5 * default", lambda xs, y, dy, own: [0.5 * own()[0]]),
    Rule("dy / (1 + sqrt(sum(dy * dy)))", lambda xs, y, dy, own: [dy / (1.0 + tf.norm(dy))]),
    Rule("dy * mean(x)", lambda xs, y, dy, own: [dy * tf.reduce_mean(xs[0])]),
    Rule("alpha * dy", lambda xs, y, dy, own: [-0.75 * dy], params={"alpha": -0.75}),
    Rule(
        "dy / (beta + abs(x)) ** power",
        lambda xs, y, dy, own: [dy / (1.25 + tf.abs(xs[0])) ** 2.0],
        params={"beta": 1.25, "power": 2.0},
    ),
    Rule("cosine", lambda xs, y, dy, own: [tf.cos(xs[0]) * dy], kind="graph"),
    Rule(REGISTERED, _window(1.5, 0.5), kind="name"),
    Rule("Identity", lambda xs, y, dy, own: [dy], kind="name"),
    Rule("Tanh", lambda xs, y, dy, own: [dy * (1.0 - y * y)], kind="name"),
    Rule("default", _own, kind="default"),
]
BINARY_RULES = [
    Rule("(sum(dy) * x0, sum(dy) * x1)", lambda xs, y, dy, own: [tf.reduce_sum(dy) * x for x in xs]),
    Rule("(None, dy * x0)", lambda xs, y, dy, own: [None, dy * xs[0]]),
    Rule("each(0.5 * default)", lambda xs, y, dy, own: [0.5 * item for item in own()]),
    Rule("(gain * dy, -dy)", lambda xs, y, dy, own: [1.5 * dy, -dy], params={"gain": 1.5}),
    Rule("default", _own, kind="default"),
]


@dataclass(frozen=True)
class Override:
    """Holds a rule and its conditions, all of which must hold; None: no condition. scope: without the slash."""

    rule: Rule
    op_type: str | None
    node: str | None
    scope: str | None

    def fits(self, place: Place) -> bool:
        """Returns whether the override selects the op; here `*` matches within a name part, `**` across parts."""
        if self.op_type is not None and place.op_type != self.op_type:
            return False
        if self.scope is not None and not place.name.startswith(f"{self.scope}/"):
            return False
        parts = [] if self.node is None else re.split(r"(\*\*|\*)", self.node)
        pattern = "".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts)
        return self.node is None or re.fullmatch(pattern, place.name) is not None


@dataclass(frozen=True)
class Case:
    """Holds a program and a request, by names of its top level. `late`: params are given with the call."""

    number: int
    program: Program
    static: bool
    feeds: dict[str, Any]
    fetches: list[str]
    ys: list[str]
    xs: list[str]
    grad_ys: dict[str, Any]
    stopped: frozenset[str]
    overrides: list[Override]
    late: bool

    def tensor(self, name: str) -> str:
        """Returns the graph's name of a vector of the top level."""
        made = {statement.name: tensor_name(statement) for statement in self.program.top.statements}
        return made.get(name, name)

    def rule_of(self, place: Place) -> Pull | None:
        """Returns the rule of the first override that matches."""
        return next((item.rule.python for item in self.overrides if item.fits(place)), None)

    def arguments(self) -> dict[str, Any]:
        """Returns the client's arguments. Overrides are optional: a generated one need not lie on the path."""
        overrides, params = [], {}
        for number, item in enumerate(self.overrides):
            conditions = {"op_type": item.op_type, "node": item.node, "scope": item.scope}
            selectors: dict[str, Any] = {key: value for key, value in conditions.items() if value is not None}
            label = f"override{number}"
            given = dict.fromkeys(item.rule.params, 100.0) if self.late else item.rule.params
            if item.rule.params and self.late:
                params[label] = dict(item.rule.params)
            overrides.append(
                gr.Override(item.rule.for_client(), params=dict(given) or None, label=label, optional=True, **selectors)
            )
        return {
            "feeds": self.feeds,
            "fetches": [self.tensor(name) for name in self.fetches],
            "ys": [self.tensor(name) for name in self.ys],
            "xs": [self.tensor(name) for name in self.xs],
            "grad_ys": {self.tensor(name): value for name, value in self.grad_ys.items()} or None,
            "stop_gradients": [self.tensor(name) for name in self.stopped],
            "overrides": overrides or None,
            "params": params or None,
        }


@functools.cache
def case(number: int) -> Case:
    """Returns case `number`, the same in every run and on every machine."""
    rng = random.Random(number)
    program = generate(rng)
    made = [statement.name for statement in program.top.statements]
    results = [f"y{index}" for index in range(len(program.top.results))]

    def vector(*shape: int) -> Any:
        return np.array([rng.gauss(0, 1) for _ in range(int(np.prod(shape)))]).reshape(shape)

    inner = made[:-2]
    xs = rng.sample(["x", "w", "rows"], rng.randint(1, 3)) + rng.sample(inner, rng.choice([0, 0, 1]))
    ys = results + rng.sample([name for name in inner if name not in xs], rng.choice([0, 0, 1]) if inner[1:] else 0)
    free = [name for name in inner if name not in xs + ys]
    feeds = {
        "x": vector(program.size),
        "w": vector(program.size),
        "rows": vector(program.n_rows, program.size),
        "k": np.int32(rng.randint(0, 3)),
    }
    found = places(program)
    reached = nested_reference.evaluate(program, feeds, ys, xs, rule_of=lambda place: _own).asked
    return Case(
        number=number,
        program=program,
        static=rng.random() < 0.5,
        feeds=feeds,
        fetches=[*results, *rng.sample(inner, rng.randint(0, min(2, len(inner))))],
        ys=ys,
        xs=xs,
        grad_ys={name: vector(program.size) for name in ys if rng.random() < 0.4},
        stopped=frozenset(rng.sample(free, 1) if free and rng.random() < 0.25 else []),
        overrides=_overrides(rng, found, reached),
        late=rng.random() < 0.3,
    )


def _overrides(rng: random.Random, found: list[Place], reached: set[str]) -> list[Override]:
    """Draws one to four overrides; they mostly select executed ops on the path, and prefer nested ones."""
    weights = [(6 if place.name in reached else 1) * (2 if place.kinds else 1) for place in found]
    made = []
    for _ in range(rng.randint(1, 4)):
        place = rng.choices(found, weights)[0]
        rule = rng.choice(UNARY_RULES if place.op_type in UNARY else BINARY_RULES)
        path, _, last = place.name.rpartition("/")
        how = rng.choice(["type", "type", "node", "last", "level", "within", "scope"])
        op_type: str | None = place.op_type
        node: str | None = None
        scope: str | None = None
        if how in ("level", "within", "scope") and not path:
            how = "type"
        if how == "node":
            op_type, node = rng.choice([None, op_type]), place.name
        elif how == "last":
            op_type, node = rng.choice([None, op_type]), f"**/{last}" if path else last
        elif how == "level":
            node = f"{path}/op*"
        elif how == "within":
            node = f"{path.partition('/')[0]}/**"
        elif how == "scope":
            parts = path.split("/")
            scope = "/".join(parts[: rng.randint(1, len(parts))])
        made.append(Override(rule, op_type, node, scope))
    return made


@functools.cache
def reference(number: int, *, overridden: bool = True) -> ReferenceResult:
    """Computes case `number` without functions, loops and branches; `overridden`: with its rules."""
    item = case(number)
    return nested_reference.evaluate(
        item.program,
        item.feeds,
        item.ys,
        item.xs,
        rule_of=item.rule_of if overridden else lambda place: None,
        grad_ys=item.grad_ys,
        stopped=item.stopped,
    )


__all__ = ["BINARY", "CASES", "REGISTERED", "REGISTERED_EXPRESSION", "Case", "case", "reference"]
