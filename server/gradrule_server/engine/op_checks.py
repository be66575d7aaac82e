"""Checks the ops of a built function against the table of reviewed ops.

The compile worker has checked the graph that was sent. This check sees what TensorFlow made of it, gradients and rules
included, and compares the definitions of ops with those that were reviewed.
"""

from __future__ import annotations

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.errors import Finding, GradruleError
from gradrule_server.policy import OpReview, definition_digest, review_with_digest

_MAX_FINDINGS = 20

_reviews: dict[str, OpReview] = {}


def check_ops(graph: tf.Graph) -> None:
    """Raises OP_NOT_ALLOWED with the op types of the graph and its functions that the table denies."""
    findings: list[Finding] = []
    for op_type, name in _ops_of(graph).items():
        ruling = _review(op_type)
        if not ruling.allowed:
            message = (
                f"Node {name!r} ({op_type}), which the program comes to with its rules and gradients, is not allowed "
                f"here ({ruling.category}: {ruling.reason})."
            )
            findings.append(Finding(errors_pb2.ERROR_REASON_OP_NOT_ALLOWED, message, name))
    if findings:
        raise GradruleError(findings[:_MAX_FINDINGS])


def _ops_of(graph: tf.Graph) -> dict[str, str]:
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
