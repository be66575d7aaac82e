"""Finds the parts of an `EvaluateRequest` with a header in its bytes, so that no tensor is parsed or copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from gradrule.common.wire_format import MalformedError, fields, prefix
from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.framing import Buffer

MAX_FIELDS = 1 << 14
"""Most contents of a request with a header: finding the parts of more would block the server."""
# Room for an offset of each tensor. The bytes are parsed on the event loop, and each can become an offset of 8 bytes.
_MAX_MEMORY_BYTES = 11 * MAX_FIELDS + 256

_Request = evaluate_pb2.EvaluateRequest
_HEADER, _CONTENTS = _Request.HEADER_FIELD_NUMBER, _Request.CONTENTS_FIELD_NUMBER
_MEMORY = _Request.SHARED_MEMORY_FIELD_NUMBER


class CallParts(NamedTuple):
    """The parts of a request with a header.

    Attributes:
        data: The bytes of the request.
        header: Those of its `EvaluateHeader`.
        contents: Start and end of each content in `data`.
        shared_memory: The client's memory that the call uses; None: none.
    """

    data: Buffer
    header: bytes
    contents: Sequence[tuple[int, int]]
    shared_memory: evaluate_pb2.SharedMemoryUse | None


def find_parts(data: Buffer) -> CallParts | None:
    """Returns the parts of an `EvaluateRequest`; None if it is in the plain form.

    Raises MALFORMED_REQUEST if the bytes are damaged or mix both forms, LIMIT_EXCEEDED if they have too many fields.
    """
    header: bytes | None = None
    memory: bytes | None = None
    contents: list[tuple[int, int]] = []
    count = 0
    try:
        for number, start, end in fields(data, 0, len(data)):
            count += 1
            if number == _CONTENTS:
                contents.append((start, end))
            elif number == _HEADER:
                header = bytes(data[start:end])
            elif number == _MEMORY:
                if end - start > _MAX_MEMORY_BYTES:
                    raise error(
                        errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
                        f"shared_memory has {end - start} bytes; {_MAX_MEMORY_BYTES} are the most",
                        field="shared_memory",
                    )
                memory = bytes(data[start:end])
            elif number < _HEADER:
                if header is None and not contents:
                    return None
                raise mixed_forms_error()
            if count > MAX_FIELDS:
                raise error(
                    errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
                    f"a request with a header has at most {MAX_FIELDS} fields, one for each content",
                    field="contents",
                )
        used = None if memory is None else evaluate_pb2.SharedMemoryUse.FromString(memory)
    except (MalformedError, DecodeError) as cause:
        message = f"the bytes are no {_Request.DESCRIPTOR.full_name}"
        raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message) from cause
    if header is None and contents:
        raise mixed_forms_error()
    return None if header is None else CallParts(data, header, contents, used)


def encode_parts(
    header: bytes, contents: Sequence[bytes], shared_memory: evaluate_pb2.SharedMemoryUse | None
) -> list[bytes]:
    """Returns the bytes of an `EvaluateRequest` with a header, in parts: the contents are not copied."""
    parts = [prefix(_HEADER, len(header)), header]
    for content in contents:
        parts += [prefix(_CONTENTS, len(content)), content]
    if shared_memory is not None:
        parts.append(_Request(shared_memory=shared_memory).SerializeToString())
    return parts


def mixed_forms_error() -> GradruleError:
    """Returns the error of a request that mixes the plain form and that with a header."""
    return error(
        errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
        "contents belong to a request with a header, which has only contents and shared_memory besides: everything "
        "else is in the header",
        field="header",
    )
