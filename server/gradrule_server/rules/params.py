"""Declares params of rules and their ranges (`> 0, integer`), checks values, and converts them to messages and back."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import error

ParamNumber = float | NDArray[np.float64]

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
        """Returns whether a number is in the range. Avoids NumPy, which would slow down every call with params."""
        return all(_OPERATORS[symbol](number, bound) for symbol, bound in self.bounds) and (
            not self.integer or (math.isfinite(number) and math.floor(number) == number)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Param:
    """A param of a rule.

    Attributes:
        name: Its name.
        default: Its default value; None: every use must give a value. An array broadcasts against x as in NumPy.
        description: Text for people.
        range: Conditions that every element must meet, `> 0, integer` for example; empty: no conditions.

    Raises:
        ValueError: The range is invalid, or the default is outside of it.
    """

    name: str
    default: ParamNumber | None = None
    description: str = ""
    range: str = ""
    _range: Range = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_range", parse_range(self.range))
        problem = None if self.default is None else self.problem(self.default)
        if problem is not None:
            raise ValueError(problem)

    def problem(self, value: ParamNumber) -> str | None:
        """Returns why a value is outside the range; None if it is inside."""
        outside = self._range.problem(value)
        return None if outside is None else f"param {self.name!r}: {outside}"

    def check(self, value: rule_pb2.ParamValue, field: str) -> None:
        """Raises INVALID_PARAM if the message holds no value, no real numbers, or a value outside the range."""
        outside = self.problem(read_param_value(value, self.name, field))
        if outside is not None:
            raise error(errors_pb2.ERROR_REASON_INVALID_PARAM, outside, field=field)


def write_param(param: Param) -> rule_pb2.RuleParam:
    """Returns the message that declares a param."""
    entry = rule_pb2.RuleParam(name=param.name, description=param.description, range=param.range)
    if param.default is not None:
        entry.default_value.CopyFrom(write_param_value(param.default))
    return entry


def read_param_value(value: rule_pb2.ParamValue, name: str, field: str) -> ParamNumber:
    """Returns a number, or a tensor as float64. Raises INVALID_PARAM for no value or a tensor without real numbers."""
    kind = value.WhichOneof("value")
    if kind == "number":
        return value.number
    if kind is None:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_PARAM, f"param {name!r} holds neither a number nor a tensor", field=field
        )
    try:
        array = tensor_codec.to_numpy(value.tensor)
    except ValueError as cause:
        raise error(errors_pb2.ERROR_REASON_INVALID_PARAM, f"param {name!r}: {cause}", field=field) from cause
    if array.dtype == object or array.dtype.kind in "cSU":
        raise error(
            errors_pb2.ERROR_REASON_INVALID_PARAM,
            f"param {name!r} is a tensor of {array.dtype.name}, and a param is of a float, int or bool type",
            field=field,
        )
    return array.astype(np.float64)


def write_param_value(value: ParamNumber) -> rule_pb2.ParamValue:
    """Returns the message that `read_param_value` reads."""
    if isinstance(value, np.ndarray):
        return rule_pb2.ParamValue(tensor=tensor_codec.to_message(value))
    return rule_pb2.ParamValue(number=value)


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
