"""Generates graphs of twins: nodes of one op type, most of one shape too, that differ in what a gradient may depend on.

Twins differ in the values of a constant input, an attribute, an input that occurs twice, how much of a shape is known,
the op that made an input, which outputs are used, the kind of upstream gradient, or the graph around them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

SIZE = 4

Tensor = Any
Twins = Callable[["GraphGenerator", Tensor], list[Tensor]]


# Twins: functions of a (4, 4) tensor that return (4, 4) tensors, which the generator adds up.


def _square(value: Tensor) -> Tensor:
    """Returns a (4, 4) tensor of the same type, from a tensor of 16 elements or fewer."""
    if value.shape.rank == 2 and value.shape == (SIZE, SIZE):
        return value
    return value + tf.zeros([SIZE, SIZE], value.dtype)


def _reductions(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    op = g.rng.choice([tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod, _variance])
    keep = g.rng.random() < 0.5
    axes = g.rng.sample([0, 1, -1, [0, 1], [1, 0], None], 3)
    return [tf.reshape(op(x, axis, keep), _lead(x, op(x, axis, keep))) + tf.zeros_like(x) for axis in axes]


def _lead(x: Tensor, reduced: Tensor) -> list[int]:
    return [1, 1] if reduced.shape.num_elements() == 1 else [SIZE, 1] if reduced.shape[0] == SIZE else [1, SIZE]


def _variance(x: Tensor, axis: Any, keep: bool) -> Tensor:
    return tf.math.reduce_variance(x, axis, keep)


def _reshapes(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    one = g.rng.sample([[2, 8], [8, 2], [16], [4, 4], [1, 16], [-1, 8]], 2)
    found = [tf.reshape(tf.reshape(x, shape) * g.number(), [SIZE, SIZE]) for shape in one]
    found += [tf.transpose(x, permutation) for permutation in g.rng.sample([[0, 1], [1, 0], None], 2)]
    return [*found, tf.reshape(x, tf.shape(x)), tf.squeeze(tf.expand_dims(x, g.rng.choice([0, 1, 2])))]


def _joins(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    other = g.other(x)
    found = []
    for axis in g.rng.sample([0, 1, -1], 2):
        pair = g.rng.choice([[x, x], [x, other], [other, x], [x, g.constant(x)], [x, x[:2], x[:1]]])
        joined = tf.concat(pair if pair[1].shape == x.shape else pair[:1] * 2, axis)
        found.append(joined[: g.rng.choice([SIZE]), :SIZE] if axis else joined[g.rng.choice([0, 4]) :][:SIZE, :SIZE])
    for axis in g.rng.sample([0, 1, 2], 2):
        found.append(tf.reduce_sum(tf.stack([x, other, x], axis), axis))
        found.append(tf.unstack(x, axis=axis % 2)[g.rng.randrange(SIZE)] + tf.zeros_like(x))
    return found


def _gathers(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    rows = [g.rng.choices(range(SIZE), k=SIZE) for _ in range(2)]
    found = [tf.gather(x, row, axis=axis) for row in rows for axis in (0, 1)]
    found.append(tf.gather(x, g.indices))
    found.append(tf.gather(x, tf.constant([rows[0]] * SIZE), batch_dims=1, axis=1))
    found.append(tf.gather_nd(x, tf.constant([[i] for i in rows[1]])))
    found.append(tf.gather_nd(x, tf.constant([[[i, j] for j in rows[0]] for i in rows[1]])))
    # The same values twice, from a constant and from other ops.
    found.append(tf.gather(x, tf.range(SIZE)))
    found.append(tf.gather(x, tf.constant(list(range(SIZE)))))
    return g.rng.sample(found, 4)


def _slices(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    cut = [x[:2], x[1:3], x[2:], x[::2], x[::-2], x[1::2], x[-2:]]
    found = [tf.concat([one, one], 0) for one in g.rng.sample(cut, 3)]
    found += [tf.tile(tf.slice(x, begin, [2, 2]), [2, 2]) for begin in g.rng.sample([[0, 0], [1, 2], [2, 1]], 2)]
    found.append(x[g.rng.randrange(SIZE)] + tf.zeros_like(x))
    found.append(x[:, g.rng.randrange(SIZE), None] + tf.zeros_like(x))
    return found


def _pads(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    sizes = g.rng.sample([[[1, 0], [0, 1]], [[0, 1], [1, 0]], [[1, 0], [1, 0]], [[0, 1], [0, 1]]], 2)
    found = [tf.pad(x, size)[:SIZE, :SIZE] for size in sizes]
    found += [tf.pad(x, sizes[0], mode)[1:, 1:] + tf.zeros([SIZE, SIZE], x.dtype) for mode in ("REFLECT", "SYMMETRIC")]
    found += [tf.tile(x, times)[:SIZE, :SIZE] for times in g.rng.sample([[2, 1], [1, 2], [2, 2]], 2)]
    found += [tf.reverse(x, [axis]) for axis in (0, 1)]
    found += [tf.roll(x, shift, axis) for shift, axis in g.rng.sample([(1, 0), (2, 0), (1, 1)], 2)]
    return [one if one.shape == (SIZE, SIZE) else _square(one[:SIZE, :SIZE]) for one in found]


def _splits(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    parts = [tf.split(x, count, axis) for count, axis in ((2, 0), (2, 1), (4, 0))]
    parts += [tf.split(x, sizes, 0) for sizes in ([1, 3], [3, 1])]
    found = []
    for part in g.rng.sample(parts, 3):
        # The other outputs get no upstream gradient.
        one = g.rng.choice(part)
        found.append(
            tf.reduce_sum(one, 0, keepdims=True) + tf.zeros_like(x) if one.shape[1] == SIZE else one[:, :1] + x
        )
    values, indices = tf.math.top_k(x, 2)
    found.append(tf.reduce_sum(values, 1, keepdims=True) + tf.zeros_like(x))
    found.append(tf.gather(x, indices[:, 0]))
    return found


def _products(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    op = g.rng.choice(
        [tf.multiply, tf.add, tf.subtract, tf.maximum, tf.minimum, tf.math.squared_difference, tf.math.divide_no_nan]
    )
    if x.dtype.is_complex:
        op = g.rng.choice([tf.multiply, tf.add, tf.subtract])
    c = g.constant(x)
    pairs = [
        (x, x),
        (x, c),
        (c, x),
        (x, g.constant(x)),
        (x, g.other(x)),
        (g.other(x), x),
        (x, g.constant(x, [SIZE])),
        (x, g.constant(x, [1, SIZE])),
        (x, g.constant(x, [SIZE, 1])),
        (x, g.constant(x, [])),
        (x, x[:1]),
        (x, x[:, :1]),
        (x, tf.reduce_sum(x)),
        (x, tf.zeros_like(x)),
        (x, tf.stop_gradient(x)),
        (x, g.runtime_shaped(x)),
    ]
    return [op(*pair) for pair in g.rng.sample(pairs, 4)]


def _powers(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    base = tf.abs(x) + g.number()
    exponents = [2.0, 3.0, 1.0, 0.5, 0.0]
    found = [tf.pow(base, tf.constant(exponent, x.dtype)) for exponent in g.rng.sample(exponents, 3)]
    found.append(tf.pow(base, g.constant(x, [SIZE])))
    found.append(tf.pow(base, x))
    return [*found, tf.math.xdivy(x, base), tf.math.xlogy(x, base), tf.math.atan2(x, base)]


def _matmuls(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    ways = [{}, {"transpose_a": True}, {"transpose_b": True}, {"transpose_a": True, "transpose_b": True}]
    others = [x, g.constant(x), g.constant(x), g.other(x)]
    found = [tf.matmul(x, g.rng.choice(others), **way) for way in g.rng.sample(ways, 3)]
    found.append(tf.matmul(g.rng.choice(others), x))
    found.append(tf.nn.bias_add(tf.matmul(x, others[1]), g.constant(x, [SIZE])))
    deep = tf.stack([x, g.other(x)])
    found.append(tf.matmul(deep, deep, adjoint_b=g.rng.random() < 0.5)[g.rng.randrange(2)])
    for equation in g.rng.sample(["ij,jk->ik", "ij,kj->ik", "ij,ij->ij", "ij,ji->ij", "ij,jk->ki"], 2):
        found.append(tf.einsum(equation, x, g.rng.choice(others)))
    return found


def _convolutions(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    image = tf.reshape(x, [1, SIZE, SIZE, 1])
    kernel = g.constant(x, [3, 3, 1, 1])
    kernels = [kernel, kernel, g.constant(x, [3, 3, 1, 1]), tf.reshape(x[:3, :3], [3, 3, 1, 1])]
    found = []
    for way in g.rng.sample([(1, "SAME"), (2, "SAME"), (1, "VALID"), (4, "SAME")], 2):
        made = tf.nn.conv2d(image, g.rng.choice(kernels), way[0], way[1])
        found.append(tf.reduce_mean(made, [1, 2, 3]) * x)
    found.append(tf.reshape(tf.nn.conv2d(image, kernel, 1, "SAME", dilations=g.rng.choice([1, 2])), [SIZE, SIZE]))
    found.append(tf.reshape(tf.nn.depthwise_conv2d(image, kernel, [1] * 4, "SAME"), [SIZE, SIZE]))
    for pool in g.rng.sample([tf.nn.max_pool2d, tf.nn.avg_pool2d, tf.nn.max_pool2d], 2):
        made = pool(image, g.rng.choice([2, 3]), g.rng.choice([1, 2]), g.rng.choice(["SAME", "VALID"]))
        found.append(tf.reduce_sum(made, [1, 2, 3]) + x)
    return found


def _activations(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    ops = [
        tf.nn.relu,
        tf.nn.relu,
        tf.tanh,
        tf.tanh,
        tf.sigmoid,
        tf.nn.elu,
        tf.nn.selu,
        tf.nn.softplus,
        tf.nn.relu6,
        tf.nn.gelu,
        tf.sign,
        tf.floor,
        tf.square,
        tf.abs,
        tf.sin,
        tf.exp,
        tf.negative,
        tf.identity,
        tf.stop_gradient,
        lambda v: tf.nn.leaky_relu(v, 0.1),
        lambda v: tf.nn.leaky_relu(v, 0.3),
        lambda v: tf.clip_by_value(v, -0.5, 0.5),
        lambda v: tf.clip_by_value(v, -1.0, 0.25),
        lambda v: tf.cumsum(v, 0),
        lambda v: tf.cumsum(v, 1, exclusive=True),
        lambda v: tf.cumsum(v, 1, reverse=True),
        lambda v: tf.math.cumprod(v, 0),
        lambda v: tf.nn.softmax(v, 0),
        lambda v: tf.nn.softmax(v, 1),
        tf.nn.log_softmax,
        lambda v: tf.where(v > 0, v, tf.zeros_like(v)),
        lambda v: tf.where(v > 0, tf.constant(0.5, v.dtype), v),
        lambda v: tf.where(v[:, :1] > 0, v, v[:1]),
    ]
    return [op(x) for op in g.rng.sample(ops, 5)]


def _complex(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    wide = tf.cast(x, tf.float32)
    z = tf.complex(wide, g.rng.choice([wide, tf.sin(wide), tf.ones_like(wide)]))
    z = g.rng.choice([z * z, z * tf.math.conj(z), z + tf.constant(1 + 2j, z.dtype), z @ z, tf.transpose(z)])
    parts = [tf.math.real(z), tf.math.imag(z), tf.abs(z), tf.math.real(tf.exp(tf.constant(0.1j, z.dtype) * z))]
    return [tf.cast(one, x.dtype) for one in g.rng.sample(parts, 2)]


def _casts(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    types = g.rng.sample([tf.float16, tf.bfloat16, tf.float32, tf.float64], 3)
    ops = [tf.tanh, tf.square, lambda v: v * tf.reduce_sum(v), lambda v: tf.matmul(v, v), tf.nn.relu]
    op = g.rng.choice(ops)
    found = [tf.cast(op(tf.cast(x, dtype)), x.dtype) for dtype in types]
    # A step: its gradient is zero unless a rule says otherwise.
    found += [tf.cast(x > limit, x.dtype) for limit in (0.0, 0.25)]
    return found


def _losses(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    labels = tf.constant([g.rng.randrange(SIZE) for _ in range(SIZE)])
    sparse = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)
    sparser = tf.nn.sparse_softmax_cross_entropy_with_logits((labels + 1) % SIZE, x)
    targets = tf.nn.softmax(g.constant(x))
    dense = tf.nn.softmax_cross_entropy_with_logits(g.rng.choice([targets, tf.nn.softmax(g.other(x))]), x)
    raw = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=x, labels=targets)
    # The second output is a gradient that few use; the gradient function asks whether its own upstream is zero.
    return [one[:, None] + tf.zeros_like(x) for one in (sparse, sparser, dense, raw.loss)] + [raw.backprop]


def _norms(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    found = []
    for axis in (0, 1):
        mean, variance = tf.nn.moments(x, [axis], keepdims=True)
        scale = g.rng.choice([None, g.constant(x, [SIZE]), x[0]])
        found.append(tf.nn.batch_normalization(x, mean, variance, None, scale, tf.constant(1e-3, x.dtype)))
    wide = tf.reshape(tf.cast(x, tf.float32), [1, SIZE, SIZE, 1])
    ones = g.constant(wide, [1])
    for scale in (ones, tf.reduce_sum(wide)[None]):
        made = tf.raw_ops.FusedBatchNormV3(
            x=wide,
            scale=scale,
            offset=ones,
            mean=ones,
            variance=tf.abs(ones) + 1,
            epsilon=0.01,
            is_training=g.rng.random() < 0.5,
        )
        found.append(tf.cast(tf.reshape(made.y, [SIZE, SIZE]), x.dtype))
    return found


def _segments(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    found = []
    for _ in range(2):
        groups = [*sorted(g.rng.choices(range(3), k=SIZE - 1)), 3]
        found.append(tf.math.unsorted_segment_sum(x, g.rng.sample(groups, SIZE), SIZE))
        found.append(tf.math.segment_sum(x, groups) if x.dtype.is_floating else x)
    parts = tf.dynamic_partition(x, tf.constant([0, 1, 0, 1]), 2)
    found.append(tf.dynamic_stitch([tf.constant([1, 2]), tf.constant(g.rng.choice([[0, 3], [3, 0]]))], parts))
    index = tf.constant([[g.rng.randrange(SIZE)]])
    found.append(tf.tensor_scatter_nd_update(x, index, g.constant(x, [1, SIZE])))
    return [
        _square(tf.ensure_shape(one, [SIZE, SIZE])) for one in found if one.shape.rank != 2 or one.shape[0] in (4, None)
    ]


def _matrices(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    wide = tf.cast(x, tf.float64)
    regular = wide + 5 * tf.eye(SIZE, dtype=tf.float64)
    found = [tf.linalg.solve(regular, wide, adjoint=adjoint) for adjoint in (False, True)]
    found += [tf.linalg.inv(regular, adjoint=g.rng.random() < 0.5)]
    found += [tf.linalg.band_part(wide, *bands) for bands in ((0, -1), (-1, 0), (1, 1))]
    found += [tf.linalg.set_diag(wide, wide[0]), tf.linalg.diag(tf.linalg.diag_part(wide))]
    return [tf.cast(one, x.dtype) for one in g.rng.sample(found, 3)]


def _wiring(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    """The same ops with unused outputs, control inputs and other consumers."""
    first, second = tf.raw_ops.IdentityN(input=[tf.tanh(x), tf.square(x)])
    third, _ = tf.raw_ops.IdentityN(input=[tf.tanh(x), tf.square(x)])
    with tf.control_dependencies([second]):
        fourth = tf.tanh(x)
    return [first, third, fourth, tf.tanh(x), tf.add_n([x, x, first]), tf.add_n([x, first, first])]


def _control_flow(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    """Equal ops at top level, in functions, loops and branches; the names of their nodes repeat."""
    op = g.rng.choice([tf.tanh, tf.nn.relu, tf.square, lambda v: v * v, lambda v: tf.reduce_sum(v, 0) + v])

    def body(value: Tensor) -> Tensor:
        return op(value) * tf.constant(0.5, value.dtype)

    positive = tf.reduce_sum(tf.cast(x, tf.float32)) > 0
    turns = 2 + tf.cast(positive, tf.int32)
    made: list[Callable[[], Tensor]] = [
        lambda: tf.function(body, autograph=False)(x),
        lambda: tf.function(body, autograph=False)(tf.function(body, autograph=False)(x)),
        lambda: tf.cond(positive, lambda: body(x), lambda: body(x * 2)),
        lambda: tf.cond(positive, lambda: body(x), lambda: x),
        lambda: tf.while_loop(lambda i, _: i < turns, lambda i, v: (i + 1, body(v)), [0, x])[1],
        lambda: tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, body(v) + x), [0, x], maximum_iterations=3)[1],
        lambda: tf.switch_case(tf.minimum(turns - 2, 1), [lambda: body(x), lambda: body(body(x))]),
    ]
    return [tf.ensure_shape(one(), x.shape) for one in g.rng.sample(made, 2)] + [body(x)]


def _random_numbers(g: GraphGenerator, x: Tensor) -> list[Tensor]:
    if x.dtype not in (tf.float32, tf.float64, tf.float16, tf.bfloat16):
        return [x]
    seeds = g.rng.sample([[1, 2], [2, 1], [3, 4]], 2)
    return [x * tf.random.stateless_uniform([SIZE, SIZE], seed, dtype=x.dtype) for seed in seeds]


TWINS: Mapping[str, Twins] = {
    "reductions": _reductions,
    "reshapes": _reshapes,
    "joins": _joins,
    "gathers": _gathers,
    "slices": _slices,
    "pads": _pads,
    "splits": _splits,
    "products": _products,
    "powers": _powers,
    "matmuls": _matmuls,
    "convolutions": _convolutions,
    "activations": _activations,
    "complex": _complex,
    "casts": _casts,
    "losses": _losses,
    "norms": _norms,
    "segments": _segments,
    "matrices": _matrices,
    "wiring": _wiring,
    "control flow": _control_flow,
    "random numbers": _random_numbers,
}
_NARROW = frozenset(
    {"products", "activations", "reductions", "matmuls", "reshapes", "joins", "slices", "wiring", "casts"}
)
"""Kinds that have kernels for 16-bit types."""


class GraphGenerator:
    """Builds one graph of the placeholders x, w (floats), indices and the output y."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.dtype = rng.choices(["float32", "float64", "float16", "bfloat16"], [60, 25, 8, 7])[0]
        self.feeds: dict[str, Any] = {}
        self.indices: Tensor = None
        self._values: list[Tensor] = []

    def number(self) -> float:
        """Returns a number that is exact in every type."""
        return self.rng.choice([0.25, 0.5, 0.75, 1.5])

    def constant(self, like: Tensor, shape: Sequence[int] = (SIZE, SIZE)) -> Tensor:
        """Returns a constant of the type of a tensor; a large one now and then: it is data, not structure."""
        count = int(np.prod(shape))
        values = np.array([self.rng.choice(range(-7, 8)) / 4 for _ in range(count)]).reshape(shape)
        return tf.constant(values, like.dtype)

    def other(self, like: Tensor) -> Tensor:
        """Returns another (4, 4) tensor of the graph, or a large constant's part."""
        found = [value for value in self._values if value.dtype == like.dtype and value.shape == (SIZE, SIZE)]
        if self.rng.random() < 0.15 or not found:
            many = np.array([self.rng.choice(range(-7, 8)) / 4 for _ in range(8 * SIZE * 64)]).reshape(SIZE, -1)
            return tf.constant(many, like.dtype)[:, :SIZE]
        return self.rng.choice(found)

    def runtime_shaped(self, like: Tensor) -> Tensor:
        """Returns a tensor whose shape only a run knows: (4, 4) or something that broadcasts to it."""
        size = self.rng.choice([[1, 1], [1, SIZE], [SIZE, SIZE]])
        shape = tf.constant(size) + tf.reduce_min(self.indices) * 0
        return tf.ones(shape, like.dtype) * tf.constant(0.5, like.dtype)

    def graph_def(self) -> Any:
        """Returns the graph."""
        rng = self.rng
        dtype = tf.as_dtype(self.dtype)
        shapes = [[SIZE, SIZE], [None, SIZE], [None, None], [SIZE, None]]
        with tf.Graph().as_default() as graph:
            for name in ("x", "w"):
                declared = tf.compat.v1.placeholder(dtype, rng.choice(shapes[:1] * 3 + shapes), name=name)
                value = np.array([rng.choice(range(-9, 10)) / 8 or 0.5 for _ in range(SIZE * SIZE)])
                self.feeds[name] = value.reshape(SIZE, SIZE).astype(dtype.as_numpy_dtype)
                if rng.random() < 0.6 or declared.shape != (SIZE, SIZE):
                    # Some nodes see the declared shape, others the checked one.
                    self._grow_unknown(declared)
                    declared = tf.ensure_shape(declared, [SIZE, SIZE])
                self._values.append(declared)
            self.indices = tf.compat.v1.placeholder(tf.int32, [SIZE], name="indices")
            self.feeds["indices"] = np.array(rng.choices(range(SIZE), k=SIZE), np.int32)
            kinds = sorted(TWINS if dtype.size > 2 else _NARROW)
            for number in range(rng.randint(2, 5)):
                self._grow(rng.choice(kinds), number)
            unused = [value for value in self._values if not value.consumers()] + self._values[-1:]
            total = tf.add_n([tf.reduce_mean(tf.cast(value, dtype)) for value in unused])
            tf.identity(total, name="y")
            tf.reduce_sum(self._values[-1], 1, name="v")
        return graph.as_graph_def()

    def _grow_unknown(self, declared: Tensor) -> None:
        made = self.rng.sample([declared * declared, tf.tanh(declared), tf.nn.relu(declared), declared + 1], 2)
        self._values += [tf.ensure_shape(one, [SIZE, SIZE]) for one in made]

    def _grow(self, kind: str, number: int) -> None:
        value = self.rng.choice(self._values[-3:] + self._values)
        with tf.name_scope(f"block{number}"):
            found = [_square(one) for one in TWINS[kind](self, value)]
            found = [one for one in found if one.dtype == value.dtype]
            chosen = self.rng.sample(found, min(len(found), self.rng.randint(2, 5)))
            # Values stay small, so that no product overflows.
            total = tf.add_n([tf.tanh(one) for one in chosen]) / tf.constant(2, value.dtype)
            self._values.append(tf.ensure_shape(total, [SIZE, SIZE]))
            if self.rng.random() < 0.4:
                self._values.append(self.rng.choice(chosen))
