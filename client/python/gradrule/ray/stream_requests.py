"""Counts the requests of a stream that have no answer yet, without parsing its messages."""

from __future__ import annotations

from gradrule.common import wire_format
from gradrule.ray import rpcs
from gradrule.ray.rpcs import Rpc
from gradrule.v1 import evaluate_pb2

_Request = evaluate_pb2.StreamEvaluateRequest
_Response = evaluate_pb2.StreamEvaluateResponse
# Requests that a client began and never completed: the oldest ones are forgotten, so that they take no memory.
_MAX_INCOMPLETE = 1024


class StreamRequests:
    """Tells by how many each message of a stream changes the number of requests that wait for an answer.

    A request of StreamEvaluate counts once it is complete. One that comes in chunks may be refused, and so answered,
    before its last message. In other streams each message is a request or an answer.
    """

    def __init__(self, rpc: Rpc) -> None:
        self._has_ids = rpc.path == rpcs.STREAM_EVALUATE
        # IDs of requests of which only chunks have come, and whether they have an answer.
        self._incomplete: dict[int, bool] = {}

    def change_by_request(self, message: bytes) -> int:
        """Returns by how many a message of the client changes the number of requests: 1 or 0."""
        found = _fields(message) if self._has_ids else {}
        number = found.get(_Request.REQUEST_ID_FIELD_NUMBER, 0)
        if _Request.CANCEL_FIELD_NUMBER in found:
            return 0
        if _Request.CHUNK_FIELD_NUMBER in found:
            self._incomplete.setdefault(number, False)
            if len(self._incomplete) > _MAX_INCOMPLETE:
                del self._incomplete[next(iter(self._incomplete))]
            return 0
        is_answered = self._incomplete.pop(number, False)
        # A request without chunks may use the ID of one that was refused.
        return 0 if is_answered and _Request.TOTAL_BYTES_FIELD_NUMBER in found else 1

    def change_by_answer(self, message: bytes) -> int:
        """Returns by how many a message of the server changes the number of requests: -1 or 0."""
        found = _fields(message) if self._has_ids else {}
        number = found.get(_Response.REQUEST_ID_FIELD_NUMBER, 0)
        if _Response.CHUNK_FIELD_NUMBER in found:
            return 0
        if number in self._incomplete:
            self._incomplete[number] = True
            return 0
        return -1


def _fields(message: bytes) -> dict[int, int]:
    """Returns the fields of a message: their numbers, and the value of the request ID, 0 for others.

    Bytes that are no message have none: the server refuses them.
    """
    found: dict[int, int] = {}
    try:
        for number, start, _ in wire_format.fields(message, 0, len(message)):
            is_id = number == _Request.REQUEST_ID_FIELD_NUMBER
            found[number] = wire_format.read_varint(message, start)[0] if is_id else 0
    except wire_format.MalformedError:
        return {}
    return found
