"""What an expression is once it is read: operators and calls are one thing, every name is resolved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    """A number (as float64) or a truth value."""

    value: float | bool
    offset: int


@dataclass(frozen=True, slots=True)
class Variable:
    """`x1`: family `x`, index 1. `bare`: written without an index, which `each` reads as "of this input"."""

    family: str
    index: int
    bare: bool
    offset: int

    @property
    def name(self) -> str:
        return f"{self.family}{self.index}"


@dataclass(frozen=True, slots=True)
class ParamUse:
    """A param's value."""

    name: str
    offset: int


@dataclass(frozen=True, slots=True)
class Axes:
    """What a reduction reduces: `all`, all but axis 0 (`sample`), all but the last axis (`channel`), or a `list`."""

    kind: str
    axes: tuple[int, ...] = ()

    @property
    def keeps_samples_apart(self) -> bool:
        """True if axis 0 is certainly not reduced. A negative axis may be axis 0."""
        return self.kind == "sample" or (self.kind == "list" and all(axis > 0 for axis in self.axes))


EVERYTHING = Axes("all")


@dataclass(frozen=True, slots=True)
class Call:
    """A function, or an operator under its symbol, on arguments.

    `dtype`: of `cast(v, "float32")`. `comparisons`: the symbols of a chain, one less than its arguments.
    """

    function: str
    arguments: tuple[Expression, ...]
    offset: int
    axes: Axes | None = None
    dtype: int | None = None
    comparisons: tuple[str, ...] = ()


Expression = Constant | Variable | ParamUse | Call


@dataclass(frozen=True, slots=True)
class Single:
    """One expression for the one differentiable input."""

    expression: Expression


@dataclass(frozen=True, slots=True)
class First:
    """`first(expr)`: for the first differentiable input, None for the others."""

    expression: Expression


@dataclass(frozen=True, slots=True)
class Each:
    """`each(expr)`: the same formula for every differentiable input."""

    expression: Expression


@dataclass(frozen=True, slots=True)
class PerInput:
    """A tuple: an expression or None per input."""

    expressions: tuple[Expression | None, ...]


Form = Single | First | Each | PerInput


def expressions_of(form: Form) -> tuple[Expression, ...]:
    """The expressions in a form."""
    if isinstance(form, PerInput):
        return tuple(expression for expression in form.expressions if expression is not None)
    return (form.expression,)


def walk(expression: Expression) -> Iterator[Expression]:
    """The expression and all that it is made of."""
    pending = [expression]
    while pending:
        current = pending.pop()
        yield current
        if isinstance(current, Call):
            pending.extend(current.arguments)
