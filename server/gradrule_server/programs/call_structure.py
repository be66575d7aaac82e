"""What decides how a call of a stored program is run, read from the request's bytes without parsing its tensors."""

from __future__ import annotations

from typing import TypeAlias

from google.protobuf.message import DecodeError

from gradrule.common.wire_format import MalformedError, fields, read_varint, varint
from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.errors import error
from gradrule_server.policy import SMALL_BYTES

CallStructure: TypeAlias = tuple[bytes, ...]
"""The program's name, the names of all given tensors and all other fields of a request, each with its tag.

Requests of one structure differ in nothing but the values of their tensors, which are all inline or in shared memory,
and in which memory that is.
"""


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
# A structure is a key of a cache: larger ones are rare and must not fill it.
_MOST_FIELDS = 256
USES_MEMORY = bytes([_MEMORY])
"""The part of a structure that stands for the use of a client's memory."""
# Of one tensor, bytes that are not its content. Nobody weighs them before they are parsed, so those of all tensors
# together are no more than a message may have that is not weighed.
_MOST_PARSED_BYTES = SMALL_BYTES // _MOST_FIELDS
_MOST_BYTES = 16 << 10


def structure_of(raw: bytes) -> CallStructure | None:
    """Returns the structure of an `EvaluateRequest`.

    None where the request must be parsed to know it: it holds its program, names a blob, is written in an unusual way,
    has very many fields, or is no message at all.
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
                # The tag belongs to it: it says which list the name is in.
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


def memory_use(raw: bytes) -> evaluate_pb2.SharedMemoryUse:
    """Returns how a request uses a client's memory. `raw`: bytes that have a structure with `USES_MEMORY`."""
    number = evaluate_pb2.EvaluateRequest.SHARED_MEMORY_FIELD_NUMBER
    start, end = next((start, end) for found, start, end in fields(raw, 0, len(raw)) if found == number)
    try:
        return evaluate_pb2.SharedMemoryUse.FromString(raw[start:end])
    except DecodeError as cause:
        message = f"shared_memory is no {evaluate_pb2.SharedMemoryUse.DESCRIPTOR.full_name}"
        raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message, field="shared_memory") from cause


def _is_inline(raw: bytes, position: int, stop: int) -> bool:
    """Whether a tensor's value begins here, is inline or in shared memory, is all there is until `stop`, and parses to
    little more.
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
        # Nothing of it is content: all of it takes more once parsed.
        return False
    if raw.startswith(_PACKED, position):
        size, position = read_varint(raw, position + len(_PACKED))
        return position + size == stop and _is_content(raw, position, stop, _PACKED_CONTENT)
    return _is_content(raw, position, stop, _CONTENT)


def _is_content(raw: bytes, position: int, stop: int, content: int) -> bool:
    """Whether nearly all of a tensor is its bytes: numbers that are written one by one take more once parsed.

    content: the tag of the field that holds them.
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
