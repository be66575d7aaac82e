"""Declares params of rules, checks their values, and converts them from and to messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import error
from gradrule_server.rules.ranges import Range, parse_range

ParamNumber = float | NDArray[np.float64]


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
