"""Tensors in fewer bytes: float32 rounded to bfloat16, bytes compressed with Zstandard.

The client and the engine both pack and unpack here; the front end passes packed bytes on as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import ml_dtypes
import numpy as np
from google.protobuf.message import Message

from gradrule.common import tensor_codec, wire_format
from gradrule.common.dtypes import as_dt, dtype_name
from gradrule.v1 import tensor_pb2
from gradrule.v1.tensor_pb2 import COMPRESSION_UNSPECIFIED, COMPRESSION_ZSTD, Dt, PackedTensor

MIN_COMPRESSED_BYTES = 1024
"""Smaller contents are not compressed: little would be gained."""

# Higher levels take twice the time and make floats no smaller, see docs/guide/compression.md.
_LEVEL = 1
_PACKED = tensor_pb2.Tensor.PACKED_FIELD_NUMBER
_CONTENT = PackedTensor.CONTENT_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class Packing:
    """How tensors are packed. zstd: contents are compressed. bfloat16: float32 elements are rounded to bfloat16."""

    zstd: bool = False
    bfloat16: bool = False

    def message(self) -> tensor_pb2.Packing:
        """Returns the message that asks for answers packed so."""
        compression = COMPRESSION_ZSTD if self.zstd else COMPRESSION_UNSPECIFIED
        return tensor_pb2.Packing(compression=compression, float32_as_bfloat16=self.bfloat16)


class Packed(NamedTuple):
    """A packed tensor: the bytes of its `Tensor` message in two parts, of which the second is the content."""

    head: bytes
    content: wire_format.Part


def packing_of(message: tensor_pb2.Packing) -> Packing | None:
    """Returns what a request asks for; None where that is nothing. Raises `ValueError`."""
    if message.compression not in (COMPRESSION_UNSPECIFIED, COMPRESSION_ZSTD):
        raise ValueError(f"the compression {message.compression} is unknown; known is {COMPRESSION_ZSTD} (zstd)")
    packing = Packing(message.compression == COMPRESSION_ZSTD, message.float32_as_bfloat16)
    return packing if packing.zstd or packing.bfloat16 else None


def has_zstd() -> bool:
    """Returns whether the package for Zstandard is installed."""
    return find_spec("zstandard") is not None


def pack(number: int, array: tensor_codec.Array, packing: Packing) -> Packed | None:
    """Returns a tensor of an element type in packed form; None where that would not be smaller."""
    if not (array.nbytes and tensor_codec.has_plain_bytes(array)):
        return None
    shape = np.shape(array)
    message = PackedTensor(dtype=as_dt(number), shape=tensor_codec.shape_message(shape))
    if packing.bfloat16 and number == Dt.DT_FLOAT:
        message.content_dtype = Dt.DT_BFLOAT16
        # Values too large for bfloat16 become infinite, of which NumPy would warn.
        with np.errstate(over="ignore", invalid="ignore"):
            array = array.astype(ml_dtypes.bfloat16)
    content = tensor_codec.content_of(array)
    if packing.zstd and len(content) >= MIN_COMPRESSED_BYTES:
        import zstandard

        compressed = zstandard.ZstdCompressor(level=_LEVEL).compress(content)
        if len(compressed) < len(content):
            message.compression, content = COMPRESSION_ZSTD, memoryview(compressed)
    if not (message.compression or message.content_dtype):
        return None
    head = message.SerializeToString() + wire_format.prefix(_CONTENT, len(content))
    return Packed(wire_format.prefix(_PACKED, len(head) + len(content)) + head, content)


def pack_feeds(request: Message, packing: Packing) -> None:
    """Packs the tensors of a call's `NamedTensor` fields, where they lie."""
    for field in ("feeds", "grad_ys", "tangents", "vectors"):
        for item in getattr(request, field, ()):
            if item.value.HasField("inline_tensor") and not item.value.inline_tensor.HasField("packed"):
                tensor = item.value.inline_tensor
                packed = pack(tensor.dtype, tensor_codec.to_numpy(tensor), packing)
                if packed is not None:
                    tensor.ParseFromString(b"".join(packed))


def unpack_all(message: Message, *, keep_bfloat16: bool) -> None:
    """Unpacks all packed tensors anywhere in a message, where they lie. Raises `ValueError`."""
    if isinstance(message, tensor_pb2.Tensor):
        if message.HasField("packed"):
            message.CopyFrom(tensor_codec.to_message(unpack(message.packed, keep_bfloat16=keep_bfloat16)))
        return
    for field, value in message.ListFields():
        # Maps hold no tensors that are answers.
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            unpack_all(part, keep_bfloat16=keep_bfloat16)


def unpacked_bytes(message: PackedTensor) -> int:
    """Returns the number of bytes that the tensor has unpacked. Raises `ValueError`."""
    return math.prod(tensor_codec.known_shape(message.shape)) * tensor_codec.numpy_dtype(message.dtype).itemsize


def unpack(
    message: PackedTensor, *, content: wire_format.Part | None = None, keep_bfloat16: bool = False
) -> tensor_codec.Array:
    """Returns the elements of a packed tensor, which may share the memory of its content. Raises `ValueError`.

    It takes no more memory than `unpacked_bytes`, whatever the content is; callers bound that.

    Args:
        message: The packed tensor.
        content: Its content, where that is not in the message.
        keep_bfloat16: float32 elements that were rounded to bfloat16 come as bfloat16.
    """
    dtype, shape = tensor_codec.numpy_dtype(message.dtype), tensor_codec.known_shape(message.shape)
    stored = dtype
    if message.content_dtype and message.content_dtype != message.dtype:
        if (message.dtype, message.content_dtype) != (Dt.DT_FLOAT, Dt.DT_BFLOAT16):
            raise ValueError(
                f"a packed tensor of {dtype_name(message.dtype)} cannot have content of "
                f"{dtype_name(message.content_dtype)}; float32 can have bfloat16"
            )
        stored = np.dtype(ml_dtypes.bfloat16)
    if not tensor_codec.has_plain_bytes(np.empty(0, stored)):
        raise ValueError(f"tensors of {dtype_name(message.dtype)} cannot be packed")
    size = math.prod(shape) * stored.itemsize
    data: wire_format.Part = message.content if content is None else content
    if message.compression == COMPRESSION_ZSTD:
        data = _decompressed(data, size)
    elif message.compression != COMPRESSION_UNSPECIFIED:
        raise ValueError(f"the compression {message.compression} is unknown; known is {COMPRESSION_ZSTD} (zstd)")
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes do not fit {stored.name} of shape {list(shape)}: {size}")
    array = np.frombuffer(data, stored.newbyteorder("<")).reshape(shape).astype(stored, copy=False)
    return array if stored == dtype or keep_bfloat16 else array.astype(dtype)


def _decompressed(data: wire_format.Part, size: int) -> bytes:
    """Returns the content of a Zstandard frame that says that it has `size` bytes. Raises `ValueError`."""
    try:
        import zstandard
    except ImportError:
        raise ValueError(NO_ZSTD) from None
    try:
        # Nothing is unpacked before the frame's own number of bytes is the right one: that bounds the memory.
        told = zstandard.frame_content_size(data)
        if told != size:
            what = "does not tell how many bytes it has" if told < 0 else f"has {told} bytes"
            raise ValueError(f"the zstd frame {what} unpacked; the tensor takes {size}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as cause:
        raise ValueError(f"the content is no zstd frame: {cause}") from None


NO_ZSTD = "zstd needs the package zstandard: pip install 'gradrule[zstd]'"
"""Error message where the package `zstandard` is not installed."""
