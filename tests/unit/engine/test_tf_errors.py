"""Tests the translation of TensorFlow's messages."""

from __future__ import annotations

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine.checks import failed_check, require_same_shape
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.engine.tf_errors import clean_message


def test_a_kernel_s_message_loses_scopes_stacks_and_decorations() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, None]), tf.TensorSpec([None, None])], autograph=False)
    def multiply(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        with tf.name_scope(IMPORT_SCOPE):
            return tf.linalg.matmul(a, b, name="layer/product")

    try:
        multiply(tf.ones([2, 3]), tf.ones([2, 3]))
        raise AssertionError("the shapes do not fit")
    except tf.errors.InvalidArgumentError as cause:
        text = clean_message(cause.message)
    assert "Matrix size-incompatible" in text
    assert "g/" not in text and "{{" not in text and "[[" not in text and "\n" not in text


def test_name_that_resembles_the_scope_is_kept() -> None:
    assert clean_message("node big/thing and g/thing") == "node big/thing and thing"


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
