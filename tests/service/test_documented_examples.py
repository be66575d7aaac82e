"""Examples of TensorFlow's pages on custom gradients, with their documented numbers: the pages' Python traced, and the
same with gradrule's API. `test_documented_derivatives` has those on derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, refused, rules_by_node

RuleMaker = Callable[..., str]


def taped(fn: Callable[..., Any], *values: Any, also: Sequence[Any] = ()) -> list[Any]:
    """Computes TensorFlow's own gradients: of the arguments, then of the variables in `also`."""
    xs = [tf.constant(value, tf.float32) for value in values]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y = fn(*xs)
    return [None if gradient is None else gradient.numpy() for gradient in tape.gradient(y, [*xs, *also])]


def log1pexp_plain(x: Any) -> Any:
    return tf.math.log(1 + tf.exp(x))


@tf.custom_gradient
def log1pexp(x: Any) -> Any:
    e = tf.exp(x)

    def grad(upstream: Any) -> Any:
        return upstream * (1 - 1 / (1 + e))

    return tf.math.log(1 + e), grad


def test_log1pexp_traced(either: Any) -> None:
    plain = either.evaluate(gr.trace(log1pexp_plain, ("float32", [])), {"x": 100.0}, ys=["output"], xs=["x"])
    assert np.isnan(plain.gradients["x"])
    assert np.isnan(taped(log1pexp_plain, 100.0)[0])
    r = either.evaluate(gr.trace(log1pexp, ("float32", [])), {"x": 100.0}, ys=["output"], xs=["x"])
    assert r.gradients["x"] == 1.0
    assert taped(log1pexp, 100.0) == [1.0]
    assert list(rules_by_node(r).values()) == ["log1pexp"]


def test_log1pexp_with_overrides(either: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [])
    y = g.op("Log", 1 + g.op("Exp", x), name="y")
    assert np.isnan(either.evaluate(g, {"x": 100.0}, ys=[y], xs=[x]).gradients["x"])
    override = gr.Override(gr.Rule("dy * (1 - 1 / (1 + exp(x)))"), region=gr.Region(inputs=[x], outputs=[y]))
    assert either.evaluate(g, {"x": 100.0}, ys=[y], xs=[x], overrides=[override]).gradients["x"] == 1.0


@tf.custom_gradient
def bar(x: Any, y: Any) -> Any:
    def grad(upstream: Any) -> Any:
        dz_dx = y
        dz_dy = x
        return upstream * dz_dx, upstream * dz_dy

    return x * y, grad


def test_product_traced(either: Any) -> None:
    feeds = {"x": 2.0, "y": 3.0}
    g = gr.trace(bar, ("float32", []), ("float32", []))
    r = either.evaluate(g, feeds, fetches=["output"], ys=["output"], xs=["x", "y"])
    assert r.outputs["output"] == 6.0
    assert [r.gradients["x"], r.gradients["y"]] == [3.0, 2.0] == taped(bar, 2.0, 3.0)


def test_product_with_overrides(either: Any) -> None:
    g = gr.Graph()
    x, y = g.placeholder("x", "float32", []), g.placeholder("y", "float32", [])
    z = g.multiply(x, y, name="z")
    overrides = {"Mul": gr.Rule("(dy * x1, dy * x0)")}
    r = either.evaluate(g, {"x": 2.0, "y": 3.0}, fetches=[z], ys=[z], xs=[x, y], overrides=overrides)
    assert r.outputs["z"] == 6.0
    assert [r.gradients["x"], r.gradients["y"]] == [3.0, 2.0]


@tf.custom_gradient
def cube_with_fused_backprop(x: Any) -> Any:
    """Builds `op_with_fused_backprop` with x³ as the fused op, which also returns 3x²; nothing differentiates that."""
    y, x_grad = tf.stop_gradient(x**3), tf.stop_gradient(3 * x**2)

    def first_order_gradient(dy: Any) -> Any:
        @tf.custom_gradient
        def first_order_custom(unused_x: Any) -> Any:
            def second_order_and_transpose(ddy: Any) -> Any:
                return ddy * 6 * unused_x

            return x_grad, second_order_and_transpose

        return dy * first_order_custom(x)

    return y, first_order_gradient


def second_order(fn: Callable[[Any], Any], x: Any, vector: Any) -> Any:
    """Computes TensorFlow's second-order gradients one by one."""
    at = tf.constant(x)
    with tf.GradientTape() as outer:
        outer.watch(at)
        with tf.GradientTape() as inner:
            inner.watch(at)
            y = fn(at)
        first = inner.gradient(y, at)
    return outer.gradient(first, at, output_gradients=tf.constant(vector)).numpy()


X = np.float32([1.0, -2.0, 3.0])
V = np.float32([1.0, 0.5, -1.0])


def test_nested_fused_op_traced(either: Any) -> None:
    g = gr.trace(cube_with_fused_backprop, ("float32", [None]))
    r = either.evaluate(g, {"x": X}, fetches=["output"], ys=["output"], xs=["x"])
    assert_close(r.outputs["output"], X**3)
    assert_close(r.gradients["x"], 3 * X**2)
    assert_close(r.gradients["x"], taped(cube_with_fused_backprop, X)[0])
    found = either.hvp(g, {"x": X}, {"x": V}, ys=["output"], xs=["x"])["x"]
    assert_close(found, 6 * X * V)
    assert_close(found, second_order(cube_with_fused_backprop, X, V))


def test_nested_fused_op_with_overrides(either: Any) -> None:
    """The rule has a rule for its own gradient, for x, y and dy; here with 7 where 6 would be right."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    y = g.op("StopGradient", x * x * x, name="y")
    second = gr.Rule("(7 * x0 * x2 * dy, None, 3 * x0 ** 2 * dy)")
    fused = gr.Override(gr.Rule("3 * x ** 2 * dy", gradient=second), region=gr.Region(inputs=[x], outputs=[y]))
    assert_close(either.evaluate(g, {"x": X}, ys=[y], xs=[x], overrides=[fused]).gradients["x"], 3 * X**2)
    assert_close(either.hvp(g, {"x": X}, {"x": V}, ys=[y], xs=[x], overrides=[fused])["x"], 7 * X * V)


POINTS = np.float32([1.0, 2.0, 3.0])


def linear_polynomials() -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """Returns the weights, the page's function, and the same function without a custom gradient."""
    weights = tf.Variable(tf.ones([2]), name="weights")

    def plain(x: Any) -> Any:
        return weights[1] * x + weights[0]

    @tf.custom_gradient
    def linear_poly(x: Any) -> Any:
        poly = weights[1] * x + weights[0]

        def grad_fn(dpoly: Any, variables: Any) -> Any:
            grad_xs = dpoly * weights[1]
            grad_vars = []
            assert variables is not None
            assert len(variables) == 1
            assert variables[0] is weights
            dy_dw = dpoly * tf.stack([x**1, x**0])
            grad_vars.append(tf.reduce_sum(tf.reshape(dy_dw, [2, -1]), axis=1))
            return grad_xs, grad_vars

        return poly, grad_fn

    return weights, linear_poly, plain


def test_linear_polynomial_traced(either: Any) -> None:
    weights, linear_poly, plain = linear_polynomials()
    for fn, wanted in ((linear_poly, [6.0, 3.0]), (plain, [3.0, 6.0])):
        g = gr.trace(fn, ("float32", [3]))
        r = either.evaluate(g, {"x": POINTS}, fetches=["output"], ys=["output"], xs=["x", "weights"])
        assert r.outputs["output"].tolist() == [2.0, 3.0, 4.0]
        assert r.gradients["x"].tolist() == [1.0, 1.0, 1.0]
        assert r.gradients["weights"].tolist() == wanted
        for name, local in zip(("x", "weights"), taped(fn, POINTS, also=[weights]), strict=True):
            assert_close(r.gradients[name], local)


def test_linear_polynomial_with_overrides(either: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [3])
    weights = g.variable("weights", [1.0, 1.0])
    poly = g.add(weights[1] * x, weights[0], name="poly")
    plain = either.evaluate(g, {"x": POINTS}, fetches=[poly], ys=[poly], xs=[x, "weights"])
    assert plain.outputs["poly"].tolist() == [2.0, 3.0, 4.0]
    assert plain.gradients["weights"].tolist() == [3.0, 6.0]

    rule = gr.Graph()
    at, values, dy = (rule.placeholder(name, "float32", None) for name in ("x", "x1", "dy"))
    rule.multiply(dy, values[1], name="dx")
    rule.op("Sum", dy * rule.stack([at, rule.ones_like(at)]), [1], name="dx1")
    page = gr.Override(gr.Rule(graph=rule), region=gr.Region(inputs=[x, weights], outputs=[poly]))
    r = either.evaluate(g, {"x": POINTS}, ys=[poly], xs=[x, "weights"], overrides=[page])
    assert r.gradients["x"].tolist() == [1.0, 1.0, 1.0]
    assert r.gradients["weights"].tolist() == [6.0, 3.0]


def test_shuffle_behind_stop_gradient(either: Any) -> None:
    x: Any = np.float32([0.3, 0.5])

    @tf.custom_gradient
    def test_function_with_stop_gradient(x: Any) -> Any:
        @tf.function
        def _inner_func() -> Any:
            return tf.stop_gradient(tf.random.shuffle(x))

        def grad(upstream: Any) -> Any:
            return upstream

        return _inner_func(), grad

    g = gr.trace(test_function_with_stop_gradient, ("float32", [2]))
    r = either.evaluate(g, {"x": x}, fetches=["output"], ys=["output"], xs=["x"])
    assert sorted(r.outputs["output"].tolist()) == x.tolist()
    assert_close(r.gradients["x"], np.float32([1, 1]))
    assert_close(r.gradients["x"], taped(test_function_with_stop_gradient, x)[0])


def test_shuffle_without_stop_gradient_is_refused(either: Any) -> None:
    @tf.function
    def shuffled(x: Any) -> Any:
        return tf.random.shuffle(x)

    # The page announces a LookupError; TensorFlow 2.21 returns None instead.
    assert taped(shuffled, [0.3, 0.5]) == [None]
    g = gr.trace(shuffled, ("float32", [2]))
    with refused("NO_GRADIENT") as refusal:
        either.evaluate(g, {"x": [0.3, 0.5]}, ys=["output"], xs=["x"])
    refusal.says("RandomShuffle", "stop_gradients")


def with_custom_square(name: str) -> Callable[[Any], Any]:
    """Builds the page's graph: a square with its own gradient, and one with the gradient of that name."""

    def both(c: Any) -> Any:
        s_1 = tf.square(c)
        with tf.compat.v1.get_default_graph().gradient_override_map({"Square": name}):
            s_2 = tf.square(c)
        return s_1, s_2

    return both


def test_custom_square_traced(either: Any) -> None:
    name = "GradruleReferenceCustomSquare"

    @tf.RegisterGradient(name)
    def _custom_square_grad(op: Any, grad: Any) -> Any:
        return grad * 7.0 * op.inputs[0]

    both = with_custom_square(name)
    g = gr.trace(both, ("float32", []))
    r = either.evaluate(g, {"c": 5.0}, fetches=["output_0", "output_1"], ys=["output_0", "output_1"], xs=["c"])
    assert [r.outputs["output_0"], r.outputs["output_1"]] == [25.0, 25.0]
    assert r.gradients["c"] == 10.0 + 35.0
    assert taped(tf.function(both), 5.0) == [10.0 + 35.0]
    assert list(rules_by_node(r).values()) == [name]


def test_custom_square_with_overrides(either: Any, rule: RuleMaker) -> None:
    rule("CustomSquare", "7 * x * dy")
    g = gr.Graph()
    c = g.placeholder("c", "float32", [])
    s_1 = g.op("Square", c, name="s_1")
    with g.gradient_override_map({"Square": "CustomSquare"}):
        s_2 = g.op("Square", c, name="s_2")
    r = either.evaluate(g, {"c": 5.0}, ys=[s_1, s_2], xs=[c])
    assert r.gradients["c"] == 10.0 + 35.0
    assert rules_by_node(r) == {"s_2": "CustomSquare"}


def test_gradient_of_sub_traced(either: Any) -> None:
    """The page registers it for Sub, as TensorFlow does; here doubled, to tell it from TensorFlow's."""
    name = "GradruleReferenceSub"

    @tf.RegisterGradient(name)
    def _sub_grad(unused_op: Any, grad: Any) -> Any:
        return 2.0 * grad, 2.0 * tf.negative(grad)

    def difference(x: Any, y: Any) -> Any:
        with tf.compat.v1.get_default_graph().gradient_override_map({"Sub": name}):
            return x - y

    g = gr.trace(difference, ("float32", [2]), ("float32", [2]))
    feeds = {"x": np.float32([1, 2]), "y": np.float32([3, 5])}
    r = either.evaluate(g, feeds, ys=["output"], xs=["x", "y"])
    for x, wanted, local in zip(("x", "y"), (2.0, -2.0), taped(tf.function(difference), *feeds.values()), strict=True):
        assert_close(r.gradients[x], np.float32([wanted, wanted]))
        assert_close(r.gradients[x], local)


def test_gradient_of_sub_with_overrides(either: Any, rule: RuleMaker) -> None:
    rule("SubGrad", "(dy, -dy)")
    g = gr.Graph()
    x, y = g.placeholder("x", "float32", [2]), g.placeholder("y", "float32", [2])
    z = g.subtract(x, y, name="z")
    for name in ("SubGrad", "Sub"):
        r = either.evaluate(g, {"x": [1.0, 2.0], "y": [3.0, 5.0]}, ys=[z], xs=[x, y], overrides={"Sub": name})
        assert r.gradients["x"].tolist() == [1.0, 1.0]
        assert r.gradients["y"].tolist() == [-1.0, -1.0]
