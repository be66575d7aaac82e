"""Checks a built function: its ops while it is built, shapes and sizes while it runs.

The compile worker has checked the ops of the graph that was sent. The check here covers what TensorFlow made of it,
gradients and rules included, and compares the definitions of ops with those that were reviewed.
"""

from __future__ import annotations

import re
from typing import cast

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.code_rules.target import Gradient
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.policy import OpReview, definition_digest, review_with_digest

# A message has at most 2 GiB; the rest is for names and for fields that the front end adds.
MAX_ANSWER_BYTES = 2**31 - 2**26

_MAX_FINDINGS = 20

_reviews: dict[str, OpReview] = {}


def check_ops(graph: tf.Graph) -> None:
    """Raises OP_NOT_ALLOWED with the op types of the graph and its functions that the table denies."""
    findings: list[Finding] = []
    for op_type, name in _op_types_in(graph).items():
        review = _review(op_type)
        if not review.allowed:
            message = (
                f"Node {name!r} ({op_type}), which the program has with its rules and gradients, is not allowed here "
                f"({review.category}: {review.reason})."
            )
            findings.append(Finding(errors_pb2.ERROR_REASON_OP_NOT_ALLOWED, message, name))
    if findings:
        raise GradruleError(findings[:_MAX_FINDINGS])


def _op_types_in(graph: tf.Graph) -> dict[str, str]:
    """Returns every op type of the graph and its functions, with the name of one node."""
    found: dict[str, str] = {}
    functions: dict[str, None] = {}
    for op in graph.get_operations():
        found.setdefault(op.type, op.name.removeprefix(IMPORT_SCOPE))
        if tf_private.runs_functions(op.type):
            functions.update(dict.fromkeys(tf_private.functions_named(op.node_def)))
    for function in tf_private.functions_reached(functions):
        for node in function.node_def:
            found.setdefault(node.op, node.name)
    return found


def _review(op_type: str) -> OpReview:
    found = _reviews.get(op_type)
    if found is None:
        found = _reviews[op_type] = review_with_digest(op_type, definition_digest(tf_private.op_definition(op_type)))
    return found


_MARKER = "gradrule-check"
# Text of the error, by kind of check.
_MESSAGES = {
    "shape": "has shape ({got}), must have ({wanted})",
    "bytes": "takes {got} bytes, and at most {wanted} fit into an answer",
}
_FAILED = re.compile(
    rf"{_MARKER}\|(?P<kind>\w+)\|(?P<reason>\d+)\|(?P<where>.*?)\|\]"
    r"\s*\[(?P<got>[^\]]*)\]\s*\[(?P<wanted>[^\]]*)\]",
    re.DOTALL,
)


def require_same_shape(
    value: tf.Tensor,
    like: tf.Tensor,
    reason: errors_pb2.ErrorReason.ValueType,
    where: str,
    shape: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns `value`, with a check at run time that it has the shape of `like`, unless that is known already.

    `shape`: shape of `like`, if it is known without `like`.
    """
    if value.shape.is_fully_defined() and like.shape.is_fully_defined() and value.shape == like.shape:
        return value
    checked = require_same(value, tf.shape(value), tf.shape(like) if shape is None else shape, reason, where)
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
        f"{match['where'].replace(chr(92), '')}: {_MESSAGES[match['kind']].format(got=got, wanted=wanted)}",
    )
