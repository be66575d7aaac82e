"""Reads tensors from their sources, messages and blobs, and keeps the values of variables on the device."""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import sys
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
from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.engine.program import Input
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import missing_blobs

_NAME = re.compile(r"[0-9a-f]{64}")
_KEPT_NAME = re.compile(r"\.kept-[0-9]+")
_FOLDER = re.compile(r"tenant-[0-9a-f]{32}")


# Element types of which TensorFlow takes memory of NumPy; bfloat16 as integers.
_MAPPED_DTYPES = frozenset(
    {
        *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
        *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
    }
)


class BlobReader:
    """Reads blobs from a folder; None: there are none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._maps: weakref.WeakValueDictionary[str, mmap.mmap] = weakref.WeakValueDictionary()

    def for_folder(self, name: str) -> BlobReader:
        """Returns a reader for a subfolder; without a name, this reader. Raises INTERNAL for an invalid name."""
        if not name:
            return self
        if _FOLDER.fullmatch(name) is None:
            raise error(errors_pb2.ERROR_REASON_INTERNAL, f"{name!r} is no folder of blobs")
        reader = BlobReader(None if self._folder is None else self._folder / name)
        reader._maps = self._maps
        return reader

    def read(self, name: str) -> bytes:
        """Returns the bytes of a blob. Raises BLOB_NOT_FOUND."""
        path = self._path(name)
        if path is None or not path.exists():
            raise missing_blobs([name])
        return path.read_bytes()

    def map_kept(self, name: str) -> memoryview:
        """Maps a file of kept values into memory. Raises INTERNAL if there is none."""
        return memoryview(self._map_kept(name))

    def kept_array(self, kept: link_pb2.KeptValue, spec: tensor_pb2.TensorSpec) -> NDArray[Any]:
        """Returns a tensor of kept values, in memory that processes share. Raises INTERNAL if there is none."""
        dtype, sizes = tensor_codec.numpy_dtype(spec.dtype), _sizes(spec.shape)
        little = dtype.newbyteorder("<")
        array = np.frombuffer(self._map_kept(kept.file), little, math.prod(sizes), kept.offset)
        return array.reshape(sizes).astype(dtype, copy=False)

    def _map_kept(self, name: str) -> mmap.mmap:
        if self._folder is None or _KEPT_NAME.fullmatch(name) is None:
            raise error(errors_pb2.ERROR_REASON_INTERNAL, f"{name!r} is no file of kept values")
        path = str(self._folder / name)
        found = self._maps.get(path)
        if found is None:
            with open(path, "rb") as file:
                # Private memory that can be written counts towards the limit of the address space, this does not.
                found = self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return found

    def array(self, blob: tensor_pb2.BlobTensor, what: str, field: str) -> NDArray[Any]:
        """Returns a mapped tensor. `what`, `field`: name it in errors. Raises BLOB_NOT_FOUND or INVALID_TENSOR."""
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


def check_tensor(
    header: evaluate_pb2.TensorHeader, item: Input, max_rank: int, what: str, field: str
) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Checks the header of a tensor for an input; returns the type of its elements, its shape and its size in bytes.

    Raises INVALID_TENSOR, FEED_DTYPE, FEED_SHAPE or LIMIT_EXCEEDED.

    Args:
        header: The header.
        item: The input.
        max_rank: Highest rank that is accepted.
        what: Names the kind of input in errors.
        field: Field of the request, for errors.
    """
    where = f"{what} {item.name!r}"
    if header.dtype != item.dtype.base_dtype.as_datatype_enum:
        raise error(
            errors_pb2.ERROR_REASON_FEED_DTYPE,
            f"{where} is {_dtype_name(header.dtype)}, but the tensor is {item.dtype.name}",
            node=item.name,
            field=field,
        )
    if len(header.shape) > max_rank:
        raise error(
            errors_pb2.ERROR_REASON_LIMIT_EXCEEDED,
            f"{where} has rank {len(header.shape)}; {max_rank} is the most (--max-rank)",
            node=item.name,
            field=field,
        )
    shape = tuple(header.shape)
    if min(shape, default=0) < 0:
        raise _invalid(f"{where}: a tensor's shape must be known", field)
    if not item.shape.is_compatible_with(shape):
        raise error(
            errors_pb2.ERROR_REASON_FEED_SHAPE,
            f"{where} has shape {shape}, but the tensor has {item.shape}",
            node=item.name,
            field=field,
        )
    try:
        dtype = tensor_codec.numpy_dtype(header.dtype)
    except ValueError as cause:
        raise _invalid(f"{where}: {cause}", field) from cause
    if header.in_shared_memory and not tensor_codec.is_plain(header.dtype):
        raise _invalid(f"{where} is {dtype_name(header.dtype)}; such tensors travel inline", field)
    if not (tensor_codec.is_plain(header.dtype) or header.content_is_tensor or header.blob_sha256):
        raise _invalid(f"{where} is {dtype_name(header.dtype)}; the content of such a tensor is a Tensor", field)
    is_packed = bool(header.compression or header.content_dtype)
    if header.in_shared_memory + bool(header.blob_sha256) + header.content_is_tensor + is_packed > 1:
        message = "in_shared_memory, blob_sha256, content_is_tensor and packing exclude each other"
        raise _invalid(f"{where}: {message}", field)
    # NumPy refuses such shapes even if one size is 0.
    if 0 in shape and math.prod(filter(None, shape)) * dtype.itemsize > sys.maxsize:
        raise _invalid(f"{where} has shape {shape}, which is too large", field)
    return dtype, shape, math.prod(shape) * dtype.itemsize


def _dtype_name(dtype: int) -> str:
    try:
        return str(tf.as_dtype(dtype).name)
    except TypeError:
        return f"of unknown type {dtype}"


def _invalid(message: str, field: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_INVALID_TENSOR, message, field=field)


_Key = tuple[str, str, int, tuple[int, ...]]


class _Exported:
    """Offers read-only memory to NumPy as if it could be written, since NumPy exports no other memory with DLPack.

    TensorFlow does not write to memory that it did not allocate, even where it computes in place.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


class VariableCache:
    """Keeps values of variables on the device, by tenant, hash, type and shape, while programs use them. Thread-safe.

    Tenants, whose blobs lie in different folders, share none: nobody learns from the speed what another has.
    """

    def __init__(self, blobs: BlobReader, device: str = "CPU:0") -> None:
        self._blobs = blobs
        self._shares_memory = device.startswith("CPU")
        self._lock = threading.Lock()
        self._kept: weakref.WeakValueDictionary[_Key, tf.Tensor] = weakref.WeakValueDictionary()

    def tensors(self, variables: Sequence[link_pb2.BoundVariable], blob_folder: str = "") -> list[tf.Tensor]:
        """Returns the value of each variable. `blob_folder`: the tenant's. Raises BLOB_NOT_FOUND or INVALID_TENSOR."""
        blobs = self._blobs.for_folder(blob_folder)
        return [self._tensor(item, blob_folder, blobs) for item in variables]

    def _tensor(self, variable: link_pb2.BoundVariable, blob_folder: str, blobs: BlobReader) -> tf.Tensor:
        value, what = variable.value, f"variable {variable.spec.name!r}"
        if variable.HasField("kept"):
            key = (blob_folder, variable.kept.sha256, variable.spec.dtype, _sizes(variable.spec.shape))
        elif value.HasField("blob"):
            key = (blob_folder, value.blob.sha256, value.blob.dtype, _sizes(value.blob.shape))
        else:
            content = value.inline_tensor.SerializeToString(deterministic=True)
            digest = hashlib.sha256(content).hexdigest()
            key = (blob_folder, digest, value.inline_tensor.dtype, _sizes(value.inline_tensor.tensor_shape))
        with self._lock:
            tensor = self._kept.get(key)
            if tensor is None:
                try:
                    if variable.HasField("kept"):
                        array = blobs.kept_array(variable.kept, variable.spec)
                    elif value.HasField("blob"):
                        array = blobs.array(value.blob, what, "spec.variables")
                    else:
                        array = tensor_codec.to_numpy(value.inline_tensor)
                except ValueError as cause:
                    raise error(
                        errors_pb2.ERROR_REASON_INVALID_TENSOR, f"{what}: {cause}", field="spec.variables"
                    ) from cause
                is_mapped = not value.HasField("inline_tensor")
                tensor = self._kept[key] = self._convert(array, tf.as_dtype(variable.spec.dtype), is_mapped=is_mapped)
        return tensor

    def _convert(self, array: NDArray[Any], dtype: tf.DType, *, is_mapped: bool) -> tf.Tensor:
        """Returns a tensor of an array; it uses the memory of a mapped file if TensorFlow can."""
        if is_mapped and self._shares_memory and dtype in _MAPPED_DTYPES and array.size:
            shared = np.asarray(_Exported(array.view(np.uint16) if dtype == tf.bfloat16 else array))
            tensor = tf.experimental.dlpack.from_dlpack(shared.__dlpack__())
            return tf.bitcast(tensor, dtype) if dtype == tf.bfloat16 else tensor
        return tf.constant(array, dtype=dtype)


def _sizes(shape: tensor_pb2.TensorShape) -> tuple[int, ...]:
    return tuple(dim.size for dim in shape.dim)
