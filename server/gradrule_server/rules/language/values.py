"""Tracks the types and shapes of values while a formula is converted to a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradrule_server.rules import dtypes
from gradrule_server.rules.dtypes import Dt
from gradrule_server.rules.graph_builder import GraphBuilder

_REDUCED = "reduced/"


@dataclass(frozen=True, slots=True)
class Value:
    """A constant, or a tensor of the graph.

    Attributes:
        dtype: Its element type.
        tensor: The tensor; None for a constant.
        constant: The constant.
        weak: Whether it consists of literals and params only, so that it gets the type of values it is combined with.
        sources: The sources from which the shape is broadcast; empty for rank 0. `reduced/x0` is the shape of x0 with
            some axes of size 1.
    """

    dtype: int
    tensor: str | None
    constant: float | bool | None = None
    weak: bool = False
    sources: frozenset[str] = frozenset()

    @property
    def is_bool(self) -> bool:
        return self.dtype == Dt.DT_BOOL


class TypeConflictError(Exception):
    """Values cannot be combined; the message says why and what to write instead."""


def number(value: float) -> Value:
    """Returns the value of a literal, which is float64 until it is combined with a tensor."""
    return Value(Dt.DT_DOUBLE, None, float(value), weak=True)


def truth(value: bool) -> Value:
    """Returns the value of True or False."""
    return Value(Dt.DT_BOOL, None, bool(value))


def broadcast_sources(values: Iterable[Value]) -> frozenset[str]:
    """Returns the sources of the shape that the values broadcast to; x0 replaces reduced/x0."""
    joined = frozenset[str]().union(*(value.sources for value in values))
    return frozenset(
        source
        for source in joined
        if source.removeprefix(_REDUCED) == source or source.removeprefix(_REDUCED) not in joined
    )


def reduced_sources(value: Value) -> frozenset[str]:
    """Returns the sources of the shape of `value` with some axes reduced to size 1."""
    return frozenset(source if source.startswith(_REDUCED) else _REDUCED + source for source in value.sources)


def common_dtype(values: Sequence[Value], x_dtype: int, *, keep_bool: bool = False) -> int | None:
    """Returns the common type of values; None if all are weak and stay float64.

    All tensors must have one type, which literals, params and bools are converted to. For bools alone it is the type of
    x, or bool with `keep_bool`.

    Raises:
        TypeConflictError: Tensors have different types.
    """
    strong = {value.dtype for value in values if not value.weak and not value.is_bool}
    if len(strong) > 1:
        raise TypeConflictError(_conflict(sorted(strong)))
    if strong:
        return strong.pop()
    bools = [value for value in values if value.is_bool]
    if not bools:
        return None
    if keep_bool and len(bools) == len(values):
        return Dt.DT_BOOL
    return x_dtype


def coerce(value: Value, dtype: int, builder: GraphBuilder) -> str:
    """Returns the tensor of a value in `dtype`, with at most one Cast. Raises `TypeConflictError`."""
    if value.constant is not None:
        if dtype not in dtypes.DIFFERENTIABLE and dtype != Dt.DT_BOOL:
            _require_integral(value.constant, dtype)
        return builder.constant(value.constant, dtype)
    assert value.tensor is not None
    if value.dtype == dtype:
        return value.tensor
    if value.weak and dtype not in dtypes.DIFFERENTIABLE:
        raise TypeConflictError(
            f"a param is a number of a float type and meets {dtypes.dtype_name(dtype)}: cast the integers, cast(v, dy)"
        )
    return builder.add("Cast", value.tensor, SrcT=value.dtype, DstT=dtype, Truncate=False)


def _require_integral(constant: float | bool, dtype: int) -> None:
    name = dtypes.dtype_name(dtype)
    if not float(constant).is_integer():
        raise TypeConflictError(f"{constant!r} meets {name}: cast the integers to a float type, cast(v, dy)")
    bits = dtypes.NUMPY[dtype].itemsize * 8 if dtype in dtypes.INTEGERS else None
    if bits is None or abs(float(constant)) >= 2.0 ** (bits - 1):
        raise TypeConflictError(f"{constant!r} does not fit {name}: cast the integers first, cast(v, dy)")


def _conflict(found: Sequence[int]) -> str:
    names = " and ".join(dtypes.dtype_name(dtype) for dtype in found)
    integers = [dtype for dtype in found if dtype not in dtypes.DIFFERENTIABLE]
    if integers and len(integers) < len(found):
        return (
            f'{names} meet: cast the {dtypes.dtype_name(integers[0])} one, for example cast(v, x) or cast(v, "float32")'
        )
    return f'{names} meet, and nothing is converted silently: cast one, for example cast(v, x) or cast(v, "float32")'
