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
    why: part of the reason why calls do not run together; empty: they do. made: the graph, if it exists already.
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


def crossed(g: gr.Graph) -> None:
    x = x_of(g, 4)
    g.op_output("MatMul", x, x, transpose_b=True, name="y")


def turned(g: gr.Graph) -> None:
    g.op_output("Transpose", x_of(g, 4), g.constant(np.array([1, 0], np.int32)), name="y")


def reversed_rows(g: gr.Graph) -> None:
    g.op_output("ReverseV2", x_of(g, 4), g.constant(np.array([0], np.int32)), name="y")


def first_row(g: gr.Graph) -> None:
    x = x_of(g, 4)
    index = g.constant(np.array([0], np.int32))
    g.op_output("Sub", x, g.op_output("GatherV2", x, index, g.constant(np.int32(0))), name="y")


def fixed(g: gr.Graph) -> None:
    g.op_output("Tanh", g.placeholder("x", "float32", [2, 4]), name="y")


def any_rank(g: gr.Graph) -> None:
    g.op_output("Tanh", g.placeholder("x", "float32", None), name="y")


def hidden_mean_loss(g: gr.Graph) -> None:
    """Builds a mean loss that is not fetched; its gradients are divided by the number of examples."""
    x = x_of(g, 4)
    g.reduce_mean(g.op_output("Square", x), axis=[0, 1], name="loss")
    g.op_output("Tanh", x, name="y")


def whole_tensor(g: gr.Graph) -> None:
    g.op_output("Sign", x_of(g, 4), name="y")


_LOSS = {"vjp": program_pb2.Vjp(ys=["loss"], xs=["x"])}
_IMAGE = {"x": (4, 4, 2)}

_WEIGHTED = {"vjp": program_pb2.Vjp(ys=["y"], xs=["x", "w"])}

SOUND = {
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
    "batched jacobian": Case(
        perceptron, derivative={"jacobian": program_pb2.Jacobian(ys=["y"], xs=["x"], batched=True)}
    ),
    "forward only": Case(perceptron, derivative={}),
    "sum of others": Case(reduced("Sum", [1])),
    "mean of others": Case(reduced("Mean", [-1])),
}
"""Programs that may declare batching."""

MIXING = {
    "hidden mean loss": Case(hidden_mean_loss, derivative=_LOSS, why="the derivative 'x' differs"),
    "batch norm in training": Case(lambda g: batch_norm(g, is_training=True), _IMAGE, why="output 'y' differs"),
    "batch norm by hand": Case(own_batch_norm, why="output 'y' differs"),
    "random by seed": Case(seeded, derivative={}, why="output 'y' differs"),
    "number of elements": Case(counted, why="output 'y' differs"),
    "rows by rows": Case(crossed, derivative={}, why="output 'y' differs"),
    "reversed": Case(reversed_rows, derivative={}, why="output 'y' differs"),
    "the first row": Case(first_row, derivative={}, why="output 'y' differs"),
    "cumulative": Case(
        lambda g: g.op_output("Cumsum", x_of(g, 4), g.constant(np.int32(0)), name="y"),
        derivative={},
        why="output 'y' differs",
    ),
    "softmax of a vector": Case(
        lambda g: g.op_output("Softmax", g.placeholder("x", "float32", [None]), name="y"),
        {"x": ()},
        derivative={},
        why="output 'y' differs",
    ),
    "two rows for an example": Case(
        lambda g: g.reshape(x_of(g, 4), [-1, 2], name="y"), derivative={}, why="not one row for each of"
    ),
}
"""Programs that declare batching wrongly, which only a comparison of runs shows."""

REFUSED = {
    "sum over the batch": Case(reduced("Sum", [0]), why="output 'y' has the shape (4,)"),
    "sum over all": Case(reduced("Sum", [0, 1]), why="output 'y' has the shape ()"),
    "gradient of weights": Case(weighted, derivative=_WEIGHTED, why="the derivative 'w' has the shape (4, 3)"),
    "rule over the whole tensor": Case(
        whole_tensor, overrides={"Sign": "gradient_clip_norm"}, why="the rule 'gradient_clip_norm' is not per sample"
    ),
    "expression over the whole tensor": Case(
        whole_tensor, overrides={"Sign": "dy / (1 + sum(dy * dy))"}, why="the rule 'inline' is not per sample"
    ),
    "random": Case(random, derivative={}, why="draws random numbers"),
    "transposed": Case(turned, derivative={}, why="output 'y' has the shape (4, None)"),
    "fixed size": Case(fixed, why="has the shape (2, 4)"),
    "any rank": Case(any_rank, why="no input that a result depends on"),
    "jacobian": Case(
        perceptron, derivative={"jacobian": program_pb2.Jacobian(ys=["y"], xs=["x"])}, why="a whole Jacobian"
    ),
}
"""Programs that declare batching wrongly, which is known when they are compiled."""
