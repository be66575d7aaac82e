"""Parses ranges of params, such as `> 0, integer`, and checks values against them."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_INTEGER = "integer"
_MAX_LENGTH = 256
_COMPARISON = re.compile(r"(>=|<=|>|<)\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_USAGE = "a range is made of the conditions '> 0', '>= 0', '< 1', '<= 1' and 'integer', separated by commas"


@dataclass(frozen=True, slots=True)
class Range:
    """Conditions that every element of a value must meet; without conditions every value is in the range, even NaN.

    Attributes:
        text: The range as written.
        bounds: Comparisons: operator and number.
        integer: Whether elements must be whole numbers, which excludes infinity.
    """

    text: str = ""
    bounds: tuple[tuple[str, float], ...] = ()
    integer: bool = False

    def problem(self, value: float | NDArray[np.float64]) -> str | None:
        """Returns why a value is outside the range; None if it is inside. NaN meets no condition."""
        if not isinstance(value, np.ndarray):
            return None if self._contains(value) else f"{value:g} is outside its range: {self.text}"
        numbers = value.ravel()
        inside = np.ones(numbers.shape, bool)
        for symbol, bound in self.bounds:
            inside &= _OPERATORS[symbol](numbers, bound)
        if self.integer:
            inside &= np.isfinite(numbers) & (np.floor(numbers) == numbers)
        if inside.all():
            return None
        first = int(np.argmin(inside))
        return f"{numbers[first]:g} (element {first} of the tensor) is outside its range: {self.text}"

    def _contains(self, number: float) -> bool:
        """Returns whether a number is in the range. Does not use NumPy, because every call with params does this."""
        return all(_OPERATORS[symbol](number, bound) for symbol, bound in self.bounds) and (
            not self.integer or (math.isfinite(number) and math.floor(number) == number)
        )


def parse_range(text: str) -> Range:
    """Parses a range. Raises `ValueError` for invalid text, or a range that contains no number."""
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"a range has at most {_MAX_LENGTH} characters, this one has {len(text)}: {_USAGE}")
    if not text.strip():
        return Range()
    bounds: list[tuple[str, float]] = []
    integer = False
    for part in text.split(","):
        condition = part.strip()
        match = _COMPARISON.fullmatch(condition)
        if condition == _INTEGER:
            integer = True
        elif match is None:
            raise ValueError(f"{condition!r} is no condition: {_USAGE}")
        else:
            bound = float(match[2])
            if math.isinf(bound):
                raise ValueError(f"{condition!r} is no condition: the number is too large for float64")
            bounds.append((match[1], bound))
    found = Range(text.strip(), tuple(bounds), integer)
    if _is_empty(found):
        raise ValueError(f"no number is in the range {found.text!r}")
    return found


def _is_empty(range_: Range) -> bool:
    """Returns whether no number is in the range."""
    lows = [bound for symbol, bound in range_.bounds if symbol.startswith(">")]
    highs = [bound for symbol, bound in range_.bounds if symbol.startswith("<")]
    if not lows or not highs:
        return False
    low, high = max(lows), min(highs)
    candidates = (math.floor(low), math.floor(low) + 1.0) if range_.integer else (low, high, low + (high - low) / 2)
    return all(range_.problem(number) is not None for number in candidates)
