"""Variables of a graph on a real server: values, gradients, and feeds, compared with local TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.v1 import graph_pb2, tensor_pb2
from tests.service import raw
from tests.service.answers import assert_close, dense, keeps_engine, provokes, refused, refused_raw

v1 = tf.compat.v1
Arrays = dict[str, npt.NDArray[Any]]

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(3, 2)).astype(np.float32)
BIAS = np.array([0.5, -0.25], np.float32)


class Local:
    """Holds a TensorFlow graph and computes y and its gradients."""

    def __init__(self, make: Callable[[], Any], values: Arrays, feeds: Arrays) -> None:
        self.values, self.feeds = values, feeds
        self._graph = tf.Graph()
        with self._graph.as_default():
            self._y = tf.identity(make(), name="y")
            self._variables = {item.op.name: item for item in v1.global_variables()}
        self.graph_def = self._graph.as_graph_def()

    def run(self, xs: list[str]) -> tuple[Any, list[Any]]:
        """y, and the gradient of each x: a variable by its name, or a tensor."""
        with self._graph.as_default(), v1.Session(graph=self._graph) as session:
            targets = [
                self._variables[name] if name in self._variables else self._graph.get_tensor_by_name(f"{name}:0")
                for name in xs
            ]
            found = tf.gradients(self._y, targets)
            gradients = [None if item is None else tf.convert_to_tensor(item) for item in found]

            def reset() -> dict[str, Any]:
                for name, value in self.values.items():
                    self._variables[name].load(value, session)
                return {f"{name}:0": value for name, value in self.feeds.items()}

            y = session.run(self._y, reset())
            # Computing a gradient runs the assignments again.
            return y, [None if item is None else session.run(item, reset()) for item in gradients]

    def on_server(self) -> gr.Graph:
        """Returns the same graph for a server."""
        graph = gr.Graph.from_bytes(self.graph_def.SerializeToString())
        graph.variables.update(self.values)
        return graph


def _dense() -> Any:
    x = v1.placeholder(tf.float32, [None, 3], name="x")
    kernel = v1.get_variable("dense/kernel", [3, 2], use_resource=True)
    bias = v1.get_variable("dense/bias", [2], use_resource=True)
    return tf.reduce_sum(tf.tanh(x @ kernel + bias))


def _dense_reference() -> Any:
    x = v1.placeholder(tf.float32, [None, 3], name="x")
    kernel = v1.get_variable("dense/kernel", [3, 2], use_resource=False)
    bias = v1.get_variable("dense/bias", [2], use_resource=False)
    return tf.reduce_sum(tf.tanh(x @ kernel + bias))


def _embedding() -> Any:
    ids = v1.placeholder(tf.int32, [None], name="ids")
    table = v1.get_variable("table", [4, 3], use_resource=True)
    return tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)


def _moving_average() -> Any:
    x = v1.placeholder(tf.float32, [None, 3], name="x")
    gamma = v1.get_variable("gamma", [3], use_resource=True)
    moving = v1.get_variable("moving_mean", [3], use_resource=True, trainable=False)
    mean, variance = tf.nn.moments(x, [0])
    update = moving.assign_sub((moving.read_value() - tf.stop_gradient(mean)) * 0.1)
    with tf.control_dependencies([update]):
        return tf.reduce_sum(((x - mean) * tf.math.rsqrt(variance + 1e-3) * gamma + moving.read_value()) ** 3)


def _written_in_a_loop() -> Any:
    x = v1.placeholder(tf.float32, [3], name="x")
    w = v1.get_variable("w", [3], use_resource=True)

    @tf.function
    def run() -> Any:
        total = tf.zeros([3])
        for i in tf.range(3):
            w.assign_add(tf.cast(i, tf.float32) * tf.ones([3]))
            total += w * w * x
        return total

    result = run()
    with tf.control_dependencies([result]):
        return tf.reduce_sum(result * w.read_value())


def _written_in_a_branch() -> Any:
    x = v1.placeholder(tf.float32, [3], name="x")
    w = v1.get_variable("w", [3], use_resource=True)

    @tf.function
    def run() -> Any:
        if tf.reduce_sum(x) > 0.0:
            w.assign_add([1.0, 2.0, 3.0])
            return w * x
        w.assign_sub([1.0, 1.0, 1.0])
        return w * w

    result = run()
    with tf.control_dependencies([result]):
        return tf.reduce_sum(result * w.read_value())


def _normalized() -> Any:
    """Reads a variable, assigns what depends on the read and on x, and reads it twice again."""
    x = v1.placeholder(tf.float32, [3], name="x")
    w = v1.get_variable("w", [3], use_resource=True)
    first = w.read_value()
    with tf.control_dependencies([w.assign(first / tf.norm(first) * x)]):
        second = w.read_value()
    with tf.control_dependencies([second, w.assign_sub(second * second)]):
        return tf.reduce_sum(first * second * second + tf.sin(w.read_value()) * x)


def _scattered() -> Any:
    """Reads single rows of a variable before and after single rows are assigned."""
    x = v1.placeholder(tf.float32, [3], name="x")
    w = v1.get_variable("w", [3], use_resource=True)
    first = tf.gather(w, [0, 2]) ** 2
    with tf.control_dependencies([first]):
        update = tf.raw_ops.ResourceScatterAdd(resource=w.handle, indices=[2, 1], updates=x[:2] * first)
    with tf.control_dependencies([update]):
        return tf.reduce_sum(tf.gather(w, [2, 2, 1]) ** 3) + tf.reduce_sum(first)


def _assigned_reference() -> Any:
    """Uses a variable, and the output of its assignment, which has no gradient."""
    x = v1.placeholder(tf.float32, [3], name="x")
    w = v1.get_variable("w", [3], use_resource=False)
    # TensorFlow reads a reference again in the backward pass, after the assignment; the sum is a copy.
    first = (w + 0.0) * x
    with tf.control_dependencies([first]):
        assigned = v1.assign_add(w, first)
    return tf.reduce_sum(tf.sin(first) * assigned)


def _initialized_from_an_input() -> Any:
    x = v1.placeholder(tf.float32, [3], name="x")
    w = v1.get_variable("w", initializer=lambda: x * 2.0, dtype=tf.float32, use_resource=True)
    return tf.reduce_sum(w * w)


VECTOR: Arrays = {"x": np.array([1.0, -0.5, 2.0], np.float32)}
W: Arrays = {"w": np.array([0.3, -1.5, 2.0], np.float32)}
CASES: list[tuple[Callable[[], Any], Arrays, Arrays, list[str]]] = [
    (_dense, {"dense/kernel": KERNEL, "dense/bias": BIAS}, {"x": X}, ["x", "dense/kernel", "dense/bias"]),
    (_dense_reference, {"dense/kernel": KERNEL, "dense/bias": BIAS}, {"x": X}, ["x", "dense/kernel", "dense/bias"]),
    (_embedding, {"table": X[:4]}, {"ids": np.array([1, 3, 1], np.int32)}, ["table"]),
    (_moving_average, {"gamma": X[0], "moving_mean": X[1]}, {"x": X}, ["x", "gamma", "moving_mean"]),
    (_written_in_a_loop, W, VECTOR, ["x", "w"]),
    (_written_in_a_branch, W, VECTOR, ["x", "w"]),
    (_written_in_a_branch, W, {"x": -VECTOR["x"]}, ["x", "w"]),
    (_normalized, W, VECTOR, ["x", "w"]),
    (_normalized, W, VECTOR, ["x"]),
    (_scattered, W, VECTOR, ["w"]),
    (_assigned_reference, W, VECTOR, ["x", "w"]),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0].__name__ for case in CASES])
@keeps_engine
def test_values_and_gradients_equal_tensorflow(
    either: Any, case: tuple[Callable[[], Any], Arrays, Arrays, list[str]]
) -> None:
    make, values, feeds, xs = case
    local = Local(make, values, feeds)
    y, gradients = local.run(xs)
    answer = either.evaluate(local.on_server(), feeds=feeds, fetches=["y"], ys=["y"], xs=xs)
    assert_close(answer.outputs["y"], y)
    for name, gradient in zip(xs, gradients, strict=True):
        if gradient is None:
            assert answer.gradients[name] is None
        else:
            assert_close(dense(answer.gradients[name]), gradient, rtol=1e-4)


def test_gradients_stop_at_the_initial_value_of_a_variable(client: Any) -> None:
    graph = Local(_initialized_from_an_input, {}, {}).on_server()
    answer = client.evaluate(graph, {"x": [1.0, 2.0, 3.0]}, ["y"], ys="y", xs=["x", "w"])
    assert answer.outputs["y"] == 56.0
    assert answer.gradients["x"] is None
    assert answer.gradients["w"].tolist() == [4.0, 8.0, 12.0]


def test_gradients_of_gradients_stop_at_written_values_too(client: Any) -> None:
    x, w = tf.constant(VECTOR["x"]), tf.Variable(W["w"])
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            w.assign(w / tf.norm(w))
            y = tf.reduce_sum(tf.sin(w) * x)
        slope = inner.gradient(y, w)
        product = tf.reduce_sum(slope * x)
    wanted = outer.gradient(product, w)

    def make() -> Any:
        x = v1.placeholder(tf.float32, [3], name="x")
        w = v1.get_variable("w", [3], use_resource=True)
        with tf.control_dependencies([w.assign(w / tf.norm(w))]):
            return tf.reduce_sum(tf.sin(w.read_value()) * x)

    program = client.compile(Local(make, W, {}).on_server(), ys="y", xs="w")
    assert_close(program.hvp(VECTOR, {"w": VECTOR["x"]})["w"], wanted.numpy(), rtol=1e-5)
    assert_close(program.jvp(VECTOR, {"w": VECTOR["x"]})["y"], product.numpy(), rtol=1e-5)


def test_rule_of_an_assignment_passes_its_gradient_on(client: Any) -> None:
    def make() -> Any:
        x = v1.placeholder(tf.float32, [3], name="x")
        w = v1.get_variable("w", [3], use_resource=True)
        with tf.control_dependencies([w.assign(x * 2.0)]):
            return tf.reduce_sum(w.read_value())

    graph = Local(make, W, {}).on_server()
    for xs in (["x"], ["x", "w"]):
        answer = client.evaluate(graph, VECTOR, ys="y", xs=xs, overrides={"AssignVariableOp": "Identity"})
        assert answer.gradients["x"].tolist() == [2.0, 2.0, 2.0]
    assert answer.gradients["w"].tolist() == [1.0, 1.0, 1.0]


def test_gradient_of_a_gather_is_sparse(client: Any) -> None:
    local = Local(_embedding, {"table": X[:4]}, {"ids": np.array([1, 3, 1], np.int32)})
    gradient = client.evaluate(local.on_server(), feeds=local.feeds, ys=["y"], xs=["table"]).gradients["table"]
    assert isinstance(gradient, gr.Sparse)
    assert gradient.indices.tolist() == [1, 3, 1]


def _line() -> gr.Graph:
    """Makes y = sum(x · w + b), w = (3, 6), b = 1."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [2])
    w = g.variable("w", [3.0, 6.0])
    b = g.variable("b", 1.0)
    g.op("Sum", x * w + b, [0], name="y")
    return g


@keeps_engine
def test_builder_makes_variables(either: Any) -> None:
    answer = either.evaluate(_line(), feeds={"x": [1.0, 2.0]}, fetches=["y", "w"], ys=["y"], xs=["w", "b", "x"])
    assert answer.outputs["y"] == 17.0
    assert answer.outputs["w"].tolist() == [3.0, 6.0]
    assert answer.gradients["w"].tolist() == [1.0, 2.0]
    assert answer.gradients["b"] == 2.0
    assert answer.gradients["x"].tolist() == [3.0, 6.0]


@keeps_engine
def test_feed_replaces_a_value_without_recompiling(either: Any) -> None:
    program = either.compile(_line(), fetches=["y"], ys=["y"], xs=["x"])
    assert {name: spec.optional for name, spec in program.inputs.items()} == {"x": False, "w": True, "b": True}
    x = [1.0, 2.0]
    assert program.evaluate({"x": x}).outputs["y"] == 17.0
    fed = program.evaluate({"x": x, "w": [1.0, 1.0]})
    assert (fed.outputs["y"], fed.timings.compile) == (5.0, 0.0)
    assert fed.gradients["x"].tolist() == [1.0, 1.0]
    assert program.evaluate({"x": x}).outputs["y"] == 17.0


@keeps_engine
def test_last_assigned_value_is_used(client: Any) -> None:
    g = _line()
    for value in (1.0, 5.0):
        g.variables["b"] = value
        answer = client.evaluate(g, feeds={"x": [0.0, 0.0]}, fetches=["y"])
        assert answer.outputs["y"] == 2 * value
    with pytest.raises(ValueError, match="read-only"):
        g.variables["w"] += 1.0


@keeps_engine
def test_stop_gradients_at_a_variable_cut_its_gradient(client: Any) -> None:
    answer = client.evaluate(
        _line(), feeds={"x": [1.0, 2.0]}, ys=["y"], xs=["x", "w"], stop_gradients=["w"], unconnected_gradients="zero"
    )
    assert answer.gradients["w"].tolist() == [1.0, 2.0]
    assert answer.gradients["x"].tolist() == [3.0, 6.0]


@keeps_engine
def test_overrides_reach_reads_and_later_ops(client: Any) -> None:
    g = gr.Graph()
    w = g.variable("w", [0.5, -3.0])
    g.op("Sum", g.op("Sign", w, name="sign"), [0], name="y")
    for overrides in ({"Sign": "7 * dy"}, {"ReadVariableOp": "7 * dy", "Sign": "Identity"}):
        words = {key: gr.Rule(value) if "*" in value else value for key, value in overrides.items()}
        answer = client.evaluate(g, ys=["y"], xs=["w"], overrides=words)
        assert answer.gradients["w"].tolist() == [7.0, 7.0]


@keeps_engine
def test_compare_with_respect_to_variables(client: Any) -> None:
    g = gr.Graph()
    w = g.variable("w", [0.5, -0.25])
    g.op("Sum", g.op("Tanh", w * g.placeholder("x", "float32", [2]), name="tanh"), [0], name="y")
    for xs in ("w", "x"):
        found = client.compare(g, {"x": [1.0, 2.0]}, ys="y", xs=xs, overrides={"straight": {"Tanh": "Identity"}})
        assert found.finite_differences is not None
        (difference,) = (row.from_finite_differences for row in found.rows if row.is_x and row.label == "default")
        assert difference is not None
        assert difference < 1e-4


@keeps_engine
def test_variable_with_an_initializer_can_be_fed(either: Any) -> None:
    def make() -> Any:
        w = v1.get_variable("w", initializer=tf.constant([1.0, 2.0]), use_resource=True)
        return tf.reduce_sum(w * w)

    graph = gr.Graph.from_bytes(Local(make, {}, {}).graph_def.SerializeToString())
    computed = either.evaluate(graph, fetches=["y"], ys=["y"], xs=["w"])
    assert (computed.outputs["y"], computed.gradients["w"].tolist()) == (5.0, [2.0, 4.0])
    fed = either.evaluate(graph, feeds={"w": [3.0, 0.0]}, fetches=["y"], ys=["y"], xs=["w"])
    assert (fed.outputs["y"], fed.gradients["w"].tolist()) == (9.0, [6.0, 0.0])
    program = either.compile(graph, fetches=["y"])
    assert program.evaluate().outputs["y"] == 5.0
    assert program.evaluate({"w": [3.0, 0.0]}).outputs["y"] == 9.0


def _shared() -> gr.Graph:
    g = gr.Graph()
    handle = g.op("VarHandleOp", name="handle", shared_name="weights", dtype="float32", shape=[2])
    g.op("ReadVariableOp", handle, name="y", dtype="float32")
    return g


@keeps_engine
def test_variable_is_found_by_its_shared_name(either: Any) -> None:
    g = _shared()
    for name in ("handle", "weights"):
        answer = either.evaluate(g, feeds={name: [1.0, 2.0]}, fetches=["y"], ys=["y"], xs=[name])
        assert answer.outputs["y"].tolist() == [1.0, 2.0]
        assert answer.gradients[name].tolist() == [1.0, 1.0]
        valued = _shared()
        valued.variables[name] = [3.0, 4.0]
        assert either.evaluate(valued, fetches=["y"]).outputs["y"].tolist() == [3.0, 4.0]
    with refused("UNKNOWN_FEED"):
        either.evaluate(g, feeds={"handle": [1.0, 2.0], "weights": [1.0, 2.0]}, fetches=["y"])


# Invalid values.


@provokes("MISSING_FEED")
@keeps_engine
def test_variable_without_a_value_must_be_fed(either: Any) -> None:
    with refused("MISSING_FEED") as refusal:
        either.evaluate(_shared(), fetches=["y"])
    refusal.says("'handle'", "float32")


@keeps_engine
def test_values_of_wrong_shape_or_dtype_are_refused(either: Any) -> None:
    for value, reason in (
        (np.zeros(2), "FEED_DTYPE"),
        (np.zeros(3, np.float32), "FEED_SHAPE"),
        (np.zeros((2, 1), np.float32), "FEED_SHAPE"),
    ):
        g = _shared()
        g.variables["handle"] = value
        with refused(reason) as refusal:
            either.evaluate(g, fetches=["y"])
        refusal.says("'handle'")


@keeps_engine
def test_value_of_an_unknown_variable_is_refused(either: Any) -> None:
    g = _line()
    g.variables["ww"] = [1.0]
    with refused("UNKNOWN_TENSOR") as refusal:
        either.evaluate(g, feeds={"x": [1.0, 2.0]}, fetches=["y"])
    refusal.says("'ww'", "Did you mean")


@keeps_engine
def test_unused_value_is_accepted(either: Any) -> None:
    g = _line()
    assert either.evaluate(g, feeds={"x": [1.0, 2.0]}, fetches=["x"]).outputs["x"].tolist() == [1.0, 2.0]


@keeps_engine
def test_invalid_values_in_plain_messages_are_refused(channel: grpc.Channel) -> None:
    variable = raw.node(
        "w",
        "VarHandleOp",
        dtype=graph_pb2.AttrValue(type=tensor_pb2.DT_FLOAT),
        shape=graph_pb2.AttrValue(shape=tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=2)])),
    )
    read = raw.node("y", "ReadVariableOp", "w", dtype=graph_pb2.AttrValue(type=tensor_pb2.DT_FLOAT))
    broken = raw.tensor([1.0, 2.0])
    broken.tensor_content = b"\0"
    for value in (tensor_pb2.TensorSource(), tensor_pb2.TensorSource(inline_tensor=broken)):
        message = raw.request(raw.graph(variable, read), {}, variables=[tensor_pb2.NamedTensor(name="w", value=value)])
        with refused_raw("INVALID_TENSOR"):
            raw.evaluate(channel, message)
    twice = [tensor_pb2.NamedTensor(name="w", value=tensor_pb2.TensorSource(inline_tensor=raw.tensor([1.0, 2.0])))] * 2
    with refused_raw("UNKNOWN_FEED"):
        raw.evaluate(channel, raw.request(raw.graph(variable, read), {}, variables=twice))
