"""Ranges of params: which values a rule takes, as text for people and as conditions that a value must meet."""

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
    """Conditions that every element of a value must meet; none: every value is in it, NaN too.

    `text`: as written. `bounds`: comparisons with a number. `integer`: whole numbers alone, so no infinity.
    """

    text: str = ""
    bounds: tuple[tuple[str, float], ...] = ()
    integer: bool = False

    def problem(self, value: float | NDArray[np.float64]) -> str | None:
        """Why the value is outside; None if it is inside. NaN meets no condition."""
        if not isinstance(value, np.ndarray):
            return None if self._holds(value) else f"{value:g} is outside its range: {self.text}"
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

    def _holds(self, number: float) -> bool:
        """The same for one number, without NumPy: this is on the way of every call with params."""
        return all(_OPERATORS[symbol](number, bound) for symbol, bound in self.bounds) and (
            not self.integer or (math.isfinite(number) and math.floor(number) == number)
        )


def parse_range(text: str) -> Range:
    """The range that `text` says: `> 0, integer`. ValueError where it says none, or one that no number is in."""
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


def _is_empty(asked: Range) -> bool:
    """True if the bounds contradict each other."""
    lows = [bound for symbol, bound in asked.bounds if symbol.startswith(">")]
    highs = [bound for symbol, bound in asked.bounds if symbol.startswith("<")]
    if not lows or not highs:
        return False
    low, high = max(lows), min(highs)
    tried = (math.floor(low), math.floor(low) + 1.0) if asked.integer else (low, high, low + (high - low) / 2)
    return all(asked.problem(number) is not None for number in tried)
