"""Reads arrays of NumPy and other libraries, and converts them to the element type of a tensor.

Errors are `ValueError`s whose message describes the problem; callers add the name of the tensor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.common.tensor_codec import Array

# Types that NumPy, pandas and image readers give to values if the caller does not choose one.
_USUAL_TYPES = {"float64", "int64", "uint8", "bool", "object"}


@dataclass(frozen=True, slots=True)
class Cast:
    """Marks a value to be converted to its tensor's type even if that rounds it."""

    value: Any


def is_array(value: Any) -> bool:
    """Returns whether a value has a dtype: NumPy arrays and scalars, tensors of other libraries, data frames."""
    return hasattr(value, "dtype") or hasattr(value, "__array__")


def may_need_conversion(value: Any) -> bool:
    """Returns whether a value may have another element type than the caller intends: lists, and arrays of usual types.

    Arrays of other types, such as float32, were made for their tensor.
    """
    if isinstance(value, Cast):
        return True
    return not is_array(value) or str(getattr(value, "dtype", "object")).rpartition(".")[2] in _USUAL_TYPES


def read_array(value: Any) -> Array:
    """Returns the values of an array, of a tensor of TensorFlow, PyTorch or JAX, or of a data frame.

    Tensors of PyTorch may require gradients, be on a GPU and have any type, such as bfloat16.

    Raises:
        ValueError: The value has masked elements, or is ragged or sparse.
    """
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            raise ValueError("has masked elements; replace them with .filled(value)")
        return value.data
    if hasattr(value, "detach") and hasattr(value, "cpu"):
        value = _readable_torch_tensor(value)
    for method in ("to_tensor", "todense"):
        if hasattr(value, method):
            parts = "" if method == "todense" else "; a ragged input of a traced function has parts to feed instead"
            raise ValueError(f"is a {type(value).__name__}; give a dense array: .{method}(){parts}")
    try:
        array = np.asarray(value)
    except (TypeError, RuntimeError) as cause:
        raise ValueError(f"is a {type(value).__name__} that NumPy cannot read: {cause}") from cause
    if array.dtype == object and array.ndim == 0 and not isinstance(array[()], str | bytes):
        raise ValueError(f"is a {type(value).__name__}, which NumPy does not read as an array; give a dense array")
    return array


def _readable_torch_tensor(tensor: Any) -> Any:
    """Returns a tensor of PyTorch, or an array of its values, that NumPy can read."""
    tensor = tensor.detach().cpu()
    if not str(tensor.dtype).endswith(("bfloat16", "float8_e4m3fn", "float8_e5m2")):
        return tensor
    # NumPy has no such type, so PyTorch gives no array, but it shares the bytes.
    dtype = tensor_codec.numpy_dtype(tensor_codec.dtype_number(tensor.dtype))
    torch: Any = sys.modules["torch"]
    integers = torch.int16 if dtype.itemsize == 2 else torch.uint8
    return np.asarray(tensor.contiguous().view(integers)).view(dtype)


def converted(array: Array, number: int, *, cast: bool) -> Array:
    """Converts an array to an element type.

    Args:
        array: The array.
        number: The element type (`Dt`).
        cast: Allows to change values, as `numpy.astype` does, except that integer types need values in their range;
            otherwise every value must stay the same, and floats do not become integers.

    Raises:
        ValueError: A value would change and `cast` is false, or the conversion is not possible: strings to numbers,
            complex numbers to real ones, NaN, infinity and numbers out of range to integers, NaN and infinity to bool.
    """
    name, actual = dtype_name(number), dtype_name(tensor_codec.number_of_array(array))
    mismatch = f"is an array of {'objects' if array.dtype == object else actual}, the tensor is {name}"
    if array.dtype == object:
        array = tensor_codec.natural_array(array.tolist())
    target = tensor_codec.numpy_dtype(number)
    is_possible = (
        array.dtype.kind not in "OSU" and target.kind != "O" and (array.dtype.kind != "c" or target.kind == "c")
    )
    remedy = f"convert it with .astype({name!r}), or give cast=True to evaluate" if is_possible else "convert it"
    # NumPy does not report that it wraps integers, nor that it makes NaN true.
    if is_possible and cast and not tensor_codec.holds(array, target):
        raise ValueError(f"{mismatch}, which has no value for NaN, infinity and numbers out of range")
    try:
        if is_possible and cast:
            with np.errstate(over="ignore"):
                found: Array = array.astype(target)
        else:
            found = tensor_codec.from_value(array, number)
            _check_equal(array, found)
    except ValueError as cause:
        raise ValueError(f"{mismatch}: {cause}; {remedy}") from None
    if tensor_codec.number_of_array(found) != number:
        # Quantised types hold plain integers, whose meaning only the caller knows.
        raise ValueError(f"{mismatch}; convert it")
    return found


def _check_equal(array: Array, found: Array) -> None:
    """Raises `ValueError` if a conversion to floats changed a value."""
    if array.dtype.kind == "b" or found.dtype.kind in "biuO":
        return
    with np.errstate(all="ignore"):
        back = (found if array.dtype.kind == "c" else np.real(found)).astype(array.dtype)
        is_same = back == array
        if array.dtype.kind in "iu":
            # A float that the integer type does not hold may become any integer, also the right one.
            is_same &= np.abs(found) < 2.0 ** (8 * array.dtype.itemsize - (array.dtype.kind == "i"))
        else:
            is_same |= np.isnan(array)
    if not is_same.all():
        index = tuple(int(i) for i in np.argwhere(~is_same)[0]) if array.ndim else ()
        where = f" (at {list(index)})" if index else ""
        # Numbers of Python show all digits, also those of 16-bit types.
        number = complex if found.dtype.kind == "c" else float
        raise ValueError(f"{array[index].item()!r}{where} would become {number(found[index])!r}")
