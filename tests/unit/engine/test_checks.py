"""Tests the checks that run inside built functions."""

from __future__ import annotations

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine.checks import failed_check, require_same_shape


def test_a_shape_check_fails_with_its_reason_place_and_both_shapes() -> None:
    @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)], autograph=False)
    def check(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        return require_same_shape(a, b, errors_pb2.ERROR_REASON_RULE_OUTPUT, "rule 'r' on node 'n'")

    assert check(tf.ones([2, 3]), tf.ones([2, 3])).shape == (2, 3)
    for left, right in (([2, 3], [3, 2]), ([2], [2, 1]), ([2, 2], [2]), ([], [1])):
        try:
            check(tf.ones(left), tf.ones(right))
            raise AssertionError("the shapes differ")
        except tf.errors.InvalidArgumentError as cause:
            found = failed_check(cause.message)
        assert found is not None
        assert found.reason == errors_pb2.ERROR_REASON_RULE_OUTPUT
        assert "rule 'r' on node 'n'" in found.message
        assert f"({', '.join(map(str, left))})" in found.message
        assert f"({', '.join(map(str, right))})" in found.message


def test_other_message_is_not_a_failed_check() -> None:
    assert failed_check("Matrix size-incompatible") is None
