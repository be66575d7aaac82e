"""Tests the translation of TensorFlow's messages."""

from __future__ import annotations

import tensorflow as tf

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
