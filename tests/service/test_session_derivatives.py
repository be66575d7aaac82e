"""Derivatives and forward handles in sessions, at the values that the variables have: compared with TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, refused

RNG = np.random.default_rng(15)
X = RNG.normal(size=(4, 3)).astype(np.float32)
W = RNG.normal(size=(3, 2)).astype(np.float32)
B = np.float32([0.25, -0.5])
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
SGD = gr.optimizers.SGD(0.5)


def network() -> gr.Graph:
    """Makes y = tanh(x·w + b) and loss = Σ y³."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    w, b = g.variable("w", W), g.variable("b", B)
    y = g.op("Tanh", g.op("AddV2", g.op("MatMul", x, w), b), name="y")
    g.reduce_sum(y * y * y, name="loss")
    return g


def local(x: Any, w: Any, b: Any) -> tuple[tf.Tensor, tf.Tensor]:
    y = tf.tanh(tf.matmul(x, w) + b)
    return y, tf.reduce_sum(y**3)


def local_vjp(values: dict[str, Any], dy: Any, *xs: str) -> list[tf.Tensor]:
    """Returns the gradients of y, pulled back from `dy`, at these values."""
    given = {name: tf.constant(value) for name, value in {"x": X, **values}.items()}
    with tf.GradientTape() as tape:
        tape.watch(list(given.values()))
        y, _ = local(**given)
    return list(tape.gradient(y, [given[name] for name in xs], output_gradients=tf.constant(dy)))


def test_derivatives_are_those_at_the_present_values(either: Any) -> None:
    tangents = {name: RNG.normal(size=value.shape).astype(np.float32) for name, value in {"x": X, "w": W}.items()}
    with either.session(network()) as s:
        s.step({"x": X}, "loss", SGD)
        s.assign({"b": [0.5, 1.0]})
        values = s.read()
        assert np.abs(values["w"] - W).max() > 0.01
        given = {"x": tf.constant(X), **{name: tf.constant(value) for name, value in values.items()}}
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(list(given.values()))
            y, loss = local(**given)
        jacobian = s.jacobian({"x": X}, ys="y", xs=["w", "b", "x"])
        for name, block in jacobian["y"].items():
            np.testing.assert_allclose(block, tape.jacobian(y, given[name]), **CLOSE)
        batched = s.jacobian({"x": X}, ys="y", xs={"inputs": ["x"]}, batched=True)
        np.testing.assert_allclose(batched["y"]["inputs"]["x"], tape.batch_jacobian(y, given["x"]), **CLOSE)

        with tf.autodiff.ForwardAccumulator(
            [given[name] for name in tangents], [tf.constant(value) for value in tangents.values()]
        ) as accumulator:
            forward_y, _ = local(**given)
        product = s.jvp({"x": X}, tangents, ys="y", xs=["x", "w"])
        np.testing.assert_allclose(product["y"], accumulator.jvp(forward_y), **CLOSE)

        with tf.autodiff.ForwardAccumulator(given["w"], tf.constant(tangents["w"])) as accumulator:
            with tf.GradientTape() as inner:
                inner.watch([given["w"], given["b"]])
                _, loss = local(**given)
            gradients = inner.gradient(loss, [given["w"], given["b"]])
        products = s.hvp({"x": X}, {"w": tangents["w"]}, ys="loss", xs=["w", "b"])
        for name, gradient in zip(["w", "b"], gradients, strict=True):
            np.testing.assert_allclose(products[name], accumulator.jvp(gradient), **CLOSE)

        upstream = RNG.normal(size=y.shape).astype(np.float32)
        with tf.autodiff.ForwardAccumulator(given["w"], tf.constant(tangents["w"])) as accumulator:
            with tf.GradientTape() as inner:
                inner.watch(given["w"])
                weighted, _ = local(**given)
            gradient = inner.gradient(weighted, given["w"], output_gradients=tf.constant(upstream))
        products = s.hvp({"x": X}, {"w": tangents["w"]}, ys="y", xs="w", grad_ys={"y": upstream})
        np.testing.assert_allclose(products["w"], accumulator.jvp(gradient), **CLOSE)

        rows = RNG.normal(size=(2, *y.shape)).astype(np.float32)
        stacked = s.evaluate({"x": X}, ys="y", xs="w", grad_ys=[rows], stacked_grad_ys=True).gradients["w"]
        for row, pulled in zip(rows, stacked, strict=True):
            np.testing.assert_allclose(pulled, local_vjp(values, row, "w")[0], **CLOSE)
        after = s.read()
        assert all((after[name] == values[name]).all() for name in values)


def test_handle_keeps_the_values_of_its_own_run(either: Any) -> None:
    dy = RNG.normal(size=(4, 2)).astype(np.float32)
    with either.session(network()) as s:
        # The optimizer has its variables, which later steps change in place.
        s.step({"x": X}, "loss", SGD)
        before = s.read()
        with s.forward({"x": X}, ["y"], ys="y", xs=["w", "x"]) as handle:
            assert_close(handle.outputs["y"], local(X, **before)[0].numpy(), rtol=1e-5)
            assert handle.bytes > 0
            s.step({"x": X}, "loss", SGD)
            s.assign({"b": [3.0, -3.0]})
            after = s.read()
            for _ in range(2):
                gradients = handle.vjp({"y": dy})
                for name, wanted in zip(["w", "x"], local_vjp(before, dy, "w", "x"), strict=True):
                    np.testing.assert_allclose(gradients[name], wanted, **CLOSE)
            with s.forward({"x": X}, ys="y", xs={"weights": "w"}) as later:
                np.testing.assert_allclose(later.vjp([dy])["weights"]["w"], local_vjp(after, dy, "w")[0], **CLOSE)
            stacked = handle.vjp([np.stack([dy, 2 * dy])], stacked_grad_ys=True)["w"]
            np.testing.assert_allclose(stacked[1], 2 * local_vjp(before, dy, "w")[0], **CLOSE)
        with refused("HANDLE_EXPIRED") as refusal:
            handle.vjp()
        refusal.says("forward")
        with refused("INVALID_DERIVATIVE"):
            s.forward({"x": X}, ys=(), xs=())
        with refused("FEED_SHAPE"):
            s.forward({"x": X[0]}, ys="y", xs="w")
        assert s.step({"x": X}, "loss", SGD).step == 3
    handle.close()


def test_overrides_and_aliases_of_the_session_apply(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    g.op("MatMul", x, g.op("Sign", g.variable("w", W)), name="y")
    g.aliases.update(rows="x", scores="y")
    rule = gr.Rule("dy * k", params={"k": 2.0})
    with client.session(g, overrides=[gr.Override(rule, op_type="Sign", label="s")]) as s:
        jacobian = s.jacobian({"rows": X}, ys="scores", xs="w")["scores"]["w"]
        np.testing.assert_allclose(jacobian, 2 * np.einsum("ni,op->noip", X, np.eye(2)), **CLOSE)
        product = s.jvp({"rows": X}, {"w": W}, ys="scores", xs="w", params={"s": {"k": 3.0}})["scores"]
        np.testing.assert_allclose(product, 3 * X @ W, **CLOSE)
        with s.forward({"rows": X}, ["scores"], ys="scores", xs="w", params={"s": {"k": 5.0}}) as handle:
            assert list(handle.outputs) == ["scores"]
            np.testing.assert_allclose(handle.vjp()["w"], 5 * X.T @ np.ones((4, 2), np.float32), **CLOSE)


def test_values_that_the_graph_assigns_are_kept(client: Any) -> None:
    def build() -> None:
        v1 = tf.compat.v1
        count = v1.get_variable("count", initializer=tf.constant(0), use_resource=True, trainable=False)
        w = v1.get_variable("w", initializer=tf.constant([2.0, 3.0]), use_resource=True)
        with tf.control_dependencies([count.assign_add(1)]):
            tf.square(w, name="y")

    with tf.Graph().as_default() as graph:
        build()
    with client.session(graph.as_graph_def()) as s:
        np.testing.assert_allclose(s.jacobian(ys="y", xs="w")["y"]["w"], [[4.0, 0.0], [0.0, 6.0]])
        s.jvp(None, {"w": [1.0, 1.0]}, ys="y", xs="w")
        np.testing.assert_allclose(s.hvp(None, {"w": [1.0, 2.0]}, ys="y", xs="w")["w"], [2.0, 4.0])
        with s.forward(ys="y", xs="w") as handle:
            assert s.read("count")["count"] == 4
            np.testing.assert_allclose(handle.vjp([[1.0, 10.0]])["w"], [4.0, 60.0])
        assert s.read("count")["count"] == 4
