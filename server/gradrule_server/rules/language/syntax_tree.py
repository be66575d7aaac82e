"""Declares the syntax tree of the language: operators are calls, and all names are resolved."""

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
class Single:
    """An expression for an op with one differentiable input."""

    expression: Expression


@dataclass(frozen=True, slots=True)
class First:
    """`first(expr)`: the gradient of the first differentiable input; None for the others."""

    expression: Expression


@dataclass(frozen=True, slots=True)
class Each:
    """`each(expr)`: the same expression for every differentiable input."""

    expression: Expression


@dataclass(frozen=True, slots=True)
class PerInput:
    """A tuple: an expression or None for each input."""

    expressions: tuple[Expression | None, ...]


Form = Single | First | Each | PerInput


def expressions_of(form: Form) -> tuple[Expression, ...]:
    """Returns the expressions in a form."""
    if isinstance(form, PerInput):
        return tuple(expression for expression in form.expressions if expression is not None)
    return (form.expression,)


def walk(expression: Expression) -> Iterator[Expression]:
    """Yields the expression and all expressions within it."""
    pending = [expression]
    while pending:
        current = pending.pop()
        yield current
        if isinstance(current, Call):
            pending.extend(current.arguments)
