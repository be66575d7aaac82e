"""What is measured: graphs, what is asked of them, and the values of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2

RULE = {"Sign": "ste_sign"}
_PIXELS = 28 * 28


@dataclass(frozen=True)
class Work:
    """A graph with fetches, ys, xs and overrides, and feeds for it."""

    graph: gr.Graph
    fetches: list[str]
    ys: list[str]
    xs: list[str]
    feeds: dict[Any, Any]
    overrides: Mapping[str, str] = field(default_factory=lambda: RULE)
    batching: gr.Batching | None = None

    def compile(self, client: gr.Client) -> gr.Program:
        return client.compile(
            self.graph,
            fetches=self.fetches,
            ys=self.ys,
            xs=self.xs,
            overrides=self.overrides,
            batching=self.batching,
        )

    def evaluate(self, client: gr.Client) -> gr.Result:
        """With the graph in the request."""
        return client.evaluate(
            self.graph, self.feeds, fetches=self.fetches, ys=self.ys, xs=self.xs, overrides=self.overrides
        )

    def named_request(self, program: gr.Program) -> bytes:
        """The bytes of a call by program name."""
        return self._with_feeds(evaluate_pb2.EvaluateRequest(program=program.name))

    def request(self) -> bytes:
        """The bytes of a call that names no program: what it feeds alone."""
        return self._with_feeds(evaluate_pb2.EvaluateRequest())

    def inline_request(self) -> bytes:
        """The bytes of a call with the graph in it."""
        request = evaluate_pb2.EvaluateRequest()
        request.spec.graph.serialized = self.graph.to_bytes()
        request.spec.fetches.extend(self.fetches)
        request.spec.vjp.ys.extend(self.ys)
        request.spec.vjp.xs.extend(self.xs)
        for op_type, rule in self.overrides.items():
            request.spec.overrides.add(rule=rule).selector.op_type = op_type
        return self._with_feeds(request)

    def _with_feeds(self, request: evaluate_pb2.EvaluateRequest) -> bytes:
        for name, value in self.feeds.items():
            request.feeds.add(name=name).value.inline_tensor.CopyFrom(tensor_codec.to_message(value))
        return request.SerializeToString()


def tiny() -> Work:
    """(2, 4) by (4, 3), sign, sum: forward and two gradients."""
    g = gr.Graph()
    x, w = g.placeholder("x", "float32", [2, 4]), g.placeholder("w", "float32", [4, 3])
    g.reduce_sum(g.op_output("Sign", g.matmul(x, w)), axis=[0, 1], name="loss")
    rng = np.random.default_rng(0)
    feeds = {"x": rng.normal(size=(2, 4)).astype(np.float32), "w": rng.normal(size=(4, 3)).astype(np.float32)}
    return Work(g, ["loss"], ["loss"], ["x", "w"], feeds)


def large(size: int) -> Work:
    """A float32 vector in, its gradient of the same size out, nothing fetched."""
    g = gr.Graph()
    g.op_output("Sign", g.placeholder("x", "float32", [None]), name="y")
    return Work(g, [], ["y"], ["x"], {"x": np.random.default_rng(0).normal(size=size).astype(np.float32)})


def chain(nodes: int, *, on_path: bool) -> Work:
    """A graph of so many nodes, on four numbers. on_path: all of them run; else all but a handful lie aside."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [4])
    last = x
    for _ in range(nodes - 2):
        last = g.op_output("Tanh", last)
    g.op_output("Sign", last if on_path else x, name="y")
    return Work(g, ["y"], ["y"], ["x"], {"x": np.linspace(-0.9, 0.9, 4, dtype=np.float32)})


def compute(size: int, layers: int) -> Work:
    """A program that computes for long and says little: products of matrices of size × size, on one vector."""
    g = gr.Graph()
    rng = np.random.default_rng(0)
    weights = g.constant((rng.normal(size=(size, size)) / np.sqrt(size)).astype(np.float32))
    last = g.op_output("Mul", g.placeholder("x", "float32", [size]), weights)
    for number in range(layers):
        last = g.op_output("Sign" if number == layers // 2 else "Tanh", g.matmul(last, weights))
    g.reduce_sum(last, axis=[0, 1], name="loss")
    return Work(g, ["loss"], ["loss"], ["x"], {"x": rng.normal(size=size).astype(np.float32)})


def layers(nodes: int, seed: int) -> Work:
    """A network of about so many nodes whose weights are the seed's: every seed is a graph that no server has seen."""
    g = gr.Graph()
    rng = np.random.default_rng(seed)
    last = g.placeholder("x", "float32", [None, 4])
    for number in range(max(1, nodes // 5)):
        weights, bias = (rng.normal(size=shape).astype(np.float32) / 4 for shape in ((4, 4), 4))
        total = g.op_output("AddV2", g.matmul(last, g.constant(weights)), g.constant(bias))
        last = g.op_output("Sign" if number % 10 == 5 else "Tanh", total)
    g.op_output("Identity", last, name="y")
    return Work(g, ["y"], ["y"], ["x"], {"x": np.ones((1, 4), np.float32)})


def recurrent(width: int, steps: int) -> Work:
    """A binary recurrent network, unrolled, on a batch whose size the caller chooses; here one example."""
    g = gr.Graph()
    rng = np.random.default_rng(0)
    weights = g.constant((rng.normal(size=(width, width)) / np.sqrt(width)).astype(np.float32))
    state = x = g.placeholder("x", "float32", [None, width])
    for _ in range(steps):
        state = g.op_output("Sign", g.op_output("AddV2", g.matmul(state, weights), x))
    g.reduce_sum(state, axis=[1], name="y")
    feeds = {"x": rng.normal(size=(1, width)).astype(np.float32)}
    return Work(g, ["y"], ["y"], ["x"], feeds, batching=gr.Batching(axis=0))


def perceptron(width: int) -> Work:
    """A binary network of two wide layers, on a batch whose size the caller chooses; here one example."""
    g = gr.Graph()
    rng = np.random.default_rng(0)
    last = g.placeholder("x", "float32", [None, _PIXELS])
    for inputs, outputs in ((_PIXELS, width), (width, width)):
        weights = (rng.normal(size=(inputs, outputs)) / np.sqrt(inputs)).astype(np.float32)
        last = g.op_output("Sign", g.matmul(last, g.constant(weights)))
    g.reduce_sum(last, axis=[1], name="y")
    feeds = {"x": rng.normal(size=(1, _PIXELS)).astype(np.float32)}
    return Work(g, ["y"], ["y"], ["x"], feeds, batching=gr.Batching(axis=0))


def resnet() -> Work:
    """A ResNet50 of Keras with random weights, new ones at each call, and one image."""
    import keras

    graph = gr.from_keras(keras.applications.ResNet50(weights=None, classifier_activation=None))
    image = np.random.default_rng(0).normal(size=(1, 224, 224, 3)).astype(np.float32)
    (x,), (y,) = graph.inputs, graph.outputs
    return Work(graph, [y], [y], [x], {x: image}, {"Relu": "guided_relu"})


def named(name: str) -> Work:
    """Returns a work by its name and numbers, such as `large:1024`: what a driver in another process is told."""
    kind, *numbers = name.split(":")
    values = [int(number) for number in numbers]
    match kind:
        case "tiny":
            return tiny()
        case "large":
            return large(*values)
        case "chain":
            return chain(values[0], on_path=True)
        case "aside":
            return chain(values[0], on_path=False)
        case "compute":
            return compute(*values)
        case "recurrent":
            return recurrent(*values)
        case "perceptron":
            return perceptron(*values)
        case _:
            raise ValueError(f"there is no work {name!r}")
