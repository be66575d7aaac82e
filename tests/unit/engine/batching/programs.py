"""Defines programs whose calls may run together, and programs whose calls may not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gradrule as gr
from gradrule.v1 import program_pb2

_rng = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """A program that fetches y and differentiates it by x.

    shapes: shape of each input for one example, without axis 0. shared: inputs that are the same in all calls.
    why: part of the reason why calls may not run together; empty: they may. made: the graph, if it exists already.
    """

    make: Callable[[gr.Graph], None]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"x": (4,)})
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    derivative: Mapping[str, Any] = field(default_factory=lambda: {"vjp": program_pb2.Vjp(ys=["y"], xs=["x"])})
    fetches: tuple[str, ...] = ("y",)
    why: str = ""
    made: gr.Graph | None = None

    def graph(self) -> gr.Graph:
        if self.made is not None:
            return self.made
        made = gr.Graph()
        self.make(made)
        return made


def weights(*shape: int) -> Any:
    return _rng.normal(size=shape).astype(np.float32)


def x_of(g: gr.Graph, *tail: int) -> Any:
    return g.placeholder("x", "float32", [None, *tail])


def perceptron(g: gr.Graph) -> None:
    h = g.op_output(
        "Relu", g.op_output("BiasAdd", g.matmul(x_of(g, 4), g.constant(weights(4, 8))), g.constant(weights(8)))
    )
    g.op_output("LogSoftmax", g.matmul(h, g.constant(weights(8, 3))), name="y")


def convolution(g: gr.Graph) -> None:
    x = x_of(g, 8, 8, 3)
    c = g.op_output("Conv2D", x, g.constant(weights(3, 3, 3, 4)), strides=[1, 2, 2, 1], padding="SAME")
    c = g.op_output("MaxPool", g.op_output("Relu", c), ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID")
    g.op_output("Softmax", g.matmul(g.reshape(c, [-1, 16]), g.constant(weights(16, 3))), name="y")


def depthwise(g: gr.Graph) -> None:
    c = g.op_output(
        "DepthwiseConv2dNative", x_of(g, 6, 6, 2), g.constant(weights(3, 3, 2, 2)), strides=[1, 1, 1, 1], padding="SAME"
    )
    c = g.op_output("AvgPool", c, ksize=[1, 3, 3, 1], strides=[1, 3, 3, 1], padding="VALID")
    g.reduce_mean(c, axis=[1, 2], name="y")


def batch_norm(g: gr.Graph, *, is_training: bool = False) -> None:
    x = x_of(g, 4, 4, 2)
    given = [g.constant(np.abs(weights(2)) + 0.5) for _ in range(4)]
    if is_training:
        given[2:] = [g.constant(np.zeros(0, np.float32))] * 2
    out = g.op("FusedBatchNormV3", x, *given, is_training=is_training)[0]
    g.op_output("Tanh", out, name="y")


def own_batch_norm(g: gr.Graph) -> None:
    x = x_of(g, 4)
    g.op_output("Sub", x, g.reduce_mean(x, axis=[0]), name="y")


def sequence(g: gr.Graph) -> None:
    """Builds a dense layer on each step, as Keras writes it, and attention of each example to itself."""
    x = x_of(g, 5, 4)
    shape = g.op_output("Shape", x)
    free = g.op_output("GatherV2", shape, g.constant(np.array([0, 1], np.int32)), g.constant(np.int32(0)))
    rows = g.matmul(g.reshape(x, [-1, 4]), g.constant(weights(4, 4)))
    h = g.reshape(rows, g.op_output("ConcatV2", [free, g.constant(np.array([4], np.int32))], g.constant(np.int32(0))))
    scores = g.op_output("Softmax", g.op_output("BatchMatMulV2", h, x, adj_y=True))
    g.op_output("BatchMatMulV2", scores, h, name="y")


def slices(g: gr.Graph) -> None:
    x = x_of(g, 6)
    left, right = (
        g.op_output(
            "StridedSlice",
            x,
            g.constant(np.array([0, first], np.int32)),
            g.constant(np.array([0, first + 3], np.int32)),
            g.constant(np.array([1, 1], np.int32)),
            begin_mask=1,
            end_mask=1,
        )
        for first in (0, 3)
    )
    both = g.op_output("ConcatV2", [g.op_output("Tanh", left), right * right], g.constant(np.int32(1)))
    g.op_output("Transpose", g.reshape(both, [-1, 2, 3]), g.constant(np.array([0, 2, 1], np.int32)), name="y")


def embedding(g: gr.Graph) -> None:
    x = g.placeholder("x", "float32", [None, 3])
    index = g.op_output("Cast", g.op_output("ArgMax", x, g.constant(np.int32(1))), DstT="int32")
    row = g.op_output("GatherV2", g.constant(weights(3, 5)), index, g.constant(np.int32(0)))
    g.op_output("AddV2", row, g.matmul(x, g.constant(weights(3, 5))), name="y")


def broadcasting(g: gr.Graph) -> None:
    x, s = x_of(g, 4), g.placeholder("s", "float32", [None, 1])
    z = x * s + g.constant(weights(4))
    t = g.op_output("Mul", s, g.op_output("Sigmoid", s))
    g.reduce_sum(g.op_output("Mul", g.op_output("Square", z), t), axis=[1], name="y")


def temperature(g: gr.Graph) -> None:
    """Builds a program with an input that has no examples: calls run together only if it is the same in all."""
    x, t = x_of(g, 4), g.placeholder("t", "float32", [])
    g.op_output("Softmax", x / t, name="y")


def score(g: gr.Graph) -> None:
    """Builds the saliency of a class. Its sum over the batch is not fetched."""
    h = g.matmul(g.op_output("Tanh", x_of(g, 4)), g.constant(weights(4, 3)))
    begin, end, strides = (g.constant(np.array(value, np.int32)) for value in ([0, 1], [0, 2], [1, 1]))
    picked = g.op_output("StridedSlice", h, begin, end, strides, begin_mask=1, end_mask=1, shrink_axis_mask=2)
    g.reduce_sum(picked, axis=[0], name="loss")
    g.op_output("Softmax", h, name="y")


def plain(op_type: str, **attrs: Any) -> Callable[[gr.Graph], None]:
    def make(g: gr.Graph) -> None:
        g.op_output(op_type, x_of(g, 4), name="y", **attrs)

    return make


def reduced(op_type: str, axes: list[int]) -> Callable[[gr.Graph], None]:
    def make(g: gr.Graph) -> None:
        g.op_output(op_type, x_of(g, 4), g.constant(np.array(axes, np.int32)), name="y")

    return make


def weighted(g: gr.Graph) -> None:
    g.matmul(x_of(g, 4), g.placeholder("w", "float32", [4, 3]), name="y")


def random(g: gr.Graph) -> None:
    x = x_of(g, 4)
    g.op_output(
        "AddV2", x, g.op_output("RandomUniform", g.op_output("Shape", x), dtype="float32", seed=1, seed2=2), name="y"
    )


def seeded(g: gr.Graph) -> None:
    x = x_of(g, 4)
    noise = g.op_output(
        "StatelessRandomUniform", g.op_output("Shape", x), g.constant(np.array([1, 2], np.int32)), dtype="float32"
    )
    g.op_output("AddV2", x, noise, name="y")


def counted(g: gr.Graph) -> None:
    x = x_of(g, 4)
    size = g.op_output("Cast", g.op_output("Size", x), DstT="float32")
    g.op_output("RealDiv", x, size, name="y")


def squeezed(g: gr.Graph) -> None:
    g.op_output("Squeeze", x_of(g, 4), name="y", squeeze_dims=[])


def crossed(g: gr.Graph) -> None:
    x = x_of(g, 4)
    g.op_output("MatMul", x, x, transpose_b=True, name="y")


def turned(g: gr.Graph) -> None:
    g.op_output("Transpose", x_of(g, 4), g.constant(np.array([1, 0], np.int32)), name="y")


def reversed_rows(g: gr.Graph) -> None:
    g.op_output("ReverseV2", x_of(g, 4), g.constant(np.array([0], np.int32)), name="y")


def shuffled_rows(g: gr.Graph) -> None:
    """Reshapes to rows of another length, which reach into the next example."""
    g.reshape(x_of(g, 4), [-1, 3], name="y")


def against_columns(g: gr.Graph) -> None:
    x, v = x_of(g, 4), g.placeholder("v", "float32", [None])
    g.op_output("AddV2", x, v, name="y")


def first_row(g: gr.Graph) -> None:
    x = x_of(g, 4)
    index = g.constant(np.array([0], np.int32))
    g.op_output("Sub", x, g.op_output("GatherV2", x, index, g.constant(np.int32(0))), name="y")


def fixed(g: gr.Graph) -> None:
    g.op_output("Tanh", g.placeholder("x", "float32", [2, 4]), name="y")


def any_rank(g: gr.Graph) -> None:
    g.op_output("Tanh", g.placeholder("x", "float32", None), name="y")


def mean_loss(g: gr.Graph) -> None:
    g.reduce_mean(g.op_output("Square", x_of(g, 4)), axis=[0, 1], name="y")


def hidden_mean_loss(g: gr.Graph) -> None:
    """Builds a mean loss that is not fetched; its gradients are divided by the number of examples."""
    x = x_of(g, 4)
    g.reduce_mean(g.op_output("Square", x), axis=[0, 1], name="loss")
    g.op_output("Tanh", x, name="y")


def whole_tensor(g: gr.Graph) -> None:
    g.op_output("Sign", x_of(g, 4), name="y")


def ints(g: gr.Graph, *values: int) -> Any:
    return g.constant(np.array(values, np.int32))


def example_count(g: gr.Graph, x: Any) -> Any:
    """Returns the number of examples as a vector of one element."""
    return g.op_output("StridedSlice", g.op_output("Shape", x), ints(g, 0), ints(g, 1), ints(g, 1))


def split_by_count(g: gr.Graph) -> None:
    x = x_of(g, 4)
    sizes = g.op_output("ConcatV2", [example_count(g, x), ints(g, -1)], g.constant(np.int32(0)))
    g.op_output("Identity", g.op("SplitV", x, sizes, g.constant(np.int32(1)), num_split=2)[0], name="y")


def count_as_bool(g: gr.Graph) -> None:
    """Reshapes all examples into one row: the number of examples, cast to bool and back, is 1."""
    x = x_of(g, 4)
    one = g.op_output("Cast", g.op_output("Cast", example_count(g, x), DstT="bool"), DstT="int32")
    g.reshape(x, g.op_output("ConcatV2", [one, ints(g, -1)], g.constant(np.int32(0))), name="y")


def large_count(g: gr.Graph) -> None:
    x = x_of(g, 4)
    large = g.op_output("Mul", example_count(g, x), ints(g, 2**30))
    size = g.op_output("FloorDiv", large, ints(g, 2**30))
    g.op_output(
        "Fill",
        g.op_output("ConcatV2", [size, ints(g, 4)], g.constant(np.int32(0))),
        g.constant(np.float32(1)),
        name="y",
    )


def reversed_behind_ellipsis(g: gr.Graph) -> None:
    """Slices with an ellipsis that covers no axis, so the next position is that of the batch axis."""
    begin, end, strides = ints(g, 0, 0, 0), ints(g, 0, 0, 4), ints(g, 1, -1, 1)
    slicing = {"ellipsis_mask": 1, "new_axis_mask": 1, "begin_mask": 6, "end_mask": 6}
    g.op_output("StridedSlice", x_of(g, 4), begin, end, strides, name="y", **slicing)


def sum_along_unrelated_axes(g: gr.Graph) -> None:
    x = x_of(g, 4)
    axes = g.op("BroadcastGradientArgs", ints(g, 1, 1, 4), ints(g, 1, 5, 4))[1]
    g.reshape(g.op_output("Sum", x, axes), g.op_output("Shape", x), name="y")


def broadcast_loss(g: gr.Graph) -> None:
    """Builds a loss whose gradient has the shape of the labels, so an example has four rows in the result."""
    x, labels = x_of(g, 1), g.placeholder("s", "float32", [None, 4])
    g.reshape(g.op("SoftmaxCrossEntropyWithLogits", x, labels)[1], [-1, 1], name="y")


_LOSS = {"vjp": program_pb2.Vjp(ys=["loss"], xs=["x"])}
_IMAGE = {"x": (4, 4, 2)}

PROVEN = {
    "perceptron": Case(perceptron),
    "guided backprop": Case(perceptron, overrides={"Relu": "guided_relu"}),
    "deconvnet": Case(perceptron, overrides={"Relu": "deconvnet"}),
    "straight through": Case(plain("Sign"), overrides={"Sign": "ste_sign"}),
    "convolution": Case(convolution, {"x": (8, 8, 3)}),
    "guided convolution": Case(convolution, {"x": (8, 8, 3)}, overrides={"Relu": "guided_relu"}),
    "depthwise": Case(depthwise, {"x": (6, 6, 2)}),
    "batch norm": Case(batch_norm, _IMAGE),
    "sequence": Case(sequence, {"x": (5, 4)}),
    "slices": Case(slices, {"x": (6,)}),
    "embedding": Case(embedding, {"x": (3,)}),
    "broadcasting": Case(broadcasting, {"x": (4,), "s": (1,)}),
    "temperature": Case(temperature, shared={"t": ()}),
    "shared weights": Case(weighted, shared={"w": (4, 3)}),
    "score": Case(score, derivative=_LOSS),
    "jvp": Case(perceptron, derivative={"jvp": program_pb2.Jvp(ys=["y"], xs=["x"])}),
    "hvp": Case(plain("Tanh"), derivative={"hvp": program_pb2.Hvp(ys=["y"], xs=["x"])}),
    "forward only": Case(perceptron, derivative={}),
    "one op": Case(plain("Exp")),
    "sum of others": Case(reduced("Sum", [1])),
    "mean of others": Case(reduced("Mean", [-1])),
    "largest of others": Case(reduced("Max", [1])),
    "loss that broadcasts": Case(broadcast_loss, {"x": (1,), "s": (4,)}, derivative={}),
    "product of others": Case(reduced("Prod", [1]), derivative={}),
}
REFUSED = {
    "sum over the batch": Case(reduced("Sum", [0]), why="Sum 'y' works along the batch"),
    "sum over all": Case(reduced("Sum", [0, 1]), why="Sum 'y' works along the batch"),
    "mean loss": Case(mean_loss, why="Mean 'y' works along the batch"),
    "hidden mean loss": Case(hidden_mean_loss, derivative=_LOSS, why="computes with the number of examples"),
    "batch norm in training": Case(lambda g: batch_norm(g, is_training=True), _IMAGE, why="statistics of the batch"),
    "batch norm by hand": Case(own_batch_norm, why="works along the batch"),
    "gradient of weights": Case(
        weighted,
        shared={"w": (4, 3)},
        derivative={"vjp": program_pb2.Vjp(ys=["y"], xs=["x", "w"])},
        why="MatMul",
    ),
    "rule over the whole tensor": Case(
        whole_tensor, overrides={"Sign": "gradient_clip_norm"}, why="works along the batch"
    ),
    "random": Case(random, derivative={}, why="random"),
    "random by seed": Case(seeded, derivative={}, why="not known to keep examples apart"),
    "number of elements": Case(counted, why="computes with the number of examples"),
    "squeeze": Case(squeezed, derivative={}, why="where there is one example"),
    "rows by rows": Case(crossed, derivative={}, why="mixes examples"),
    "transposed": Case(turned, derivative={}, why="moves the batch axis"),
    "reversed": Case(reversed_rows, derivative={}, why="works along the batch"),
    "rows of another length": Case(shuffled_rows, derivative={}, why="batch is not axis 0"),
    "one axis against another": Case(against_columns, {"x": (4,), "v": ()}, derivative={}, why="against one another"),
    "the first row": Case(first_row, derivative={}, why="works along the batch"),
    "cumulative": Case(
        lambda g: g.op_output("Cumsum", x_of(g, 4), g.constant(np.int32(0)), name="y"),
        derivative={},
        why="works along the batch",
    ),
    "softmax of a vector": Case(
        lambda g: g.op_output("Softmax", g.placeholder("x", "float32", [None]), name="y"),
        {"x": ()},
        derivative={},
        why="works along the batch",
    ),
    "split by the number of examples": Case(split_by_count, derivative={}, why="mixes examples"),
    "number of examples as a bool": Case(count_as_bool, derivative={}, why="batch is not axis 0"),
    "number of examples that overflows": Case(large_count, derivative={}, why="computes with the number of examples"),
    "reversed behind an ellipsis": Case(reversed_behind_ellipsis, derivative={}, why="slices the batch axis"),
    "sum along unrelated axes": Case(sum_along_unrelated_axes, derivative={}, why="sums over the batch"),
    "fixed size": Case(fixed, why="no input has an axis 0 of any size"),
    "any rank": Case(any_rank, why="no input has an axis 0 of any size"),
    "jacobian": Case(perceptron, derivative={"jacobian": program_pb2.Jacobian(ys=["y"], xs=["x"])}, why="batch"),
}
