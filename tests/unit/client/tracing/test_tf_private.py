"""Tests the private parts of TensorFlow that the client uses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tensorflow as tf

from gradrule._tracing import tf_private


def registered(fn: Any) -> Any:
    """The gradient that TensorFlow registers for one call of a custom gradient."""
    concrete = tf.function(fn).get_concrete_function(tf.TensorSpec([2], tf.float32))
    (node,) = [op for op in concrete.graph.get_operations() if op.type == "IdentityN"]
    return tf_private.registered_gradient(node.get_attr("_gradient_op_type").decode())


@tf.custom_gradient
def named(x: Any) -> Any:
    def grad(dy: Any) -> Any:
        return dy

    return (x, -x), lambda dy, other: grad(dy) - other


def shared(dy: Any) -> Any:
    return dy


class Holder:
    @tf.custom_gradient
    def method(self: Any) -> Any:
        return tf.identity(self), lambda dy: dy


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (named, ("named", 2)),
        (tf.custom_gradient(lambda x: (tf.identity(x), shared)), ("shared", 1)),
        (tf.custom_gradient(lambda x: (tf.identity(x), functools.partial(shared))), ("partial", 1)),
        (tf.custom_gradient(lambda x: (tf.identity(x), lambda dy: dy)), ("lambda", 1)),
        (Holder.method, ("method", 1)),
    ],
)
def test_name_and_results_of_a_custom_gradient(fn: Any, expected: tuple[str, int]) -> None:
    assert tf_private.custom_gradient_of(registered(fn)) == expected


def test_other_gradients_are_no_custom_ones() -> None:
    relu = tf_private.registered_gradient("Relu")
    assert relu is not None
    assert tf_private.custom_gradient_of(relu) is None
    assert not tf_private.is_loaded_gradient(relu)
    assert tf_private.registered_gradient("Shape") is None
    with pytest.raises(LookupError):
        tf_private.registered_gradient("none of this name")


def test_tensors_and_handles() -> None:
    variable = tf.Variable([1.0, 2.0])
    (item,) = tf_private.handle_data(variable.handle)
    assert (item.dtype, [dim.size for dim in item.shape.dim]) == (1, [2])
    assert tf_private.read_variable(variable.handle, tf.float32).tolist() == [1, 2]
    graph = tf.function(lambda x: variable * x).get_concrete_function(tf.TensorSpec([2], tf.float32)).graph
    ((outer, inner),) = tf_private.captures(graph)
    assert tf_private.identity_of(outer) == tf_private.identity_of(variable.handle)
    assert tf_private.identity_of(inner) != tf_private.identity_of(outer)
    assert tf_private.handle_data(inner)[0].dtype == 1
    assert tf_private.deferred_captures(graph) == 0
    definition = tf_private.definition_of(graph, "of_a_test")
    assert len(definition.signature.input_arg) == len(graph.inputs) == 2
