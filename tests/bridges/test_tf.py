"""gradrule.tf, compared with the same functions in TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule.tf
from gradrule.errors import UnsupportedError
from tests.bridges import examples

W = tf.constant(examples.W)
X = tf.constant(examples.X)


def local(x: Any, w: Any) -> Any:
    """Computes `examples.smooth_graph` in TensorFlow."""
    h = tf.tanh(x @ w)
    return {"y": h**2, "z": tf.reduce_sum(h)}


def derivatives(function: Any) -> Any:
    """Returns values, gradients, and gradients of a function of the gradients."""
    with tf.GradientTape() as outer:
        outer.watch([X, W])
        with tf.GradientTape() as inner:
            inner.watch([X, W])
            found = function(x=X, w=W)
            loss = tf.reduce_sum(tf.sin(found["y"])) + found["z"]
        gradients = inner.gradient(loss, [X, W])
        scalar = tf.reduce_sum(tf.cos(gradients[0])) + tf.reduce_sum(gradients[1] ** 2)
    return [found["y"], found["z"], *gradients, *outer.gradient(scalar, [X, W])]


@pytest.mark.parametrize("compiled", [False, True])
def test_derivatives_equal_those_of_tensorflow(smooth: Any, compiled: bool) -> None:
    remote = gradrule.tf.remote(smooth)
    run = tf.function(derivatives) if compiled else derivatives
    for found, wanted in zip(run(remote), derivatives(local), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_the_gradient_passes_tensorflows_check(smooth: Any) -> None:
    remote = gradrule.tf.remote(smooth)
    found, numeric = tf.test.compute_gradient(lambda x, w: remote(x=x, w=w)["z"], [X, W], delta=1e-5)
    for one, wanted in zip(found, numeric, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-8)


def test_overrides_apply(binary: Any) -> None:
    x, w = tf.cast(X, tf.float32), tf.cast(W, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        loss = gradrule.tf.remote(binary)(x, w)
    for found, wanted in zip(tape.gradient(loss, [x, w]), examples.straight_through(x.numpy(), w.numpy()), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_random_numbers_of_the_backward_pass_are_those_of_the_forward_pass(dropout: Any) -> None:
    x = tf.range(1.0, 1001.0)
    remote = gradrule.tf.remote(dropout)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = remote(x)
    np.testing.assert_allclose(tape.gradient(y, x), y / x)
    # TensorFlow raises an error of its own while it traces.
    with pytest.raises(Exception, match="draws random numbers"):
        tf.function(remote)(x)


def test_gradients_by_inputs_that_are_no_xs_are_refused(client: Any) -> None:
    by_w = gradrule.tf.remote(client.compile(examples.smooth_graph(), fetches=["z"], ys=["z"], xs=["w"]))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([X, W])
        z = by_w(X, W) + tf.reduce_sum(X)
        constant = by_w(tf.stop_gradient(X), W)
    assert tape.gradient(constant, W) is not None
    with pytest.raises(gradrule.errors.InvalidDerivativeError, match="'x' is not one of the program's xs"):
        tape.gradient(z, X)


def test_third_derivatives_say_that_there_are_none(smooth: Any) -> None:
    remote = gradrule.tf.remote(smooth)
    with tf.GradientTape() as third:
        third.watch(W)
        with tf.GradientTape() as second:
            second.watch(W)
            with tf.GradientTape() as first:
                first.watch(W)
                z = remote(X, W)["z"]
            one = first.gradient(z, W)
        two = second.gradient(one, W)
    with pytest.raises(UnsupportedError, match="not third ones"):
        third.gradient(two, W)


def test_a_loop_around_a_remote_function_has_the_gradient_of_each_call(client: Any) -> None:
    g = gradrule.Graph()
    x = g.placeholder("x", "float64", [])
    g.multiply(x, x, name="y")
    square = gradrule.tf.remote(client.compile(g, fetches=["y"], ys=["y"], xs=["x"]))

    @tf.function
    def power(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, square(v)), [0, x])[1]
        return tape.gradient(found, x)

    # x to the power 8
    np.testing.assert_allclose(power(tf.constant(1.5, tf.float64)), 8 * 1.5**7, rtol=1e-12)


def test_a_network_trains(digits_network: Any) -> None:
    program, start = digits_network
    loss = gradrule.tf.remote(program)
    weights = {name: tf.Variable(value) for name, value in start.items()}
    optimizer = tf.keras.optimizers.Adam(0.01)
    digits = examples.DIGITS
    for batch in examples.BATCHES:
        with tf.GradientTape() as tape:
            value = loss(x=digits.train_x[batch], labels=digits.train_labels[batch], **weights)
        variables = list(weights.values())
        optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))
        for variable in variables:
            variable.assign(tf.clip_by_value(variable, -1, 1))
    trained = {name: variable.numpy() for name, variable in weights.items()}
    assert examples.accuracy(program, trained) >= examples.WANTED_ACCURACY
