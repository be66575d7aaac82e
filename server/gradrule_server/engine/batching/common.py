"""What the rules of ops share. They raise `NotPerExample` where an op may mix examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gradrule_server.engine.batching.values import (
    UNKNOWN,
    Extent,
    NotPerExample,
    PerExample,
    Shape,
    Uniform,
    Value,
    integers,
    numbers_of,
)

Attr: TypeAlias = Callable[[str], Any]
Rule: TypeAlias = "Callable[[list[Value], Attr, list[Shape | None]], Value | list[Value]]"
"""Of the inputs, the attributes and TensorFlow's shapes of the outputs."""


def batched(value: Value, *, least_rank: int = 1) -> PerExample:
    """Returns the value, which must be per example; `NotPerExample` where it is not."""
    if not isinstance(value, PerExample):
        raise NotPerExample("has the batch in an input where it mixes examples")
    if value.rank < least_rank:
        raise NotPerExample("works along the batch")
    return value


def require_uniform(*values: Value) -> None:
    """`NotPerExample` where one of the values depends on the batch."""
    if not all(isinstance(value, Uniform) for value in values):
        raise NotPerExample("has the batch in an input where it mixes examples")


def axes_of(value: Value, rank: int) -> set[int]:
    """Axes that an input names, which must not be the batch's."""
    found = integers(value)
    if found is None:
        raise NotPerExample("works along axes that are not known before it runs")
    return away_from_batch(found, rank)


def away_from_batch(axes: Sequence[int], rank: int) -> set[int]:
    """Returns the axes, counted from 0; `NotPerExample` where the batch's is among them."""
    counted = {axis % rank for axis in axes}
    if 0 in counted:
        raise NotPerExample("works along the batch (axis 0)")
    return counted


def tail_of(shape: Shape | None) -> Shape:
    """The tail that TensorFlow knows of an output."""
    if not shape:
        raise NotPerExample("gives a tensor whose rank is not known")
    return shape[1:]


def require_same_rows(value: Value, like: PerExample) -> None:
    """`NotPerExample` where the value has another number of rows per example, or is the number of examples."""
    if isinstance(value, PerExample):
        if value.rows != like.rows:
            raise NotPerExample("combines tensors of different numbers of rows per example")
    elif not isinstance(value, Uniform):
        raise NotPerExample("takes the number of examples where it may mix them")


def target_of(sizes: Value) -> tuple[int, Shape]:
    """Rows per example and tail of a tensor of this shape, whose first size must be a multiple of B."""
    numbers = list(numbers_of(sizes).flat)
    if not numbers or not isinstance(numbers[0], Extent) or any(isinstance(number, Extent) for number in numbers[1:]):
        raise NotPerExample("gives a shape in which the batch is not axis 0")
    return numbers[0].factor, tuple(None if number is UNKNOWN else number for number in numbers[1:])


def joined(values: Sequence[Value]) -> PerExample:
    """Returns the first of values that must all be per example, with the same number of rows each."""
    first = batched(values[0])
    for value in values:
        require_same_rows(batched(value), first)
    return first
