"""Functions of x and w with every kind of container inside, for derivatives that local TensorFlow takes eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from tests.service.graph_defs import drawn, loaded, placeholder

Function = Callable[[Any, Any], Any]

X: Any = np.float32([[0.3, -0.7, 1.1], [0.9, 0.2, -0.4]])
W: Any = np.float32([[0.5, -0.2, 0.1], [0.4, 0.6, -0.3], [-0.8, 0.7, 0.2]])

FEEDS = {"x": X, "w": W}
VX: Any = np.float32([[0.4, -1.2, 0.3], [0.8, 0.1, -0.9]])
VW: Any = np.float32([[0.2, 0.9, -0.5], [-0.7, 0.3, 1.1], [0.6, -0.4, 0.1]])
# Of float32 through loops, on both sides.
RTOL = 2e-4


def plain(x: Any, w: Any) -> Any:
    """A layer."""
    return tf.tanh(tf.matmul(x, w)) * tf.sin(x)


def loop(x: Any, w: Any) -> Any:
    """A loop whose number of turns is known only when it runs."""

    def body(i: Any, value: Any) -> tuple[Any, Any]:
        return i + 1, tf.sin(tf.matmul(value, w)) + x

    turns = 2 + tf.cast(tf.reduce_sum(x) > 100.0, tf.int32)
    return tf.while_loop(lambda i, _: i < turns, body, [0, x])[1]


def nested_loops(x: Any, w: Any) -> Any:
    """A loop in a loop."""

    def inner(i: Any, value: Any) -> tuple[Any, Any]:
        return i + 1, tf.tanh(value * x)

    def outer(i: Any, value: Any) -> tuple[Any, Any]:
        return i + 1, tf.while_loop(lambda j, _: j < 2, inner, [0, tf.matmul(value, w)])[1] + value

    return tf.while_loop(lambda i, _: i < 2, outer, [0, x])[1]


def branch(x: Any, w: Any) -> Any:
    """A branch."""
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.exp(tf.matmul(x, w)) * x, lambda: x * 3.0)


def branch_in_loop(x: Any, w: Any) -> Any:
    """A branch in a loop."""

    def body(i: Any, value: Any) -> tuple[Any, Any]:
        return i + 1, tf.cond(tf.equal(i % 2, 0), lambda: tf.matmul(value, w) * x, lambda: tf.sin(value) * value)

    return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


@tf.function(autograph=False)
def _called(x: Any, w: Any) -> Any:
    return tf.sigmoid(tf.matmul(x, w)) * x


def nested_function(x: Any, w: Any) -> Any:
    """Calls of a function."""
    return _called(_called(x, w), w)


def scan(x: Any, w: Any) -> Any:
    """A recurrent cell, its states gathered."""

    def cell(state: Any, one: Any) -> Any:
        gate = tf.sigmoid(one + tf.linalg.matvec(w, state))
        return gate * tf.tanh(one) + (1.0 - gate) * state

    return tf.scan(cell, x, initializer=tf.zeros([3]))


def mapped(x: Any, w: Any) -> Any:
    """`map_fn`, whose turns do not depend on one another."""
    return tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row)) * row, x)


CASES: Mapping[str, Function] = {
    function.__name__: function
    for function in (plain, loop, nested_loops, branch, branch_in_loop, nested_function, scan, mapped)
}


def graph_of(function: Function, shape: Any = (None, None)) -> gr.Graph:
    """The graph of y = function(x, w), as a user would load it."""

    def build() -> None:
        tf.identity(function(placeholder("x", shape=shape), placeholder("w", shape=shape)), name="y")

    return loaded(drawn(build))


class Local:
    """Derivatives of a function at X and W, taken eagerly, by tapes and accumulators."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._x, self._w = tf.constant(X), tf.constant(W)

    def jvp(self, tangent_x: Any, tangent_w: Any) -> Any:
        """Forward mode."""
        with tf.autodiff.ForwardAccumulator(
            [self._x, self._w], [tf.constant(tangent_x), tf.constant(tangent_w)]
        ) as accumulator:
            y = self._function(self._x, self._w)
        return accumulator.jvp(y).numpy()

    def jacobian(self) -> tuple[Any, Any]:
        """By x and by w."""
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([self._x, self._w])
            y = self._function(self._x, self._w)
        found = tape.jacobian(y, [self._x, self._w], experimental_use_pfor=False)
        return tuple(value.numpy() for value in found)

    def gradients(self, grad_y: Any) -> tuple[Any, Any]:
        """By x and by w."""
        with tf.GradientTape() as tape:
            tape.watch([self._x, self._w])
            y = self._function(self._x, self._w)
        found = tape.gradient(y, [self._x, self._w], output_gradients=tf.constant(grad_y))
        return tuple(value.numpy() for value in found)

    def hvp(self, vector_x: Any, vector_w: Any) -> tuple[Any, Any]:
        """Reverse over reverse, by x and by w."""
        with tf.GradientTape() as outer:
            outer.watch([self._x, self._w])
            with tf.GradientTape() as inner:
                inner.watch([self._x, self._w])
                y = self._function(self._x, self._w)
            first = inner.gradient(y, [self._x, self._w])
        found = outer.gradient(
            first,
            [self._x, self._w],
            output_gradients=[tf.constant(vector_x), tf.constant(vector_w)],
            unconnected_gradients="zero",
        )
        return tuple(value.numpy() for value in found)
