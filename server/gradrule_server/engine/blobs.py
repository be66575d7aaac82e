"""Blobs as the engine reads them: files of a folder, mapped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.v1 import errors_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.policy import missing_blobs

_NAME = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"tenant-[0-9a-f]{32}")


class BlobReader:
    """The blobs in a folder; None: there are none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def within(self, name: str) -> BlobReader:
        """The blobs in a folder of that folder; without a name, these. INTERNAL for what is no name of one."""
        if not name:
            return self
        if _FOLDER.fullmatch(name) is None:
            raise error(errors_pb2.ERROR_REASON_INTERNAL, f"{name!r} is no folder of blobs")
        return BlobReader(None if self._folder is None else self._folder / name)

    def read(self, name: str) -> bytes:
        """Returns the bytes of a blob. BLOB_NOT_FOUND."""
        path = self._path(name)
        if path is None or not path.exists():
            raise missing_blobs([name])
        return path.read_bytes()

    def array(self, blob: tensor_pb2.BlobTensor, what: str, field: str) -> NDArray[Any]:
        """The tensor, read-only. BLOB_NOT_FOUND, INVALID_TENSOR; `what` and `field` tell which tensor it is."""
        shape = tensor_codec.shape_tuple(blob.shape)
        if shape is None or any(size is None for size in shape):
            raise _invalid(f"{what}: a tensor's shape must be known", field)
        sizes = tuple(size or 0 for size in shape)
        try:
            dtype = tensor_codec.numpy_dtype(blob.dtype)
        except ValueError as cause:
            raise _invalid(f"{what}: {cause}", field) from cause
        if dtype.hasobject:
            raise _invalid(f"{what} is a blob of strings; strings travel inline", field)
        path = self._path(blob.sha256)
        # What is counted in Python does not overflow.
        wanted = int(np.prod(np.array(sizes, object), initial=1)) * dtype.itemsize
        size = path.stat().st_size if path is not None and path.exists() else None
        if path is None or size is None:
            raise error(
                errors_pb2.ERROR_REASON_BLOB_NOT_FOUND,
                f"{what}: the server does not have the blob {blob.sha256}; upload it, and send the request again",
                field=field,
            )
        if size != wanted:
            raise _invalid(
                f"{what} is a blob of {size} bytes, but {dtype_name(blob.dtype)} of shape {list(sizes)} takes {wanted}",
                field,
            )
        little = dtype.newbyteorder("<")
        # Nothing can be mapped that has no bytes.
        array = np.memmap(path, little, "r", shape=sizes) if wanted else np.empty(sizes, little)
        return array.astype(dtype, copy=False)

    def _path(self, name: str) -> Path | None:
        return self._folder / name if self._folder is not None and _NAME.fullmatch(name) else None


def _invalid(message: str, field: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_INVALID_TENSOR, message, field=field)
