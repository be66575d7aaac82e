"""Builds a random program with TensorFlow: functions, `while_loop`, `map_fn`, `scan`, `cond`, `switch_case`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tests.service.nested_programs import Block, Branch, Call, Loop, Map, Op, Program, Scan, Statement

OPS: dict[str, Callable[..., Any]] = {
    "Sign": tf.sign,
    "Floor": tf.floor,
    "Tanh": tf.tanh,
    "Sigmoid": tf.sigmoid,
    "Relu": tf.nn.relu,
    "Square": tf.square,
    "Sin": tf.sin,
    "Neg": tf.negative,
    "Abs": tf.abs,
    "Softplus": tf.nn.softplus,
    "AddV2": tf.add,
    "Sub": tf.subtract,
    "Mul": tf.multiply,
    "Maximum": tf.maximum,
}

Env = Mapping[str, Any]
"""Vectors by name, and `rows` and `k`."""


def graph_def(program: Program, *, static: bool) -> Any:
    """Returns the GraphDef with results y0, y1, …; static: whether placeholders have shapes."""
    size, n_rows = (program.size, program.n_rows) if static else (None, None)
    with tf.Graph().as_default() as graph:
        env = {name: tf.compat.v1.placeholder(tf.float64, [size], name=name) for name in program.top.params}
        env["rows"] = tf.compat.v1.placeholder(tf.float64, [n_rows, size], name="rows")
        env["k"] = tf.compat.v1.placeholder(tf.int32, [], name="k")
        builder = _Builder(program, [tf.TensorSpec([size], tf.float64)] * 2 + [env[name] for name in ("rows", "k")])
        results = builder.block(program.top, env)
        for number, result in enumerate(results):
            tf.identity(result, name=f"y{number}")
    return graph.as_graph_def()


def tensor_name(statement: Statement) -> str:
    """Returns the name of the tensor that a top-level statement makes."""
    return statement.name if isinstance(statement, Op) else f"{statement.name}/out"


class _Builder:
    def __init__(self, program: Program, signature: Sequence[Any]) -> None:
        specs = [tf.TensorSpec(item.shape, item.dtype) for item in signature]
        self._functions = {
            name: tf.function(self._function(body), input_signature=specs, autograph=False)
            for name, body in program.functions.items()
        }

    def _function(self, body: Block) -> Callable[..., Any]:
        def function(first: Any, second: Any, rows: Any, k: Any) -> Any:
            env = dict(zip(body.params, (first, second), strict=True)) | {"rows": rows, "k": k}
            return self.block(body, env)[0]

        return function

    def block(self, block: Block, env: Env) -> list[Any]:
        """Builds a block and returns its results. Identity ops keep TensorFlow from renaming the nodes of results."""
        inner = dict(env)
        for statement in block.statements:
            inner[statement.name] = self._statement(statement, inner)
        return [tf.identity(inner[name]) for name in block.results]

    def _statement(self, statement: Statement, env: Env) -> Any:
        args = [env[name] for name in statement.args]
        if isinstance(statement, Op):
            return OPS[statement.op_type](*args, name=statement.name)
        if isinstance(statement, Call):
            with tf.name_scope(statement.name):
                result = self._functions[statement.function](*args, env["rows"], env["k"])
        elif isinstance(statement, Loop):
            result = self._loop(statement, args, env)
        elif isinstance(statement, Map):
            rows = tf.stack(args) if args else env["rows"]
            mapped = tf.map_fn(lambda row: self._bound(statement.body, env, row)[0], rows, name=statement.name)
            result = tf.reduce_sum(mapped, axis=0)
        elif isinstance(statement, Scan):
            rows, start = tf.stack(args) if args else env["rows"], env[statement.initial]
            scanned = tf.scan(
                lambda total, row: self._bound(statement.body, env, total, row)[0], rows, start, name=statement.name
            )
            result = scanned[-1] if statement.last else tf.reduce_sum(scanned, axis=0)
        else:
            result = self._branch(statement, args, env)
        return tf.identity(result, name=f"{statement.name}/out")

    def _bound(self, block: Block, env: Env, *values: Any) -> list[Any]:
        return self.block(block, {**env, **dict(zip(block.params, values, strict=True))})

    def _loop(self, loop: Loop, states: list[Any], env: Env) -> Any:
        def goes_on(turn: Any, *now: Any) -> Any:
            if loop.trips == "value":
                return tf.logical_and(turn < 3, tf.reduce_sum(tf.abs(now[0])) < tf.constant(loop.limit, tf.float64))
            return turn < (env["k"] if loop.trips == "fed" else loop.trips)

        if not loop.collect:
            return tf.while_loop(
                goes_on,
                lambda turn, *now: (turn + 1, *self._bound(loop.body, env, *now)),
                [0, *states],
                name=loop.name,
            )[1]

        def keeping(turn: Any, kept: Any, *now: Any) -> Any:
            after = self._bound(loop.body, env, *now)
            return (turn + 1, kept.write(turn, after[0]), *after)

        array = tf.TensorArray(tf.float64, size=loop.trips)
        found = tf.while_loop(
            lambda turn, kept, *now: goes_on(turn, *now), keeping, [0, array, *states], name=loop.name
        )
        return tf.reduce_sum(found[1].stack(), axis=0)

    def _branch(self, branch: Branch, args: list[Any], env: Env) -> Any:
        bodies = [lambda block=block: self.block(block, env)[0] for block in branch.branches]
        total = tf.reduce_sum(args[0])
        if branch.by == "sum":
            return tf.cond(total > tf.constant(branch.limit, tf.float64), *bodies, name=branch.name)
        index = env["k"] if branch.by == "fed" else tf.cast(tf.reduce_sum(tf.abs(args[0])), tf.int32)
        return tf.switch_case(index, bodies, name=branch.name)
