"""Second derivatives of programs with rules equal those of the frameworks' own custom gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradrule as gr
import gradrule.jax
import gradrule.scipy
import gradrule.tf
import gradrule.torch

RULE = "dy / (1 + abs(x)) ** 2"
X = np.array([0.5, -1.5, 0.25, 2.0])
W = np.array([-0.75, 0.5, 1.25, 0.3])
VECTOR = np.array([1.0, -2.0, 0.5, 3.0])


def loss(sign: Any, total: Any, x: Any, w: Any) -> Any:
    """Computes Σ (2 s + w)² s + s' x of s = sign(x w), s' = sign(w + s): one sign depends on another."""
    s = sign(x * w)
    return total((2 * s + w) * (2 * s + w) * s + sign(w + s) * x)


@pytest.fixture(scope="module", params=["first", "all"])
def program(client: Any, request: pytest.FixtureRequest) -> Any:
    """The program of `loss` in float64; its second derivatives must not depend on the override's order."""
    g = gr.Graph()
    x, w = g.placeholder("x", "float64", [None]), g.placeholder("w", "float64", [None])
    y = loss(lambda v: g.op_output("Sign", v), lambda v: g.reduce_sum(v, axis=[0]), x, w)
    g.op("Identity", y, name="y")
    override = gr.Override(gr.Rule(RULE), op_type="Sign", order=request.param)
    return client.compile(g, fetches=["y"], ys=["y"], xs=["x", "w"], overrides=[override])


class Sign(torch.autograd.Function):  # type: ignore[misc]
    """The sign with the gradient of RULE."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return dys[0] / (1 + torch.abs(x)) ** 2


def by_torch(function: Any) -> list[Any]:
    """Returns the second derivatives by x and w of a function of PyTorch tensors."""
    x, w = (torch.tensor(value, requires_grad=True) for value in (X, W))
    (first,) = torch.autograd.grad(function(x, w), w, create_graph=True)
    return [found.numpy() for found in torch.autograd.grad((first * torch.tensor(VECTOR)).sum(), [x, w])]


def wanted() -> list[Any]:
    return by_torch(lambda x, w: loss(Sign.apply, torch.sum, x, w))


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_torch_equals_its_own_function_and_the_local_surrogate(program: Any) -> None:
    surrogate = gradrule.torch.surrogate(gr.Rule(RULE), torch.sign)
    assert_equal(by_torch(lambda x, w: loss(surrogate, torch.sum, x, w)), wanted())
    assert_equal(by_torch(lambda x, w: gradrule.torch.remote(program)(x=x, w=w)), wanted())


def test_tensorflow_equals_its_custom_gradient(program: Any) -> None:
    @tf.custom_gradient
    def sign(x: tf.Tensor) -> Any:
        return tf.sign(x), lambda dy: dy / (1 + tf.abs(x)) ** 2

    def second(function: Any) -> list[Any]:
        x, w = tf.constant(X), tf.constant(W)
        with tf.GradientTape() as outer:
            outer.watch([x, w])
            with tf.GradientTape() as inner:
                inner.watch(w)
                y = function(x, w)
            total = tf.reduce_sum(inner.gradient(y, w) * VECTOR)
        return [found.numpy() for found in outer.gradient(total, [x, w])]

    assert_equal(second(lambda x, w: loss(sign, tf.reduce_sum, x, w)), wanted())
    assert_equal(second(lambda x, w: gradrule.tf.remote(program)(x=x, w=w)), wanted())


def test_jax_equals_its_custom_vjp_and_the_local_surrogate(program: Any) -> None:
    @jax.custom_vjp
    def sign(x: Any) -> Any:
        return jnp.sign(x)

    sign.defvjp(lambda x: (sign(x), x), lambda x, dy: (dy / (1 + jnp.abs(x)) ** 2,))

    def second(function: Any) -> Any:
        return jax.grad(lambda x, w: jnp.sum(jax.grad(function, 1)(x, w) * VECTOR), (0, 1))(jnp.array(X), jnp.array(W))

    with jax.enable_x64(True):
        assert_equal(second(lambda x, w: loss(sign, jnp.sum, x, w)), wanted())
        surrogate = gradrule.jax.surrogate(gr.Rule(RULE), "sign")
        assert_equal(second(lambda x, w: loss(surrogate, jnp.sum, x, w)), wanted())
        assert_equal(second(lambda x, w: gradrule.jax.remote(program)(x=x, w=w)), wanted())


def test_products_follow_the_order_unless_told_otherwise(program: Any, request: pytest.FixtureRequest) -> None:
    """The derivative of the gradient's numbers, in which signs are constant, is the default."""
    feeds = {"x": X, "w": W}
    every = program.hvp(feeds, {"w": VECTOR}, every_order=True)
    assert_equal([every["x"], every["w"]], wanted())
    own = program.hvp(feeds, {"w": VECTOR})

    def gradient(x: Any, w: Any) -> Any:
        return program.evaluate({"x": x, "w": w}).gradients["w"] @ VECTOR

    step = 1e-6
    differences = [
        (gradient(X, W + step * unit) - gradient(X, W - step * unit)) / (2 * step) for unit in np.eye(len(W))
    ]
    if request.node.callspec.params["program"] == "first":
        np.testing.assert_allclose(own["w"], differences, rtol=1e-5, atol=1e-7)
    else:
        assert_equal([own["x"], own["w"]], wanted())
