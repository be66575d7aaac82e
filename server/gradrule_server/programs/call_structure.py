"""Reads the structure of calls, which decides how they run; of known calls without parsing their tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from google.protobuf.message import DecodeError

from gradrule.common.wire_format import MalformedError, fields, read_varint, varint
from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.errors import error
from gradrule_server.link.messages import CallShape, canonical
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import SMALL_BYTES

CallStructure: TypeAlias = tuple[bytes, ...]
"""The program's name, the names of all tensors and all other fields of a request, each with its tag.

Requests of one structure differ only in the values of their tensors, which are inline or in shared memory, and in the
shared memory that they use.
"""


# An output number with leading zeros: the engine knows the tensor by another name.
_PADDED_OUTPUT = re.compile(r"(.*):0+([0-9]+)")

_NUMBER, _LENGTH = 0, 2
_FIELDS = evaluate_pb2.EvaluateRequest.DESCRIPTOR.fields_by_name
_TENSORS = frozenset(_FIELDS[name].number << 3 | _LENGTH for name in ("feeds", "grad_ys", "tangents", "vectors"))
_PROGRAM = _FIELDS["program"].number << 3 | _LENGTH
_PARAMS = _FIELDS["params"].number << 3 | _LENGTH
_BATCHING = _FIELDS["batching"].number << 3 | _LENGTH
_PACKING = _FIELDS["answer_packing"].number << 3 | _LENGTH
_MEMORY = _FIELDS["shared_memory"].number << 3 | _LENGTH
_NUMBERS = frozenset(_FIELDS[name].number << 3 for name in ("derivative", "stacked_grad_ys"))
_NAME = tensor_pb2.NamedTensor.NAME_FIELD_NUMBER << 3 | _LENGTH
_VALUE = tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER << 3 | _LENGTH
_INLINE = tensor_pb2.TensorSource.INLINE_TENSOR_FIELD_NUMBER << 3 | _LENGTH
_SHARED = tensor_pb2.TensorSource.SHARED_MEMORY_FIELD_NUMBER << 3 | _LENGTH
_CONTENT = tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER << 3 | _LENGTH
_PACKED = varint(tensor_pb2.Tensor.PACKED_FIELD_NUMBER << 3 | _LENGTH)
_PACKED_CONTENT = tensor_pb2.PackedTensor.CONTENT_FIELD_NUMBER << 3 | _LENGTH
_VALUES, _SOURCES = (_VALUE,), (_INLINE, _SHARED)
# Structures are keys of a cache. Larger ones are rare and must not fill it.
_MOST_FIELDS = 256
USES_MEMORY = bytes([_MEMORY])
"""The part of a structure that says that the call uses a client's shared memory."""
# Bytes of one tensor besides its content. Their size after parsing is not checked before, so all tensors of a request
# have at most as many as a message whose parsed size is not checked.
_MOST_PARSED_BYTES = SMALL_BYTES // _MOST_FIELDS
_MOST_BYTES = 16 << 10


def structure_of(raw: bytes) -> CallStructure | None:
    """Returns the structure of an `EvaluateRequest`.

    Returns None if the request must be parsed to know its structure: it holds its program, names a blob, has an unusual
    encoding or very many fields, or is damaged.
    """
    parts: list[bytes] = []
    has_program = False
    position, end, kept = 0, len(raw), 0
    try:
        while position < end:
            start = position
            tag = raw[position]
            size = raw[position + 1]
            position += 2
            if tag in _TENSORS:
                if size > 0x7F:
                    size, position = read_varint(raw, position - 1)
                stop = position + size
                name_end = position + 2 + raw[position + 1]
                if raw[position] != _NAME or raw[position + 1] > 0x7F or not _is_inline(raw, name_end, stop):
                    return None
                # Include the tag: it says which list the name is in.
                parts.append(raw[start : start + 1] + raw[position:name_end])
                position = stop
            elif tag in (_PROGRAM, _PARAMS, _BATCHING, _PACKING):
                if size > 0x7F:
                    size, position = read_varint(raw, position - 1)
                if tag == _PROGRAM:
                    if has_program:
                        return None
                    has_program = True
                position += size
                parts.append(raw[start:position])
            elif tag == _MEMORY and size <= 0x7F and USES_MEMORY not in parts:
                position += size
                parts.append(USES_MEMORY)
            elif tag in _NUMBERS and size <= 0x7F:
                parts.append(raw[start:position])
            else:
                return None
            kept += len(parts[-1])
            if len(parts) > _MOST_FIELDS or kept > _MOST_BYTES:
                return None
    except (IndexError, MalformedError):
        return None
    return tuple(parts) if has_program and position == end else None


def call_shape(request: link_pb2.RawEvaluateRequest) -> CallShape:
    """Returns what of a call its program depends on. Raises UNKNOWN_FEED for repeated or invalid names."""
    return CallShape(
        _names([item.name for item in request.feeds], "feeds"),
        _names([item.name for item in request.grad_ys], "grad_ys"),
        request.derivative,
        _names([item.name for item in request.tangents], "tangents"),
        _names([item.name for item in request.vectors], "vectors"),
        request.stacked_grad_ys,
    )


def _names(given: Sequence[str], field: str) -> frozenset[str]:
    """Returns canonical names. Raises UNKNOWN_FEED for repeated or invalid ones."""
    names = [canonical(name) for name in given]
    unique = frozenset(names)
    if len(names) != len(unique):
        twice = next(name for name in names if names.count(name) > 1)
        raise error(errors_pb2.ERROR_REASON_UNKNOWN_FEED, f"{field} name {twice!r} twice", node=twice, field=field)
    for name in unique:
        padded = _PADDED_OUTPUT.fullmatch(name)
        if padded is not None:
            raise error(
                errors_pb2.ERROR_REASON_UNKNOWN_FEED,
                f"{field} name {name!r}, which is no name of a tensor; did you mean '{padded[1]}:{padded[2]}'?",
                field=field,
            )
    return unique


def memory_use(raw: bytes) -> evaluate_pb2.SharedMemoryUse:
    """Returns how a request uses a client's shared memory. `raw`: bytes whose structure has `USES_MEMORY`."""
    number = evaluate_pb2.EvaluateRequest.SHARED_MEMORY_FIELD_NUMBER
    start, end = next((start, end) for found, start, end in fields(raw, 0, len(raw)) if found == number)
    try:
        return evaluate_pb2.SharedMemoryUse.FromString(raw[start:end])
    except DecodeError as cause:
        message = f"shared_memory is no {evaluate_pb2.SharedMemoryUse.DESCRIPTOR.full_name}"
        raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message, field="shared_memory") from cause


def _is_inline(raw: bytes, position: int, stop: int) -> bool:
    """Returns whether a tensor's value fills `raw[position:stop]`, is inline or in shared memory, and stays small when
    it is parsed.
    """
    tag = 0
    for tags in (_VALUES, _SOURCES):
        tag = raw[position]
        if tag not in tags:
            return False
        size, position = read_varint(raw, position + 1)
        if position + size != stop:
            return False
    if stop > len(raw) or size <= _MOST_PARSED_BYTES:
        return stop <= len(raw)
    if tag == _SHARED:
        # It has no content, so all of it grows when it is parsed.
        return False
    if raw.startswith(_PACKED, position):
        size, position = read_varint(raw, position + len(_PACKED))
        return position + size == stop and _is_content(raw, position, stop, _PACKED_CONTENT)
    return _is_content(raw, position, stop, _CONTENT)


def _is_content(raw: bytes, position: int, stop: int, content: int) -> bool:
    """Returns whether nearly all bytes of a tensor are its content; single numbers grow when they are parsed.

    content: The tag of the field with the content.
    """
    parsed = 0
    while position < stop:
        tag = raw[position]
        size = 0
        if tag & 7 == _LENGTH:
            size, after = read_varint(raw, position + 1)
        else:
            _, after = read_varint(raw, position + 1)
        parsed += after - position + (0 if tag == content else size)
        position = after + size
        if parsed > _MOST_PARSED_BYTES or tag > 0x7F or tag & 7 not in (_NUMBER, _LENGTH):
            return False
    return position == stop
