"""Bytes that travel once and are named by their hash ever after: large graphs, weights, arrays that are fed again."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from gradrule.common import tensor_codec
from gradrule.common.dtypes import as_dt
from gradrule.errors import BlobNotFoundError, InvalidTensorError
from gradrule.v1 import blob_pb2, tensor_pb2

if TYPE_CHECKING:
    from gradrule._calls import Call

R = TypeVar("R")
Data: TypeAlias = "bytes | memoryview"
Blobs: TypeAlias = "dict[str, Data]"

UPLOAD_METHOD = "/gradrule.v1.BlobService/UploadBlob"

# Smaller values and graphs travel with each request: asking for them by hash would save nothing.
MAX_INLINE_VALUE = 4 << 10
MAX_INLINE_GRAPH = 1 << 20

_PIECE = 1 << 20
# What an upload may take beyond the call's timeout.
_SECONDS_PER_BYTE = 1 / (4 << 20)
# A server that is short of room may have let go what it had just now.
_TRIES = 3


class Blob:
    """An array that is sent to a server once, however often it is fed: `blob = gr.Blob(array)`, `p(x=blob)`.

    The array is copied. Raises `InvalidTensorError` for strings and what is no array of numbers.
    """

    def __init__(self, array: Any) -> None:
        try:
            values = np.array(array)
            self.number = tensor_codec.number_of_array(values)
            if self.number == tensor_pb2.DT_STRING:
                raise ValueError("strings cannot be kept as a blob")
        except ValueError as cause:
            raise InvalidTensorError(f"blob: {cause}") from None
        self.shape = values.shape
        self.data = data_of(values)
        self.sha256 = digest(self.data)

    def source(self) -> tensor_pb2.TensorSource:
        """The message that names it."""
        return source(self.sha256, self.number, self.shape)

    def __repr__(self) -> str:
        return f"<Blob {self.sha256[:12]} of shape {list(self.shape)}>"


@dataclass(frozen=True, slots=True)
class Upload:
    """One upload, as clients send it."""

    sha256: str
    data: Data

    def pieces(self) -> Iterator[bytes]:
        """The messages of the stream."""
        view = memoryview(self.data)
        for start in range(0, max(len(view), 1), _PIECE):
            name = "" if start else self.sha256
            message = blob_pb2.UploadBlobRequest(sha256=name, data=bytes(view[start : start + _PIECE]))
            yield message.SerializeToString()

    def deadline(self, timeout: float) -> float:
        """Seconds that it may take, in a call of that timeout."""
        return timeout + len(self.data) * _SECONDS_PER_BYTE


def digest(data: Data) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def data_of(array: tensor_codec.Array) -> Data:
    """The elements' bytes, row-major and little-endian."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    flat: Any = np.ascontiguousarray(little).reshape(-1).view(np.uint8)
    return memoryview(flat)


def source(sha256: str, number: int, shape: Iterable[int]) -> tensor_pb2.TensorSource:
    """The message of a tensor that is a blob."""
    blob = tensor_pb2.BlobTensor(sha256=sha256, dtype=as_dt(number), shape=tensor_codec.shape_message(shape))
    return tensor_pb2.TensorSource(blob=blob)


def fed(*values: Any) -> Blobs:
    """The blobs among values that a call gives, each a dict, a list or nothing."""
    found: Blobs = {}
    for given in values:
        items = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
        found.update({value.sha256: value.data for value in items if isinstance(value, Blob)})
    return found


def find_missing(names: Iterable[str]) -> Call[list[str]]:
    """FindMissingBlobs."""
    from gradrule._calls import Call

    return Call(
        "/gradrule.v1.BlobService/FindMissingBlobs",
        blob_pb2.FindMissingBlobsRequest(sha256=names),
        blob_pb2.FindMissingBlobsResponse.FromString,
        lambda response: list(response.missing),
    )


def steps(call: Call[R]) -> Generator[Call[Any] | Upload, Any, R]:
    """What a client does one after the other to get a call's answer: the call, and what the server turns out to lack.

    Each step is sent its outcome, or thrown its error.
    """
    bare = call._replace(blobs={})
    for _ in range(_TRIES):
        try:
            answer: R = yield bare
        except BlobNotFoundError:
            if not call.blobs:
                raise
        else:
            return answer
        yield from uploads(call.blobs)
    last: R = yield bare
    return last


def uploads(blobs: Mapping[str, Data]) -> Generator[Call[Any] | Upload, Any, None]:
    """The steps that bring blobs to a server that may have some of them."""
    missing = yield find_missing(blobs)
    for name in missing:
        yield Upload(name, blobs[name])
