"""Parses and checks an expression, and derives its properties that do not depend on an op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gradrule.v1 import errors_pb2
from gradrule_server.errors import error
from gradrule_server.rules import dtypes
from gradrule_server.rules.language.functions import LOGIC, MIXING, RANDOM, UNARY
from gradrule_server.rules.language.parse import parse_form
from gradrule_server.rules.language.source import invalid_expression
from gradrule_server.rules.language.syntax_tree import (
    Call,
    Constant,
    Expression,
    Form,
    ParamUse,
    Variable,
    expressions_of,
    walk,
)


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
        return tuple(part for expression in expressions_of(self.form) for part in walk(expression))


def parse(expression: str, params: Sequence[str] = ()) -> Formula:
    """Parses and checks an expression over the variables and `params`.

    Raises:
        GradruleError: INVALID_EXPRESSION for a syntax error, or a number in place of a truth value; INVALID_RULE for an
            expression that is only a constant.
    """
    text, form = parse_form(expression, params)
    formula = Formula(text, form, tuple(params))
    for part in formula._parts:
        if isinstance(part, Call):
            _check_truth_values(text, part)
            _check_seed(text, part)
    if not formula.variables:
        raise error(
            errors_pb2.ERROR_REASON_INVALID_RULE,
            f"the rule {text.strip()[:80]!r} is only a constant: it names none of x, y, dy, default. "
            "A gradient of zeros is zeros_like(x), one of ones is ones_like(x)",
            field="expression",
        )
    return formula


def _mixes_samples(call: Call) -> bool:
    if call.function == "sum_to":
        return True
    if call.function not in MIXING or call.axes is None or call.axes.keeps_samples_apart:
        return False
    return any(isinstance(part, Variable) for part in walk(call))


def _check_truth_values(text: str, call: Call) -> None:
    """Refuses numbers in place of truth values, where they can be recognised without an op."""
    if call.function in LOGIC or call.function in ("any", "all"):
        wanted = call.arguments
    elif call.function == "where":
        wanted = call.arguments[:1]
    else:
        return
    for argument in wanted:
        if _is_number(argument):
            raise invalid_expression(
                text,
                argument.offset,
                f"{call.function!r} wants a truth value, such as x > 0, and this is a number; v != 0 makes one of it",
            )


def _check_seed(text: str, call: Call) -> None:
    """Refuses a seed that depends on variables, because a seed must be one number that the caller knows."""
    if call.function not in RANDOM:
        return
    seed = call.arguments[1]
    if not _is_number(seed) or any(isinstance(part, Variable) for part in walk(seed)):
        problem = "is a number or a param: it must be known without the op"
    elif isinstance(seed, Constant) and not float(seed.value).is_integer():
        problem = "is a whole number"
    else:
        return
    raise invalid_expression(text, seed.offset, f"the seed of {call.function!r} {problem}")


def _is_number(expression: Expression) -> bool:
    """Returns whether an expression is a number for every op; x and y may be bool."""
    match expression:
        case Constant(value=value):
            return not isinstance(value, bool)
        case ParamUse():
            return True
        case Variable(family=family):
            return family in ("dy", "default")
        case Call(function="where", arguments=(_, first, second)):
            return _is_number(first) or _is_number(second)
        case Call(function="zeros_like" | "ones_like" | "stop_gradient", arguments=(argument,)):
            return _is_number(argument)
        case Call(function="cast", arguments=(_, like)):
            return _is_number(like)
        case Call(function="cast", dtype=dtype):
            return dtype != dtypes.Dt.DT_BOOL
        case Call(function=function):
            gives_bool = function in LOGIC or function in ("compare", "any", "all")
            return not gives_bool and not (function in UNARY and UNARY[function].gives_bool)
