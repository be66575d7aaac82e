"""Compares results up to the rounding of floats."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_MOST_DIFFERENCE = 0.1


def is_inexact(array: np.ndarray) -> bool:
    """Returns whether an array holds floats or complex numbers, those of `ml_dtypes` too."""
    return array.dtype.kind in "fc" or (array.dtype.kind == "V" and "float" in array.dtype.name)


def is_close(first: Any, second: Any, units: float, least: float) -> bool:
    """Returns whether two results are equal up to rounding; integers exactly.

    units: how far floats may be apart, in units of the last place of the largest of them, or of `least`.
    """
    one, other = _array(first), _array(second)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not is_inexact(one):
        return bool(np.array_equal(one, other))
    a, b = _wide(one), _wide(other)
    finite = np.isfinite(a)
    if not (np.array_equal(finite, np.isfinite(b)) and np.array_equal(a[~finite], b[~finite], equal_nan=True)):
        return False
    tolerance = min(units * _epsilon(one.dtype), _MOST_DIFFERENCE)
    most = np.max(np.abs(a[finite]), initial=least)
    return bool(np.all(np.abs(a[finite] - b[finite]) <= tolerance * most))


def _array(value: Any) -> np.ndarray:
    # TensorFlow returns a scalar string as bytes.
    return np.asarray(value, object if isinstance(value, bytes) else None)


def magnitude(value: Any) -> float:
    """Returns the largest finite absolute value of a tensor of floats; 0 of other types."""
    array = _array(value)
    if not is_inexact(array):
        return 0.0
    values = _wide(array)
    return float(np.max(np.abs(values[np.isfinite(values)]), initial=0.0))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _epsilon(dtype: np.dtype) -> float:
    found: Any = ml_dtypes.finfo  # Has no types.
    return float(found(dtype).eps)
