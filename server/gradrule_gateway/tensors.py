"""Converts tensors between JSON and messages: nested lists, or base64 of the elements' bytes."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.common.tensor_codec import Array
from gradrule.v1.tensor_pb2 import Dt, Tensor
from gradrule_gateway.problems import Problem

Elements = Literal["list", "base64"]

KEYS = frozenset({"dtype", "shape", "values", "base64"})
"""Keys of a tensor in compact form."""
_EXACT = 2**53
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MAX_RANK = 32
# Python's `int` accepts spaces, underscores, plus signs and the digits of all scripts too.
INTEGER = re.compile(r"-?[0-9]{1,20}")


def is_compact(value: Any) -> bool:
    """Returns whether a JSON value is a tensor in compact form, not the message `Tensor` in protobuf's mapping."""
    return not isinstance(value, dict) or "values" in value or "base64" in value


def read(tensor: Tensor, value: Any, path: str) -> bool:
    """Writes a tensor in compact form into an empty message. Returns False if the element type is still open.

    The message then has the type that holds all values: float64, int64, uint64, bool or string; see `set_dtype`.

    Raises:
        Problem: The value is not a tensor.
    """
    try:
        return _read(tensor, value)
    except ValueError as wrong:
        raise Problem("INVALID_TENSOR", f"{path}: {wrong}", field=path) from None


def set_dtype(tensor: Tensor, number: int | None, path: str) -> None:
    """Converts the elements of a tensor that `read` returned False for.

    Args:
        tensor: The tensor.
        number: The element type (`Dt`); None: float32, int32 (int64 or uint64 for larger numbers), bool or string.
        path: Path of the tensor in the request, for errors.

    Raises:
        Problem: The elements cannot be converted without loss.
    """
    array = tensor_codec.to_numpy(tensor)
    try:
        if number is None:
            number = _default_type(array)
        if array.dtype.kind == "O" and number != Dt.DT_STRING:
            array = _numbers([text.decode() for text in array.ravel()]).reshape(array.shape)
        if number in (Dt.DT_COMPLEX64, Dt.DT_COMPLEX128):
            array = _complex(array)
        converted = tensor_codec.from_value(array, number)
    except (ValueError, UnicodeDecodeError) as wrong:
        raise Problem("FEED_DTYPE", f"{path}: {wrong}", field=path) from None
    _write(tensor, converted, number)


def write(tensor: Tensor, elements: Elements) -> Any:
    """Returns a tensor as JSON in compact form; arrays of plain numbers stay NumPy arrays.

    Raises:
        ValueError: The message is not a tensor.
    """
    if tensor.HasField("packed"):
        raise ValueError("a packed tensor has no compact form")
    array = tensor_codec.to_numpy(tensor)
    found: dict[str, Any] = {"dtype": dtype_name(tensor.dtype), "shape": list(array.shape)}
    if elements == "base64" and array.dtype.kind != "O":
        found["base64"] = base64.b64encode(tensor_codec.content_of(array)).decode()
    else:
        found["values"] = _values(array)
    return found


def _read(tensor: Tensor, value: Any) -> bool:
    if not isinstance(value, dict):
        _write_natural(tensor, _natural(value), None)
        return False
    _check_keys(value)
    number = None if value.get("dtype") is None else dtype_number(value["dtype"])
    shape = None if value.get("shape") is None else _shape(value["shape"])
    if "base64" in value:
        if number is None:
            raise ValueError("base64 elements need a dtype")
        _write(tensor, _from_base64(value["base64"], number, shape), number)
        return True
    array = _natural(value["values"])
    if number is None:
        _write_natural(tensor, array, shape)
        return False
    if array.dtype.kind == "O" and number != Dt.DT_STRING:
        array = _numbers(array.ravel().tolist()).reshape(array.shape)
    if number in (Dt.DT_COMPLEX64, Dt.DT_COMPLEX128):
        array = _complex(array)
    _write(tensor, _shaped(tensor_codec.from_value(array, number), shape), number)
    return True


def dtype_number(name: Any) -> int:
    """Returns the number (`Dt`) of a name such as `float32` or `DT_FLOAT`. Raises `ValueError`."""
    if not isinstance(name, str):
        raise ValueError(f'dtype is a name such as "float32", not {_kind(name)}')
    return tensor_codec.dtype_number(name)


def parse_integer(text: str) -> int | None:
    """Returns the integer of at most 20 digits that a text is, as JSON would write it; None for other texts."""
    return int(text) if INTEGER.fullmatch(text) else None


def _check_keys(value: Mapping[str, Any]) -> None:
    unknown = sorted(set(value) - KEYS)
    if unknown:
        raise ValueError(f"a tensor has no key {unknown[0]!r}; its keys are dtype, shape and values or base64")
    if "values" in value and "base64" in value:
        raise ValueError("a tensor has either values or base64")


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError("shape is a list of sizes, 0 or larger")
    if len(value) > _MAX_RANK:
        raise ValueError(f"shape has more than {_MAX_RANK} dimensions")
    return tuple(value)


def _shaped(array: Array, shape: tuple[int, ...] | None) -> Array:
    """Returns the array with a shape; values may be nested as the shape says, or be one flat list."""
    if shape is None or array.shape == shape:
        return array
    if array.size != math.prod(shape) or (array.ndim > 1 and array.size):
        raise ValueError(f"values of shape {list(array.shape)} do not have the shape {list(shape)}")
    return array.reshape(shape)


def _natural(value: Any) -> Array:
    """Returns a nested list as float64, int64, uint64, bool, or as objects that are str, numbers or bytes."""
    if value is None or (isinstance(value, dict) and set(value) != {"base64"}):
        raise ValueError(f"a tensor is a number, a nested list, or an object with dtype and values, not {_kind(value)}")
    array = tensor_codec.natural_array(value)
    if array.ndim > _MAX_RANK:
        raise ValueError(f"lists are nested more than {_MAX_RANK} deep")
    kind = array.dtype.kind
    if kind == "f" and array.size and not np.abs(array).max() < 2**63:
        return _large(array, value)
    if kind == "O":
        return _objects(array)
    if kind not in "fiub":
        raise ValueError("elements are numbers, bools or strings")
    return array


def _large(array: Array, value: Any) -> Array:
    """Returns floats, or uint64 where all numbers are integers: NumPy makes floats of integers below and above 2^63."""
    if not np.isfinite(array).all():
        raise ValueError("a number is too large for float64")
    exact = np.asarray(value, object)
    return _numbers(exact.ravel().tolist()).reshape(exact.shape)


def _objects(array: Array) -> Array:
    """Checks the elements of an array of objects; one with numbers in it, such as `[1, "NaN"]`, becomes numbers."""
    flat = [_element(value) for value in array.ravel().tolist()]
    if any(not isinstance(value, str | bytes) for value in flat):
        return _numbers(flat).reshape(array.shape)
    found = np.empty(len(flat), object)
    found[:] = flat
    return found.reshape(array.shape)


def _element(value: Any) -> Any:
    if isinstance(value, dict):
        text = value.get("base64")
        if set(value) != {"base64"} or not isinstance(text, str):
            raise ValueError('an element that is an object is {"base64": "…"}, a string of bytes')
        return _decoded(text)
    if isinstance(value, list):
        raise ValueError("the list is ragged: rows differ in length")
    if value is None:
        raise ValueError('an element is null; a missing number is "NaN"')
    return value


def _numbers(values: list[Any]) -> Array:
    """Returns numbers, some of which are strings: NaN, infinities and integers beyond 2^53."""
    found = []
    for value in values:
        if isinstance(value, str):
            number: float | int | None = _SPECIAL.get(value)
            if number is None:
                number = parse_integer(value)
            if number is None:
                raise ValueError(
                    f'{value[:40]!r} is not a number; as strings, only "NaN", "Infinity", "-Infinity" '
                    "and integers are numbers"
                )
            found.append(number)
        elif isinstance(value, bool | bytes):
            raise ValueError("numbers and other elements are mixed")
        else:
            found.append(value)
    array = np.asarray(found)
    if array.dtype.kind == "f" and all(isinstance(number, int) for number in found) and found:
        if not all(0 <= number < 2**64 for number in found):
            raise ValueError("the integers fit neither int64 nor uint64")
        array = np.asarray(found, np.uint64)
    if array.dtype.kind not in "fiu":
        raise ValueError("an integer is outside the range of int64 and uint64")
    return array


def _complex(array: Array) -> Array:
    """Returns complex numbers from pairs `[re, im]` along the last axis."""
    if not array.size:
        return array.astype(np.complex128)
    if array.ndim == 0 or array.shape[-1] != 2 or array.dtype.kind not in "fiu":
        raise ValueError("complex numbers are pairs [re, im]")
    pairs = array.astype(np.float64)
    found: Array = np.ascontiguousarray(pairs).view(np.complex128)[..., 0]
    return found


def _from_base64(text: Any, number: int, shape: tuple[int, ...] | None) -> Array:
    if not isinstance(text, str):
        raise ValueError("base64 is a string")
    dtype = tensor_codec.numpy_dtype(number)
    if dtype.kind == "O":
        raise ValueError("strings have no base64 form; write them as values")
    content = _decoded(text)
    if shape is None:
        if len(content) % dtype.itemsize:
            raise ValueError(f"{len(content)} bytes are not a whole number of {dtype_name(number)}")
        shape = (len(content) // dtype.itemsize,)
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{len(content)} bytes do not fit {dtype_name(number)} of shape {list(shape)}: "
            f"{math.prod(shape) * dtype.itemsize}"
        )
    return np.frombuffer(content, dtype.newbyteorder("<")).reshape(shape)


def _decoded(text: str) -> bytes:
    try:
        # Protobuf's JSON accepts the alphabet for URLs too, with or without padding.
        plain = text.translate(_URL_SAFE)
        found = base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the text is not base64") from None
    groups = len(found) // 3
    end = base64.b64encode(found[3 * groups :]).decode()
    if plain[4 * groups :] not in (end, end.rstrip("=")):
        # Python ignores bits and padding after the last byte. They occur in texts that were cut.
        raise ValueError("the text is not base64: its end has bits or padding that no byte has")
    return found


_URL_SAFE = {ord("-"): "+", ord("_"): "/"}
decode_base64 = _decoded


def _write_natural(tensor: Tensor, array: Array, shape: tuple[int, ...] | None) -> None:
    array = _shaped(array, shape)
    _write(tensor, array, tensor_codec.number_of_array(array))


def _write(tensor: Tensor, array: Array, number: int) -> None:
    tensor.CopyFrom(tensor_codec.to_message(array, number))


def _default_type(array: Array) -> int:
    kind = array.dtype.kind
    if kind == "f":
        return Dt.DT_FLOAT
    if kind in "iu":
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        return Dt.DT_INT32 if low >= -(2**31) and high < 2**31 else Dt.DT_INT64 if high < 2**63 else Dt.DT_UINT64
    return Dt.DT_BOOL if kind == "b" else Dt.DT_STRING


def _values(array: Array) -> Any:
    """Returns the elements as nested lists, or as an array if it has only numbers that JSON can hold exactly."""
    if not array.size:
        # A shape such as (1000000000, 0) would be a billion empty lists.
        return []
    if array.dtype.kind == "O":
        return _nested(array, _text)
    if array.dtype.kind == "c":
        parts = np.ascontiguousarray(array).view(np.float32 if array.itemsize == 8 else np.float64)
        return _values(parts.reshape(*array.shape, 2))
    if array.dtype.type.__module__ != "numpy":
        # float32 and int32 hold all values of the types of ml_dtypes, which orjson does not know.
        array = array.astype(np.int32 if "int" in array.dtype.name else np.float32)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return _nested(array, _special)
    if array.dtype.kind in "iu" and array.itemsize == 8 and max(-int(array.min()), int(array.max())) > _EXACT:
        return _nested(array, _integer)
    return np.ascontiguousarray(array) if array.ndim else array[()]


def _nested(array: Array, convert: Any) -> Any:
    flat = np.empty(array.size, object)
    flat[:] = [convert(value) for value in array.ravel()]
    return flat.reshape(array.shape).tolist()


def _text(value: bytes | str) -> Any:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _special(value: Any) -> Any:
    number = float(value)
    return (
        value if math.isfinite(number) else "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    )


def _integer(value: Any) -> Any:
    return int(value) if -_EXACT <= value <= _EXACT else str(value)


def _kind(value: Any) -> str:
    """Returns the name of a JSON value's kind."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a bool", type(None): "null"}
    return kinds.get(type(value), "a number")


kind_of = _kind
