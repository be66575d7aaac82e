"""Defines blobs: arrays and graphs that are uploaded once and that requests name by their SHA-256."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gradrule.common import tensor_codec
from gradrule.common.dtypes import as_dt
from gradrule.errors import InvalidTensorError
from gradrule.v1 import blob_pb2, tensor_pb2

Data: TypeAlias = "bytes | memoryview"
Blobs: TypeAlias = "dict[str, Data]"

UPLOAD_METHOD = "/gradrule.v1.BlobService/UploadBlob"

# Smaller values and graphs are sent with each request, because a hash would hardly be shorter.
MAX_INLINE_VALUE = 4 << 10
MAX_INLINE_GRAPH = 1 << 20

_PIECE_BYTES = 1 << 20
SECONDS_PER_BYTE = 1 / (1 << 20)
"""Time that an upload adds to the timeout of a call."""


class Blob:
    """Holds an array that is sent to a server once and fed many times: `blob = gr.Blob(array)`, `program(x=blob)`.

    Args:
        array: An array or list of numbers, of any shape; copied.

    Attributes:
        number: Element type as the number of TensorFlow's `DataType`.
        shape: Shape of the array.
        data: The elements' bytes, row-major and little-endian.
        sha256: SHA-256 of the bytes, in hex.

    Raises:
        InvalidTensorError: The value is not an array of numbers.
    """

    def __init__(self, array: Any) -> None:
        try:
            values = np.array(array)
            self.number = tensor_codec.number_of_array(values)
            if self.number == tensor_pb2.DT_STRING:
                raise ValueError("strings cannot be stored as a blob")
        except ValueError as cause:
            raise InvalidTensorError(f"blob: {cause}") from None
        self.shape = values.shape
        self.data = data_of(values)
        self.sha256 = digest(self.data)

    def source(self) -> tensor_pb2.TensorSource:
        """Returns the message that names the blob."""
        return source(self.sha256, self.number, self.shape)

    def __repr__(self) -> str:
        return f"<Blob {self.sha256[:12]} of shape {list(self.shape)}>"


@dataclass(frozen=True, slots=True)
class Upload:
    """Splits a blob into the messages of an upload."""

    sha256: str
    data: Data

    def pieces(self, advance: Callable[[int], object] = lambda _: None) -> Iterator[bytes]:
        """Yields the messages of the stream. Calls `advance` with the number of bytes of each, once it is sent."""
        view = memoryview(self.data)
        for start in range(0, max(len(view), 1), _PIECE_BYTES):
            name = "" if start else self.sha256
            piece = bytes(view[start : start + _PIECE_BYTES])
            yield blob_pb2.UploadBlobRequest(sha256=name, data=piece).SerializeToString()
            advance(len(piece))

    @property
    def additional_s(self) -> float:
        """Seconds that the upload adds to the timeout of its call."""
        return len(self.data) * SECONDS_PER_BYTE


def digest(data: Data) -> str:
    """Returns the SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def data_of(array: tensor_codec.Array) -> Data:
    """Returns the elements' bytes, row-major and little-endian."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    flat: Any = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
    return memoryview(flat)


def source(sha256: str, number: int, shape: Iterable[int]) -> tensor_pb2.TensorSource:
    """Returns the message that names a tensor by its hash."""
    blob = tensor_pb2.BlobTensor(sha256=sha256, dtype=as_dt(number), shape=tensor_codec.shape_message(shape))
    return tensor_pb2.TensorSource(blob=blob)


def blobs_in(*values: Any) -> Blobs:
    """Returns the blobs in a call's values; each argument is a dict, a list or None."""
    found: Blobs = {}
    for given in values:
        items = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
        found.update({value.sha256: value.data for value in items if isinstance(value, Blob)})
    return found
