"""Computes a nested program without functions, loops and branches: op by op with its rule, on a gradient tape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tests.service.nested_graphs import OPS
from tests.service.nested_programs import (
    Block,
    Branch,
    Call,
    Loop,
    Map,
    Op,
    Place,
    Program,
    Scan,
    Statement,
    blocks_of,
    container,
)

Pull = Callable[..., Any]
"""(xs, y, dy, own) → one gradient per x; `own()` gives those of the op itself."""


@dataclass
class ReferenceResult:
    """Holds the results. asked: places whose rule was called; constructs: executions of each kind of construct."""

    values: dict[str, Any]
    gradients: dict[str, Any]
    asked: set[str] = field(default_factory=set)


@dataclass
class _Run:
    program: Program
    rule_of: Callable[[Place], Pull | None]
    stopped: frozenset[str]
    asked: set[str]
    tops: dict[str, Any]
    tape: Any
    watched: frozenset[str]

    def block(self, block: Block, env: Mapping[str, Any], path: str) -> list[Any]:
        inner = dict(env)
        for statement in block.statements:
            value = self._statement(statement, inner, path)
            if block is self.program.top:
                # Make a new tensor even if a loop makes no iteration.
                value = tf.identity(value)
                if statement.name in self.watched:
                    # Watch it even if it depends on no x: gradients with respect to it are requested.
                    self.tape.watch(value)
                self.tops[statement.name] = value
                value = tf.stop_gradient(value) if statement.name in self.stopped else value
            inner[statement.name] = value
        return [inner[name] for name in block.results]

    def _statement(self, statement: Statement, env: Mapping[str, Any], path: str) -> Any:
        args = [env[name] for name in statement.args]
        if isinstance(statement, Op):
            return self._op(statement, args, path)
        within = container(statement, path)

        def bound(block: Block, *values: Any) -> list[Any]:
            return self.block(block, {**env, **dict(zip(block.params, values, strict=True))}, within)

        blocks = blocks_of(statement, self.program)
        if isinstance(statement, Call):
            return bound(blocks[0], *args)[0]
        if isinstance(statement, Loop):
            return self._loop(statement, args, int(env["k"]), bound)
        rows = args or [env["rows"][number] for number in range(self.program.n_rows)]
        if isinstance(statement, Map):
            return _sum([bound(statement.body, row)[0] for row in rows])
        if isinstance(statement, Scan):
            total, found = env[statement.initial], []
            for row in rows:
                total = bound(statement.body, total, row)[0]
                found.append(total)
            return found[-1] if statement.last else _sum(found)
        assert isinstance(statement, Branch)
        return bound(blocks[_chosen(statement, args[0], int(env["k"]))])[0]

    def _loop(self, loop: Loop, states: list[Any], k: int, bound: Callable[..., list[Any]]) -> Any:
        found, turn = [], 0
        most = loop.trips if isinstance(loop.trips, int) else {"fed": k, "value": 3}[loop.trips]
        while turn < most and (loop.trips != "value" or np.abs(states[0].numpy()).sum() < loop.limit):
            states = bound(loop.body, *states)
            found.append(states[0])
            turn += 1
        return _sum(found) if loop.collect else states[0]

    def _op(self, op: Op, args: list[Any], path: str) -> Any:
        place = Place(path + op.name, op.op_type, ())
        pull = self.rule_of(place)
        compute = OPS[op.op_type]
        if pull is None:
            return compute(*args)

        @tf.custom_gradient
        def ruled(*xs: Any) -> Any:
            y = compute(*xs)

            def gradient(dy: Any) -> Any:
                self.asked.add(place.name)
                return pull(xs, y, dy, lambda: _own(compute, xs, dy))

            return y, gradient

        return ruled(*args)


def _chosen(branch: Branch, value: Any, k: int) -> int:
    """Returns the branch that runs; TensorFlow takes the last one for an index out of range."""
    if branch.by == "sum":
        return 0 if value.numpy().sum() > branch.limit else 1
    index = k if branch.by == "fed" else int(np.abs(value.numpy()).sum())
    return index if 0 <= index < len(branch.branches) else len(branch.branches) - 1


def _sum(values: Sequence[Any]) -> Any:
    return tf.reduce_sum(tf.stack(values), axis=0)


def _own(compute: Callable[..., Any], xs: Sequence[Any], dy: Any) -> list[Any]:
    """Computes the gradients of the op itself with another tape; zeros where there are none."""
    # One tensor may be two inputs.
    xs = [tf.identity(x) for x in xs]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = compute(*xs)
    found: list[Any] = tape.gradient(y, list(xs), dy, unconnected_gradients="zero")
    return found


def evaluate(
    program: Program,
    feeds: Mapping[str, Any],
    ys: Sequence[str],
    xs: Sequence[str],
    *,
    rule_of: Callable[[Place], Pull | None] = lambda place: None,
    grad_ys: Mapping[str, Any] | None = None,
    stopped: frozenset[str] = frozenset(),
) -> ReferenceResult:
    """Returns top-level values by name (results as y0, …) and gradients by x; ys, xs, stopped are top-level names."""
    env = {name: tf.constant(value) for name, value in feeds.items()}
    with tf.GradientTape() as tape:
        for name in env.keys() & set(xs):
            tape.watch(env[name])
        run = _Run(program, rule_of, stopped, set(), dict(env), tape, frozenset(xs))
        for number, result in enumerate(run.block(program.top, env, "")):
            run.tops[f"y{number}"] = tf.identity(result)
    targets = [run.tops[name] for name in ys]
    upstream = [
        tf.constant(grad_ys[name]) if grad_ys and name in grad_ys else tf.ones_like(target)
        for name, target in zip(ys, targets, strict=True)
    ]
    found = tape.gradient(targets, [run.tops[name] for name in xs], upstream)
    gradients = {x: None if value is None else np.asarray(value) for x, value in zip(xs, found, strict=True)}
    return ReferenceResult({name: np.asarray(value) for name, value in run.tops.items()}, gradients, run.asked)
