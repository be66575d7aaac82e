"""Element types by number and by name, as TensorFlow has them. No NumPy here."""

from __future__ import annotations

from typing import cast

from gradrule.v1.tensor_pb2 import Dt

_TEXT = {Dt.DT_FLOAT: "float32", Dt.DT_DOUBLE: "float64", Dt.DT_HALF: "float16"}
REF_OFFSET = 100

NAMES: dict[int, str] = {
    number: _TEXT.get(number, text.removeprefix("DT_").lower())
    for text, number in Dt.items()
    if 0 < number < REF_OFFSET
}
NUMBERS: dict[str, int] = {name: number for number, name in NAMES.items()}


def name_of(number: int) -> str:
    """`float32` for 1, `float32_ref` for 101; a number that is no type is named as such."""
    if number > REF_OFFSET and number - REF_OFFSET in NAMES:
        return NAMES[number - REF_OFFSET] + "_ref"
    return NAMES.get(number, "unknown" if number == 0 else f"type {number}")


def base(number: int) -> int:
    """The type that a reference type refers to; any other type itself."""
    return number - REF_OFFSET if number > REF_OFFSET else number


def as_dt(number: int) -> Dt.ValueType:
    """The same number, typed as the enum."""
    return cast("Dt.ValueType", number)
