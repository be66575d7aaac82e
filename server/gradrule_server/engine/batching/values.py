"""Describes what the analysis knows of a tensor when a built function runs on a batch of B examples.

B is a symbol: the analysis holds for every number of examples. One example is one row of each per-example argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Shape: TypeAlias = "tuple[int | None, ...]"
"""Sizes of axes; None: unknown, but the same for every B."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The number `factor` * B, where `factor` is at least 1."""

    factor: int


class _Unknown:
    """An unknown number that does not depend on the batch."""

    def __repr__(self) -> str:
        return "?"


UNKNOWN = _Unknown()

Number: TypeAlias = "int | Extent | _Unknown"


@dataclass(frozen=True, slots=True)
class Uniform:
    """A tensor whose values and shape do not depend on the batch.

    shape: None where the rank is unknown. numbers: its integers, where they are few and known.
    """

    shape: Shape | None = None
    numbers: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class PerExample:
    """A tensor of shape (`rows` * B, *tail) whose rows i * `rows` to (i + 1) * `rows` depend on example i alone."""

    rows: int
    tail: Shape

    @property
    def rank(self) -> int:
        """Its rank, which is at least 1."""
        return 1 + len(self.tail)

    @property
    def elements(self) -> int | None:
        """Elements that belong to one example, if known."""
        return None if None in self.tail else self.rows * math.prod(size or 0 for size in self.tail)


@dataclass(frozen=True, slots=True)
class Unranked:
    """A tensor like `PerExample` whose shape is not known. The elements of an example lie together, in order."""


@dataclass(frozen=True, slots=True)
class GradientAxes:
    """Axes along which a gradient is summed because the op broadcast. They may include axes of size 1.

    rows: rows per example of that gradient; 0: it is not per example. with_batch: axis 0 is one of the axes.
    """

    rows: int
    with_batch: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """A small tensor of integers, at least one of which is an `Extent`; the others are independent of the batch."""

    numbers: np.ndarray


@dataclass(frozen=True, slots=True)
class Mixed:
    """A tensor that mixes examples, or may mix them. reason: the reason, as text."""

    reason: str


Value: TypeAlias = "Uniform | PerExample | Unranked | GradientAxes | Sizes | Mixed"


class NotPerExample(Exception):
    """An op may mix examples. Its text is the reason."""


def value_from_numbers(numbers: np.ndarray) -> Uniform | Sizes:
    """Returns the value of a tensor of these numbers."""
    if any(isinstance(number, Extent) for number in numbers.flat):
        return Sizes(numbers)
    known = all(isinstance(number, int) for number in numbers.flat)
    return Uniform(tuple(numbers.shape), numbers if known else None)


def as_array(numbers: Sequence[Number]) -> np.ndarray:
    """Returns a vector of numbers."""
    array = np.empty(len(numbers), object)
    array[:] = list(numbers)
    return array


def get_numbers(value: Value) -> np.ndarray:
    """Returns the numbers of a tensor. Raises `NotPerExample` if they are not known."""
    if isinstance(value, Sizes):
        return value.numbers
    if isinstance(value, Uniform):
        if value.numbers is not None:
            return value.numbers
        if value.shape is not None and None not in value.shape:
            return np.full([size or 0 for size in value.shape], UNKNOWN, object)
    raise NotPerExample("has sizes that depend on values that are not known before it runs")


def integers(value: Value) -> list[int] | None:
    """Returns the elements of a tensor if they are known integers that do not depend on the batch."""
    if not isinstance(value, Uniform) or value.numbers is None:
        return None
    return [int(number) for number in value.numbers.flat]


def multiplied(a: Any, b: Any) -> Number:
    """Returns the product of two numbers."""
    if isinstance(a, Extent) and isinstance(b, int) and b > 0:
        return Extent(a.factor * b)
    if isinstance(b, Extent) and isinstance(a, int) and a > 0:
        return Extent(b.factor * a)
    if 0 in (a, b):
        return 0
    return _plain(a, b, lambda x, y: x * y)


def added(a: Any, b: Any) -> Number:
    """Returns the sum of two numbers."""
    if isinstance(a, Extent) and isinstance(b, Extent):
        return Extent(a.factor + b.factor)
    return a if b == 0 else b if a == 0 else _plain(a, b, lambda x, y: x + y)


def subtracted(a: Any, b: Any) -> Number:
    """Returns the difference of two numbers."""
    if isinstance(a, Extent) and isinstance(b, Extent) and a.factor >= b.factor:
        return Extent(a.factor - b.factor) if a.factor > b.factor else 0
    return a if b == 0 else _plain(a, b, lambda x, y: x - y)


def divided(a: Any, b: Any) -> Number:
    """Returns the quotient of two numbers, rounded down."""
    if isinstance(a, Extent) and isinstance(b, Extent):
        return a.factor // b.factor
    if isinstance(a, Extent) and isinstance(b, int) and b > 0 and a.factor % b == 0:
        return Extent(a.factor // b)
    return _plain(a, b, lambda x, y: x // y)


def remainder(a: Any, b: Any) -> Number:
    """Returns the remainder of a division of two numbers, with the divisor's sign."""
    return _plain(a, b, lambda x, y: x % y)


def largest(a: Any, b: Any) -> Number:
    """Returns the larger of two numbers. B is at least 1."""
    if isinstance(a, Extent) and isinstance(b, Extent):
        return a if a.factor >= b.factor else b
    for extent, other in ((a, b), (b, a)):
        if isinstance(extent, Extent) and isinstance(other, int) and other <= extent.factor:
            return extent
    return _plain(a, b, max)


def is_equal(a: Any, b: Any) -> bool | _Unknown:
    """Returns whether two numbers are equal. Raises `NotPerExample` if that depends on B."""
    if isinstance(a, Extent) and isinstance(b, Extent):
        return a.factor == b.factor
    for extent, other in ((a, b), (b, a)):
        if isinstance(extent, Extent) and isinstance(other, int) and other < extent.factor:
            return False
    result = _plain(a, b, lambda x, y: x == y)
    return UNKNOWN if isinstance(result, _Unknown) else bool(result)


def _plain(a: Any, b: Any, function: Callable[[Any, Any], Number]) -> Number:
    if isinstance(a, Extent) or isinstance(b, Extent):
        raise NotPerExample("computes with the number of examples")
    if isinstance(a, _Unknown) or isinstance(b, _Unknown):
        return UNKNOWN
    try:
        return function(a, b)
    except ZeroDivisionError:
        raise NotPerExample("divides sizes by zero") from None


Attr: TypeAlias = Callable[[str], Any]
Rule: TypeAlias = "Callable[[list[Value], Attr, list[Shape | None]], Value | list[Value]]"
"""Returns the outputs of an op for its inputs, its attributes and TensorFlow's shapes of the outputs."""


def require_per_example(value: Value, *, least_rank: int = 1) -> PerExample:
    """Returns the value. Raises `NotPerExample` unless it is per example and has at least rank `least_rank`."""
    if not isinstance(value, PerExample):
        raise NotPerExample("has the batch in an input where it mixes examples")
    if value.rank < least_rank:
        raise NotPerExample("works along the batch")
    return value


def require_uniform(*values: Value) -> None:
    """Raises `NotPerExample` if one of the values depends on the batch."""
    if not all(isinstance(value, Uniform) for value in values):
        raise NotPerExample("has the batch in an input where it mixes examples")


def read_axes(value: Value, rank: int) -> set[int]:
    """Returns the axes that an input names. Raises `NotPerExample` if the batch axis is among them."""
    found = integers(value)
    if found is None:
        raise NotPerExample("works along axes that are not known before it runs")
    return require_other_axes(found, rank)


def require_other_axes(axes: Sequence[int], rank: int) -> set[int]:
    """Returns the axes, counted from 0. Raises `NotPerExample` if the batch axis is among them."""
    counted = {axis % rank for axis in axes}
    if 0 in counted:
        raise NotPerExample("works along the batch (axis 0)")
    return counted


def get_output_tail(shape: Shape | None) -> Shape:
    """Returns the sizes of an output after axis 0, as TensorFlow knows them. Raises `NotPerExample` for no rank."""
    if not shape:
        raise NotPerExample("gives a tensor whose rank is not known")
    return shape[1:]


def require_same_rows(value: Value, like: PerExample) -> None:
    """Raises `NotPerExample` if the value has another number of rows per example, or is the number of examples."""
    if isinstance(value, PerExample):
        if value.rows != like.rows:
            raise NotPerExample("combines tensors of different numbers of rows per example")
    elif not isinstance(value, Uniform):
        raise NotPerExample("takes the number of examples where it may mix them")


def read_target_shape(sizes: Value) -> tuple[int, Shape]:
    """Returns rows per example and tail of a tensor of this shape, whose first size must be a multiple of B."""
    numbers = list(get_numbers(sizes).flat)
    if not numbers or not isinstance(numbers[0], Extent) or any(isinstance(number, Extent) for number in numbers[1:]):
        raise NotPerExample("gives a shape in which the batch is not axis 0")
    return numbers[0].factor, tuple(None if number is UNKNOWN else number for number in numbers[1:])


def require_equal_rows(values: Sequence[Value]) -> PerExample:
    """Returns the first value. Raises `NotPerExample` unless all are per example with equal numbers of rows."""
    first = require_per_example(values[0])
    for value in values:
        require_same_rows(require_per_example(value), first)
    return first
