"""Builds the graph of a rule node by node, and tracks the types and shapes of its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradrule.common.dtypes import as_dt, dtype_name
from gradrule.common.op_inference import type_attr
from gradrule.v1 import graph_pb2, tensor_pb2
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.rules.signature import COMPUTED_IN, DIFFERENTIABLE, INTEGER_TYPES, NUMPY_TYPES

# Version of TensorFlow's graph format, which all supported releases of TensorFlow read.
_PRODUCER = 1087

Attr = int | bool | graph_pb2.AttrValue


class GraphBuilder:
    """Builds a graph. Every method returns the name of a node, which is the name of its first output.

    Values of a 16-bit type are computed in float32 (`COMPUTED_IN`): `variable` converts them when they enter, `add` and
    `constant` use float32 for a 16-bit type, and `result` rounds to the 16-bit type.
    """

    def __init__(self) -> None:
        self.graph = graph_pb2.Graph(versions=graph_pb2.Versions(producer=_PRODUCER))
        self._added: dict[tuple[object, ...], str] = {}
        self._counts: dict[str, int] = {}
        self._variables: dict[str, str] = {}

    def placeholder(self, name: str, dtype: int, *, scalar: bool = False) -> str:
        """Adds a placeholder of any shape, or of rank 0 (`scalar`)."""
        if ("placeholder", name) not in self._added:
            shape = graph_pb2.AttrValue(shape=tensor_pb2.TensorShape(unknown_rank=not scalar))
            self.graph.node.add(name=name, op="Placeholder", attr={"dtype": type_attr(dtype), "shape": shape})
            self._added["placeholder", name] = name
        return name

    def variable(self, placeholder: str, dtype: int) -> str:
        """Adds the value of a placeholder in the type that it is computed in."""
        if dtype not in COMPUTED_IN:
            return placeholder
        computed = self._cast(placeholder, dtype, COMPUTED_IN[dtype])
        self._variables[computed] = placeholder
        return computed

    def result(self, tensor: str, dtype: int) -> str:
        """Adds a value in its own type, rounded if that has 16 bits."""
        if dtype not in COMPUTED_IN:
            return tensor
        # A rule such as `dy` needs no casts at all.
        return self._variables.get(tensor) or self._cast(tensor, COMPUTED_IN[dtype], dtype)

    def cast(self, tensor: str, source: int, target: int) -> str:
        """Adds a conversion of element types. It does not round to 16 bits; see `rounded`."""
        source, target = COMPUTED_IN.get(source, source), COMPUTED_IN.get(target, target)
        return tensor if source == target else self._cast(tensor, source, target)

    def rounded(self, tensor: str, dtype: int) -> str:
        """Rounds a value of a 16-bit type to its bits; other values do not change."""
        if dtype not in COMPUTED_IN:
            return tensor
        return self._cast(self._cast(tensor, COMPUTED_IN[dtype], dtype), dtype, COMPUTED_IN[dtype])

    def _cast(self, tensor: str, source: int, target: int) -> str:
        no = graph_pb2.AttrValue(b=False)
        return self._add(
            "Cast", (tensor,), "Cast", {"SrcT": type_attr(source), "DstT": type_attr(target), "Truncate": no}
        )

    def constant(self, value: float | bool | list[int], dtype: int) -> str:
        """Adds a constant of rank 0, or a vector of ints."""
        dtype = COMPUTED_IN.get(dtype, dtype)
        content = np.asarray(value).astype(NUMPY_TYPES[dtype])
        raw = content.tobytes()
        key = ("constant", raw, content.ndim, dtype)
        if key not in self._added:
            shape = tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=size) for size in content.shape])
            tensor = tensor_pb2.Tensor(dtype=as_dt(dtype), tensor_shape=shape, tensor_content=raw)
            name = self._unique_name("Const")
            self.graph.node.add(
                name=name, op="Const", attr={"dtype": type_attr(dtype), "value": graph_pb2.AttrValue(tensor=tensor)}
            )
            self._added[key] = name
        return self._added[key]

    def add(self, op: str, *inputs: str, name: str | None = None, **attrs: Attr) -> str:
        """Adds a node.

        Args:
            op: Its op type.
            inputs: Its inputs.
            name: Its name, to which a number may be appended; None: the op type.
            attrs: Its attributes. An int is an element type.
        """
        return self._add(op, inputs, name or op, {key: _attr(value) for key, value in attrs.items()})

    def _add(self, op: str, inputs: tuple[str, ...], name: str, values: Mapping[str, graph_pb2.AttrValue]) -> str:
        node_key = (op, inputs, tuple((key, value.SerializeToString()) for key, value in sorted(values.items())))
        if node_key not in self._added:
            unique = self._unique_name(name)
            self.graph.node.add(name=unique, op=op, input=inputs, attr=values)
            self._added[node_key] = unique
        return self._added[node_key]

    def _unique_name(self, stem: str) -> str:
        number = self._counts.get(stem, 0)
        self._counts[stem] = number + 1
        return stem if number == 0 else f"{stem}_{number}"


def _attr(value: Attr) -> graph_pb2.AttrValue:
    if isinstance(value, graph_pb2.AttrValue):
        return value
    return graph_pb2.AttrValue(b=value) if isinstance(value, bool) else type_attr(COMPUTED_IN.get(value, value))


_REDUCED = "reduced/"


@dataclass(frozen=True, slots=True)
class Value:
    """A constant, or a tensor of the graph.

    Attributes:
        dtype: Its element type. The tensor of a value of a 16-bit type is float32.
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


def depends_on_variables(value: Value) -> bool:
    """Returns whether the shape of a value depends on more than params."""
    return any(not source.removeprefix(_REDUCED).startswith("param/") for source in value.sources)


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
        if dtype not in DIFFERENTIABLE and dtype != Dt.DT_BOOL:
            _require_integral(value.constant, dtype)
        return builder.constant(value.constant, dtype)
    assert value.tensor is not None
    if value.dtype == dtype:
        return value.tensor
    if value.weak and dtype not in DIFFERENTIABLE:
        raise TypeConflictError(
            f"a param has a float type and is combined with {dtype_name(dtype)}: cast the integers, cast(v, dy)"
        )
    return builder.cast(value.tensor, value.dtype, dtype)


def _require_integral(constant: float | bool, dtype: int) -> None:
    name = dtype_name(dtype)
    if not float(constant).is_integer():
        raise TypeConflictError(f"{constant!r} is combined with {name}: cast the integers to a float type, cast(v, dy)")
    bits = NUMPY_TYPES[dtype].itemsize * 8 if dtype in INTEGER_TYPES else None
    if bits is None or abs(float(constant)) >= 2.0 ** (bits - 1):
        raise TypeConflictError(f"{constant!r} does not fit {name}: cast the integers first, cast(v, dy)")


def _conflict(found: Sequence[int]) -> str:
    names = " and ".join(dtype_name(dtype) for dtype in found)
    integers = [dtype for dtype in found if dtype not in DIFFERENTIABLE]
    if integers and len(integers) < len(found):
        one = f"the {dtype_name(integers[0])} one"
    else:
        one = "one, because types are never converted silently"
    return f'{names} are combined: cast {one}, for example cast(v, x) or cast(v, "float32")'
