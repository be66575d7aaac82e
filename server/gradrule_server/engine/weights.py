"""Values of variables as tensors on the device: made once, shared by all of a tenant's programs that hold them."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Sequence

import tensorflow as tf

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, tensor_pb2
from gradrule_server.engine.blobs import BlobReader
from gradrule_server.errors import error
from gradrule_server.link.v1 import link_pb2

_Key = tuple[str, str, int, tuple[int, ...]]


class Weights:
    """Tensors by whose they are, hash, element type and shape, for as long as a program holds them. Thread-safe.

    Tenants, whose blobs lie in different folders, share none: nobody learns from the speed what another has.
    """

    def __init__(self, blobs: BlobReader) -> None:
        self._blobs = blobs
        self._lock = threading.Lock()
        self._tensors: weakref.WeakValueDictionary[_Key, tf.Tensor] = weakref.WeakValueDictionary()

    def of(self, variables: Sequence[link_pb2.BoundVariable], blob_folder: str = "") -> list[tf.Tensor]:
        """The tensor of each variable. `blob_folder`: where its caller's blobs are. BLOB_NOT_FOUND, INVALID_TENSOR."""
        blobs = self._blobs.within(blob_folder)
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
            tensor = self._tensors.get(key)
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
                tensor = self._tensors[key] = tf.constant(array, dtype=tf.as_dtype(variable.spec.dtype))
        return tensor


def _sizes(shape: tensor_pb2.TensorShape) -> tuple[int, ...]:
    return tuple(dim.size for dim in shape.dim)
