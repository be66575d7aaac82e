"""Large tensors of a request, written next to its message instead of into it.

protobuf copies a tensor several times on the way into a message and out to bytes; first touch of fresh memory makes
each copy cost more than the network. Repeated fields may stand in several places of a message, so large tensors
follow the bytes of the rest, and each is copied once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradrule import _tensors
from gradrule._dtypes import as_dt
from gradrule.v1 import tensor_pb2

MIN_LARGE_BYTES = 64 * 1024
"""Smaller tensors gain nothing."""

_LENGTH_DELIMITED = 2
_NAME = tensor_pb2.NamedTensor.NAME_FIELD_NUMBER
_VALUE = tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER
_INLINE = tensor_pb2.TensorSource.INLINE_FIELD_NUMBER
_CONTENT = tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER

Parts = Sequence["bytes | memoryview"]


def is_large(array: _tensors.Array) -> bool:
    """Whether `parts` takes the array: numbers, in contiguous little-endian order or cheap to bring into it."""
    return array.nbytes >= MIN_LARGE_BYTES and _tensors.has_plain_bytes(array)


def parts(field: int, name: str, array: _tensors.Array) -> Parts:
    """The bytes of one entry of a repeated field of `NamedTensor`; the array's own memory is among them.

    Args:
        field: The repeated field's number in its message.
        name: The tensor's name.
        array: An array for which `is_large` holds.
    """
    content = _tensors.content_of(array)
    head = tensor_pb2.Tensor(
        dtype=as_dt(_tensors.number_of_array(array)), tensor_shape=_tensors.shape_message(np.shape(array))
    ).SerializeToString() + _prefix(_CONTENT, len(content))
    for number in (_INLINE, _VALUE):
        head = _prefix(number, len(head) + len(content)) + head
    encoded = name.encode()
    head = _prefix(_NAME, len(encoded)) + encoded + head
    return _prefix(field, len(head) + len(content)) + head, content


def length(parts: Parts) -> int:
    """Bytes of all parts together."""
    return sum(len(part) for part in parts)


def wrapped(field: int, parts: Parts) -> Parts:
    """The parts as one length-delimited field of another message."""
    return _prefix(field, length(parts)), *parts


def _prefix(field: int, size: int) -> bytes:
    """What stands before a length-delimited field of `size` bytes."""
    return _varint(field << 3 | _LENGTH_DELIMITED) + _varint(size)


def _varint(number: int) -> bytes:
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
