"""Jacobian-vector, Jacobian, Hessian-vector products and stacked pull-backs, compared with local TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, dense, refused
from tests.service.derivative_cases import CASES, FEEDS, RTOL, VW, VX, LocalDerivatives, W, X, graph_for_function, plain
from tests.service.graph_defs import build_graph, placeholder

GRAD_YS = np.random.default_rng(8).normal(size=(4, *X.shape)).astype(np.float32)
RNG = np.random.default_rng(9)


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Any:
    """Returns a function with control flow."""
    return CASES[request.param]


def test_jacobian_vector_products_equal_tensorflow(client: Any, case: Any) -> None:
    found = client.jvp(graph_for_function(case), FEEDS, {"x": VX, "w": VW}, ys=["y"], xs=["x", "w"])
    assert_close(found["y"], LocalDerivatives(case).jvp(VX, VW), rtol=RTOL)


def test_jacobians_equal_tensorflow(client: Any, case: Any) -> None:
    found = client.jacobian(graph_for_function(case), FEEDS, ys=["y"], xs=["x", "w"])
    by_x, by_w = LocalDerivatives(case).jacobian()
    assert_close(found["y"]["x"], by_x, rtol=RTOL)
    assert_close(found["y"]["w"], by_w, rtol=RTOL)


def test_hessian_vector_products_equal_tensorflow(client: Any, case: Any) -> None:
    found = client.hvp(graph_for_function(case), FEEDS, {"x": VX, "w": VW}, ys=["y"], xs=["x", "w"])
    by_x, by_w = LocalDerivatives(case).hvp(VX, VW)
    assert_close(found["x"], by_x, rtol=RTOL)
    assert_close(found["w"], by_w, rtol=RTOL)


def test_hessian_vector_products_with_upstream_gradients_equal_tensorflow(either: Any) -> None:
    graph, upstream = graph_for_function(plain), GRAD_YS[0]
    with tf.GradientTape() as outer:
        x, w = tf.Variable(X), tf.Variable(W)
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum(plain(x, w) * upstream)
        by_x, by_w = inner.gradient(loss, [x, w])
        along = tf.reduce_sum(by_x * VX) + tf.reduce_sum(by_w * VW)
    wanted = outer.gradient(along, [x, w])
    vectors = {"x": VX, "w": VW}
    found = either.hvp(graph, FEEDS, vectors, ys=["y"], xs=["x", "w"], grad_ys=[upstream])
    program = either.compile(graph, ys=["y"], xs=["x", "w"])
    again = program.hvp(FEEDS, vectors, grad_ys={"y": upstream})
    for index, name in enumerate(["x", "w"]):
        assert_close(found[name], wanted[index].numpy(), rtol=RTOL)
        assert_close(again[name], wanted[index].numpy(), rtol=RTOL)
    with refused("INVALID_DERIVATIVE"):
        either.hvp(graph, FEEDS, vectors, ys=["y"], xs=["x", "w"], grad_ys=["w"])


def test_stacked_pull_backs_equal_tensorflow(client: Any, case: Any) -> None:
    found = client.evaluate(
        graph_for_function(case), FEEDS, ["y"], ys=["y"], xs=["x", "w"], grad_ys={"y": GRAD_YS}, stacked_grad_ys=True
    )
    wanted = [LocalDerivatives(case).gradients(grad_y) for grad_y in GRAD_YS]
    assert_close(found.gradients["x"], np.stack([by_x for by_x, _ in wanted]), rtol=RTOL)
    assert_close(found.gradients["w"], np.stack([by_w for _, by_w in wanted]), rtol=RTOL)
    assert_close(found.outputs["y"], case(X, W).numpy(), rtol=RTOL)


@pytest.mark.parametrize("shape", [None, (None, 3), (None, None)])
def test_derivatives_of_shapes_unknown_before_running(client: Any, shape: Any) -> None:
    def build() -> None:
        tf.identity(tf.sin(placeholder("x", shape=shape)) * placeholder("w", shape=shape), name="y")

    graph = build_graph(build)
    feeds = {"x": X, "w": W[:2]}
    by_x = np.cos(X) * W[:2]
    jacobian = client.jacobian(graph, feeds, ys=["y"], xs=["x"])["y"]["x"]
    assert_close(jacobian, (np.eye(6, dtype=np.float32) * by_x.ravel()).reshape(2, 3, 2, 3))
    assert_close(client.jvp(graph, feeds, {"x": VX}, ys=["y"], xs=["x"])["y"], by_x * VX)
    assert_close(client.hvp(graph, feeds, {"x": VX}, ys=["y"], xs=["x"])["x"], -np.sin(X) * W[:2] * VX)


def test_one_program_computes_several_derivatives(either: Any) -> None:
    program = either.compile(graph_for_function(plain), fetches=["y"], ys=["y"], xs=["x", "w"])
    local = LocalDerivatives(plain)
    assert_close(program.jvp(FEEDS, {"x": VX, "w:0": VW})["y"], local.jvp(VX, VW), rtol=RTOL)
    assert_close(program.jvp(FEEDS, {"w": VW})["y"], local.jvp(0 * VX, VW), rtol=RTOL)
    by_x, by_w = local.jacobian()
    found = program.jacobian(FEEDS)["y"]
    assert_close(found["x"], by_x, rtol=RTOL)
    assert_close(found["w"], by_w, rtol=RTOL)
    assert_close(program.hvp(FEEDS, {"x": VX})["w"], local.hvp(VX, 0 * VW)[1], rtol=RTOL)
    stacked = program.evaluate(FEEDS, grad_ys={"y": GRAD_YS}, stacked_grad_ys=True).gradients["x"]
    assert_close(stacked[2], local.gradients(GRAD_YS[2])[0], rtol=RTOL)
    # Its gradients stay the same before and after.
    assert_close(program(FEEDS).gradients["x"], local.gradients(np.ones_like(X))[0], rtol=RTOL)
    program.delete()


def test_both_clients_compute_derivatives(either: Any) -> None:
    graph, local = graph_for_function(plain), LocalDerivatives(plain)
    assert_close(either.jvp(graph, FEEDS, {"x": VX}, ys=["y"], xs=["x"])["y"], local.jvp(VX, 0 * VW), rtol=RTOL)
    assert_close(either.jacobian(graph, FEEDS, ys=["y"], xs=["w"])["y"]["w"], local.jacobian()[1], rtol=RTOL)
    assert_close(either.hvp(graph, FEEDS, {"w": VW}, ys=["y"], xs=["x", "w"])["w"], local.hvp(0 * VX, VW)[1], rtol=RTOL)


def layer(x: Any, w: Any) -> Any:
    """Computes a layer whose examples are independent."""
    return tf.tanh(tf.matmul(x, w))


def test_batch_jacobian(client: Any) -> None:
    by_x = client.jacobian(graph_for_function(layer), FEEDS, ys=["y"], xs=["x"], batched=True)["y"]["x"]
    with tf.GradientTape(persistent=True) as tape:
        x = tf.constant(X)
        tape.watch(x)
        y = layer(x, tf.constant(W))
    assert_close(by_x, tape.batch_jacobian(y, x, experimental_use_pfor=False).numpy(), rtol=RTOL)


def test_batch_jacobian_with_a_rule_for_the_whole_batch_is_part_of_the_whole_jacobian(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float64", [None, 2])
    g.multiply(g.op("Identity", x, name="i"), g.constant(np.array([[2.0, 3.0]])), name="y")
    value = np.arange(6.0).reshape(3, 2)
    overrides = {"Identity": gr.Rule("dy / sqrt(sum(dy * dy))")}
    asked = {"ys": ["y"], "xs": ["x"], "overrides": overrides}
    found = client.jacobian(g, {"x": value}, **asked, batched=True)["y"]["x"]
    # One upstream element at a time reaches the rule, which makes it 1 whatever the scale.
    np.testing.assert_allclose(found, np.broadcast_to(np.eye(2), (3, 2, 2)), rtol=1e-12)
    whole = client.jacobian(g, {"x": value}, **asked)["y"]["x"]
    np.testing.assert_allclose(found, np.stack([whole[example, :, example] for example in range(3)]), rtol=1e-12)


def test_batch_jacobian_with_a_rule_for_the_whole_batch_keeps_only_its_blocks(client: Any) -> None:
    """The whole Jacobian would have 2 GiB, which no answer can have; the blocks have 1 MiB."""
    g = gr.Graph()
    x = g.placeholder("x", "float64", [None, 64])
    g.op("Identity", g.op("Sum", x, 1, keep_dims=True), name="y")
    overrides = {"Identity": gr.Rule("dy / sqrt(sum(dy * dy))")}
    found = client.jacobian(g, {"x": np.ones((2048, 64))}, ys="y", xs="x", overrides=overrides, batched=True)["y"]["x"]
    np.testing.assert_array_equal(found, np.ones((2048, 1, 64)))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_empty_batch_jacobian_with_a_rule_for_the_whole_batch(client: Any, shape: tuple[int, ...]) -> None:
    g = gr.Graph()
    g.op("Identity", g.placeholder("x", "float64", [None, None]), name="y")
    overrides = {"Identity": gr.Rule("dy - mean(dy)")}
    found = client.jacobian(g, {"x": np.ones(shape)}, ys="y", xs="x", overrides=overrides, batched=True)["y"]["x"]
    assert found.shape == (*shape, *shape[1:])


def test_per_example_gradients_are_the_jacobian_of_a_vector_of_losses(client: Any) -> None:
    def losses(x: Any, w: Any) -> Any:
        return tf.reduce_sum(tf.square(layer(x, w)), axis=1)

    found = client.jacobian(graph_for_function(losses), FEEDS, ys=["y"], xs=["w"])["y"]["w"]
    assert found.shape == (2, 3, 3)
    for example, gradient in enumerate(found):
        with tf.GradientTape() as tape:
            w = tf.constant(W)
            tape.watch(w)
            loss = losses(tf.constant(X[example : example + 1]), w)
        assert_close(gradient, tape.gradient(loss, w).numpy(), rtol=RTOL)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_number_of_pull_backs_may_differ_between_calls(client: Any, count: int) -> None:
    grad_ys = np.ones((count, *X.shape), np.float32)
    found = client.evaluate(
        graph_for_function(plain), FEEDS, ys=["y"], xs=["x"], grad_ys={"y": grad_ys}, stacked_grad_ys=True
    ).gradients["x"]
    assert found.shape == (count, *X.shape)


def test_jacobian_of_an_empty_tensor(client: Any) -> None:
    found = client.jacobian(graph_for_function(layer), {"x": X[:0], "w": W}, ys=["y"], xs=["x", "w"])["y"]
    assert found["x"].shape == (0, 3, 0, 3)
    assert found["w"].shape == (0, 3, 3, 3)


def embedding() -> gr.Graph:
    """Looks up rows; its gradient is sparse."""

    def build() -> None:
        table, ids = placeholder("table", shape=(5, 2)), placeholder("ids", tf.int32)
        tf.square(tf.gather(table, ids), name="y")

    return build_graph(build)


def test_stacked_sparse_gradients_are_dense(client: Any) -> None:
    table = RNG.normal(size=(5, 2)).astype(np.float32)
    feeds = {"table": table, "ids": np.int32([1, 3, 1])}
    grad_ys = RNG.normal(size=(2, 3, 2)).astype(np.float32)
    found = client.evaluate(
        embedding(), feeds, ys=["y"], xs=["table", "ids"], grad_ys={"y": grad_ys}, stacked_grad_ys=True
    )
    assert found.gradient_kinds == {"table": "dense", "ids": "not_differentiable"}
    for grad_y, gradient in zip(grad_ys, found.gradients["table"], strict=True):
        one = client.evaluate(embedding(), feeds, ys=["y"], xs=["table"], grad_ys={"y": grad_y}).gradients["table"]
        assert isinstance(one, gr.Sparse)
        assert_close(gradient, dense(one))


def test_sparse_gradients_differentiated_again(client: Any) -> None:
    table = RNG.normal(size=(5, 2)).astype(np.float32)
    vector = RNG.normal(size=(5, 2)).astype(np.float32)
    feeds = {"table": table, "ids": np.int32([1, 3, 1])}
    times = np.array([[0], [2], [0], [1], [0]], np.float32)
    found = client.hvp(embedding(), feeds, {"table": vector}, ys=["y"], xs=["table"])["table"]
    assert_close(dense(found), 2 * times * vector)
    pushed = client.jvp(embedding(), feeds, {"table": vector}, ys=["y"], xs=["table"])["y"]
    assert_close(pushed, (2 * table * vector)[[1, 3, 1]])


def test_unconnected_and_not_differentiable_xs(client: Any) -> None:
    def build() -> None:
        x, n = placeholder("x"), placeholder("n", tf.int32)
        tf.square(x, name="y")
        tf.argmax(x, name="i")
        tf.cast(n, tf.float32, name="z")

    graph, feeds = build_graph(build), {"x": np.float32([1, 2]), "n": np.int32([1])}
    ys, xs = ["y", "i", "z"], ["x", "n"]
    pushed = client.jvp(graph, feeds, {"x": np.float32([1, 1])}, ys=ys, xs=xs)
    assert_close(pushed["y"], np.float32([2, 4]))
    assert_close(pushed["z"], np.float32([0]))
    assert pushed["i"] is None
    found = client.jacobian(graph, feeds, ys=ys, xs=xs)
    assert (found["i"], found["z"], found["y"]["n"]) == ({"x": None, "n": None}, {"x": None, "n": None}, None)
    zeros = client.jacobian(graph, feeds, ys=["z"], xs=["x"], unconnected_gradients="zero")["z"]["x"]
    assert_close(zeros, np.zeros((1, 2), np.float32))
    assert client.hvp(graph, feeds, {"x": np.float32([1, 1])}, ys=["z"], xs=["x", "n"]) == {"x": None, "n": None}
    zeros = client.hvp(graph, feeds, {"x": np.float32([1, 1])}, ys=["z"], xs=["x"], unconnected_gradients="zero")["x"]
    assert_close(zeros, np.zeros(2, np.float32))


def test_stacked_grad_ys_of_ys_without_derivatives(client: Any) -> None:
    def build() -> None:
        x = placeholder("x")
        tf.argmax(x, name="i")
        tf.square(x, name="y")

    graph, stack = build_graph(build), np.ones(3, np.int64)
    asked: dict[str, Any] = {"feeds": {"x": np.float32([1, 2])}, "xs": ["x"], "stacked_grad_ys": True}
    assert client.evaluate(graph, ys=["i"], grad_ys={"i": stack}, **asked).gradients["x"] is None
    found = client.evaluate(graph, ys=["i"], grad_ys={"i": stack}, unconnected_gradients="zero", **asked)
    assert_close(found.gradients["x"], np.zeros((3, 2), np.float32))
    # A y without a grad_y gets ones in each stack entry.
    found = client.evaluate(graph, ys=["i", "y"], grad_ys={"i": stack}, **asked)
    assert_close(found.gradients["x"], np.array([[2, 4]] * 3, np.float32))


def test_stop_gradients_apply_in_every_order(client: Any) -> None:
    def build() -> None:
        x = placeholder("x")
        tf.multiply(tf.square(x, name="s"), x, name="y")

    graph, feeds = build_graph(build), {"x": np.float32([3.0])}
    one = {"x": np.float32([1.0])}
    assert_close(client.jvp(graph, feeds, one, ys=["y"], xs=["x"], stop_gradients=["s"])["y"], np.float32([9.0]))
    assert_close(client.jacobian(graph, feeds, ys=["y"], xs=["x"], stop_gradients=["s"])["y"]["x"], np.float32([[9.0]]))
    assert client.hvp(graph, feeds, one, ys=["y"], xs=["x"], stop_gradients=["s"])["x"] is None
    assert_close(client.hvp(graph, feeds, one, ys=["y"], xs=["x"])["x"], np.float32([18.0]))


def test_xs_may_be_intermediate_or_fed_tensors(client: Any) -> None:
    def build() -> None:
        h = tf.sin(placeholder("x"), name="h")
        tf.square(h, name="y")

    graph, h = build_graph(build), np.sin(np.float32([0.5]))
    one = {"h": np.float32([1.0])}
    for feeds in ({"x": np.float32([0.5])}, {"h": h}):
        assert_close(client.jvp(graph, feeds, one, ys=["y"], xs=["h"])["y"], 2 * h)
        assert_close(client.hvp(graph, feeds, one, ys=["y"], xs=["h"])["h"], np.float32([2.0]))
        assert_close(client.jacobian(graph, feeds, ys=["y"], xs=["h"])["y"]["h"], [2 * h])


def test_x_may_be_named_twice(client: Any) -> None:
    found = client.jvp(graph_for_function(plain), FEEDS, {"x": VX}, ys=["y", "y:0"], xs=["x", "x:0"])
    wanted = LocalDerivatives(plain).jvp(VX, 0 * VW)
    assert_close(found["y"], wanted, rtol=RTOL)


def test_derivatives_of_complex_tensors(client: Any) -> None:
    def build() -> None:
        x = placeholder("x", tf.complex64)
        tf.multiply(x, x, name="z")
        tf.reduce_sum(tf.abs(x) ** 3, name="y")

    graph, x = build_graph(build), np.complex64([1 + 2j, -0.5j])
    tangent = np.complex64([0.5 - 1j, 2 + 1j])
    feeds = {"x": x}
    pushed = client.jvp(graph, feeds, {"x": tangent}, ys=["z"], xs=["x"])["z"]
    assert_close(pushed, 2 * x * tangent)
    with refused("INVALID_DERIVATIVE") as refusal:
        client.jacobian(graph, feeds, ys=["z"], xs=["x"])
    refusal.says("complex64", "real and imaginary parts")
    with refused("INVALID_DERIVATIVE") as refusal:
        client.hvp(graph, feeds, {"x": tangent}, ys=["z"], xs=["x"])
    refusal.says("complex64", "grad_y")
    with tf.GradientTape() as outer:
        value = tf.constant(x)
        outer.watch(value)
        with tf.GradientTape() as inner:
            inner.watch(value)
            y = tf.reduce_sum(tf.abs(value) ** 3)
        first = inner.gradient(y, value)
    wanted = outer.gradient(first, value, output_gradients=tf.constant(tangent)).numpy()
    assert_close(client.hvp(graph, feeds, {"x": tangent}, ys=["y"], xs=["x"])["x"], wanted, rtol=RTOL)


def test_xs_in_groups_return_groups(either: Any) -> None:
    graph, local = graph_for_function(plain), LocalDerivatives(plain)
    xs = {"weights": ["w"], "inputs": "x", "all": ["x", "w:0"]}
    by_x, by_w = local.gradients(np.ones_like(X))
    program = either.compile(graph, ys=["y"], xs=xs)
    for answer in (either.evaluate(graph, FEEDS, ys=["y"], xs=xs), program(FEEDS)):
        assert_close(answer.gradients["weights"]["w"], by_w, rtol=RTOL)
        assert_close(answer.gradients["inputs"]["x"], by_x, rtol=RTOL)
        assert set(answer.gradients["all"]) == {"x", "w:0"}
    assert_close(program.jacobian(FEEDS)["y"]["weights"]["w"], local.jacobian()[1], rtol=RTOL)
    assert_close(
        either.hvp(graph, FEEDS, {"x": VX}, ys=["y"], xs=xs)["inputs"]["x"], local.hvp(VX, 0 * VW)[0], rtol=RTOL
    )
    program.delete()
