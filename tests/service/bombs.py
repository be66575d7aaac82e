"""Lists small graphs that need more memory than an engine has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from gradrule.v1 import graph_pb2, tensor_pb2
from tests.service import raw
from tests.service.graph_defs import build_graph_def, placeholder

HUGE = 10**10
"""Elements: 40 GB of float32."""
LARGE = 100_000
"""Of a vector whose outer product with itself is as large."""

_FLOAT = graph_pb2.AttrValue(type=raw.DT_FLOAT)
_INT32 = graph_pb2.AttrValue(type=tensor_pb2.DT_INT32)

EXCEEDED, LIMIT = "MEMORY_EXCEEDED", "LIMIT_EXCEEDED"


@dataclass(frozen=True)
class Bomb:
    """Describes a graph with a result y. `reason`: the expected error; `words`: what its message must contain."""

    build: Callable[[], bytes]
    feeds: Mapping[str, Any] = field(default_factory=dict)
    reason: str = EXCEEDED
    words: tuple[str, ...] = ("--memory-limit",)


def _sum(build: Callable[[], Any]) -> Callable[[], bytes]:
    """Reduces a large intermediate result to one number."""
    return lambda: build_graph_def(lambda: tf.identity(tf.reduce_sum(build()), name="y")).SerializeToString()


def _x() -> Any:
    return placeholder("x", tf.float32, (None,))


def _n(dtype: Any = tf.int64, shape: Any = (None,)) -> Any:
    return placeholder("n", dtype, shape)


def _fill(size: int = HUGE) -> Any:
    return tf.raw_ops.Fill(dims=tf.constant([size], tf.int64), value=1.0)


def _outer() -> Any:
    x = _x()
    return tf.reshape(x, [-1, 1]) * tf.reshape(x, [1, -1])


def _in_function() -> Any:
    return tf.function(lambda: tf.reduce_sum(_fill()))()


def _in_loop() -> Any:
    return tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, v + tf.reduce_sum(_fill())), [0, 0.0])[1]


def _in_both_branches() -> Any:
    small = placeholder("n", tf.int64, ())
    return tf.cond(small > 0, lambda: tf.reduce_sum(_fill()), lambda: tf.reduce_sum(tf.exp(_fill())))


def _many_tensors() -> Any:
    """Adds many tensors: each one fits, but all are needed at once."""
    return tf.add_n([tf.raw_ops.Fill(dims=tf.constant([2**27], tf.int64), value=float(i)) for i in range(64)])


def large_constant(elements: int) -> bytes:
    """Makes the sum of a constant of one repeated value: any number of elements in 91 bytes."""
    shape = tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=elements)])
    value = tensor_pb2.Tensor(dtype=raw.DT_FLOAT, tensor_shape=shape, float_val=[1.0])
    attrs = {"dtype": _FLOAT, "value": graph_pb2.AttrValue(tensor=value)}
    total = raw.node("y", "Sum", "c", "axis", T=_FLOAT, Tidx=_INT32)
    data: bytes = raw.graph(raw.node("c", "Const", **attrs), _axis(rank=1), total).SerializeToString()
    return data


def many_outputs(outputs: int) -> bytes:
    """Makes a node with that many outputs."""
    split = raw.node("s", "Split", "axis", "x", T=_FLOAT, num_split=graph_pb2.AttrValue(i=outputs))
    result = raw.node("y", "Identity", "s", T=_FLOAT)
    data: bytes = raw.graph(raw.placeholder(), _axis(rank=0), split, result).SerializeToString()
    return data


def doubling_calls(depth: int) -> bytes:
    """Makes functions, each of which calls the next one twice: 2 to the power of `depth` nodes."""
    graph = raw.graph(raw.placeholder())
    graph.node.append(_call("y", "f0", "x"))
    for level in range(depth):
        function = graph.library.function.add()
        function.signature.name = f"f{level}"
        function.signature.input_arg.add(name="a", type=raw.DT_FLOAT)
        function.signature.output_arg.add(name="r", type=raw.DT_FLOAT)
        if level < depth - 1:
            inner = f"f{level + 1}"
            function.node_def.extend([_call("b", inner, "a"), _call("c", inner, "b:output:0")])
            function.ret["r"] = "c:output:0"
        else:
            function.node_def.extend([raw.node("b", "Neg", "a", T=_FLOAT), raw.node("c", "Neg", "b:y:0", T=_FLOAT)])
            function.ret["r"] = "c:y:0"
    data: bytes = graph.SerializeToString()
    return data


def _call(name: str, function: str, value: str) -> graph_pb2.Node:
    node = raw.node(name, "PartitionedCall", value, f=graph_pb2.AttrValue(func=graph_pb2.NameAttrList(name=function)))
    node.attr["Tin"].list.type.append(raw.DT_FLOAT)
    node.attr["Tout"].list.type.append(raw.DT_FLOAT)
    return node


def _axis(rank: int) -> graph_pb2.Node:
    """Makes the constant 0 as a scalar (rank 0) or a vector of one element (rank 1)."""
    value = tensor_pb2.Tensor(dtype=tensor_pb2.DT_INT32, int_val=[0])
    if rank:
        value.tensor_shape.dim.add(size=1)
    return raw.node("axis", "Const", dtype=_INT32, value=graph_pb2.AttrValue(tensor=value))


_VECTOR = {"x": np.ones(LARGE, np.float32)}
_MANY = {"n": np.int64([HUGE])}

BOMBS: Mapping[str, Bomb] = {
    # All shapes are known.
    "Fill": Bomb(_sum(_fill)),
    "Tile": Bomb(_sum(lambda: tf.tile(tf.ones([1000]), tf.constant([HUGE // 1000], tf.int64)))),
    "BroadcastTo": Bomb(_sum(lambda: tf.exp(tf.broadcast_to(1.0, tf.constant([HUGE], tf.int64))))),
    "Range": Bomb(_sum(lambda: tf.range(tf.constant(10**12, tf.int64)))),
    "OneHot": Bomb(_sum(lambda: tf.one_hot(list(range(16)), 2**31 - 1))),
    "eye": Bomb(_sum(lambda: tf.linalg.diag(tf.ones([LARGE])))),
    "Pad": Bomb(_sum(lambda: tf.pad(tf.ones([10]), tf.constant([[0, HUGE]], tf.int64)))),
    "random": Bomb(_sum(lambda: tf.random.stateless_normal(tf.constant([HUGE], tf.int64), [1, 2]))),
    "ScatterNd": Bomb(
        _sum(lambda: tf.scatter_nd(tf.constant([[0]], tf.int64), tf.ones([1]), tf.constant([HUGE], tf.int64)))
    ),
    "outer product": Bomb(_sum(lambda: tf.einsum("i,j->ij", tf.ones([LARGE]), tf.ones([LARGE])))),
    "MatMul": Bomb(_sum(lambda: tf.matmul(tf.ones([LARGE, 1]), tf.ones([1, LARGE])))),
    "in a function": Bomb(_sum(_in_function)),
    "in a loop": Bomb(_sum(_in_loop)),
    "in both branches": Bomb(_sum(_in_both_branches), {"n": np.int64(1)}),
    "many at once": Bomb(_sum(_many_tensors)),
    # A call gives shapes or sizes.
    "Fill, fed": Bomb(_sum(lambda: tf.fill(_n(), 1.0)), _MANY),
    "Fill, computed": Bomb(_sum(lambda: tf.fill(_n() * 1000, 1.0)), {"n": np.int64([HUGE // 1000])}),
    "Tile, fed": Bomb(_sum(lambda: tf.tile(_x(), _n())), {**_VECTOR, "n": np.int64([LARGE])}),
    "BroadcastTo, fed": Bomb(
        _sum(lambda: tf.exp(tf.broadcast_to(_x(), _n()))), {**_VECTOR, "n": np.int64([LARGE, LARGE])}
    ),
    "OneHot, fed": Bomb(_sum(lambda: tf.one_hot([0, 1, 2, 3], _n(tf.int32, ()))), {"n": np.int32(2**31 - 1)}),
    "Range, fed": Bomb(
        _sum(lambda: tf.range(tf.constant(0, tf.int64), _n(shape=()), tf.constant(1, tf.int64))),
        {"n": np.int64(10**12)},
    ),
    "ScatterNd, fed": Bomb(_sum(lambda: tf.scatter_nd(tf.constant([[0]], tf.int64), tf.ones([1]), _n())), _MANY),
    "SparseToDense, fed": Bomb(
        _sum(
            lambda: tf.raw_ops.SparseToDense(
                sparse_indices=tf.constant([[0]], tf.int64),
                output_shape=_n(),
                sparse_values=tf.ones([1]),
                default_value=0.0,
            )
        ),
        _MANY,
    ),
    "Pad, fed": Bomb(_sum(lambda: tf.pad(_x(), _n(shape=(1, 2)))), {**_VECTOR, "n": np.int64([[0, HUGE]])}),
    "random, fed": Bomb(_sum(lambda: tf.random.stateless_uniform(_n(), [1, 2])), _MANY),
    "outer product, fed": Bomb(_sum(_outer), _VECTOR),
    "MatrixDiag, fed": Bomb(_sum(lambda: tf.linalg.diag(_x())), _VECTOR),
    # Detected in the graph itself.
    "a constant of one value": Bomb(lambda: large_constant(HUGE), reason=LIMIT, words=("--max-constant-bytes",)),
    "ten million outputs": Bomb(
        lambda: many_outputs(10**7), _VECTOR, LIMIT, ("num_split", "1024", "--max-node-outputs")
    ),
    "calls that double": Bomb(lambda: doubling_calls(30), _VECTOR, LIMIT, ("1000000", "--max-inlined-nodes")),
}
"""Each takes more than 30 GB, where nothing stops it."""


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))


def nested(*numbers: int, inside: bytes) -> bytes:
    """Nests messages by field number, the outermost first."""
    for number in reversed(numbers):
        inside = _varint(number << 3 | 2) + _varint(len(inside)) + inside
    return inside


# Large Evaluate requests without content.
MESSAGES: Mapping[str, Callable[[], bytes]] = {
    "empty nodes": lambda: nested(2, 1, 1, inside=b"\x0a\x00" * 2_000_000),
    "empty nodes, serialised": lambda: nested(2, 1, 2, inside=b"\x0a\x00" * 2_000_000),
    "empty overrides": lambda: nested(2, inside=b"\x12\x00" * 1_000_000),
    "empty dimensions": lambda: nested(3, 2, 1, 2, inside=b"\x12\x00" * 3_000_000),
    "a chain": lambda: raw.request(
        raw.graph(
            raw.placeholder(), *(raw.node(f"n{i}", "Neg", f"n{i - 1}" if i else "x") for i in range(199_000))
        ).SerializeToString(),
        fetches=["n9"],
    ).SerializeToString(),
}
"""Each would take the front end more than 128 MiB and ten times its size."""
