"""Converts between TensorFlow's element type numbers and names, without NumPy."""

from __future__ import annotations

from typing import cast

from gradrule.v1.tensor_pb2 import Dt

_TEXT = {Dt.DT_FLOAT: "float32", Dt.DT_DOUBLE: "float64", Dt.DT_HALF: "float16"}
REF_OFFSET = 100
"""TensorFlow numbers the reference to type n as n + 100."""

NAMES: dict[int, str] = {
    number: _TEXT.get(number, text.removeprefix("DT_").lower())
    for text, number in Dt.items()
    if 0 < number < REF_OFFSET
}
NUMBERS: dict[str, int] = {name: number for number, name in NAMES.items()}


def dtype_name(number: int) -> str:
    """Returns the name: `float32` for 1, `float32_ref` for 101, `type 77` for a number that is no element type."""
    if number > REF_OFFSET and number - REF_OFFSET in NAMES:
        return NAMES[number - REF_OFFSET] + "_ref"
    return NAMES.get(number, "unknown" if number == 0 else f"type {number}")


def without_ref(number: int) -> int:
    """Returns the type that a reference type refers to, and any other type unchanged."""
    return number - REF_OFFSET if number > REF_OFFSET else number


def as_dt(number: int) -> Dt.ValueType:
    """Returns the same number, typed as the enum, for mypy."""
    return cast("Dt.ValueType", number)
