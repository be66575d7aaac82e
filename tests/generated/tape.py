"""A tape of NumPy arrays with reverse-mode differentiation; what a pull-back computes is on the tape again.

`Value` is an array that knows how it was computed, `Record` is one computation. A record of a graph's node keeps the
rule of its override beside its own gradient; `Pass` says which of the two a differentiation uses.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Gradients: TypeAlias = "list[Value | None]"
Pull: TypeAlias = "Callable[[Gradients, Pass], Sequence[Value | None]]"
_serial = itertools.count()


class Pass(enum.Enum):
    """FIRST differentiates the ys; AGAIN differentiates the gradients of the first."""

    FIRST = enum.auto()
    AGAIN = enum.auto()


@dataclass(eq=False)
class Record:
    """One computation. `own` and `rule`: from upstream gradients of the outputs to gradients of `inputs`.

    origin: the override's match that it computes. fills: whether missing upstream gradients become zeros where another
    output has one. blocks: no gradient passes. enters: it hands a value to a loop or branch. sources: what it depends
    on; None: its inputs. through: the outputs as other records computed them, if it stands for a subgraph with a rule;
    where the rule does not hold, gradients go on there, so that a node inside gets the sum of its upstream gradients.
    """

    inputs: Sequence[Value]
    own: Pull
    rule: Pull | None = None
    every_order: bool = False
    origin: Any = None
    fills: bool = True
    blocks: bool = False
    enters: bool = False
    sources: Sequence[Value] | None = None
    through: Sequence[Value] = ()
    outputs: list[Value] = field(default_factory=list)
    serial: int = field(default_factory=lambda: next(_serial))

    def give(self, data: Any) -> Value:
        """Adds an output."""
        self.outputs.append(Value(data, self))
        return self.outputs[-1]

    def pull(self, upstream: Gradients, stage: Pass) -> Sequence[tuple[Value, Value | None]]:
        """The values that gradients go on to, with their gradients."""
        given = [
            zeros_like(output) if dy is None and output.is_float and self.fills else dy
            for output, dy in zip(self.outputs, upstream, strict=True)
        ]
        if self.rule is not None and (stage is Pass.FIRST or self.every_order):
            return list(zip(self.inputs, self.rule(given, stage), strict=True))
        if self.through and stage is Pass.AGAIN:
            return list(zip(self.through, given, strict=True))
        return list(zip(self.inputs, self.own(given, stage), strict=True))


@dataclass(eq=False)
class Value:
    """An array, and the record that computed it; None: a constant or an input."""

    data: Array
    record: Record | None = None

    def __post_init__(self) -> None:
        self.data = np.asarray(self.data)

    @property
    def is_float(self) -> bool:
        return bool(np.issubdtype(self.data.dtype, np.floating))

    def __add__(self, other: Any) -> Value:
        return add(self, as_value(other))

    def __radd__(self, other: Any) -> Value:
        return add(as_value(other), self)

    def __sub__(self, other: Any) -> Value:
        return add(self, -as_value(other))

    def __rsub__(self, other: Any) -> Value:
        return add(as_value(other), -self)

    def __mul__(self, other: Any) -> Value:
        return mul(self, as_value(other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Value:
        return mul(self, reciprocal(as_value(other)))

    def __rtruediv__(self, other: Any) -> Value:
        return mul(as_value(other), reciprocal(self))

    def __neg__(self) -> Value:
        return _one(-self.data, [self], lambda dy: [-dy])


def as_value(value: Any) -> Value:
    return value if isinstance(value, Value) else Value(np.asarray(value))


def constant(value: Value) -> Value:
    """The same array without its history."""
    return Value(value.data)


def zeros_like(value: Value) -> Value:
    return Value(np.zeros_like(value.data))


def _one(data: Any, inputs: Sequence[Value], pull: Callable[[Value], Sequence[Value | None]]) -> Value:
    """One output, whose upstream gradient is always there."""

    def own(upstream: Gradients, stage: Pass) -> Sequence[Value | None]:
        assert upstream[0] is not None
        return pull(upstream[0])

    return Record(inputs, own).give(data)


def add(a: Value, b: Value) -> Value:
    return _one(a.data + b.data, [a, b], lambda dy: [sum_to(dy, a), sum_to(dy, b)])


def mul(a: Value, b: Value) -> Value:
    return _one(a.data * b.data, [a, b], lambda dy: [sum_to(dy * b, a), sum_to(dy * a, b)])


def reciprocal(a: Value) -> Value:
    return _one(1 / a.data, [a], lambda dy: [-dy / (a * a)])


def matmul(a: Value, b: Value) -> Value:
    return _one(a.data @ b.data, [a, b], lambda dy: [matmul(dy, transpose(b)), matmul(transpose(a), dy)])


def transpose(a: Value) -> Value:
    return _one(a.data.T, [a], lambda dy: [transpose(dy)])


def cos(a: Value) -> Value:
    return _one(np.cos(a.data), [a], lambda dy: [-dy * sin(a)])


def sin(a: Value) -> Value:
    return _one(np.sin(a.data), [a], lambda dy: [dy * cos(a)])


def sign(a: Value) -> Value:
    return Value(np.sign(a.data))


def absolute(a: Value) -> Value:
    return _one(np.abs(a.data), [a], lambda dy: [dy * sign(a)])


def where(condition: Array, a: Any, b: Any) -> Value:
    a, b = as_value(a), as_value(b)

    def pull(dy: Value) -> Sequence[Value]:
        return [sum_to(dy * condition.astype(dy.data.dtype), a), sum_to(dy * (~condition).astype(dy.data.dtype), b)]

    return _one(np.where(condition, a.data, b.data), [a, b], pull)


def cast(a: Value, dtype: Any) -> Value:
    if not a.is_float or not np.issubdtype(dtype, np.floating):
        return Value(a.data.astype(dtype))
    return _one(a.data.astype(dtype), [a], lambda dy: [cast(dy, a.data.dtype)])


def total(a: Value, axis: int | None = None, *, keepdims: bool = False) -> Value:
    def pull(dy: Value) -> Sequence[Value]:
        if axis is not None and not keepdims:
            dy = _reshape(dy, np.expand_dims(dy.data, axis).shape)
        return [broadcast(dy, a.data.shape)]

    return _one(a.data.sum(axis, keepdims=keepdims), [a], pull)


def broadcast(a: Value, shape: tuple[int, ...]) -> Value:
    return _one(np.broadcast_to(a.data, shape), [a], lambda dy: [sum_to(dy, a)])


def sum_to(a: Value, like: Value) -> Value:
    """Sums the axes along which `like` was broadcast to the shape of `a`."""
    while a.data.ndim > like.data.ndim:
        a = total(a, 0)
    for axis, size in enumerate(like.data.shape):
        if size == 1 and a.data.shape[axis] != 1:
            a = total(a, axis, keepdims=True)
    return a


def _reshape(a: Value, shape: tuple[int, ...]) -> Value:
    return _one(a.data.reshape(shape), [a], lambda dy: [_reshape(dy, a.data.shape)])


def gradients(
    ys: Sequence[Value],
    upstream: Gradients,
    xs: Sequence[Value],
    stage: Pass,
    *,
    partial: bool = False,
    visit: Callable[[Record], bool] = lambda record: True,
) -> Gradients:
    """The gradients of the xs, None where nothing connects.

    partial: xs count as independent of one another, and the first of equal xs gets the gradient. visit: whether
    gradients pass through a record.
    """
    found: dict[int, Value] = {}
    stops = {id(x) for x in xs} if partial else set()
    waiting: list[tuple[int, Record]] = []
    seen: set[int] = set()

    def arrive(value: Value, dy: Value | None) -> None:
        if dy is None or not value.is_float:
            return
        found[id(value)] = found[id(value)] + dy if id(value) in found else dy
        record = value.record
        if record is not None and id(value) not in stops and record.serial not in seen:
            seen.add(record.serial)
            heapq.heappush(waiting, (-record.serial, record))

    for y, dy in zip(ys, upstream, strict=True):
        arrive(y, dy)
    while waiting:
        _, record = heapq.heappop(waiting)
        dys = [None if id(output) in stops else found.get(id(output)) for output in record.outputs]
        if all(dy is None for dy in dys) or not visit(record):
            continue
        for value, dy in record.pull(dys, stage):
            arrive(value, dy)
    if not partial:
        return [found.get(id(x)) for x in xs]
    return [found.pop(id(x), None) for x in xs]
