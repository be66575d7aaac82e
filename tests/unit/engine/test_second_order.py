"""Rules that carry the rule for their own gradient: by definition, and as a nested `tf.custom_gradient` brings them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.v1 import override_pb2
from tests.service.custom_gradient_graphs import graph_def_with_gradients
from tests.service.graph_defs import build_graph_def, placeholder
from tests.unit.engine.second_order import twice, twice_locally

X = np.float32([-1.5, 0.5, 2.0])
DY = np.float32([1.0, -2.0, 3.0])
SEED = np.float32([0.5, 1.0, -1.0])

Custom = Callable[..., Any]


def assert_same(build: Callable[[Custom, Any], Any], reference: Callable[[Any], Any] | None = None) -> list[Any]:
    """Compares a graph with embedded gradients to TensorFlow with the same gradients as Python functions.

    `reference`: the same function written without custom gradients, which TensorFlow cannot nest in calls, loops and
    branches.
    """

    def draw(custom_gradient: Custom) -> None:
        tf.identity(build(custom_gradient, placeholder("x", shape=(3,))), name="y")

    got = twice(graph_def_with_gradients(draw).SerializeToString(), {"x": X}, "y", DY, SEED)
    wanted = twice_locally(reference or (lambda x: build(tf.custom_gradient, x)), [X], DY, SEED)
    assert [value is None for value in got] == [value is None for value in wanted]
    for value, expected in zip(got, wanted, strict=True):
        if expected is not None:
            np.testing.assert_allclose(value, expected, rtol=1e-4)
    return got


def fused(custom_gradient: Custom) -> Callable[[Any], Any]:
    """Returns the nested example of TensorFlow's documentation: a fused op whose gradient has its own gradient."""

    @custom_gradient
    def op_with_fused_backprop(x: Any) -> Any:
        y, x_grad = x**3, 7 * x**2

        def first_order_gradient(dy: Any) -> Any:
            @custom_gradient
            def first_order_custom(unused_x: Any) -> Any:
                del unused_x

                def second_order_and_transpose(ddy: Any) -> Any:
                    return 11 * x * ddy

                return x_grad, second_order_and_transpose

            return dy * first_order_custom(x)

        return y, first_order_gradient

    return op_with_fused_backprop


def jet(v: Any, value: Any, first: Any, second: Any) -> Any:
    """Computes, with plain ops, a function that has this value and these derivatives at v."""
    away = v - tf.stop_gradient(v)
    value, first, second = map(tf.stop_gradient, (value, first, second))
    return value + first * away + second * away * away / 2


def fused_jet(v: Any) -> Any:
    """Computes the same as `fused`, with plain ops."""
    return jet(v, v**3, 7 * v**2, 11 * v)


def test_gradient_without_own_gradient_is_differentiated() -> None:
    def build(custom_gradient: Custom, x: Any) -> Any:
        @custom_gradient
        def f(v: Any) -> Any:
            return tf.sign(v), lambda dy: dy * tf.exp(v)

        return f(2 * x)

    first, second, of_dy = assert_same(build)
    np.testing.assert_allclose(first, 2 * DY * np.exp(2 * X), rtol=1e-5)
    np.testing.assert_allclose(second, 4 * SEED * DY * np.exp(2 * X), rtol=1e-5)
    np.testing.assert_allclose(of_dy, 2 * SEED * np.exp(2 * X), rtol=1e-5)


def test_the_nested_fused_op() -> None:
    first, second, of_dy = assert_same(lambda custom_gradient, x: fused(custom_gradient)(x))
    np.testing.assert_allclose(first, 7 * X**2 * DY, rtol=1e-5)
    np.testing.assert_allclose(second, 11 * X * DY * SEED, rtol=1e-5)
    np.testing.assert_allclose(of_dy, 7 * X**2 * SEED, rtol=1e-5)


def test_nested_in_calls() -> None:
    def build(custom_gradient: Custom, x: Any) -> Any:
        @tf.function(autograph=False)
        def inner(v: Any) -> Any:
            return fused(custom_gradient)(tf.sin(v))

        return inner(x) * inner(2 * x)

    assert_same(build, lambda x: fused_jet(tf.sin(x)) * fused_jet(tf.sin(2 * x)))


@pytest.mark.parametrize("sign", [1, -1])
def test_nested_in_a_branch(sign: int) -> None:
    def build(custom_gradient: Custom, x: Any) -> Any:
        return tf.cond(sign * tf.reduce_sum(x) > 0, lambda: fused(custom_gradient)(x) * x, lambda: tf.sin(x))

    assert_same(build, lambda x: fused_jet(x) * x if sign * np.sum(X) > 0 else tf.sin(x))


def test_nested_in_a_loop() -> None:
    def build(custom_gradient: Custom, x: Any) -> Any:
        def step(n: Any, v: Any) -> Any:
            return n + 1, tf.sin(fused(custom_gradient)(v)) + x

        return tf.while_loop(lambda n, v: n < 3, step, (tf.constant(0), x))[1]

    def unrolled(x: Any) -> Any:
        v = x
        for _ in range(3):
            v = tf.sin(fused_jet(v)) + x
        return v

    assert_same(build, unrolled)


def test_loops_and_calls_in_the_gradient_of_a_gradient() -> None:
    def build(custom_gradient: Custom, x: Any) -> Any:
        @tf.function(autograph=False)
        def slope(v: Any) -> Any:
            return fused(custom_gradient)(v) + v

        @custom_gradient
        def f(v: Any) -> Any:
            def backward(dy: Any) -> Any:
                loop = tf.while_loop(lambda n, _: n < 2, lambda n, w: (n + 1, w * slope(v)), (tf.constant(0), dy))
                return loop[1]

            return tf.abs(v), backward

        return f(x)

    def reference(x: Any) -> Any:
        slope = x**3 + x
        return jet(x, tf.abs(x), slope**2, 2 * slope * (7 * x**2 + 1))

    assert_same(build, reference)


def sign_graph() -> bytes:
    def build() -> None:
        tf.identity(2 * tf.raw_ops.Sign(x=3 * placeholder("x", shape=(3,))), name="y")

    found: bytes = build_graph_def(build).SerializeToString()
    return found


def override(rule: gr.Rule) -> override_pb2.GradientOverride:
    return gr.Override(rule, op_type="Sign").message()


def test_rule_contains_the_rule_for_its_own_gradient() -> None:
    # x is v, x1 is sign(v), x2 is dy; y is the first rule's gradient.
    gradient = gr.Rule("(scale * dy * x2, None, 10 * dy * x1 + y)", params=["scale"])
    rule = gr.Rule("dy * exp(x) * more", params=["more"], gradient=gradient)
    first, second, of_dy = twice(
        sign_graph(), {"x": X}, "y", DY, SEED, overrides=[override(rule)], params={"scale": 5.0, "more": 2.0}
    )
    inner, pulled = 3 * X, 2 * DY
    given = pulled * np.exp(inner) * 2
    np.testing.assert_allclose(first, 3 * given, rtol=1e-5)
    np.testing.assert_allclose(second, 3 * 5 * (3 * SEED) * pulled, rtol=1e-5)
    np.testing.assert_allclose(of_dy, 2 * (10 * 3 * SEED * np.sign(X) + given), rtol=1e-5)


def test_params_with_the_same_name_are_shared() -> None:
    gradient = gr.Rule("(scale * dy, None, None)", params=["scale"])
    rule = gr.Rule("dy * scale", params=["scale"], gradient=gradient)
    first, second, of_dy = twice(
        sign_graph(), {"x": X}, "y", DY, SEED, overrides=[override(rule)], params={"scale": 5.0}
    )
    np.testing.assert_allclose(first, 3 * 5 * 2 * DY, rtol=1e-5)
    np.testing.assert_allclose(second, 3 * 5 * 3 * SEED, rtol=1e-5)
    assert of_dy is None


def test_the_rules_own_derivative_is_the_default_of_its_gradient() -> None:
    gradient = gr.Rule("(10 * default0, default1, 100 * default2)")
    plain = gr.Rule("dy * exp(x)")
    tied = gr.Rule("dy * exp(x)", gradient=gradient)
    found = [twice(sign_graph(), {"x": X}, "y", DY, SEED, overrides=[override(rule)]) for rule in (plain, tied)]
    for factor, before, after in zip((1, 10, 100), *found, strict=True):
        np.testing.assert_allclose(after, factor * before, rtol=1e-5)
