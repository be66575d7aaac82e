"""Large tensors of a request, written next to its message instead of into it.

protobuf copies a tensor several times on the way into a message and out to bytes; first touch of fresh memory makes
each copy cost more than the network. Repeated fields may stand in several places of a message, so large tensors
follow the bytes of the rest, and each is copied once.
"""

from __future__ import annotations

import numpy as np

from gradrule import _tensors, _wire
from gradrule._dtypes import as_dt
from gradrule.v1 import tensor_pb2

MIN_LARGE_BYTES = 64 * 1024
"""Smaller tensors gain nothing."""

_NAME = tensor_pb2.NamedTensor.NAME_FIELD_NUMBER
_VALUE = tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER
_INLINE = tensor_pb2.TensorSource.INLINE_FIELD_NUMBER
_CONTENT = tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER


def is_large(array: _tensors.Array) -> bool:
    """Whether `parts` takes the array: numbers, in contiguous little-endian order or cheap to bring into it."""
    return array.nbytes >= MIN_LARGE_BYTES and _tensors.has_plain_bytes(array)


def parts(field: int, name: str, array: _tensors.Array) -> _wire.Parts:
    """The bytes of one entry of a repeated field of `NamedTensor`; the array's own memory is among them.

    Args:
        field: The repeated field's number in its message.
        name: The tensor's name.
        array: An array for which `is_large` holds.
    """
    return head(field, name, array), _tensors.content_of(array)


def head(field: int, name: str, array: _tensors.Array) -> bytes:
    """Returns what stands before the content of such an entry."""
    tensor = tensor_pb2.Tensor(
        dtype=as_dt(_tensors.number_of_array(array)), tensor_shape=_tensors.shape_message(np.shape(array))
    ).SerializeToString() + _wire.prefix(_CONTENT, array.nbytes)
    return named(field, name, tensor, array.nbytes)


def named(field: int, name: str, head: bytes, size: int) -> bytes:
    """Returns what stands before the content of an entry, from a tensor's bytes up to its content of `size` bytes."""
    for number in (_INLINE, _VALUE):
        head = _wire.prefix(number, len(head) + size) + head
    encoded = name.encode()
    head = _wire.prefix(_NAME, len(encoded)) + encoded + head
    return _wire.prefix(field, len(head) + size) + head
