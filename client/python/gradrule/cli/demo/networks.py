"""Builds the demo's two networks as graphs; weights are placeholders, whose values the client holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gradrule._builder.graph import Graph
from gradrule._builder.handles import TensorHandle
from gradrule.cli.demo.data import CLASSES, PIXELS, SIDE
from gradrule.common.tensor_codec import Array

# Compensates the division of the logits by the root of the last fan-in.
_GAIN = 2.0


@dataclass
class Network:
    """Holds a graph and the initial values of its weights, by placeholder name.

    The graph takes `x` (float32, (n, pixels)) and `labels` (int64, (n,)); it has `logits` ((n, 10)), `loss` (the mean
    cross entropy) and `score` (the sum over examples of the logit of the label).
    """

    graph: Graph = field(default_factory=Graph)
    weights: dict[str, Array] = field(default_factory=dict)

    def inputs(self, pixels: int) -> tuple[TensorHandle, TensorHandle]:
        """Adds the placeholders `x` and `labels`."""
        x = self.graph.placeholder("x", "float32", [None, pixels])
        return x, self.graph.placeholder("labels", "int64", [None])

    def weight(self, name: str, value: Array) -> TensorHandle:
        """Adds a placeholder for a weight with this initial value."""
        self.weights[name] = value.astype(np.float32)
        return self.graph.placeholder(name, "float32", value.shape)

    def outputs(self, logits: TensorHandle, labels: TensorHandle) -> None:
        """Names the logits and adds loss and score."""
        g = self.graph
        logits = g.op_output("Identity", logits, name="logits")
        losses, _ = g.op("SparseSoftmaxCrossEntropyWithLogits", logits, labels)
        g.reduce_mean(losses, axis=[0], name="loss")
        g.reduce_sum(logits * g.one_hot(labels, CLASSES), axis=[0, 1], name="score")


def binary_network(seed: int, hidden: Sequence[int] = (256, 256)) -> Network:
    """Builds dense layers with binary weights and sign activations.

    Layer i computes `sign(h @ sign(w_i) / sqrt(fan_in))`, the last one without the outer sign. Every trainable
    weight is the argument of a sign, so without a rule for `Sign` the gradient of all of them is zero.
    """
    rng = np.random.default_rng(seed)
    network = Network()
    g = network.graph
    h, labels = network.inputs(PIXELS)
    widths = [PIXELS, *hidden, CLASSES]
    for layer, (fan_in, width) in enumerate(itertools.pairwise(widths), start=1):
        latent = network.weight(f"w{layer}", rng.uniform(-0.5, 0.5, (fan_in, width)))
        h = g.matmul(h, g.op_output("Sign", latent, name=f"binary_w{layer}")) * (1 / math.sqrt(fan_in))
        if layer < len(widths) - 1:
            h = g.op_output("Sign", h, name=f"sign{layer}")
    network.outputs(h * _GAIN, labels)
    return network


def relu_network(seed: int, side: int = SIDE, channels: Sequence[int] = (16, 32), width: int = 64) -> Network:
    """Builds two convolutions and two dense layers with ReLU, whose decisions the demo explains.

    side: height and width of the images, an even number.
    """
    rng = np.random.default_rng(seed)
    network = Network()
    g = network.graph

    def weight(name: str, *shape: int) -> TensorHandle:
        return network.weight(name, rng.normal(0.0, math.sqrt(2 / math.prod(shape[:-1])), shape))

    def bias(name: str, size: int) -> TensorHandle:
        return network.weight(name, np.zeros(size))

    x, labels = network.inputs(side * side)
    h = g.op_output("Reshape", x, [-1, side, side, 1])
    first, second = channels
    for layer, (fan_in, fan_out, stride) in enumerate([(1, first, 1), (first, second, 2)], start=1):
        kernel = weight(f"kernel{layer}", 3, 3, fan_in, fan_out)
        h = g.op_output("Conv2D", h, kernel, strides=[1, stride, stride, 1], padding="SAME")
        h = g.op_output("Relu", g.op_output("BiasAdd", h, bias(f"kernel{layer}_bias", fan_out)))
    flat = (side // 2) ** 2 * second
    h = g.op_output("Reshape", h, [-1, flat])
    h = g.op_output(
        "Relu", g.op_output("BiasAdd", g.matmul(h, weight("dense", flat, width)), bias("dense_bias", width))
    )
    logits = g.op_output("BiasAdd", g.matmul(h, weight("logits_w", width, CLASSES)), bias("logits_bias", CLASSES))
    network.outputs(logits, labels)
    return network
