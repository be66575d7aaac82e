"""Converts Python values to attribute values of the types that an op's definition declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gradrule.common import op_definitions, tensor_codec
from gradrule.common.dtypes import as_dt
from gradrule.common.op_definitions import AttrDef
from gradrule.errors import InvalidAttrError
from gradrule.v1.graph_pb2 import AttrValue, NameAttrList
from gradrule.v1.tensor_pb2 import Tensor, TensorShape


def attr_value(attr: AttrDef, value: Any, where: str) -> AttrValue:
    """Returns the message for one attribute; `where` starts error messages. Raises `InvalidAttrError`."""
    if isinstance(value, AttrValue):
        return value
    try:
        if attr.type.startswith("list("):
            if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
                raise TypeError(f"is no list: {value!r}")
            field, convert = _CONVERTERS[attr.type[5:-1]]
            return AttrValue(list=AttrValue.ListValue(**{field: [convert(entry) for entry in value]}))
        field, convert = _CONVERTERS[attr.type]
        return AttrValue(**{field: convert(value)})
    except (TypeError, ValueError, OverflowError) as cause:
        raise InvalidAttrError(f"{where}: attribute {attr.name!r} is of type {attr.type}: {cause}") from None


def attr_of_op(op_type: str, name: str, value: Any, where: str) -> AttrValue:
    """Returns the message for an attribute of an op type.

    If the op type is a group or empty, the first op type that declares the attribute decides its type.

    Raises:
        InvalidAttrError: no op type declares the attribute, or the value does not fit.
    """
    own = op_definitions.find(op_type)
    known = (
        [own] if own is not None else [op for op in map(op_definitions.find, op_definitions.names()) if op is not None]
    )
    declared = next((attr for op in known for attr in op.attrs if attr.name == name), None)
    if declared is None:
        raise InvalidAttrError(f"{where}: {op_type if own else 'no op type'} has no attribute {name!r}")
    return attr_value(declared, value, where)


def free_value(name: str, value: Any, where: str) -> AttrValue:
    """Returns the message for an undeclared attribute (`_name`): a message, bool, int, float, bytes or string."""
    if isinstance(value, AttrValue):
        return value
    for python_type, field in ((bool, "b"), (int, "i"), (float, "f"), (bytes, "s")):
        if isinstance(value, python_type):
            return AttrValue(**{field: value})  # type: ignore[arg-type]  # the field fits the type just tested
    if isinstance(value, str):
        return AttrValue(s=value.encode())
    raise InvalidAttrError(f"{where}: attribute {name!r} must be a bool, number or string, not {type(value).__name__}")


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{value!r} is no integer")
    return int(value.__index__())


def _number(value: Any) -> float:
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{value!r} is no bool")
    return bool(value)


def _string(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value.encode()


def _type(value: Any) -> int:
    return as_dt(tensor_codec.dtype_number(value))


def _shape(value: Any) -> TensorShape:
    if isinstance(value, TensorShape):
        return value
    if value is None:
        return tensor_codec.shape_message(None)
    sizes = [value] if hasattr(value, "__index__") else list(value)
    return tensor_codec.shape_message(None if size is None else _integer(size) for size in sizes)


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else tensor_codec.to_message(natural(value))


def _function(value: Any) -> NameAttrList:
    if isinstance(value, NameAttrList):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no function's name")
    return NameAttrList(name=value)


def natural(value: Any) -> tensor_codec.Array:
    """Converts a value to an array as TensorFlow does: floats to float32, ints to int32; arrays keep their type."""
    if hasattr(value, "dtype") or hasattr(value, "__array__"):
        return np.asarray(value)
    array = tensor_codec.natural_array(value)
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype.kind in "iu":
        try:
            return tensor_codec.from_value(value, tensor_codec.dtype_number("int32"))
        except ValueError:
            return array
    return array


_CONVERTERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int": ("i", _integer),
    "float": ("f", _number),
    "bool": ("b", _boolean),
    "string": ("s", _string),
    "type": ("type", _type),
    "shape": ("shape", _shape),
    "tensor": ("tensor", _tensor),
    "func": ("func", _function),
}
