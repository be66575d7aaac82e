"""How many bytes the tensors take that a forward part saved, lists of loops and optionals of branches included."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

# What TensorFlow saves, the frequent first: a variant does not tell what it holds, so they are tried in turn.
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
"""What a string takes besides its characters."""


def saved_bytes(saved: Sequence[tf.Tensor]) -> int:
    """Bytes of eager tensors; of a list, whose items are much alike, about as many times its first as it has items."""
    return sum(_bytes_of(tensor) for tensor in saved)


def _bytes_of(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.variant:
        return sum(_bytes_in(tensor, index) for index in range(tensor.shape.num_elements()))
    size = int(tensor.shape.num_elements())
    if tensor.dtype == tf.string:
        return size * _STRING_BYTES + int(tf.reduce_sum(tf.strings.length(tensor)))
    return size * int(tensor.dtype.size)


def _bytes_in(tensor: tf.Tensor, index: int) -> int:
    """Of one variant: a list, an optional, or nothing that is known."""
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
