"""Checks which ops may run and how large they may be: table of reviewed ops, checks of nodes, tensors and messages.

Graphs, rules and engines use it. Does not import TensorFlow.
"""

from gradrule.common.parsed_size import FREE_BYTES, SMALL_BYTES
from gradrule_server.limits import Limits, NodeLimits
from gradrule_server.policy.faults import (
    DROPPED_ATTRS,
    FAKE_PARAM,
    Fault,
    attribute_faults,
    check_blob_name,
    check_parsed_size,
    missing_blobs,
    op_fault,
    output_count_fault,
    shape_fault,
    tensor_fault,
    value_fault,
)
from gradrule_server.policy.op_tables import OpReview, definition_digest, find_review, op_reviews, review_with_digest

__all__ = [
    "DROPPED_ATTRS",
    "FAKE_PARAM",
    "FREE_BYTES",
    "SMALL_BYTES",
    "Fault",
    "Limits",
    "NodeLimits",
    "OpReview",
    "attribute_faults",
    "check_blob_name",
    "check_parsed_size",
    "definition_digest",
    "find_review",
    "missing_blobs",
    "op_fault",
    "op_reviews",
    "output_count_fault",
    "review_with_digest",
    "shape_fault",
    "tensor_fault",
    "value_fault",
]
