"""What gradrule uses of TensorFlow without a public name is there and does what it is used for."""

from __future__ import annotations

import pytest
import tensorflow as tf

from gradrule import _opdefs
from gradrule_server.engine import tf_private


def test_the_gradient_registry_tells_functions_none_and_nothing_apart() -> None:
    registered = tf_private.registered_gradients()
    assert callable(registered["Sign"])
    assert registered["StopGradient"] is None
    assert len(registered) > 500
    assert tf_private.gradient_of("StopGradient") is None
    with pytest.raises(LookupError):
        tf_private.gradient_of("NoSuchOp")


def test_the_op_definitions_are_those_of_the_table_that_ships() -> None:
    assert _opdefs.digest_of(tf_private.all_op_definitions()) == _opdefs.digest()


def test_small_functions_may_run_on_the_calling_thread() -> None:
    function = tf.function(lambda x: x * 2, input_signature=[tf.TensorSpec([None])]).get_concrete_function()
    with tf_private.on_calling_thread():
        assert function(tf.constant([1.0, 2.0])).numpy().tolist() == [2.0, 4.0]


def test_a_tensor_of_an_outer_graph_is_captured() -> None:
    @tf.function(input_signature=[tf.TensorSpec([])], autograph=False)
    def outer(x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            graph = tf.compat.v1.get_default_graph()
            seen = tf_private.in_graph(graph, x)
            assert seen.graph is graph
            assert tf_private.in_graph(graph, total) is total
            return i + 1, total + seen

        return tf.while_loop(lambda i, _: i < 3, body, [0, 0.0])[1]

    assert outer(tf.constant(2.0)).numpy() == 6.0
