"""Reads tensors from blobs, and keeps the values of variables on the device."""

from __future__ import annotations

import hashlib
import re
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.v1 import errors_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import missing_blobs

_NAME = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"tenant-[0-9a-f]{32}")


class BlobReader:
    """Reads blobs from a folder; None: there are none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def for_folder(self, name: str) -> BlobReader:
        """Returns a reader for a subfolder; without a name, this reader. Raises INTERNAL for an invalid name."""
        if not name:
            return self
        if _FOLDER.fullmatch(name) is None:
            raise error(errors_pb2.ERROR_REASON_INTERNAL, f"{name!r} is no folder of blobs")
        return BlobReader(None if self._folder is None else self._folder / name)

    def read(self, name: str) -> bytes:
        """Returns the bytes of a blob. Raises BLOB_NOT_FOUND."""
        path = self._path(name)
        if path is None or not path.exists():
            raise missing_blobs([name])
        return path.read_bytes()

    def array(self, blob: tensor_pb2.BlobTensor, what: str, field: str) -> NDArray[Any]:
        """Returns a read-only tensor. `what`, `field`: name it in errors. Raises BLOB_NOT_FOUND or INVALID_TENSOR."""
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
        # Python's integers do not overflow.
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
        # An empty file cannot be mapped.
        array = np.memmap(path, little, "r", shape=sizes) if wanted else np.empty(sizes, little)
        return array.astype(dtype, copy=False)

    def _path(self, name: str) -> Path | None:
        return self._folder / name if self._folder is not None and _NAME.fullmatch(name) else None


def _invalid(message: str, field: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_INVALID_TENSOR, message, field=field)


_Key = tuple[str, str, int, tuple[int, ...]]


class VariableCache:
    """Keeps values of variables on the device, by tenant, hash, type and shape, while programs use them. Thread-safe.

    Tenants, whose blobs lie in different folders, share none: nobody learns from the speed what another has.
    """

    def __init__(self, blobs: BlobReader) -> None:
        self._blobs = blobs
        self._lock = threading.Lock()
        self._kept: weakref.WeakValueDictionary[_Key, tf.Tensor] = weakref.WeakValueDictionary()

    def tensors(self, variables: Sequence[link_pb2.BoundVariable], blob_folder: str = "") -> list[tf.Tensor]:
        """Returns the value of each variable. `blob_folder`: the tenant's. Raises BLOB_NOT_FOUND or INVALID_TENSOR."""
        blobs = self._blobs.for_folder(blob_folder)
        return [self._tensor(item, blob_folder, blobs) for item in variables]

    def _tensor(self, variable: link_pb2.BoundVariable, blob_folder: str, blobs: BlobReader) -> tf.Tensor:
        value, what = variable.value, f"variable {variable.spec.name!r}"
        if value.HasField("blob"):
            key = (blob_folder, value.blob.sha256, value.blob.dtype, _sizes(value.blob.shape))
        else:
            content = value.inline_tensor.SerializeToString(deterministic=True)
            digest = hashlib.sha256(content).hexdigest()
            key = (blob_folder, digest, value.inline_tensor.dtype, _sizes(value.inline_tensor.tensor_shape))
        with self._lock:
            tensor = self._kept.get(key)
            if tensor is None:
                try:
                    is_blob = value.HasField("blob")
                    array = (
                        blobs.array(value.blob, what, "spec.variables")
                        if is_blob
                        else tensor_codec.to_numpy(value.inline_tensor)
                    )
                except ValueError as cause:
                    raise error(
                        errors_pb2.ERROR_REASON_INVALID_TENSOR, f"{what}: {cause}", field="spec.variables"
                    ) from cause
                tensor = self._kept[key] = tf.constant(array, dtype=tf.as_dtype(variable.spec.dtype))
        return tensor


def _sizes(shape: tensor_pb2.TensorShape) -> tuple[int, ...]:
    return tuple(dim.size for dim in shape.dim)
