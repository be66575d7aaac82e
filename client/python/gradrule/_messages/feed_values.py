"""Converts the values of a call, such as feeds and upstream gradients, to arrays of their tensor's element type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, TypeAlias

from gradrule._builder import blob_values
from gradrule._builder.array_values import Cast, converted, is_array, may_need_conversion, read_array
from gradrule._builder.handles import Node, TensorHandle
from gradrule._builder.node_arguments import tensorflow_array
from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.errors import FeedDtypeError, InvalidTensorError
from gradrule.v1 import tensor_pb2

# Returns the element type of a tensor by name; 0: unknown. The flag: whether expensive lookups are allowed.
TypeOf: TypeAlias = Callable[[str, bool], int]


def checked_value(value: Any, name: str, type_of: TypeOf, where: str) -> tensor_codec.Array | blob_values.Blob:
    """Returns a value as an array of its tensor's element type; blobs stay.

    Args:
        value: Lists, numbers and arrays are converted to the tensor's type; arrays only if no value changes.
        name: Name of the tensor.
        type_of: Returns the element type of a tensor.
        where: Name of the value in errors.

    Raises:
        InvalidTensorError: The value is not a valid tensor.
        FeedDtypeError: An array or blob does not have the tensor's element type.
    """
    if not isinstance(value, blob_values.Blob):
        return array_of(value, type_of(name, may_need_conversion(value)), where)
    number = type_of(name, False)
    if number and value.number != number:
        raise FeedDtypeError(f"{where} is a blob of {dtype_name(value.number)}, the tensor is {dtype_name(number)}")
    return value


def tensor_message(value: Any, number: int, where: str) -> tensor_pb2.Tensor:
    """Converts a value to a tensor message of an element type (0: the value's own type).

    Raises `InvalidTensorError` and `FeedDtypeError`.
    """
    try:
        return tensor_codec.to_message(array_of(value, number, where))
    except ValueError as cause:
        raise InvalidTensorError(f"{where}: {cause}") from None


def array_of(value: Any, number: int, where: str) -> tensor_codec.Array:
    """Converts a value to an array of an element type (0: the value's own type).

    Raises `InvalidTensorError` and `FeedDtypeError`.
    """
    cast = isinstance(value, Cast)
    if isinstance(value, Cast):
        value = value.value
    if value is None or isinstance(value, TensorHandle | Node):
        raise InvalidTensorError(f"{where} is {value!r}; expected an array, a list or a number")
    if isinstance(value, Mapping | Set | Iterator):
        raise InvalidTensorError(f"{where} is a {type(value).__name__}; expected an array, a list or a number")
    if not is_array(value):
        return _array_of_list(value, number, where)
    try:
        array = read_array(value)
        actual = tensor_codec.number_of_array(array)
    except ValueError as cause:
        raise InvalidTensorError(f"{where} {cause}") from None
    if not number or actual == number:
        return array
    try:
        return converted(array, number, cast=cast)
    except ValueError as cause:
        raise FeedDtypeError(f"{where} {cause}") from None


def _array_of_list(value: Any, number: int, where: str) -> tensor_codec.Array:
    try:
        return tensor_codec.from_value(value, number) if number else tensorflow_array(value)
    except ValueError as cause:
        if number and not isinstance(cause, tensor_codec.RaggedError):
            raise FeedDtypeError(f"{where}, whose tensor is {dtype_name(number)}: {cause}") from None
        raise InvalidTensorError(f"{where}: {cause}") from None


def casting(values: Any) -> Any:
    """Returns feeds or upstream gradients whose arrays are converted to their tensor's type even if that rounds them.

    Values that are not arrays, such as names of tensors and blobs, remain.
    """
    if isinstance(values, Mapping):
        return {key: _casting_one(value) for key, value in values.items()}
    return [_casting_one(value) for value in values] if isinstance(values, list | tuple) else values


def _casting_one(value: Any) -> Any:
    return Cast(value) if is_array(value) and not isinstance(value, TensorHandle | Node | blob_values.Blob) else value
