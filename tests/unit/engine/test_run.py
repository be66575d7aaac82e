"""Tests the size check, the writing of tensors and the translation of errors, without a program."""

from __future__ import annotations

import pytest
import tensorflow as tf

from gradrule.v1 import evaluate_pb2, tensor_pb2
from gradrule_server.engine import response_writer
from gradrule_server.engine.response_writer import ResponseWriter, results_of
from gradrule_server.engine.tf_errors import TENSORFLOW_ERRORS, translate_error
from gradrule_server.errors import GradruleError, reason_name


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (tf.zeros([10, 3], tf.float64), 240),
        (tf.zeros([], tf.bool), 1),
        (tf.constant([b"abc", b"", b"de"]), 5),
        (tf.constant(b"abc"), 3),
        (tf.cast(tf.zeros([7], tf.int8), tf.as_dtype("int4")), 70),
        (tf.bitcast(tf.zeros([6], tf.int8), tf.qint8), 6),
    ],
)
def test_too_large_answer_is_refused_before_copying(
    monkeypatch: pytest.MonkeyPatch, tensor: tf.Tensor, size: int
) -> None:
    def write() -> None:
        ResponseWriter().add_outputs(["y", "z"], results_of([tensor, tensor]))

    monkeypatch.setattr(response_writer, "MAX_ANSWER_BYTES", 2 * size)
    write()
    monkeypatch.setattr(response_writer, "MAX_ANSWER_BYTES", 2 * size - 1)
    with pytest.raises(GradruleError) as caught:
        write()
    assert reason_name(caught.value.reason) == "MESSAGE_TOO_LARGE"
    assert str(2 * size) in caught.value.message


def test_quantised_values_keep_their_type() -> None:
    writer = ResponseWriter()
    writer.add_outputs(["y"], results_of([tf.bitcast(tf.constant([1, -2], tf.int8), tf.qint8)]))
    (output,) = evaluate_pb2.EvaluateResponse.FromString(b"".join(writer.parts)).outputs
    message = output.value.inline_tensor
    assert (message.dtype, message.tensor_content) == (tensor_pb2.DT_QINT8, b"\x01\xfe")


@pytest.mark.parametrize(
    ("op", "attrs"),
    [
        ("StaticRegexFullMatch", {"pattern": b"\xff"}),
        ("StaticRegexReplace", {"pattern": b"(\xfe", "rewrite": b"\xff"}),
    ],
)
def test_error_message_with_invalid_utf8_is_reported(op: str, attrs: dict[str, bytes]) -> None:
    @tf.function(autograph=False)
    def function() -> tf.Tensor:
        return getattr(tf.raw_ops, op)(input=[b"text"], **attrs)

    with pytest.raises(TENSORFLOW_ERRORS) as caught:
        function()
    translated = translate_error(caught.value)
    assert reason_name(translated.reason) == "EXECUTION_FAILED"
    assert "\\xf" in translated.message


def test_error_about_a_string_with_invalid_utf8_is_reported() -> None:
    @tf.function(autograph=False)
    def function() -> tf.Tensor:
        return tf.strings.to_number([b"\xff\xfe"])

    with pytest.raises(TENSORFLOW_ERRORS) as caught:
        function()
    translated = translate_error(caught.value)
    assert reason_name(translated.reason) == "EXECUTION_FAILED"
    assert r"\xff\xfe" in translated.message
