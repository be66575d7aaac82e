"""Declares params of rules and their ranges (`> 0, integer`), and finds their values for a program and a call."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import Finding, GradruleError, did_you_mean, error
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import NodeLimits, tensor_fault

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
_USAGE = "a range consists of the conditions '> 0', '>= 0', '< 1', '<= 1' and 'integer', separated by commas"


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
            errors_pb2.ERROR_REASON_INVALID_PARAM, f"param {name!r} has neither a number nor a tensor", field=field
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


@functools.lru_cache(maxsize=1024)
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
            raise ValueError(f"{condition!r} is not a condition: {_USAGE}")
        else:
            bound = float(match[2])
            if math.isinf(bound):
                raise ValueError(f"{condition!r} is not a condition: the number is too large for float64")
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


@dataclass(slots=True)
class ParamTable:
    """Sets and returns the params of a program's bound rules.

    Attributes:
        bounds: Limits for tensors.
        message: The bound rules, which settings refer to by index, and labels; `write` completes it.
        settings: The values that do not depend on a call, by index of the rule and name of the param.
    """

    bounds: NodeLimits
    message: link_pb2.ParamTable = field(default_factory=link_pb2.ParamTable)
    settings: dict[tuple[int, str], rule_pb2.ParamValue] = field(default_factory=dict)

    @classmethod
    def read(cls, message: link_pb2.ParamTable, bounds: NodeLimits) -> ParamTable:
        """Returns the table that `write` wrote."""
        return cls(bounds, message, {(item.rule, item.name): item.value for item in message.settings})

    def write(self, used: Iterable[int]) -> link_pb2.ParamTable:
        """Returns the message for the front end. `used`: the rules that nodes have."""
        return link_pb2.ParamTable(
            rules=self.message.rules,
            settings=self._setting_messages(self.settings),
            default_labels=sorted(set(self.message.default_labels)),
            used=sorted(used),
        )

    def bind(self, name: str, label: str, declared: Sequence[Param], *, is_default_label: bool) -> None:
        """Adds a bound rule with its declared params, whose default values become settings.

        `is_default_label`: the caller chose no label.
        """
        params = [write_param(replace(param, default=None)) for param in declared]
        index = len(self.message.rules)
        self.message.rules.add(name=name, label=label, params=params, is_default_label=is_default_label)
        for param in declared:
            if param.default is not None:
                self.settings[index, param.name] = write_param_value(param.default)

    @staticmethod
    def _setting_messages(settings: Mapping[tuple[int, str], rule_pb2.ParamValue]) -> list[link_pb2.ParamSetting]:
        return [link_pb2.ParamSetting(rule=rule, name=name, value=value) for (rule, name), value in settings.items()]

    def call_settings(
        self, params: Mapping[str, Mapping[str, rule_pb2.ParamValue]], used: Container[int]
    ) -> list[link_pb2.ParamSetting]:
        """Returns the params of one call for the rules in `used`; values of the call replace values of the overrides.

        Raises UNKNOWN_PARAM, MISSING_PARAM, INVALID_PARAM.
        """
        settings = self.settings
        if params:
            settings = dict(settings)
            findings: list[Finding] = []
            for label, values in params.items():
                findings += self._set_by_label(settings, label, values)
            if findings:
                raise GradruleError(findings)
        missing = [
            Finding(
                errors_pb2.ERROR_REASON_MISSING_PARAM,
                f"rule {bound.name!r} of override {bound.label!r} needs param {param.name!r}: it has no default",
                field="params",
            )
            for index, bound in enumerate(self.message.rules)
            if index in used
            for param in bound.params
            if (index, param.name) not in settings
        ]
        if missing:
            raise GradruleError(missing)
        return self._setting_messages({key: value for key, value in settings.items() if key[0] in used})

    def set(
        self,
        settings: dict[tuple[int, str], rule_pb2.ParamValue],
        index: int,
        values: Mapping[str, rule_pb2.ParamValue],
        field: str,
    ) -> list[Finding]:
        """Sets params of one bound rule; returns findings for invalid ones.

        Args:
            settings: The values, which are updated.
            index: Index of the bound rule.
            values: New values by name of the param.
            field: The field of the request that holds the values.
        """
        bound = self.message.rules[index]
        declared = {param.name: param for param in bound.params}
        findings: list[Finding] = []
        for name, value in values.items():
            if name not in declared:
                findings.append(
                    Finding(
                        errors_pb2.ERROR_REASON_UNKNOWN_PARAM,
                        f"rule {bound.name!r} has no param {name!r}.{did_you_mean(name, declared)} "
                        f"Params: {', '.join(declared) or 'none'}",
                        field=f"{field}.{name}",
                    )
                )
                continue
            # Check the size first, because a few bytes can declare a tensor of any size.
            fault = tensor_fault(value.tensor, self.bounds) if value.WhichOneof("value") == "tensor" else None
            if fault:
                message = f"param {name!r} {fault[1]}"
                findings.append(Finding(errors_pb2.ERROR_REASON_INVALID_PARAM, message, field=f"{field}.{name}"))
                continue
            try:
                Param(name, range=declared[name].range).check(value, f"{field}.{name}")
            except GradruleError as cause:
                findings += cause.findings
            else:
                settings[index, name] = value
        return findings

    def _set_by_label(
        self,
        settings: dict[tuple[int, str], rule_pb2.ParamValue],
        label: str,
        values: Mapping[str, rule_pb2.ParamValue],
    ) -> list[Finding]:
        rules = self.message.rules
        indices = [index for index, bound in enumerate(rules) if bound.label == label]
        where = f"params[{label!r}]"
        if not indices:
            if label in self.message.default_labels:
                message = f"params name the label {label!r}, whose rule is 'default', which has no params"
            else:
                message = _unknown_label(label, {bound.label for bound in rules})
            return [Finding(errors_pb2.ERROR_REASON_UNKNOWN_PARAM, message, field=where)]
        # Overrides may be given the same label; set the value for each of their rules that has the param.
        declared = {index: {param.name for param in rules[index].params} for index in indices}
        findings: list[Finding] = []
        for name, value in values.items():
            targets = [index for index in indices if name in declared[index]] or indices[:1]
            if len(targets) > 1 and any(rules[index].is_default_label for index in targets):
                message = (
                    f"params name the label {label!r} and its param {name!r}, but {len(targets)} overrides share this "
                    f"label, and not all were given it: give each override a label of its own, or all of them this one"
                )
                findings.append(Finding(errors_pb2.ERROR_REASON_UNKNOWN_PARAM, message, field=f"{where}.{name}"))
                continue
            for index in targets:
                findings += self.set(settings, index, {name: value}, where)
        return findings


def _unknown_label(label: str, known: Iterable[str]) -> str:
    labels = sorted(known)
    return (
        f"params name the label {label!r}, which no override has.{did_you_mean(label, labels)} "
        f"Labels: {', '.join(map(repr, labels)) or 'none'}"
    )
