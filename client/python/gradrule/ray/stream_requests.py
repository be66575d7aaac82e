"""Counts the requests of a stream that have no answer yet, without parsing its messages."""

from __future__ import annotations

from gradrule.common import wire_format
from gradrule.ray import rpcs
from gradrule.ray.rpcs import Rpc
from gradrule.v1 import evaluate_pb2

_Request = evaluate_pb2.StreamEvaluateRequest
_Response = evaluate_pb2.StreamEvaluateResponse
# Messages of StreamEvaluate with these fields neither complete nor answer a request. In a session, each message does.
_PARTS_OF_REQUESTS = frozenset({_Request.CHUNK_FIELD_NUMBER, _Request.CANCEL_FIELD_NUMBER})
_PARTS_OF_ANSWERS = frozenset({_Response.CHUNK_FIELD_NUMBER})


def change_by_request(rpc: Rpc, message: bytes) -> int:
    """Returns by how many a message of the client changes the number of requests: 1 or 0."""
    return 0 if rpc.path == rpcs.STREAM_EVALUATE and _has_field(message, _PARTS_OF_REQUESTS) else 1


def change_by_answer(rpc: Rpc, message: bytes) -> int:
    """Returns by how many a message of the server changes the number of requests: -1 or 0."""
    return 0 if rpc.path == rpcs.STREAM_EVALUATE and _has_field(message, _PARTS_OF_ANSWERS) else -1


def _has_field(message: bytes, numbers: frozenset[int]) -> bool:
    """Returns whether a message has one of the fields. Bytes that are no message have none: the server refuses them."""
    try:
        return any(number in numbers for number, _, _ in wire_format.fields(message, 0, len(message)))
    except wire_format.MalformedError:
        return False
