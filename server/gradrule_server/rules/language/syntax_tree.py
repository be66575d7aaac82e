"""Declares the syntax tree of the language, a checked expression (`Formula`), and the names in expressions.

Operators are calls, and all names are resolved.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gradrule_server.rules.language.functions import CONSTANTS, FUNCTIONS, MIXING, SHAPE_ONLY
from gradrule_server.rules.language.source import quoted

FAMILIES = ("x", "y", "dy", "default")

_VARIABLE = re.compile(r"(x|y|dy|default)(0|[1-9][0-9]{0,5})?")
_RESERVED = re.compile(r"(x|y|dy|default)[0-9]*")
_MAX_LENGTH = 64
_MAX_LISTED = 12


def split_variable(name: str) -> tuple[str, int, bool] | None:
    """Returns family, index, and whether the index was omitted; None if the name is not a variable's."""
    match = _VARIABLE.fullmatch(name)
    if match is None:
        return None
    return match[1], int(match[2] or 0), match[2] is None


def param_name_problem(name: str) -> str | None:
    """Returns why a param cannot have this name; None if it can."""
    if len(name) > _MAX_LENGTH:
        return f"a param's name has at most {_MAX_LENGTH} characters, this one has {len(name)}: {quoted(name)}"
    if not (name.isidentifier() and name.isascii()):
        return f"{name!r} is not an identifier: use letters, digits and _, and no digit at the start"
    if keyword.iskeyword(name):
        return f"{name!r} is a keyword of the language; use {name + '_'!r}, for example"
    if _RESERVED.fullmatch(name):
        return f"{name!r} is a variable of the language (x, y, dy and default, with or without an index)"
    if name in CONSTANTS:
        return f"{name!r} is a constant of the language"
    return None


def is_function(name: str) -> bool:
    """Returns whether this is the name of a function; only params of the catalogue may have such a name."""
    return name in FUNCTIONS


def declared_params_text(params: Sequence[str]) -> str:
    """Returns the declared params as text for an error: `the declared params (alpha, beta)`."""
    if not params:
        return "declared params (this rule has none)"
    return f"the declared params ({', '.join(params[:_MAX_LISTED])}{', …' if len(params) > _MAX_LISTED else ''})"


@dataclass(frozen=True, slots=True)
class Constant:
    """A number (as float64) or a truth value."""

    value: float | bool
    offset: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable: `x1` has family `x` and index 1. `bare`: whether the index is omitted; `each` then sets it."""

    family: str
    index: int
    bare: bool
    offset: int

    @property
    def name(self) -> str:
        return f"{self.family}{self.index}"


@dataclass(frozen=True, slots=True)
class ParamUse:
    """The value of a param."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a reduction: `all`, all but axis 0 (`sample`), all but the last axis (`channel`), or a `list`."""

    kind: str
    axes: tuple[int, ...] = ()

    @property
    def keeps_samples_apart(self) -> bool:
        """Whether axis 0 is certainly not reduced. A negative axis may be axis 0."""
        return self.kind == "sample" or (self.kind == "list" and all(axis > 0 for axis in self.axes))


EVERYTHING = Axes("all")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function, or of an operator by its symbol.

    Attributes:
        function: The function or symbol.
        arguments: The arguments.
        offset: Position in the text.
        axes: The axes of a reduction.
        dtype: The type in `cast(v, "float32")`.
        comparisons: The symbols of a chain of comparisons, one less than the arguments.
    """

    function: str
    arguments: tuple[Expression, ...]
    offset: int
    axes: Axes | None = None
    dtype: int | None = None
    comparisons: tuple[str, ...] = ()


Expression = Constant | Variable | ParamUse | Call


@dataclass(frozen=True, slots=True)
class Form:
    """What an expression gives to which inputs.

    Attributes:
        kind: `single`: one expression for an op with one differentiable input; `first`: one for the first
            differentiable input; `each`: one for every differentiable input; `tuple`: one, or None, for each input.
        expressions: The expressions.
    """

    kind: Literal["single", "first", "each", "tuple"]
    expressions: tuple[Expression | None, ...]

    @property
    def given(self) -> tuple[Expression, ...]:
        """The expressions that are not None."""
        return tuple(expression for expression in self.expressions if expression is not None)


def walk(expression: Expression) -> Iterator[Expression]:
    """Yields the expression and all expressions within it."""
    pending = [expression]
    while pending:
        current = pending.pop()
        yield current
        if isinstance(current, Call):
            pending.extend(current.arguments)


def depends_on_dy(expression: Expression) -> bool:
    """Returns whether the value depends on the values of dy or default, not only on their shape or type."""
    pending = [expression]
    while pending:
        current = pending.pop()
        if isinstance(current, Variable) and current.family in ("dy", "default"):
            return True
        if isinstance(current, Call):
            unused = SHAPE_ONLY.get(current.function, ())
            pending.extend(part for index, part in enumerate(current.arguments) if index not in unused)
    return False


def is_zero(expression: Expression) -> bool:
    """Returns whether an expression is written as zero: 0 or zeros_like(v)."""
    if isinstance(expression, Constant):
        return expression.value == 0
    return isinstance(expression, Call) and expression.function == "zeros_like"


@dataclass(frozen=True)
class Formula:
    """A checked expression.

    Attributes:
        text: The expression as written, with blanks in place of line breaks.
        form: Its syntax tree.
        params: Names of the declared params.
    """

    text: str
    form: Form
    params: tuple[str, ...]

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables in the expression, with their index: `x` is `x0`."""
        return frozenset(part.name for part in self._parts if isinstance(part, Variable))

    @cached_property
    def params_used(self) -> frozenset[str]:
        """The params in the expression."""
        return frozenset(part.name for part in self._parts if isinstance(part, ParamUse))

    @cached_property
    def uses_default(self) -> bool:
        """Whether the expression needs the op's own gradient."""
        return any(isinstance(part, Variable) and part.family == "default" for part in self._parts)

    @cached_property
    def per_sample(self) -> bool:
        """Whether the gradient of an example along axis 0 never depends on other examples. Negative axes count as 0."""
        return not any(isinstance(part, Call) and _mixes_samples(part) for part in self._parts)

    @cached_property
    def _parts(self) -> tuple[Expression, ...]:
        return tuple(part for expression in self.form.given for part in walk(expression))


def _mixes_samples(call: Call) -> bool:
    if call.function == "sum_to":
        return True
    if call.function not in MIXING or call.axes is None or call.axes.keeps_samples_apart:
        return False
    return any(isinstance(part, Variable) for part in walk(call))
