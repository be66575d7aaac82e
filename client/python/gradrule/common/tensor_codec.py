"""Converts NumPy arrays to `Tensor` messages and back, and resolves names of element types.

Errors are `ValueError`s whose message describes the problem; callers add the name of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeAlias, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradrule.common.dtypes import NAMES, NUMBERS, as_dt, dtype_name, without_ref
from gradrule.v1.tensor_pb2 import Dt, Tensor, TensorShape

Array: TypeAlias = NDArray[Any]
DtypeLike: TypeAlias = "str | int | np.dtype[Any] | type | Any"

# Quantised types hold plain integers; other nodes of the graph hold their scale.
_QUANTISED = {"qint8": "int8", "quint8": "uint8", "qint32": "int32", "qint16": "int16", "quint16": "uint16"}
# Limits the memory for a small message with a large shape, whose last value fills the rest of the tensor.
_MAX_STRETCHED_BYTES = 64 * 1024 * 1024
_OPAQUE = {Dt.DT_RESOURCE, Dt.DT_VARIANT}
_NARROW_INTS = {Dt.DT_INT4, Dt.DT_UINT4, Dt.DT_INT2, Dt.DT_UINT2}
# Messages list the elements of these types one by one.
_LISTED_TYPES = {*_NARROW_INTS, Dt.DT_STRING}


class RaggedError(ValueError):
    """Reports a nested list without a shape: its rows differ in length."""


def _numpy_dtypes() -> dict[int, np.dtype[Any]]:
    found: dict[int, np.dtype[Any]] = {}
    for number, name in NAMES.items():
        if number == Dt.DT_STRING:
            found[number] = np.dtype(object)
        elif number not in _OPAQUE:
            plain = _QUANTISED.get(name, name)
            # Older versions of ml_dtypes lack some of the narrow types.
            scalar = getattr(ml_dtypes, plain, None) or getattr(np, "bool_" if plain == "bool" else plain, None)
            if scalar is not None:
                found[number] = np.dtype(scalar)
    return found


_BY_NUMBER = _numpy_dtypes()
_BY_DTYPE = {dtype: number for number, dtype in _BY_NUMBER.items() if NAMES[number] not in _QUANTISED}

_PYTHON_TYPES = (
    (float, Dt.DT_FLOAT),
    (int, Dt.DT_INT32),
    (bool, Dt.DT_BOOL),
    (complex, Dt.DT_COMPLEX128),
    (str, Dt.DT_STRING),
    (bytes, Dt.DT_STRING),
)

# What TensorFlow makes of Python's numbers, and what it calls these types.
_TYPE_NAMES = {python_type.__name__: number for python_type, number in _PYTHON_TYPES} | {
    "half": Dt.DT_HALF,
    "single": Dt.DT_FLOAT,
    "double": Dt.DT_DOUBLE,
    "object": Dt.DT_STRING,
}

_VALUE_FIELDS: dict[int, str] = {
    Dt.DT_FLOAT: "float_val",
    Dt.DT_DOUBLE: "double_val",
    Dt.DT_STRING: "string_val",
    Dt.DT_COMPLEX64: "scomplex_val",
    Dt.DT_COMPLEX128: "dcomplex_val",
    Dt.DT_INT64: "int64_val",
    Dt.DT_BOOL: "bool_val",
    Dt.DT_UINT32: "uint32_val",
    Dt.DT_UINT64: "uint64_val",
    Dt.DT_HALF: "half_val",
    Dt.DT_BFLOAT16: "half_val",
    Dt.DT_RESOURCE: "resource_handle_val",
    Dt.DT_VARIANT: "variant_val",
    **{number: "float8_val" for number, name in NAMES.items() if name.startswith(("float8", "float4"))},
}


def value_field(number: int) -> str:
    """Returns the field of a `Tensor` message that lists values of an element type."""
    return _VALUE_FIELDS.get(number, "int_val")


def dtype_number(dtype: DtypeLike) -> int:
    """Returns the number (`Dt`) of an element type.

    Args:
        dtype: A name (`"float32"`, `"DT_FLOAT"`), a NumPy dtype or scalar type, a dtype object of TensorFlow or
            PyTorch, a number, or a Python type or its name: `float` and `"float"` are float32, `int` and `"int"` are
            int32, as in TensorFlow.

    Raises:
        ValueError: The value does not denote an element type.
    """
    if isinstance(dtype, bool) or dtype is None:
        raise ValueError(f"{dtype!r} is no element type")
    if isinstance(dtype, int):
        if dtype not in NAMES:
            raise ValueError(f"{dtype} is no element type; numbers go from 1 to {max(NAMES)}")
        return dtype
    if isinstance(dtype, str) and (number := NUMBERS.get(dtype) or _TYPE_NAMES.get(dtype)):
        return number
    for python_type, number in _PYTHON_TYPES:
        if dtype is python_type:
            return number
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or str(dtype)
    short = str(name).rpartition(".")[2]
    if short in NUMBERS:
        return NUMBERS[short]
    if short in Dt.keys() and Dt.Value(short) in NAMES:  # noqa: SIM118  # an enum wrapper is not a dict
        return Dt.Value(short)
    try:
        if isinstance(dtype, str) and not any(character.isdigit() for character in dtype):
            # The size of NumPy's "long" and "uint" depends on the machine.
            raise ValueError("a name without a size")
        return number_of_array(np.empty(0, np.dtype(dtype)))
    except (TypeError, ValueError):
        near = [known for known in NUMBERS if str(name).lower() in known]
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{dtype!r} is no element type; use a name such as 'float32'.{hint}") from None


def numpy_dtype(number: int) -> np.dtype[Any]:
    """Returns the NumPy dtype of an element type, `object` for strings. Raises `ValueError` if there is none."""
    dtype = _BY_NUMBER.get(without_ref(number))
    if dtype is None:
        raise ValueError(f"{dtype_name(number)} has no values that could be sent")
    return dtype


def number_of_array(array: Array) -> int:
    """Returns the element type of an array, DT_STRING for all strings. Raises `ValueError` if there is none."""
    return number_of_dtype(array.dtype)


@lru_cache(256)
def number_of_dtype(dtype: np.dtype[Any]) -> int:
    """Returns the element type of arrays with a dtype, as `number_of_array` does."""
    if dtype.kind in "SUOT":
        return Dt.DT_STRING
    number = _BY_DTYPE.get(dtype.newbyteorder("="))
    if number is None:
        raise ValueError(f"NumPy's {dtype} is no element type of TensorFlow's")
    return number


def to_message(array: Any, dtype: DtypeLike = None) -> Tensor:
    """Returns a tensor message with the values of an array.

    Args:
        array: An array of any shape, memory order and byte order; strings as `object` (bytes or str), `S` or `U`.
        dtype: Element type; needed only for quantised types, whose arrays hold plain integers.

    Raises:
        ValueError: The array does not have this element type, or its dtype has no element type.
    """
    values = np.asarray(array)
    number = number_of_array(values) if dtype is None else dtype_number(dtype)
    if dtype is not None and number_of_array(values) != number:
        target = numpy_dtype(number)
        if values.dtype.newbyteorder("=") != target:
            raise ValueError(f"values are {values.dtype}, not {dtype_name(number)}")
    message = Tensor()
    _write(message, values, number)
    return message


def write_message(message: Tensor, array: Array) -> None:
    """Writes an array into an empty message. Saves one copy of a large tensor if the message is part of another one.

    Raises `ValueError` if the array's dtype has no element type.
    """
    _write(message, array, number_of_array(array))


def _write(message: Tensor, values: Array, number: int) -> None:
    message.dtype = as_dt(number)
    message.tensor_shape.CopyFrom(shape_message(values.shape))
    if number == Dt.DT_STRING:
        message.string_val.extend(_byte_strings(values))
    elif number in _NARROW_INTS:
        message.int_val.extend(int(value) for value in values.ravel())
    else:
        message.tensor_content = _little_endian(values).tobytes()


def has_plain_bytes(array: Array) -> bool:
    """Returns whether messages hold the array's bytes: its elements are numbers of at least one byte."""
    return is_plain(number_of_array(array))


def is_plain(number: int) -> bool:
    """Returns whether elements of a type (`Dt`) are numbers of at least one byte."""
    return number not in _LISTED_TYPES


def content_of(array: Array) -> memoryview:
    """Returns the row-major little-endian bytes of an array; without a copy if the array has this layout.

    `has_plain_bytes` must be true for the array.
    """
    flat: Any = np.ascontiguousarray(_little_endian(array)).reshape(-1).view(np.uint8)
    return memoryview(flat)


def is_little_endian(array: Array) -> bool:
    """Returns whether the array's elements are little-endian, as in messages."""
    order = array.dtype.byteorder
    return order != ">" and (order != "=" or np.little_endian)


def _little_endian(values: Array) -> Array:
    return values if is_little_endian(values) else values.astype(values.dtype.newbyteorder("<"))


def to_numpy(message: Tensor, *, writable: bool = False, content: memoryview | None = None) -> Array:
    """Converts a tensor message to an array of the same shape; strings become an `object` array of bytes.

    Args:
        message: The tensor.
        writable: Copies the values if the array would be read-only because it shares memory with the message.
        content: Replaces `tensor_content` if the bytes are not in the message.

    Raises:
        ValueError: The shape is not known, or the values do not fit the shape and element type.
    """
    number = message.dtype
    if not number and message.HasField("packed"):
        raise ValueError("a packed tensor can only be a value of a call (feeds, grad_ys, tangents, vectors)")
    dtype = numpy_dtype(number)
    shape = known_shape(message.tensor_shape)
    count = math.prod(shape)
    # Read the field once: each access to a bytes field copies it.
    values = content or message.tensor_content
    if values:
        if number == Dt.DT_STRING:
            raise ValueError("strings belong into string_val, not into tensor_content")
        size = len(values)
        if size != count * dtype.itemsize:
            raise ValueError(
                f"{size} bytes do not fit {dtype_name(number)} of shape {list(shape)}: {count * dtype.itemsize}"
            )
        array = np.frombuffer(values, dtype.newbyteorder("<")).reshape(shape)
        array = array.astype(dtype, copy=False)
        return array.copy() if writable else array
    return _filled(_listed_values(message, dtype), count, dtype, dtype_name(number)).reshape(shape)


def shape_message(shape: Iterable[int | None] | None) -> TensorShape:
    """Returns a shape message; None is an unknown size, or an unknown rank in place of the sizes."""
    if shape is None:
        return TensorShape(unknown_rank=True)
    return TensorShape(dim=[TensorShape.Dim(size=-1 if size is None else int(size)) for size in shape])


def shape_tuple(shape: TensorShape) -> tuple[int | None, ...] | None:
    """Returns the sizes of a shape message, as the inverse of `shape_message`."""
    if shape.unknown_rank:
        return None
    return tuple(None if dim.size < 0 else dim.size for dim in shape.dim)


def known_shape(shape: TensorShape) -> tuple[int, ...]:
    """Returns the sizes of a shape. Raises `ValueError` if a size or the rank is unknown."""
    sizes = tuple(dim.size for dim in shape.dim)
    if shape.unknown_rank or any(size < 0 for size in sizes):
        raise ValueError("a tensor's shape must be known")
    return sizes


def _byte_strings(values: Array) -> list[bytes]:
    flat = values.astype(object).ravel() if values.dtype.kind != "O" else values.ravel()
    strings = []
    for value in flat:
        if isinstance(value, str):
            strings.append(value.encode())
        elif isinstance(value, bytes):
            strings.append(value)
        else:
            raise ValueError(f"an array of objects must hold bytes or str, not {type(value).__name__}")
    return strings


def _listed_values(message: Tensor, dtype: np.dtype[Any]) -> Array:
    number = message.dtype
    if number == Dt.DT_STRING:
        strings = np.empty(len(message.string_val), object)
        strings[:] = list(message.string_val)
        return strings
    values = getattr(message, value_field(number))
    if isinstance(values, bytes):
        return np.frombuffer(values, dtype)
    if number in (Dt.DT_HALF, Dt.DT_BFLOAT16):
        return np.array(values, np.int64).astype(np.uint16).view(dtype)
    if number in (Dt.DT_COMPLEX64, Dt.DT_COMPLEX128):
        if len(values) % 2:
            raise ValueError("complex values come in pairs")
        return np.array(values, np.float32 if number == Dt.DT_COMPLEX64 else np.float64).view(dtype)
    if number in _NARROW_INTS:
        return np.array(values, np.int32).astype(dtype)
    return (
        np.array(values, np.int64).astype(dtype)
        if dtype.kind in "iu" and dtype.itemsize < 8
        else np.array(values, dtype)
    )


def _filled(values: Array, count: int, dtype: np.dtype[Any], name: str) -> Array:
    """Returns `count` values: the last of `values` fills the rest; zeros (or empty strings) if there are none."""
    if len(values) > count:
        raise ValueError(f"{len(values)} values are more than the {count} of {name} that the shape has")
    if len(values) == count:
        return values if values.flags.writeable else values.copy()
    if count * dtype.itemsize > _MAX_STRETCHED_BYTES:
        raise ValueError(
            f"{len(values)} values do not fill {count} of {name}; at most {_MAX_STRETCHED_BYTES} bytes are filled up, "
            "larger tensors have all their values in tensor_content"
        )
    array = np.empty(count, dtype)
    array[: len(values)] = values
    array[len(values) :] = values[-1] if len(values) else (b"" if dtype.kind == "O" else 0)
    return array


def from_value(value: Any, number: int) -> Array:
    """Converts a Python number, string or nested list to an array of an element type.

    Args:
        value: The number, string, nested list or array.
        number: The element type (`Dt`).

    Raises:
        ValueError: The conversion would lose information (floats to an integer type, numbers out of range), or the list
            is ragged.
    """
    dtype = numpy_dtype(number)
    natural = natural_array(value)
    kind = natural.dtype.kind
    if number == Dt.DT_STRING:
        natural = np.asarray(value, object)
        _byte_strings(natural)
        return natural
    if natural.size and not _fits(natural, kind, dtype):
        raise ValueError(f"{_KINDS.get(kind, str(natural.dtype))} cannot become {dtype_name(number)} without loss")
    with np.errstate(over="ignore"):
        array: Array = natural.astype(dtype)
    if _numeric_kind(dtype) in "fc" and not np.isfinite(array[np.isfinite(natural)]).all():
        raise ValueError(f"the values are too large for {dtype_name(number)}")
    return array


def natural_array(value: Any) -> Array:
    """Converts a value to an array with NumPy's type rules; strings become an `object` array. Raises `RaggedError`."""
    try:
        array = np.asarray(value)
    except UnicodeDecodeError:
        # The list has bytes and str; NumPy tries to decode the bytes.
        return np.asarray(value, object)
    except ValueError:
        raise RaggedError("the list is ragged: rows differ in length") from None
    # Use `object`: NumPy's string types drop trailing zero bytes.
    return np.asarray(value, object) if array.dtype.kind in "SU" else array


_KINDS = {
    "f": "floats",
    "i": "integers",
    "u": "integers",
    "b": "bools",
    "c": "complex numbers",
    "O": "strings and other objects",
}


def _fits(natural: Array, kind: str, dtype: np.dtype[Any]) -> bool:
    target = _numeric_kind(dtype)
    if target == "b":
        return kind == "b" or (kind in "iu" and bool(np.isin(natural, (0, 1)).all()))
    if target in "iu":
        if kind not in "iub":
            return False
        low, high = _range_of(dtype)
        return int(natural.min()) >= low and int(natural.max()) <= high
    if target == "f":
        return kind in "fiub" or _numeric_kind(natural.dtype) == "f"
    return kind in "cfiub" or _numeric_kind(natural.dtype) == "f"


def holds(array: Array, dtype: np.dtype[Any]) -> bool:
    """Returns whether a type has a value for every number of an array, with floats rounded towards 0.

    Only integer types and bool can lack values. In bool, all finite numbers other than 0 are true.
    """
    target = _numeric_kind(dtype)
    if target in "fc" or not array.size:
        return True
    # NumPy has no minima of the narrow types of ml_dtypes; float64 holds all their values.
    values = array if array.dtype.kind in "biu" else np.trunc(array.astype(np.float64))
    if not np.isfinite(values).all():
        return False
    low, high = _range_of(dtype) if target in "iu" else (-math.inf, math.inf)
    return bool(low <= int(values.min()) and int(values.max()) <= high)


def _numeric_kind(dtype: np.dtype[Any]) -> str:
    """Returns `b`, `i`, `u`, `f` or `c`; types of ml_dtypes, which NumPy reports as `V`, are classified by name."""
    if dtype.kind != "V":
        return dtype.kind
    return "i" if dtype.name.startswith("int") else "u" if dtype.name.startswith("uint") else "f"


def _range_of(dtype: np.dtype[Any]) -> tuple[int, int]:
    # np.iinfo does not support the narrow types of ml_dtypes.
    info: Any = cast(Any, ml_dtypes.iinfo)(dtype)
    return int(info.min), int(info.max)
