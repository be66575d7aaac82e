"""Limits the engine's memory, and measures the memory of tensors."""

from __future__ import annotations

import re
import resource
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error


class _Bound:
    """The memory limit of this process."""

    bytes = 0


def limit_memory(limit: int) -> None:
    """Limits the memory of this process to `limit` bytes, as the kernel counts them; 0: no limit.

    What is reserved and never used (stacks, heaps of threads) does not count.
    """
    _Bound.bytes = limit
    if not limit:
        return
    reserved = max(0, _status("VmData") - _status("RssAnon"))
    most = limit + reserved
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def memory_error(what: str) -> GradruleError:
    """Returns the error MEMORY_EXCEEDED with the limit in its text."""
    least = f"{_Bound.bytes} bytes (--memory-limit)" if _Bound.bytes else "the machine's memory"
    return error(
        errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, f"the program takes more than the engine has, {least}: {what}"
    )


def _status(field: str) -> int:
    """Returns a size of this process from `/proc/self/status`, in bytes; 0 if there is none."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


# Types that TensorFlow saves, frequent ones first: a variant does not show the type that it holds, so all are tried.
_HELD = (
    tf.float32,
    tf.variant,
    tf.int32,
    tf.bool,
    tf.float64,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.complex64,
    tf.complex128,
    tf.int8,
    tf.uint8,
    tf.int16,
    tf.uint16,
    tf.uint32,
    tf.uint64,
)
_STRING_BYTES = 24
"""Bytes of a string besides its characters."""


def saved_bytes(saved: Sequence[tf.Tensor]) -> int:
    """Returns the bytes of eager tensors. A list counts as its first item times its length."""
    return sum(_bytes_of(tensor) for tensor in saved)


def _bytes_of(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.variant:
        return sum(_bytes_in(tensor, index) for index in range(tensor.shape.num_elements()))
    size = int(tensor.shape.num_elements())
    if tensor.dtype == tf.string:
        return size * _STRING_BYTES + int(tf.reduce_sum(tf.strings.length(tensor)))
    return size * int(tensor.dtype.size)


def _bytes_in(tensor: tf.Tensor, index: int) -> int:
    """Returns the bytes of one variant: a list or an optional; 0 for anything else."""
    variant = tf.reshape(tensor, [-1])[index] if tensor.shape.rank else tensor
    try:
        length = int(tf.raw_ops.TensorListLength(input_handle=variant))
    except tf.errors.InvalidArgumentError:
        return _bytes_of_optional(variant)
    if not length:
        return 0
    for dtype in _HELD:
        try:
            first = tf.raw_ops.TensorListGetItem(input_handle=variant, index=0, element_shape=-1, element_dtype=dtype)
        except tf.errors.InvalidArgumentError:
            continue
        return length * _bytes_of(first)
    return 0


def _bytes_of_optional(variant: tf.Tensor) -> int:
    try:
        if not tf.raw_ops.OptionalHasValue(optional=variant):
            return 0
    except tf.errors.InvalidArgumentError:
        return 0
    for dtype in _HELD:
        try:
            (value,) = tf.raw_ops.OptionalGetValue(
                optional=variant, output_types=[dtype], output_shapes=[tf.TensorShape(None)]
            )
        except tf.errors.InvalidArgumentError:
            continue
        return _bytes_of(value)
    return 0
