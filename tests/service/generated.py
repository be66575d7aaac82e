"""Generates random graphs with random overrides; each rule is written as an expression and as Python for TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tests.service import reference

FLOATS = {"float16": 4e-2, "bfloat16": 1.5e-1, "float32": 2e-4, "float64": 1e-7}
"""Element type → tolerance, relative and absolute: one rounding may be magnified by an op that follows."""

COMPLEX = {"complex64": 2e-4, "complex128": 1e-7}


@dataclass(frozen=True)
class Rule:
    """Holds one rule in both languages. `op_rule`: the expression names a rule that TensorFlow registers."""

    expression: str
    python: Callable[..., Any]
    op_rule: bool = False


def _typed(op: Any, value: float) -> Any:
    return tf.constant(value, op.inputs[0].dtype)


def five_times(op: Any, dy: Any) -> Any:
    return _typed(op, 5) * dy


def clipped_window(op: Any, dy: Any) -> Any:
    return tf.where(tf.abs(op.inputs[0]) <= _typed(op, 1), dy, tf.zeros_like(dy))


def guided(op: Any, dy: Any) -> Any:
    return tf.where(op.inputs[0] > _typed(op, 0), tf.maximum(dy, _typed(op, 0)), tf.zeros_like(dy))


def by_output(op: Any, dy: Any) -> Any:
    return dy * op.outputs[0]


def reversed_gradient(op: Any, dy: Any) -> Any:
    return -dy


def cosine(op: Any, dy: Any) -> Any:
    return dy * tf.cos(op.inputs[0]) + op.inputs[0]


def half_own(op: Any, dy: Any) -> Any:
    own = reference.own_gradient(op.type)(op, dy)
    # Some gradients with one result return it in a list, such as that of Floor.
    (own,) = own if isinstance(own, (list, tuple)) else (own,)
    return tf.zeros_like(op.inputs[0]) if own is None else _typed(op, 0.5) * own


def normalised(op: Any, dy: Any) -> Any:
    return dy / (_typed(op, 1) + tf.sqrt(tf.reduce_sum(dy * dy)))


def fast_sigmoid(op: Any, dy: Any) -> Any:
    return dy / (_typed(op, 1) + tf.abs(op.inputs[0])) ** _typed(op, 2)


UNARY_RULES = [
    Rule("5 * dy", five_times),
    Rule("where(abs(x) <= 1, dy, 0)", clipped_window),
    Rule("where(x > 0, maximum(dy, 0), 0)", guided),
    Rule("dy * y", by_output),
    Rule("-dy", reversed_gradient),
    Rule("dy * cos(x) + x", cosine),
    Rule("0.5 * default", half_own),
    Rule("dy / (1 + sqrt(sum(dy * dy)))", normalised),
    Rule("dy / (1 + abs(x)) ** 2", fast_sigmoid),
    Rule("Identity", reference.own_gradient("Identity"), op_rule=True),
    Rule("Relu", reference.own_gradient("Relu"), op_rule=True),
    Rule("Tanh", reference.own_gradient("Tanh"), op_rule=True),
    Rule("Neg", reference.own_gradient("Neg"), op_rule=True),
]


def swapped(op: Any, dy: Any) -> Any:
    a, b = op.inputs
    return tf.reduce_sum(dy) * tf.ones_like(a) * a, b * tf.reduce_sum(dy)


def only_second(op: Any, dy: Any) -> Any:
    return None, tf.reduce_sum(dy) * tf.ones_like(op.inputs[1])


def half_each(op: Any, dy: Any) -> Any:
    return tuple(_typed(op, 0.5) * own for own in reference.own_gradient(op.type)(op, dy))


BINARY_RULES = [
    Rule("(sum(dy) * x0, sum(dy) * x1)", swapped),
    Rule("(None, sum(dy) * ones_like(x1))", only_second),
    Rule("each(0.5 * default)", half_each),
]

UNARY_OPS: dict[str, Callable[..., Any]] = {
    "Sign": tf.sign,
    "Floor": tf.floor,
    "Tanh": tf.tanh,
    "Sigmoid": tf.sigmoid,
    "Relu": tf.nn.relu,
    "Square": tf.square,
    "Sin": tf.sin,
    "Neg": tf.negative,
    "Abs": tf.abs,
    "Identity": tf.identity,
    "Softplus": tf.nn.softplus,
}
BINARY_OPS: dict[str, Callable[..., Any]] = {
    "AddV2": tf.add,
    "Sub": tf.subtract,
    "Mul": tf.multiply,
    "Maximum": tf.maximum,
}
RESHAPING_OPS = ("Sum", "Mean", "Transpose", "Reshape", "ConcatV2", "GatherV2", "StridedSlice", "SelectV2", "MatMul")


@dataclass
class Case:
    """Holds a generated graph, its feeds and overrides: (node, rule), at most one per node."""

    graph_def: Any
    dtype: str
    feeds: dict[str, Any]
    xs: list[str]
    overrides: list[tuple[str, Rule]] = field(default_factory=list)


def values(draw: st.DrawFn, shape: Sequence[int], dtype: str) -> Any:
    """Draws multiples of 1/4 in [-2, 2]: exact in every dtype, and often on a kink."""
    count = int(np.prod(shape))
    numbers = np.array(draw(st.lists(st.integers(-8, 8), min_size=count, max_size=count)), np.float64) / 4
    if dtype in COMPLEX:
        return (numbers + 1j * numbers[::-1]).reshape(shape).astype(dtype)
    return numbers.reshape(shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws a graph of 2 to 8 ops on one or two placeholders of one float type; y sums all unused results."""
    dtype = draw(st.sampled_from(sorted(FLOATS)))
    shape = draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    static = draw(st.booleans())
    feeds = {name: values(draw, shape, dtype) for name in ("x", "w")[: draw(st.integers(1, 2))]}
    overrides: list[tuple[str, Rule]] = []
    with tf.Graph().as_default() as graph:
        spec = shape if static else [None] * len(shape)
        open_ends = [tf.compat.v1.placeholder(dtype, spec, name=name) for name in feeds]
        for _ in range(draw(st.integers(2, 8))):
            _grow(draw, open_ends, overrides)
        total = tf.add_n([tf.reduce_sum(end) for end in open_ends])
        tf.identity(total, name="y")
    return Case(graph.as_graph_def(), dtype, feeds, list(feeds), overrides)


def _grow(draw: st.DrawFn, open_ends: list[Any], overrides: list[tuple[str, Rule]]) -> None:
    """Adds one op on one or two unused results."""
    kind = draw(st.sampled_from(["unary"] * 5 + ["binary"] * 2 + ["reshaping"] * 2))
    index = draw(st.integers(0, len(open_ends) - 1))
    value = open_ends[index]
    if kind == "unary":
        result = UNARY_OPS[draw(st.sampled_from(sorted(UNARY_OPS)))](value)
        if draw(st.booleans()):
            overrides.append((result.op.name, draw(st.sampled_from(UNARY_RULES))))
    elif kind == "binary":
        other = open_ends[draw(st.integers(0, len(open_ends) - 1))]
        if draw(st.booleans()):
            other = tf.reduce_mean(other)
        elif value.shape.rank != other.shape.rank:
            other = tf.reduce_sum(other)
        elif other is not value and value.shape != other.shape:
            other = tf.reduce_sum(other, axis=list(range(other.shape.rank)), keepdims=True)
        result = BINARY_OPS[draw(st.sampled_from(sorted(BINARY_OPS)))](value, other)
        if draw(st.booleans()):
            overrides.append((result.op.name, draw(st.sampled_from(BINARY_RULES))))
    else:
        result = _reshaped(draw(st.sampled_from(RESHAPING_OPS)), value)
    # Sometimes the input stays available, so that gradients of several paths add up.
    if draw(st.integers(0, 3)) == 0:
        open_ends.append(result)
    else:
        open_ends[index] = result


def _reshaped(op_type: str, value: Any) -> Any:
    rank = value.shape.rank
    if rank == 0:
        return tf.reshape(value, [1])
    if op_type == "Sum":
        return tf.reduce_sum(value, axis=0, keepdims=True)
    if op_type == "Mean":
        return tf.reduce_mean(value, axis=-1, keepdims=True)
    if op_type == "Transpose":
        return tf.transpose(value)
    if op_type == "ConcatV2":
        return tf.concat([value, value], axis=0)
    if op_type == "GatherV2":
        return tf.gather(value, [0, 0], axis=0)
    if op_type == "StridedSlice":
        return value[:1]
    if op_type == "SelectV2":
        return tf.where(value > tf.zeros_like(value), value, tf.zeros_like(value))
    if op_type == "MatMul" and rank == 2:
        return tf.matmul(value, value, transpose_b=True)
    return tf.reshape(value, [-1])


CHAIN_OPS = ("Sign", "Tanh", "Square", "Relu", "Sin", "Floor")
WRAPPINGS = ("call", "call in call", "while", "if", "case")


@dataclass
class Nested:
    """Holds a chain of unary ops inside a function, a loop or a branch, and the same chain without it."""

    graph_def: Any
    flat_def: Any
    dtype: str
    feed: Any
    op_type: str
    rule: Rule


@st.composite
def nested_cases(draw: st.DrawFn) -> Nested:
    """Draws a case with an override by op type; the flat graph's nodes of that type get the same rule."""
    dtype = draw(st.sampled_from(["float32", "float64"]))
    feed = values(draw, [draw(st.integers(1, 4))], dtype)
    chain = draw(st.lists(st.sampled_from(CHAIN_OPS), min_size=1, max_size=4))
    wrapping = draw(st.sampled_from(WRAPPINGS))
    turns = draw(st.integers(1, 3)) if wrapping == "while" else 1

    def body(value: Any) -> Any:
        scaled = value
        for op_type in chain:
            scaled = UNARY_OPS[op_type](scaled)
        return scaled * tf.constant(0.75, dtype) + value

    def flat(value: Any) -> Any:
        for _ in range(turns):
            value = body(value)
        return value

    def draw_graph(function: Callable[[Any], Any]) -> Any:
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(dtype, [None], name="x")
            tf.reduce_sum(function(x), name="y")
        return graph.as_graph_def()

    return Nested(
        graph_def=draw_graph(_wrapped(wrapping, body, turns)),
        flat_def=draw_graph(flat),
        dtype=dtype,
        feed=feed,
        op_type=draw(st.sampled_from(sorted(set(chain)))),
        rule=draw(st.sampled_from(UNARY_RULES)),
    )


def _wrapped(wrapping: str, body: Callable[[Any], Any], turns: int) -> Callable[[Any], Any]:
    def looped(value: Any) -> Any:
        return tf.while_loop(lambda i, _: i < turns, lambda i, inner: (i + 1, body(inner)), [0, value])[1]

    def branched(value: Any) -> Any:
        size = tf.size(value)
        return tf.cond(size > 0, lambda: body(value), lambda: value)

    def switched(value: Any) -> Any:
        return tf.switch_case(tf.minimum(tf.size(value), 1), [lambda: value, lambda: body(value)])

    called = tf.function(body)

    def call_it(value: Any) -> Any:
        return called(value)

    return {
        "call": called,
        "call in call": tf.function(call_it),
        "while": looped,
        "if": branched,
        "case": switched,
    }[wrapping]
