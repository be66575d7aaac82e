"""Lists functions of x and w with each kind of control flow, whose derivatives local TensorFlow computes eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from tests.service.graph_defs import build_graph, placeholder

Function = Callable[[Any, Any], Any]

X: Any = np.float32([[0.3, -0.7, 1.1], [0.9, 0.2, -0.4]])
W: Any = np.float32([[0.5, -0.2, 0.1], [0.4, 0.6, -0.3], [-0.8, 0.7, 0.2]])

FEEDS = {"x": X, "w": W}
VX: Any = np.float32([[0.4, -1.2, 0.3], [0.8, 0.1, -0.9]])
VW: Any = np.float32([[0.2, 0.9, -0.5], [-0.7, 0.3, 1.1], [0.6, -0.4, 0.1]])
# Relative tolerance for float32 values that pass through loops on both sides.
RTOL = 2e-4


def plain(x: Any, w: Any) -> Any:
    """Computes a dense layer."""
    return tf.tanh(tf.matmul(x, w)) * tf.sin(x)


def loop(x: Any, w: Any) -> Any:
    """Runs a loop whose number of iterations is known only at run time."""

    def body(i: Any, value: Any) -> tuple[Any, Any]:
        return i + 1, tf.sin(tf.matmul(value, w)) + x

    turns = 2 + tf.cast(tf.reduce_sum(x) > 100.0, tf.int32)
    return tf.while_loop(lambda i, _: i < turns, body, [0, x])[1]


def nested_loops(x: Any, w: Any) -> Any:
    """Runs a loop inside a loop."""

    def inner(i: Any, value: Any) -> tuple[Any, Any]:
        return i + 1, tf.tanh(value * x)

    def outer(i: Any, value: Any) -> tuple[Any, Any]:
        return i + 1, tf.while_loop(lambda j, _: j < 2, inner, [0, tf.matmul(value, w)])[1] + value

    return tf.while_loop(lambda i, _: i < 2, outer, [0, x])[1]


def branch(x: Any, w: Any) -> Any:
    """Runs a branch."""
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.exp(tf.matmul(x, w)) * x, lambda: x * 3.0)


def branch_in_loop(x: Any, w: Any) -> Any:
    """Runs a branch inside a loop."""

    def body(i: Any, value: Any) -> tuple[Any, Any]:
        return i + 1, tf.cond(tf.equal(i % 2, 0), lambda: tf.matmul(value, w) * x, lambda: tf.sin(value) * value)

    return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


@tf.function(autograph=False)
def _called(x: Any, w: Any) -> Any:
    return tf.sigmoid(tf.matmul(x, w)) * x


def nested_function(x: Any, w: Any) -> Any:
    """Calls nested functions."""
    return _called(_called(x, w), w)


def scan(x: Any, w: Any) -> Any:
    """Runs a recurrent cell and stacks its states."""

    def cell(state: Any, one: Any) -> Any:
        gate = tf.sigmoid(one + tf.linalg.matvec(w, state))
        return gate * tf.tanh(one) + (1.0 - gate) * state

    return tf.scan(cell, x, initializer=tf.zeros([3]))


def mapped(x: Any, w: Any) -> Any:
    """Runs `map_fn`, whose iterations are independent."""
    return tf.map_fn(lambda row: tf.tanh(tf.linalg.matvec(w, row)) * row, x)


CASES: Mapping[str, Function] = {
    function.__name__: function
    for function in (plain, loop, nested_loops, branch, branch_in_loop, nested_function, scan, mapped)
}


def graph_for_function(function: Function, shape: Any = (None, None)) -> gr.Graph:
    """Returns the graph of y = function(x, w), loaded from a file like a user's."""

    def build() -> None:
        tf.identity(function(placeholder("x", shape=shape), placeholder("w", shape=shape)), name="y")

    return build_graph(build)


class LocalDerivatives:
    """Computes derivatives of a function at X and W eagerly, with gradient tapes and forward accumulators."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._x, self._w = tf.constant(X), tf.constant(W)

    def jvp(self, tangent_x: Any, tangent_w: Any) -> Any:
        """Computes the Jacobian-vector product in forward mode."""
        with tf.autodiff.ForwardAccumulator(
            [self._x, self._w], [tf.constant(tangent_x), tf.constant(tangent_w)]
        ) as accumulator:
            y = self._function(self._x, self._w)
        return accumulator.jvp(y).numpy()

    def jacobian(self) -> tuple[Any, Any]:
        """Returns the Jacobians with respect to x and w."""
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([self._x, self._w])
            y = self._function(self._x, self._w)
        found = tape.jacobian(y, [self._x, self._w], experimental_use_pfor=False)
        return tuple(value.numpy() for value in found)

    def gradients(self, grad_y: Any) -> tuple[Any, Any]:
        """Returns the gradients with respect to x and w."""
        with tf.GradientTape() as tape:
            tape.watch([self._x, self._w])
            y = self._function(self._x, self._w)
        found = tape.gradient(y, [self._x, self._w], output_gradients=tf.constant(grad_y))
        return tuple(value.numpy() for value in found)

    def hvp(self, vector_x: Any, vector_w: Any) -> tuple[Any, Any]:
        """Returns Hessian-vector products with respect to x and w, reverse over reverse mode."""
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
