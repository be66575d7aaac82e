"""Measures the memory of eager tensors that the engine keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

STRING_BYTES = 24
"""Bytes of a string besides its characters."""

# Types that TensorFlow saves, frequent ones first. A variant does not report the type of its items, so all are tried.
_VARIANT_ITEM_DTYPES = (
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


def saved_bytes(saved: Sequence[tf.Tensor]) -> int:
    """Returns the bytes of eager tensors. A list counts as its first item times its length."""
    return sum(_eager_bytes(tensor) for tensor in saved)


def _eager_bytes(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.variant:
        return sum(_variant_bytes(tensor, index) for index in range(tensor.shape.num_elements()))
    size = int(tensor.shape.num_elements())
    if tensor.dtype == tf.string:
        return size * STRING_BYTES + int(tf.reduce_sum(tf.strings.length(tensor)))
    return size * int(tensor.dtype.size)


def _variant_bytes(tensor: tf.Tensor, index: int) -> int:
    """Returns the bytes of one variant: a list or an optional; 0 for anything else."""
    variant = tf.reshape(tensor, [-1])[index] if tensor.shape.rank else tensor
    for dtype in _VARIANT_ITEM_DTYPES:
        for measure in (_list_bytes, _optional_bytes):
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                return measure(variant, dtype)
    return 0


def _list_bytes(variant: tf.Tensor, dtype: tf.DType) -> int:
    length = int(tf.raw_ops.TensorListLength(input_handle=variant))
    if not length:
        return 0
    item = tf.raw_ops.TensorListGetItem(input_handle=variant, index=0, element_shape=-1, element_dtype=dtype)
    return length * _eager_bytes(item)


def _optional_bytes(variant: tf.Tensor, dtype: tf.DType) -> int:
    if not tf.raw_ops.OptionalHasValue(optional=variant):
        return 0
    (value,) = tf.raw_ops.OptionalGetValue(optional=variant, output_types=[dtype], output_shapes=[tf.TensorShape(None)])
    return _eager_bytes(value)
