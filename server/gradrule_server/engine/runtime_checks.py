"""Checks that run inside a built function, and the limit on the size of an answer."""

from __future__ import annotations

import re
from typing import cast

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine.code_rules.common import Gradient
from gradrule_server.errors import GradruleError, error

# A message has at most 2 GiB; the rest is for names and for fields that the front end adds.
MAX_ANSWER_BYTES = 2**31 - 2**26


_MARKER = "gradrule-check"
# Text of the error, by kind of check.
_WORDS = {
    "shape": "has shape ({got}), must have ({wanted})",
    "bytes": "takes {got} bytes, and at most {wanted} fit into an answer",
}
_FAILED = re.compile(
    rf"{_MARKER}\|(?P<kind>\w+)\|(?P<reason>\d+)\|(?P<where>.*?)\|\]"
    r"\s*\[(?P<got>[^\]]*)\]\s*\[(?P<wanted>[^\]]*)\]",
    re.DOTALL,
)


def require_same_shape(
    value: tf.Tensor, like: tf.Tensor, reason: errors_pb2.ErrorReason.ValueType, where: str
) -> tf.Tensor:
    """Returns `value`, with a check at run time that it has the shape of `like`, unless that is known already."""
    if value.shape.is_fully_defined() and like.shape.is_fully_defined() and value.shape == like.shape:
        return value
    checked = require_same(value, tf.shape(value), tf.shape(like), reason, where)
    checked.set_shape(like.shape)
    return checked


def require_same(
    value: tf.Tensor, got: tf.Tensor, wanted: tf.Tensor, reason: errors_pb2.ErrorReason.ValueType, where: str
) -> tf.Tensor:
    """Returns `value`, with a check at run time that the vectors of sizes `got` and `wanted` are equal."""
    # A plain Equal would fail on some different ranks, with another message, and broadcast others.
    same_sizes = tf.reduce_all(tf.raw_ops.Equal(x=got, y=wanted, incompatible_shape_error=False))
    same = tf.logical_and(tf.equal(tf.size(got), tf.size(wanted)), same_sizes)
    return _require(same, value, [f"{_MARKER}|shape|{int(reason)}|{where}|", got, wanted])


def require_bytes(value: tf.Tensor, size: tf.Tensor, most: int, where: str) -> tf.Tensor:
    """Returns `value`, with a check at run time that `size` is at most `most`; MESSAGE_TOO_LARGE if not."""
    reason = errors_pb2.ERROR_REASON_MESSAGE_TOO_LARGE
    limit = tf.constant([most], size.dtype)
    return _require(size <= limit[0], value, [f"{_MARKER}|bytes|{int(reason)}|{where}|", tf.stack([size]), limit])


def _require(condition: tf.Tensor, value: tf.Tensor, data: list[str | tf.Tensor]) -> tf.Tensor:
    check = tf.raw_ops.Assert(condition=condition, data=data, summarize=16)
    with tf.control_dependencies([check]):
        return tf.identity(value)


def checked_gradient(
    gradient: Gradient, value: tf.Tensor, *, rule: str, node: str, index: int, shape_known: bool = False
) -> Gradient:
    """Returns `gradient`, broadcast if it has rank 0. Raises RULE_OUTPUT unless it has the dtype and shape of `value`.

    Shapes that are known only at run time are checked then.
    """
    if gradient is None:
        return None
    where = f"rule {rule!r} on node {node!r}, gradient of input {index}"
    wanted = value.dtype.base_dtype
    if not (wanted.is_floating or wanted.is_complex):
        raise error(
            errors_pb2.ERROR_REASON_RULE_OUTPUT,
            f"{where}: the input is {wanted.name}, which has no gradient; the rule must give None for it",
            node=node,
        )
    if gradient.dtype.base_dtype != wanted:
        raise error(
            errors_pb2.ERROR_REASON_RULE_OUTPUT,
            f"{where}: the gradient is {gradient.dtype.base_dtype.name}, but the input is {wanted.name}",
            node=node,
        )
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    if gradient.shape.rank == 0 and value.shape.rank != 0:
        return tf.fill(tf.shape(value), gradient)
    if shape_known:
        return gradient
    if not gradient.shape.is_compatible_with(value.shape):
        raise error(
            errors_pb2.ERROR_REASON_RULE_OUTPUT,
            f"{where}: the gradient has shape {gradient.shape}, but the input has {value.shape}; only rank 0 is "
            f"broadcast, sum_to(v, x{index}) sums down to the input's shape",
            node=node,
        )
    return require_same_shape(gradient, value, errors_pb2.ERROR_REASON_RULE_OUTPUT, where)


def failed_check(message: str) -> GradruleError | None:
    """Returns the error of a failed check, read from TensorFlow's message; None for any other message."""
    match = _FAILED.search(message)
    if match is None:
        return None
    got, wanted = (", ".join(match[group].split()) for group in ("got", "wanted"))
    return error(
        cast("errors_pb2.ErrorReason.ValueType", int(match["reason"])),
        # TensorFlow escapes the quotes of what an assertion prints.
        f"{match['where'].replace(chr(92), '')}: {_WORDS[match['kind']].format(got=got, wanted=wanted)}",
    )
