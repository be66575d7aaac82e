"""Packs tensors into fewer bytes: rounds float32 to bfloat16 and compresses bytes with Zstandard.

The client and the engine use this module; the front end forwards packed bytes unchanged.
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
"""Size in bytes below which contents are not compressed, because compression would save little."""

# Higher levels take twice the time and do not make floats smaller; see docs/guide/compression.md.
_LEVEL = 1
_PACKED = tensor_pb2.Tensor.PACKED_FIELD_NUMBER
_CONTENT = PackedTensor.CONTENT_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class Packing:
    """Selects how tensors are packed.

    Attributes:
        zstd: Whether contents are compressed with Zstandard.
        bfloat16: Whether float32 elements are rounded to bfloat16.
    """

    zstd: bool = False
    bfloat16: bool = False

    def message(self) -> tensor_pb2.Packing:
        """Returns the request message that selects this packing for the response."""
        compression = COMPRESSION_ZSTD if self.zstd else COMPRESSION_UNSPECIFIED
        return tensor_pb2.Packing(compression=compression, float32_as_bfloat16=self.bfloat16)


class Packed(NamedTuple):
    """Holds a packed tensor: its message without the content, and the content."""

    message: PackedTensor
    content: wire_format.Part

    @property
    def head(self) -> bytes:
        """The bytes of a `Tensor` message before the content."""
        head = self.message.SerializeToString() + wire_format.prefix(_CONTENT, len(self.content))
        return wire_format.prefix(_PACKED, len(head) + len(self.content)) + head


def packing_of(message: tensor_pb2.Packing) -> Packing | None:
    """Returns the packing that a request selects; None for no packing. Raises `ValueError` for unknown compressions."""
    if message.compression not in (COMPRESSION_UNSPECIFIED, COMPRESSION_ZSTD):
        raise ValueError(f"the compression {message.compression} is unknown; known is {COMPRESSION_ZSTD} (zstd)")
    packing = Packing(message.compression == COMPRESSION_ZSTD, message.float32_as_bfloat16)
    return packing if packing.zstd or packing.bfloat16 else None


def has_zstd() -> bool:
    """Returns whether the package `zstandard` is installed."""
    return find_spec("zstandard") is not None


def pack(number: int, array: tensor_codec.Array, packing: Packing) -> Packed | None:
    """Packs an array.

    Args:
        number: Element type (`Dt`) of the tensor.
        array: Its values, of any shape.
        packing: How to pack them.

    Returns:
        The packed tensor; None if it would not be smaller.
    """
    if not (array.nbytes and tensor_codec.has_plain_bytes(array)):
        return None
    shape = np.shape(array)
    message = PackedTensor(dtype=as_dt(number), shape=tensor_codec.shape_message(shape))
    if packing.bfloat16 and number == Dt.DT_FLOAT:
        message.content_dtype = Dt.DT_BFLOAT16
        # Disable NumPy's warning about values that are too large for bfloat16 and become infinite.
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
    return Packed(message, content)


def pack_feeds(request: Message, packing: Packing) -> None:
    """Packs the tensors in the `NamedTensor` fields of a request, in place."""
    for field in ("feeds", "grad_ys", "tangents", "vectors"):
        for item in getattr(request, field, ()):
            if item.value.HasField("inline_tensor") and not item.value.inline_tensor.HasField("packed"):
                tensor = item.value.inline_tensor
                packed = pack(tensor.dtype, tensor_codec.to_numpy(tensor), packing)
                if packed is not None:
                    tensor.ParseFromString(packed.head + bytes(packed.content))


def unpack_all(message: Message, *, keep_bfloat16: bool) -> None:
    """Unpacks all packed tensors in a message and in its submessages, in place.

    Args:
        message: The message.
        keep_bfloat16: Whether float32 tensors that were rounded to bfloat16 become bfloat16 tensors.

    Raises:
        ValueError: As `unpack`.
    """
    if isinstance(message, tensor_pb2.Tensor):
        if message.HasField("packed"):
            message.CopyFrom(tensor_codec.to_message(unpack(message.packed, keep_bfloat16=keep_bfloat16)))
        return
    for field, value in message.ListFields():
        # Skip maps: no map of a response holds tensors.
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            unpack_all(part, keep_bfloat16=keep_bfloat16)


def unpacked_bytes(message: PackedTensor) -> int:
    """Returns the size of the unpacked tensor in bytes. Raises `ValueError` if its shape or type is not valid."""
    return math.prod(tensor_codec.known_shape(message.shape)) * tensor_codec.numpy_dtype(message.dtype).itemsize


def unpack(
    message: PackedTensor, *, content: wire_format.Part | None = None, keep_bfloat16: bool = False
) -> tensor_codec.Array:
    """Unpacks a tensor.

    Allocates at most `unpacked_bytes`, for any content; callers check this size against their limit first.

    Args:
        message: The packed tensor.
        content: The packed bytes, if they are not in the message.
        keep_bfloat16: Whether float32 elements that were rounded to bfloat16 are returned as bfloat16.

    Returns:
        An array of the tensor's shape; it may share memory with the content.

    Raises:
        ValueError: The content does not fit the shape and type, is not valid, or needs the package `zstandard`.
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
    """Decompresses a Zstandard frame with a declared size of `size` bytes. Raises `ValueError` for other frames."""
    try:
        import zstandard
    except ImportError:
        raise ValueError(NO_ZSTD) from None
    try:
        # Compare the frame's declared size before decompressing: this limits the memory.
        declared = zstandard.frame_content_size(data)
        if declared != size:
            what = "does not state how many bytes it has" if declared < 0 else f"has {declared} bytes"
            raise ValueError(f"the zstd frame {what} unpacked; the tensor takes {size}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as cause:
        raise ValueError(f"the content is no zstd frame: {cause}") from None


NO_ZSTD = "zstd needs the package zstandard: pip install 'gradrule[zstd]'"
"""Error message if the package `zstandard` is not installed."""
