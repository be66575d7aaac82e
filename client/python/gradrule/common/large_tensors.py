"""Writes large tensors of a request after the bytes of its message, so that each is copied once.

protobuf would copy a tensor several times, each time into new memory, which takes longer than sending it. A repeated
field may be continued at the end of a message, so the large tensors follow the bytes of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from gradrule.common import tensor_codec, wire_format
from gradrule.common.dtypes import as_dt
from gradrule.v1 import tensor_pb2

MIN_LARGE_BYTES = 64 * 1024
"""Smaller tensors are written into the message."""

# The name, type and shape of a tensor, before its content.
_MAX_HEAD = 64 * 1024
_NAME = tensor_pb2.NamedTensor.NAME_FIELD_NUMBER
_VALUE = tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER
_INLINE = tensor_pb2.TensorSource.INLINE_TENSOR_FIELD_NUMBER
_CONTENT = tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER


def is_large(array: tensor_codec.Array) -> bool:
    """Returns whether an array is large enough for `parts` and its messages hold its bytes."""
    return array.nbytes >= MIN_LARGE_BYTES and tensor_codec.has_plain_bytes(array)


def parts(field: int, name: str, array: tensor_codec.Array) -> wire_format.Parts:
    """Returns the bytes of one entry of a repeated field of `NamedTensor`; the array's own memory is one part.

    Args:
        field: The repeated field's number in its message.
        name: The tensor's name.
        array: An array for which `is_large` holds.
    """
    return head(field, name, array), tensor_codec.content_of(array)


class LargeTensor(NamedTuple):
    """Locates a large tensor among the parts of a request.

    Attributes:
        place: Index of the part before its content.
        content: Bytes of the tensor's elements.
        field: Number of the repeated field that contains the entry.
        name: Name of the entry.
        tensor: Dtype and shape.
    """

    place: int
    content: wire_format.Part
    field: int
    name: str
    tensor: tensor_pb2.Tensor

    def shared(self, offset: int) -> bytes:
        """Returns the bytes of the entry for a tensor in shared memory."""
        place = tensor_pb2.SharedMemoryTensor(
            offset=offset, size_bytes=len(self.content), dtype=self.tensor.dtype, shape=self.tensor.tensor_shape
        )
        entry = tensor_pb2.NamedTensor(name=self.name, value=tensor_pb2.TensorSource(shared_memory=place))
        return b"".join(wire_format.wrapped(self.field, [entry.SerializeToString()]))


def tensors_in(parts: wire_format.Parts) -> Iterator[LargeTensor]:
    """Yields the large tensors among the parts of a request, in order: those that follow a `head`."""
    before: wire_format.Part = b""
    for place, content in enumerate(parts):
        if len(content) >= MIN_LARGE_BYTES and len(before) <= _MAX_HEAD:
            described = _described(bytes(before), len(content))
            if described is not None:
                yield LargeTensor(place - 1, content, *described)
        before = content


def _described(head: bytes, size: int) -> tuple[int, str, tensor_pb2.Tensor] | None:
    """Returns field, name, and dtype and shape of the tensor in a `head`; None if the bytes are not a head."""
    try:
        key, start = wire_format.read_varint(head, 0)
        total, start = wire_format.read_varint(head, start)
        if key & 7 != wire_format.LENGTH_DELIMITED or start + total != len(head) + size:
            return None
        number, begin, position = next(wire_format.fields(head, start, len(head)))
        name = head[begin:position].decode()
        for expected in (_VALUE, _INLINE):
            tag, position = wire_format.read_varint(head, position)
            _, position = wire_format.read_varint(head, position)
            if number != _NAME or tag != expected << 3 | wire_format.LENGTH_DELIMITED:
                return None
        end = wire_format.prefix(_CONTENT, size)
        if not head.endswith(end):
            return None
        return key >> 3, name, tensor_pb2.Tensor.FromString(head[position : len(head) - len(end)])
    except (wire_format.MalformedError, DecodeError, UnicodeDecodeError):
        return None


def head(field: int, name: str, array: tensor_codec.Array) -> bytes:
    """Returns the bytes before the content of an entry for an array; the arguments are those of `parts`."""
    tensor = tensor_pb2.Tensor(
        dtype=as_dt(tensor_codec.number_of_array(array)), tensor_shape=tensor_codec.shape_message(np.shape(array))
    ).SerializeToString() + wire_format.prefix(_CONTENT, array.nbytes)
    return named(field, name, tensor, array.nbytes)


def named(field: int, name: str, head: bytes, size: int) -> bytes:
    """Returns the bytes before the content of an entry.

    Args:
        field: The repeated field's number in its message.
        name: The tensor's name.
        head: Bytes of the tensor's message up to its content.
        size: Bytes of the content.
    """
    for number in (_INLINE, _VALUE):
        head = wire_format.prefix(number, len(head) + size) + head
    encoded = name.encode()
    head = wire_format.prefix(_NAME, len(encoded)) + encoded + head
    return wire_format.prefix(field, len(head) + size) + head
