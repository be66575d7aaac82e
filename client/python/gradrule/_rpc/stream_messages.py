"""Writes and reads the messages of `StreamEvaluate`; large ones go in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from google.protobuf.duration_pb2 import Duration

from gradrule._messages.error_status import error_from_status_bytes, parsed
from gradrule._messages.rpc_calls import EVALUATE, Call
from gradrule.common import wire_format
from gradrule.errors import GradruleError, InternalError
from gradrule.v1 import evaluate_pb2

METHOD = "/gradrule.v1.GradientService/StreamEvaluate"

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk. Longer requests are sent in chunks, and the server is asked to answer in chunks of this size."""

GRACE_S = 2.0
"""Seconds after the deadline of a call until the client stops waiting for the server."""

R = TypeVar("R")

_REQUEST = evaluate_pb2.StreamEvaluateRequest
_RESPONSE = evaluate_pb2.StreamEvaluateResponse
_KINDS = {EVALUATE: "evaluate"}
_REQUEST_FIELDS = {field.name: field.number for field in _REQUEST.DESCRIPTOR.oneofs_by_name["request"].fields}
_RESPONSE_KINDS = {field.number: field.name for field in _RESPONSE.DESCRIPTOR.oneofs_by_name["response"].fields}
_RESPONSE_TAGS = {field << 3 | wire_format.LENGTH_DELIMITED: kind for field, kind in _RESPONSE_KINDS.items()}
_NUMBER = wire_format.varint(_REQUEST.REQUEST_ID_FIELD_NUMBER << 3)
_ANSWER_CHUNKS = _REQUEST(answer_chunk_bytes=CHUNK_BYTES).SerializeToString()


class StreamLostError(Exception):
    """Reports that the stream ended before a request was answered.

    Args:
        cause: Reason why it ended.
    """

    def __init__(self, cause: GradruleError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Received(NamedTuple):
    """Holds one message from the server.

    Attributes:
        number: Number of the request.
        kind: `chunk`, `status`, or the kind of the request.
        data: Bytes of the chunk, the status or the answer.
    """

    number: int
    kind: str
    data: bytes


def kind_of(call: Call[Any]) -> str:
    """Returns the name of the request's field, which is also the name of the answer's field."""
    return _KINDS.get(call.method, call.method)


def messages(number: int, kind: str, parts: wire_format.Parts, size: int, timeout: float) -> bytes | Iterator[bytes]:
    """Returns the message that sends a call, or, for a long one, its chunks and the message that ends them.

    Args:
        number: Number of the request.
        kind: See `kind_of`.
        parts: The request's bytes.
        size: Bytes of all parts.
        timeout: Seconds.
    """
    head = _NUMBER + wire_format.varint(number) + _timeout_field(timeout)
    field = _REQUEST_FIELDS[kind]
    if size <= CHUNK_BYTES:
        return b"".join((head, _ANSWER_CHUNKS, wire_format.prefix(field, size), *parts))
    return _chunked(head, field, parts, size)


def cancellation(number: int) -> bytes:
    """Returns the message that cancels a request."""
    return _REQUEST(cancel=evaluate_pb2.CancelRequest(request_id=number)).SerializeToString()


def received(data: bytes) -> Received:
    """Reads a message from the server. Raises `InternalError`."""
    number, kind, start, end = 0, "", 0, 0
    try:
        if len(data) > 2 and data[0] == _NUMBER[0]:
            # Servers write the number, then one field up to the end.
            number, position = wire_format.read_varint(data, 1)
            tag, position = wire_format.read_varint(data, position)
            size, position = wire_format.read_varint(data, position)
            if position + size == len(data) and tag in _RESPONSE_TAGS:
                return Received(number, _RESPONSE_TAGS[tag], data[position:])
        for field, begin, stop in wire_format.fields(data, 0, len(data)):
            if field == _RESPONSE.REQUEST_ID_FIELD_NUMBER:
                number, _ = wire_format.read_varint(data, begin)
            elif field in _RESPONSE_KINDS:
                kind, start, end = _RESPONSE_KINDS[field], begin, stop
    except wire_format.MalformedError as cause:
        raise InternalError(f"the server's answer cannot be read: {cause}") from None
    return Received(number, kind, data[start:end])


def decoded(call: Call[R], kind: str, data: bytes) -> R:
    """Decodes an answer. Raises the error of a failed call."""
    if kind == "status":
        raise error_from_status_bytes(data)
    if kind != kind_of(call):
        raise InternalError(f"the server answered a {kind_of(call)} with {kind or 'nothing'}")
    return parsed(call.answer, call.decode, data)


def _chunked(head: bytes, field: int, parts: wire_format.Parts, size: int) -> Iterator[bytes]:
    """Yields the chunks and the message that ends them, copying one chunk at a time."""
    chunk: list[wire_format.Part] = []
    room = CHUNK_BYTES
    for part in parts:
        position = 0
        while position < len(part):
            piece = part[position : position + room]
            chunk.append(piece)
            position += len(piece)
            room -= len(piece)
            if room == 0:
                yield b"".join((head, *wire_format.wrapped(_REQUEST.CHUNK_FIELD_NUMBER, chunk)))
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield b"".join((head, *wire_format.wrapped(_REQUEST.CHUNK_FIELD_NUMBER, chunk)))
    yield b"".join((head, _ANSWER_CHUNKS, _REQUEST(total_bytes=size).SerializeToString(), wire_format.prefix(field, 0)))


@lru_cache(64)
def _timeout_field(seconds: float) -> bytes:
    timeout = Duration()
    timeout.FromNanoseconds(int(seconds * 1e9))
    return _REQUEST(timeout=timeout).SerializeToString()
