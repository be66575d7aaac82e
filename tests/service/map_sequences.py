"""Generates sequences of override maps over one random graph, to compare what a map gives first and what it gives later.

A program that reuses what an earlier program built, such as the gradients of similar nodes, must tell apart all that
gradients depend on. So graphs consist of twins: nodes of one op type, most of one shape too, that differ in one thing
that a gradient may depend on: the values of a constant input, an attribute, an input that occurs twice, how much of a
shape is known, the op that made an input, which outputs are used, the kind of upstream gradient, the graph around them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from gradrule._messages.call_arguments import ProgramArguments
from tests.service.graph_defs import load_graph

SIZE = 4
KINDS = ("vjp", "stacked", "jacobian", "hvp", "jvp")

Tensor = Any
Twins = Callable[["_Generator", Tensor], list[Tensor]]


@dataclass(frozen=True)
class Map:
    """One override map with what is differentiated; an argument of every call that `ask` or a build makes."""

    kind: str
    arguments: ProgramArguments
    params: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    grad_ys: Mapping[str, Any] = field(default_factory=dict)
    vectors: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        shown = {name: getattr(self.arguments, name) for name in ("ys", "xs", "stop_gradients", "no_gradient")}
        return f"Map({self.kind}, {shown}, overrides={self.arguments.overrides}, params={dict(self.params)})"


@dataclass(frozen=True)
class MapSequence:
    """A graph, its feeds, and the maps in the order in which they are evaluated; some occur twice."""

    graph: gr.Graph
    feeds: dict[str, Any]
    maps: list[Map]
    graph_def: Any


def sequence(number: int, maps: int) -> MapSequence:
    """Returns the sequence of a number; the same whenever and wherever it is made."""
    rng = random.Random(number)
    generator = _Generator(rng)
    graph_def = generator.graph_def()
    chosen: list[Map] = []
    makers = _MapMaker(rng, graph_def, generator)
    while len(chosen) < maps:
        if chosen and rng.random() < 0.2:
            chosen.append(rng.choice(chosen))
        elif chosen and rng.random() < 0.35:
            chosen.append(makers.varied(rng.choice(chosen)))
        else:
            chosen.append(makers.new())
    return MapSequence(load_graph(graph_def), generator.feeds, chosen, graph_def)


# Twins: functions of a (4, 4) tensor that return (4, 4) tensors, which the generator adds up.


def _square(value: Tensor) -> Tensor:
    """Returns a (4, 4) tensor of the same type, from a tensor of 16 elements or fewer."""
    if value.shape.rank == 2 and value.shape == (SIZE, SIZE):
        return value
    return value + tf.zeros([SIZE, SIZE], value.dtype)


def _reductions(g: _Generator, x: Tensor) -> list[Tensor]:
    op = g.rng.choice([tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod, _variance])
    keep = g.rng.random() < 0.5
    axes = g.rng.sample([0, 1, -1, [0, 1], [1, 0], None], 3)
    return [tf.reshape(op(x, axis, keep), _lead(x, op(x, axis, keep))) + tf.zeros_like(x) for axis in axes]


def _lead(x: Tensor, reduced: Tensor) -> list[int]:
    return [1, 1] if reduced.shape.num_elements() == 1 else [SIZE, 1] if reduced.shape[0] == SIZE else [1, SIZE]


def _variance(x: Tensor, axis: Any, keep: bool) -> Tensor:
    return tf.math.reduce_variance(x, axis, keep)


def _reshapes(g: _Generator, x: Tensor) -> list[Tensor]:
    one = g.rng.sample([[2, 8], [8, 2], [16], [4, 4], [1, 16], [-1, 8]], 2)
    found = [tf.reshape(tf.reshape(x, shape) * g.number(), [SIZE, SIZE]) for shape in one]
    found += [tf.transpose(x, permutation) for permutation in g.rng.sample([[0, 1], [1, 0], None], 2)]
    return [*found, tf.reshape(x, tf.shape(x)), tf.squeeze(tf.expand_dims(x, g.rng.choice([0, 1, 2])))]


def _joins(g: _Generator, x: Tensor) -> list[Tensor]:
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


def _gathers(g: _Generator, x: Tensor) -> list[Tensor]:
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


def _slices(g: _Generator, x: Tensor) -> list[Tensor]:
    cut = [x[:2], x[1:3], x[2:], x[::2], x[::-2], x[1::2], x[-2:]]
    found = [tf.concat([one, one], 0) for one in g.rng.sample(cut, 3)]
    found += [tf.tile(tf.slice(x, begin, [2, 2]), [2, 2]) for begin in g.rng.sample([[0, 0], [1, 2], [2, 1]], 2)]
    found.append(x[g.rng.randrange(SIZE)] + tf.zeros_like(x))
    found.append(x[:, g.rng.randrange(SIZE), None] + tf.zeros_like(x))
    return found


def _pads(g: _Generator, x: Tensor) -> list[Tensor]:
    sizes = g.rng.sample([[[1, 0], [0, 1]], [[0, 1], [1, 0]], [[1, 0], [1, 0]], [[0, 1], [0, 1]]], 2)
    found = [tf.pad(x, size)[:SIZE, :SIZE] for size in sizes]
    found += [tf.pad(x, sizes[0], mode)[1:, 1:] + tf.zeros([SIZE, SIZE], x.dtype) for mode in ("REFLECT", "SYMMETRIC")]
    found += [tf.tile(x, times)[:SIZE, :SIZE] for times in g.rng.sample([[2, 1], [1, 2], [2, 2]], 2)]
    found += [tf.reverse(x, [axis]) for axis in (0, 1)]
    found += [tf.roll(x, shift, axis) for shift, axis in g.rng.sample([(1, 0), (2, 0), (1, 1)], 2)]
    return [one if one.shape == (SIZE, SIZE) else _square(one[:SIZE, :SIZE]) for one in found]


def _splits(g: _Generator, x: Tensor) -> list[Tensor]:
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


def _products(g: _Generator, x: Tensor) -> list[Tensor]:
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


def _powers(g: _Generator, x: Tensor) -> list[Tensor]:
    base = tf.abs(x) + g.number()
    exponents = [2.0, 3.0, 1.0, 0.5, 0.0]
    found = [tf.pow(base, tf.constant(exponent, x.dtype)) for exponent in g.rng.sample(exponents, 3)]
    found.append(tf.pow(base, g.constant(x, [SIZE])))
    found.append(tf.pow(base, x))
    return [*found, tf.math.xdivy(x, base), tf.math.xlogy(x, base), tf.math.atan2(x, base)]


def _matmuls(g: _Generator, x: Tensor) -> list[Tensor]:
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


def _convolutions(g: _Generator, x: Tensor) -> list[Tensor]:
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


def _activations(g: _Generator, x: Tensor) -> list[Tensor]:
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


def _complex(g: _Generator, x: Tensor) -> list[Tensor]:
    wide = tf.cast(x, tf.float32)
    z = tf.complex(wide, g.rng.choice([wide, tf.sin(wide), tf.ones_like(wide)]))
    z = g.rng.choice([z * z, z * tf.math.conj(z), z + tf.constant(1 + 2j, z.dtype), z @ z, tf.transpose(z)])
    parts = [tf.math.real(z), tf.math.imag(z), tf.abs(z), tf.math.real(tf.exp(tf.constant(0.1j, z.dtype) * z))]
    return [tf.cast(one, x.dtype) for one in g.rng.sample(parts, 2)]


def _casts(g: _Generator, x: Tensor) -> list[Tensor]:
    types = g.rng.sample([tf.float16, tf.bfloat16, tf.float32, tf.float64], 3)
    ops = [tf.tanh, tf.square, lambda v: v * tf.reduce_sum(v), lambda v: tf.matmul(v, v), tf.nn.relu]
    op = g.rng.choice(ops)
    found = [tf.cast(op(tf.cast(x, dtype)), x.dtype) for dtype in types]
    # A step: its gradient is zero unless a rule says otherwise.
    found += [tf.cast(x > limit, x.dtype) for limit in (0.0, 0.25)]
    return found


def _losses(g: _Generator, x: Tensor) -> list[Tensor]:
    labels = tf.constant([g.rng.randrange(SIZE) for _ in range(SIZE)])
    sparse = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x)
    sparser = tf.nn.sparse_softmax_cross_entropy_with_logits((labels + 1) % SIZE, x)
    targets = tf.nn.softmax(g.constant(x))
    dense = tf.nn.softmax_cross_entropy_with_logits(g.rng.choice([targets, tf.nn.softmax(g.other(x))]), x)
    raw = tf.raw_ops.SoftmaxCrossEntropyWithLogits(features=x, labels=targets)
    # The second output is a gradient that few use; the gradient function asks whether its own upstream is zero.
    return [one[:, None] + tf.zeros_like(x) for one in (sparse, sparser, dense, raw.loss)] + [raw.backprop]


def _norms(g: _Generator, x: Tensor) -> list[Tensor]:
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


def _segments(g: _Generator, x: Tensor) -> list[Tensor]:
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


def _matrices(g: _Generator, x: Tensor) -> list[Tensor]:
    wide = tf.cast(x, tf.float64)
    regular = wide + 5 * tf.eye(SIZE, dtype=tf.float64)
    found = [tf.linalg.solve(regular, wide, adjoint=adjoint) for adjoint in (False, True)]
    found += [tf.linalg.inv(regular, adjoint=g.rng.random() < 0.5)]
    found += [tf.linalg.band_part(wide, *bands) for bands in ((0, -1), (-1, 0), (1, 1))]
    found += [tf.linalg.set_diag(wide, wide[0]), tf.linalg.diag(tf.linalg.diag_part(wide))]
    return [tf.cast(one, x.dtype) for one in g.rng.sample(found, 3)]


def _wiring(g: _Generator, x: Tensor) -> list[Tensor]:
    """The same ops with unused outputs, control inputs and other consumers."""
    first, second = tf.raw_ops.IdentityN(input=[tf.tanh(x), tf.square(x)])
    third, _ = tf.raw_ops.IdentityN(input=[tf.tanh(x), tf.square(x)])
    with tf.control_dependencies([second]):
        fourth = tf.tanh(x)
    return [first, third, fourth, tf.tanh(x), tf.add_n([x, x, first]), tf.add_n([x, first, first])]


def _control_flow(g: _Generator, x: Tensor) -> list[Tensor]:
    """Equal ops at top level, in functions, loops and branches; the names of their nodes repeat."""
    op = g.rng.choice([tf.tanh, tf.nn.relu, tf.square, lambda v: v * v, lambda v: tf.reduce_sum(v, 0) + v])

    def body(value: Tensor) -> Tensor:
        return op(value) * tf.constant(0.5, value.dtype)

    positive = tf.reduce_sum(tf.cast(x, tf.float32)) > 0
    turns = 2 + tf.cast(positive, tf.int32)
    made = [
        lambda: tf.function(body, autograph=False)(x),
        lambda: tf.function(body, autograph=False)(tf.function(body, autograph=False)(x)),
        lambda: tf.cond(positive, lambda: body(x), lambda: body(x * 2)),
        lambda: tf.cond(positive, lambda: body(x), lambda: x),
        lambda: tf.while_loop(lambda i, _: i < turns, lambda i, v: (i + 1, body(v)), [0, x])[1],
        lambda: tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, body(v) + x), [0, x], maximum_iterations=3)[1],
        lambda: tf.switch_case(tf.minimum(turns - 2, 1), [lambda: body(x), lambda: body(body(x))]),
    ]
    return [tf.ensure_shape(one(), x.shape) for one in g.rng.sample(made, 2)] + [body(x)]


def _random_numbers(g: _Generator, x: Tensor) -> list[Tensor]:
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


class _Generator:
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


ELEMENTWISE = (
    "Relu",
    "Tanh",
    "Sigmoid",
    "Square",
    "Sign",
    "Floor",
    "Abs",
    "Sin",
    "Exp",
    "Elu",
    "Selu",
    "Relu6",
    "Softplus",
)
_UNARY = (
    "5 * dy",
    "{0} * dy",
    "where(abs(x) <= {0}, dy, 0)",
    "where(x > 0, maximum(dy, 0), 0)",
    "dy * y",
    "dy / ({0} + abs(x))",
    "{0} * default",
    "dy * sum(dy)",
    "dy * mean(x)",
    "dy + x",
)
_UNARY_NAMES = (
    "ste",
    "ste_sign",
    "guided_relu",
    "deconvnet",
    "gradient_reversal",
    "gradient_normalize",
    "elrp_activation",
    "magnitude_aware_sign",
    "deeplift_rescale",
    "gradient_sign",
    "Tanh",
    "Relu",
    "Identity",
    "default",
)
_LINEAR_NAMES = ("lrp_epsilon", "lrp_zplus", "lrp_gamma", "lrp_flat", "lrp_wsquare", "default", "feedback_alignment")
_PRESETS = (
    "guided_backprop",
    "deconvnet",
    "beta_smooth",
    "epsilon_plus",
    "epsilon_alpha2_beta1",
    "excitation_backprop",
)
_ANY = ("each({0} * default)", "each(default + {0} * default)", "default")


class _MapMaker:
    """Makes maps for one graph."""

    def __init__(self, rng: random.Random, graph_def: Any, generator: _Generator) -> None:
        self._rng, self._dtype, self._graph_def = rng, generator.dtype, graph_def
        top = [node for node in graph_def.node if node.op not in ("Const", "Placeholder", "NoOp")]
        inner = [node for function in graph_def.library.function for node in function.node_def]
        self._top = top
        self._types = sorted({node.op for node in [*top, *inner] if node.op != "Const"})
        self._elementwise = [kind for kind in self._types if kind in ELEMENTWISE]
        self._linear = [kind for kind in self._types if kind in ("MatMul", "Conv2D", "BiasAdd", "Einsum", "AvgPool")]
        self._scopes = sorted({node.name.split("/")[0] for node in top if "/" in node.name})

    def new(self) -> Map:
        """Returns a new map."""
        rng = self._rng
        kind = rng.choices(KINDS, [58, 8, 8, 16, 10])[0]
        xs = rng.choice([["x"], ["x", "w"], ["w"], ["x"]])
        y = rng.choice(["y", "y", "v"])
        overrides, params = self._overrides(kind)
        inner = [node.name for node in self._top if node.name not in ("y", "v")]
        arguments = ProgramArguments(
            fetches=rng.choice([["y"], [y], []]),
            ys=[y],
            xs=xs,
            overrides=overrides,
            stop_gradients=rng.sample(inner, 1) if rng.random() < 0.12 else (),
            unconnected_gradients=rng.choice(["none", "none", "zero"]),
            no_gradient=rng.choices(["zero", "default", "pass", "error"], [40, 30, 20, 10])[0],
            dense_gradients=rng.random() < 0.3,
        )
        shape = (SIZE,) if y == "v" else ()
        return self._with_values(Map(kind, arguments, params), shape)

    def _with_values(self, made: Map, shape: tuple[int, ...]) -> Map:
        rng = self._rng
        (y,) = made.arguments.ys
        if made.kind == "stacked":
            made = replace(made, grad_ys={y: self._array((2, *shape))})
        elif made.kind == "vjp" and rng.random() < 0.5:
            made = replace(made, grad_ys={y: self._array(shape)})
        elif made.kind in ("hvp", "jvp"):
            made = replace(made, vectors={x: self._array((SIZE, SIZE)) for x in made.arguments.xs})
        return made

    def varied(self, other: Map) -> Map:
        """Returns a map of the same nodes with other rules, or of the same rules with another derivative."""
        rng = self._rng
        if rng.random() < 0.3:
            kind = rng.choice(KINDS)
            shape = (SIZE,) if list(other.arguments.ys) == ["v"] else ()
            return self._with_values(Map(kind, other.arguments, other.params), shape)
        overrides = [
            gr.Override(gr.Rule(self._formula(_ANY[:2])), label=f"part{index}", optional=True, **self._selector())
            if isinstance(item, gr.Preset)
            else self._with_rule(item)
            for index, item in enumerate(other.arguments.overrides or [])
        ]
        return replace(other, arguments=replace(other.arguments, overrides=overrides), params={})

    def _with_rule(self, item: gr.Override) -> gr.Override:
        found = object.__new__(gr.Override)
        for name in gr.Override.__slots__:
            object.__setattr__(found, name, getattr(item, name))
        rules = _UNARY[:7] if item.selector.op_type in ELEMENTWISE else _ANY[:2]
        object.__setattr__(found, "rule", gr.Rule(self._formula(rules)))
        object.__setattr__(found, "params", None)
        return found

    def _formula(self, formulas: Sequence[str]) -> str:
        return self._rng.choice(formulas).format(self._rng.choice([0.5, 0.75, 2.0, 3.0]))

    def _overrides(self, kind: str) -> tuple[list[Any], dict[str, dict[str, float]]]:
        rng = self._rng
        if rng.random() < 0.1:
            return [gr.Preset(rng.choice(_PRESETS), optional=True)], {}
        overrides: list[Any] = []
        params: dict[str, dict[str, float]] = {}
        for index in range(rng.choice([0, 1, 1, 2, 2, 3])):
            words: dict[str, Any] = {"label": f"part{index}", "optional": True}
            if kind == "hvp" and rng.random() < 0.5:
                words["order"] = "all"
            draw = rng.random()
            if draw < 0.45 and self._elementwise:
                words |= self._narrowed({"op_type": rng.choice(self._elementwise)})
                rule: Any = self._unary(words, params)
            elif draw < 0.6 and self._linear:
                words |= self._narrowed({"op_type": rng.choice(self._linear)})
                rule = rng.choice(_LINEAR_NAMES)
            elif draw < 0.7 and len(self._top) > 2:
                words["region"] = self._region()
                rule = gr.Rule(self._formula(("first({0} * default)", "each({0} * default)")))
            else:
                words |= self._selector()
                rule = gr.Rule(self._formula(_ANY[:2])) if rng.random() < 0.75 else "default"
            overrides.append(gr.Override(rule, **words))
        return overrides, params

    def _unary(self, words: dict[str, Any], params: dict[str, dict[str, float]]) -> Any:
        rng = self._rng
        draw = rng.random()
        if draw < 0.12:
            words["params"] = {"gain": rng.choice([0.5, 2.0]), "beta": 1.25}
            if rng.random() < 0.5:
                params[words["label"]] = {"gain": rng.choice([0.75, 3.0])}
            return gr.Rule("gain * dy / (beta + abs(x))", params={"gain": None, "beta": None})
        if draw < 0.2:
            # The nodes' names decide which numbers are drawn.
            params[words["label"]] = {"seed": rng.choice([7, 8]), "step": 1}
            return "gradient_noise"
        if draw < 0.5:
            return rng.choice(_UNARY_NAMES)
        return gr.Rule(self._formula(_UNARY))

    def _narrowed(self, selector: dict[str, Any]) -> dict[str, Any]:
        rng = self._rng
        draw = rng.random()
        if draw < 0.2 and self._scopes:
            return selector | {"scope": rng.choice(self._scopes)}
        if draw < 0.35:
            return selector | {"position": rng.choice(["nearest_xs", "nearest_ys", 0, -1])}
        if draw < 0.45:
            return selector | {"depends_on": (rng.choice(["x", "w"]),)}
        if draw < 0.5:
            return selector | {"rank": rng.choice([0, 1, 2])}
        if draw < 0.65:
            names = [node.name for node in self._top if node.op == selector["op_type"]]
            return {"node": tuple(rng.sample(names, min(len(names), 2)))} if names else selector
        return selector

    def _selector(self) -> dict[str, Any]:
        rng = self._rng
        draw = rng.random()
        if draw < 0.3:
            return {"op_type": rng.choice(self._types)}
        if draw < 0.6:
            return {"node": tuple(node.name for node in rng.sample(self._top, min(len(self._top), rng.randint(1, 3))))}
        if draw < 0.7 and self._scopes:
            return {"scope": rng.choice(self._scopes)}
        if draw < 0.8:
            return {"op_type": rng.choice(["@activation", "@linear", "@step", "@sum", "@bias"])}
        if draw < 0.9:
            return {"layer": rng.choice(["@linear", "@dense", "@convolution", "@activation"])}
        return self._chain()

    def _chain(self) -> dict[str, Any]:
        by_name = {node.name: node for node in self._top}
        node = self._rng.choice(self._top)
        before = [by_name[name] for name in (text.split(":")[0] for text in node.input) if name in by_name]
        return {"pattern": (self._rng.choice(before).op, node.op)} if before else {"op_type": node.op}

    def _region(self) -> gr.Region:
        """Returns a region of one node: from its inputs that are no constants."""
        rng = self._rng
        constants = {node.name for node in self._graph_def.node if node.op == "Const"}
        node = rng.choice(self._top)
        inputs = [text for text in node.input if not text.startswith("^") and text not in constants]
        return gr.Region(inputs=dict.fromkeys(inputs) or ["x"], outputs=[node.name])

    def _array(self, shape: tuple[int, ...]) -> Any:
        count = int(np.prod(shape))
        values = np.array([self._rng.choice(range(-9, 10)) / 4 for _ in range(count)]).reshape(shape)
        return values.astype(tf.as_dtype(self._dtype).as_numpy_dtype)


def orders(rng: random.Random, maps: Sequence[Map]) -> Iterator[Map]:
    """Yields the maps in another order."""
    yield from rng.sample(list(maps), len(maps))
