"""`tf.random.Generator` in traced functions: the same numbers as local TensorFlow, in single calls and in sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr


def make(state: list[int]) -> Any:
    return tf.random.Generator.from_state(np.array(state, np.int64), alg="philox")


# The counter overflows into its second number, and as a signed number, where the state says so.
STATES = [[3, 0, 0], [-1, 7, 5], [-256, -1, 5], [2**63 - 1, 1, -9]]


@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_generator_draws_the_numbers_of_tensorflow(client: gr.Client, state: list[int]) -> None:
    generator = make(state)

    def fn(x: Any) -> Any:
        noise = generator.normal([2, 3]) + generator.truncated_normal([3])
        index = generator.uniform([3], 0, 10, dtype=tf.int32)
        steps = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * generator.uniform([3])), [0, x])[1]
        return {"noisy": x * noise, "index": index, "steps": steps, "state": generator.state.read_value()}

    graph = gr.trace(fn, ("float32", [3]))
    x = np.array([1.0, -2.0, 0.5], np.float32)
    (name,) = graph.variables
    r = client.evaluate(graph, {"x": x}, ["noisy", "index", "steps", "state"], ys="noisy", xs="x")
    local = make(state)
    noise = (local.normal([2, 3]) + local.truncated_normal([3])).numpy()
    index = local.uniform([3], 0, 10, dtype=tf.int32)
    factors = [local.uniform([3]).numpy() for _ in range(3)]
    np.testing.assert_allclose(r.outputs["noisy"], x * noise, rtol=1e-6)
    np.testing.assert_array_equal(r.outputs["index"], index)
    np.testing.assert_allclose(r.outputs["steps"], x * np.prod(factors, 0), rtol=1e-6)
    np.testing.assert_array_equal(r.outputs["state"], local.state)
    np.testing.assert_allclose(r.gradients["x"], noise.sum(0), rtol=1e-6)
    # A call does not change the graph's state: the same call gives the same numbers.
    again = client.evaluate(graph, {"x": x, name: np.array(state, np.int64)}, "noisy")
    np.testing.assert_array_equal(again.outputs["noisy"], r.outputs["noisy"])


def test_a_session_keeps_the_state_of_a_generator(client: gr.Client) -> None:
    generator, local = make([3, 0, 0]), make([3, 0, 0])
    weight = tf.Variable([1.0, 2.0], name="weight")
    graph = gr.trace(lambda x: tf.reduce_sum((x + generator.normal([2])) * weight), ("float32", [2]))
    expected = np.array([1.0, 2.0])
    with client.session(graph) as session:
        for _ in range(3):
            session.step({"x": [1.0, 1.0]}, "output", optimizer=gr.optimizers.SGD(0.1))
            expected -= 0.1 * (1.0 + local.normal([2]).numpy())
        values = session.read()
    np.testing.assert_allclose(values["weight"], expected, rtol=1e-6)
    (name,) = set(values) - {"weight"}
    np.testing.assert_array_equal(values[name], local.state)


def test_a_generator_of_another_algorithm_is_refused(client: gr.Client) -> None:
    generator = tf.random.Generator.from_state(np.array([1, 2], np.int64), alg="threefry")
    graph = gr.trace(lambda x: x * generator.normal([2]), ("float32", [2]))
    with pytest.raises(gr.errors.UnsupportedOpError, match=r"RngReadAndSkip.*alg='philox'"):
        client.evaluate(graph, {"x": [1.0, 1.0]}, "output")
