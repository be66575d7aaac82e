"""Examples of TensorFlow's pages on gradients, Hessians, Jacobians and forward accumulation, with their documented
numbers:
the pages' Python traced, and the same with gradrule's API.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, refused


def in_graph(build: Callable[[], Any]) -> Any:
    """Computes in TensorFlow the tensors that `build` makes in a new graph."""
    return [value.numpy() if value is not None else None for value in tf.function(build)()]


# tf.gradients


def chain() -> gr.Graph:
    """Returns a, b = 2 · a, and their sum."""
    g = gr.Graph()
    a = g.placeholder("a", "float32", [])
    b = g.multiply(2.0, a, name="b")
    g.add(a, b, name="sum")
    return g


def test_stop_gradients(either: Any) -> None:
    def partial() -> Any:
        a = tf.constant(0.0)
        b = 2 * a
        return tf.gradients(a + b, [a, b], stop_gradients=[a, b])

    def total() -> Any:
        a = tf.constant(0.0)
        b = 2 * a
        return tf.gradients(a + b, [a, b])

    words: dict[str, Any] = {"feeds": {"a": 0.0}, "ys": ["sum"], "xs": ["a", "b"]}
    r = either.evaluate(chain(), **words, stop_gradients=["a", "b"])
    assert [r.gradients["a"], r.gradients["b"]] == [1.0, 1.0] == in_graph(partial)
    r = either.evaluate(chain(), **words)
    assert [r.gradients["a"], r.gradients["b"]] == [3.0, 1.0] == in_graph(total)


def test_stop_gradient_while_building(either: Any) -> None:
    def stopped(a: Any) -> Any:
        a = tf.stop_gradient(a)
        b = tf.stop_gradient(2 * a)
        total = tf.identity(a) + tf.identity(b)
        return {"a": a, "b": b, "sum": total}

    g = gr.trace(stopped, ("float32", []))
    r = either.evaluate(g, {"a": 0.0}, ys=["sum"], xs=["StopGradient", "StopGradient_1", "a"])
    assert [r.gradients["StopGradient"], r.gradients["StopGradient_1"], r.gradients["a"]] == [1.0, 1.0, None]
    # Their names belong to copies that nothing depends on.
    assert list(g.outputs) == ["output_a", "b", "sum"]


def test_gradient_graph_can_be_sent(either: Any) -> None:
    """`tf.gradients` in a traced function is part of the graph."""

    def example(weights: Any) -> Any:
        bs = 2 * weights
        return tf.gradients(weights + bs, [weights, bs])

    r = either.evaluate(gr.trace(example, ("float32", [])), {"weights": 0.0}, fetches=["output_0", "output_1"])
    assert list(r.outputs.values()) == [3.0, 1.0]


def test_unconnected_gradients(either: Any) -> None:
    g = gr.Graph()
    a = g.placeholder("a", "float32", [1, 2])
    b = g.placeholder("b", "float32", [3, 1])
    feeds = {"a": np.ones((1, 2), np.float32), "b": np.ones((3, 1), np.float32)}

    def example(how: str) -> Any:
        a, b = tf.ones([1, 2]), tf.ones([3, 1])
        return in_graph(lambda: tf.gradients([b], [a], unconnected_gradients=how))[0]

    assert either.evaluate(g, feeds, ys=[b], xs=[a], unconnected_gradients="none").gradients["a"] is None
    assert example("none") is None
    zeros = either.evaluate(g, feeds, ys=[b], xs=[a], unconnected_gradients="zero").gradients["a"]
    assert zeros.tolist() == [[0.0, 0.0]] == example("zero").tolist()


def test_integers_are_constants(either: Any) -> None:
    def through_an_integer(x: Any) -> Any:
        return tf.cast(tf.cast(x, tf.int32), tf.float32) * x

    x = tf.constant(2.5)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = through_an_integer(x)
    g = gr.trace(through_an_integer, ("float32", []))
    r = either.evaluate(g, {"x": 2.5}, fetches=["output"], ys=["output"], xs=["x"])
    assert r.outputs["output"] == 5.0
    assert r.gradients["x"] == 2.0 == tape.gradient(y, x).numpy()


# tf.hessians


def test_hessians(either: Any) -> None:
    def cubic(x: Any) -> Any:
        return x[0] ** 3 * x[1] + tf.sin(x[1])

    def local() -> Any:
        x = tf.constant([1.5, -0.5])
        return tf.hessians(cubic(x), x)

    g = gr.trace(cubic, ("float32", [2]))
    rows = [
        either.hvp(g, {"x": [1.5, -0.5]}, {"x": unit}, ys=["output"], xs=["x"])["x"] for unit in np.eye(2, dtype="f")
    ]
    assert_close(np.stack(rows), in_graph(local)[0])
    assert_close(np.stack(rows), np.float32([[6 * 1.5 * -0.5, 3 * 1.5**2], [3 * 1.5**2, -np.sin(-0.5)]]))


# tf.GradientTape.jacobian and batch_jacobian


def square() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", None)
    g.multiply(x, x, name="y")
    return g


def test_jacobian(either: Any) -> None:
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    wanted = tape.jacobian(y, x).numpy().tolist()
    for g in (square(), gr.trace(lambda x: {"y": x * x}, ("float32", [2]))):
        found = either.jacobian(g, {"x": [1.0, 2.0]}, ys="y", xs="x")["y"]["x"]
        assert found.tolist() == [[2.0, 0.0], [0.0, 4.0]] == wanted


def test_batch_jacobian(either: Any) -> None:
    at = [[1.0, 2.0], [3.0, 4.0]]
    x = tf.constant(at)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    wanted = tape.batch_jacobian(y, x).numpy().tolist()
    for g in (square(), gr.trace(lambda x: {"y": x * x}, ("float32", [None, 2]))):
        found = either.jacobian(g, {"x": at}, ys="y", xs="x", batched=True)["y"]["x"]
        assert found.tolist() == [[[2, 0], [0, 4]], [[6, 0], [0, 8]]] == wanted


# tf.autodiff.ForwardAccumulator


def test_linear_regression(either: Any) -> None:
    """Pushing the kernel of a Dense layer forward column by column gives its gradient."""
    x = tf.constant([[2.0, 3.0], [1.0, 4.0]])
    targets = tf.constant([[1.0], [-1.0]])
    dense = tf.keras.layers.Dense(1, name="dense")
    dense.build([None, 2])
    dense.kernel.assign([[0.5], [-1.25]])

    def loss_fn() -> Any:
        return tf.reduce_sum((dense(x) - targets) ** 2.0)

    with tf.GradientTape() as tape:
        loss = loss_fn()
    kernel_grad, bias_grad = tape.gradient(loss, (dense.kernel, dense.bias))
    g = gr.trace(loss_fn)
    kernel, bias = "dense/kernel", "dense/bias"
    assert sorted(g.variables) == [bias, kernel]

    def pushed(name: str, tangent: Any) -> Any:
        variable = dense.kernel if name == kernel else dense.bias
        with tf.autodiff.ForwardAccumulator(variable.value, tf.constant(tangent)) as accumulator:
            local = accumulator.jvp(loss_fn())
        found = either.jvp(g, {}, {name: tangent}, ys=["output"], xs=[kernel, bias])["output"]
        assert_close(found, local.numpy())
        return found

    columns = [pushed(kernel, [[1.0], [0.0]]), pushed(kernel, [[0.0], [1.0]])]
    assert_close(np.stack(columns)[:, np.newaxis], kernel_grad.numpy())
    assert_close(pushed(bias, [1.0])[np.newaxis], bias_grad.numpy())
    gradients = either.evaluate(g, ys=["output"], xs=[kernel, bias]).gradients
    assert_close(gradients[kernel], kernel_grad.numpy())
    assert_close(gradients[bias], bias_grad.numpy())


def test_higher_orders(either: Any) -> None:
    """Checks x ** 3.5 at 1.1 against the documented numbers."""

    def power(primal: Any) -> Any:
        return primal**3.5

    def derivative(primal: Any) -> Any:
        return tf.gradients(power(primal), primal)[0]

    words: dict[str, Any] = {"feeds": {"primal": 1.1}, "ys": ["output"], "xs": ["primal"]}
    one = {"primal": 1.0}
    g = gr.trace(power, ("float32", []))
    assert_close(either.jvp(g, tangents=one, **words)["output"], np.float32(4.4417057))
    assert_close(either.hvp(g, vectors=one, **words)["primal"], np.float32(10.094786))
    again = gr.trace(derivative, ("float32", []))
    assert_close(either.jvp(again, tangents=one, **words)["output"], np.float32(10.094786))


def test_hessian_vector_product_of_a_variable(either: Any) -> None:
    v = tf.Variable([1.0, 2.0], name="v")
    g = gr.trace(lambda: tf.reduce_sum(v**3.0))
    assert either.evaluate(g, ys=["output"], xs=["v"]).gradients["v"].tolist() == [3.0, 12.0]
    assert either.hvp(g, {}, {"v": [1.0, 0.0]}, ys=["output"], xs=["v"])["v"].tolist() == [6.0, 0.0]


@pytest.mark.parametrize("ys", [["b"], ["sum", "b"]])
def test_several_ys_add_up(either: Any, ys: list[str]) -> None:
    def local() -> Any:
        a = tf.constant(0.0)
        b = 2 * a
        made = {"b": b, "sum": a + b}
        return tf.gradients([made[y] for y in ys], [a])

    assert either.evaluate(chain(), {"a": 0.0}, ys=ys, xs=["a"]).gradients["a"] == in_graph(local)[0]


def test_name_that_the_graph_lacks_is_refused(either: Any) -> None:
    """A tensor is requested by a name of the documentation that the graph lacks."""
    with refused("UNKNOWN_TENSOR") as refusal:
        either.evaluate(chain(), {"a": 0.0}, ys=["summ"], xs=["a"])
    refusal.says("'summ'", "'sum'")
