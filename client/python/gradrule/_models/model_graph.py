"""Builds the graph of a model: values with a memory layout, scopes, constants, and calls of composite operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from gradrule._builder.graph import Graph
from gradrule._builder.handles import TensorHandle
from gradrule._models.composite_ops import COMPOSITE_OPS, function_of
from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name

Size: TypeAlias = "int | TensorHandle"
"""A known size of an axis, or an int32 scalar of the graph."""


class UnsupportedOpError(Exception):
    """Reports arguments of an operation that cannot be converted; the message says which."""


@dataclass(frozen=True, slots=True)
class Step:
    """Computes a comparison as numbers, by an operation that rules of spikes can name.

    Attributes:
        dtype: Name of the type of the numbers.
        add: Adds the operation; returns its result.
    """

    dtype: str
    add: Callable[[], Value]


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the model.

    Attributes:
        handle: The tensor in the graph.
        rank: Its number of axes.
        channels_last: Whether the second axis of the model is the last axis of the tensor.
        other: The same value in the other layout, if a node for it was added.
        step: For comparisons: computes them as 0 and 1.
        parts: For tensors that were stacked: the new axis and the tensors.
    """

    handle: TensorHandle
    rank: int
    channels_last: bool = False
    other: Value | None = field(default=None, repr=False)
    step: Step | None = field(default=None, repr=False)
    parts: tuple[int, Sequence[Value]] | None = field(default=None, repr=False)

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return dtype_name(self.handle.number)


class ModelGraph:
    """Adds nodes of a model to a graph. Names of nodes are `scope/OpType`, made unique.

    Attributes:
        graph: The graph.
        function_names: Names of the functions that were written for it, those of inner graphs included.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.function_names: set[str] = set()
        self._scope = ""
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], TensorHandle] = {}

    @contextlib.contextmanager
    def scope(self, path: str) -> Iterator[None]:
        """Puts `path/` before the names of nodes that are added inside the context. `path`: Empty: no prefix."""
        outer, self._scope = self._scope, f"{path}/" if path else ""
        try:
            yield
        finally:
            self._scope = outer

    def nested(self) -> ModelGraph:
        """Returns an empty graph that becomes a function of this one."""
        inner = ModelGraph()
        inner.function_names = self.function_names
        return inner

    def op(self, op_type: str, *inputs: Any, name: str = "", **attrs: Any) -> TensorHandle:
        """Adds a node with one output in the scope. `name`: Its name within the scope; default: the op type."""
        return self.graph.op_output(op_type, *inputs, name=self._scope + (name or op_type), **attrs)

    def ops(self, op_type: str, *inputs: Any, name: str = "", **attrs: Any) -> tuple[TensorHandle, ...]:
        """Adds a node in the scope; returns its outputs."""
        found = self.graph.op(op_type, *inputs, name=self._scope + (name or op_type), **attrs)
        return found if isinstance(found, tuple) else (found,)

    def constant(self, value: Any, dtype: str) -> TensorHandle:
        """Returns a constant; equal constants are one node at the top level of the graph."""
        array = np.asarray(value, dtype=tensor_codec.numpy_dtype(tensor_codec.dtype_number(dtype)))
        key = array.tobytes(), dtype, array.shape
        if key not in self._constants:
            self._constants[key] = self.graph.constant(array, name="constants/Const")
        return self._constants[key]

    def int32(self, *values: int) -> TensorHandle:
        """Returns a vector of int32."""
        return self.constant(np.array(values, np.int32), "int32")

    def sizes(self, sizes: Sequence[Size]) -> TensorHandle:
        """Returns the vector, int32, of sizes that are known or computed by the graph."""
        if all(isinstance(size, int) for size in sizes):
            return self.int32(*(size for size in sizes if isinstance(size, int)))
        scalars = [self.constant(size, "int32") if isinstance(size, int) else size for size in sizes]
        return self.op("Pack", scalars)

    def size_of(self, value: Value, axis: int) -> TensorHandle:
        """Returns the size of an axis of the model, an int32 scalar."""
        return self.op("GatherV2", self.op("Shape", value.handle), self.axis_of(value, axis), 0, name="size")

    def axis_of(self, value: Value, axis: int) -> int:
        """Returns the position in the tensor of an axis of the model."""
        axis %= value.rank
        if not value.channels_last or axis == 0:
            return axis
        return value.rank - 1 if axis == 1 else axis - 1

    def composite(self, op_type: str, *inputs: TensorHandle, **constants: Any) -> TensorHandle:
        """Adds a call of a composite operation, which is one node and a function of the graph.

        Args:
            op_type: The operation, from `COMPOSITE_OPS`.
            inputs: Its tensors; all have the element type of the first one, except those that the operation names.
            constants: Values of the operation's constants and flags, by name.
        """
        operation = COMPOSITE_OPS[op_type]
        self.graph.add_function(function_of(operation))
        attrs: dict[str, Any] = {
            name: tensor_codec.to_message(
                np.asarray(
                    constants[name] if name in constants else operation.constants[name].value,
                    tensor_codec.numpy_dtype(operation.constants[name].dtype or inputs[0].number),
                )
            )
            for name in operation.constants
        }
        flags: dict[str, Any] = {name: constants[name] for name in operation.flags}
        return self.op(op_type, *inputs, **attrs, **flags)

    # Layouts.

    def natural(self, value: Value) -> TensorHandle:
        """Returns the tensor with its axes in the order of the model."""
        if not value.channels_last:
            return value.handle
        if value.other is None:
            axes = [0, value.rank - 1, *range(1, value.rank - 1)]
            with self.scope("layout"):
                value.other = Value(self.op("Transpose", value.handle, self.int32(*axes)), value.rank, other=value)
        return value.other.handle

    def channels_last(self, value: Value) -> TensorHandle:
        """Returns the tensor with the second axis of the model as its last one."""
        if value.channels_last or value.rank < 3:
            return value.handle
        if value.other is None:
            axes = [0, *range(2, value.rank), 1]
            with self.scope("layout"):
                moved = self.op("Transpose", value.handle, self.int32(*axes))
            value.other = Value(moved, value.rank, channels_last=True, other=value)
        return value.other.handle

    def elementwise(self, op_type: str, value: Value, **attrs: Any) -> Value:
        """Adds a node that computes each element on its own; the layout stays."""
        return Value(self.op(op_type, value.handle, **attrs), value.rank, value.channels_last)

    def broadcast(self, op_type: str, values: Sequence[Value], **attrs: Any) -> Value:
        """Adds a node whose inputs are broadcast, in the layout that needs no transposition if there is one."""
        rank = max(value.rank for value in values)
        if not any(value.channels_last and value.rank == rank for value in values):
            return Value(self.op(op_type, *map(self.natural, values), **attrs), rank)
        operands = [self.channels_last(self._of_rank(value, rank)) for value in values]
        return Value(self.op(op_type, *operands, **attrs), rank, channels_last=True)

    def _of_rank(self, value: Value, rank: int) -> Value:
        """Returns a value with axes of size 1 in front; a scalar as it is."""
        if value.rank in (0, rank):
            return value
        handle = self.natural(value)
        for _ in range(rank - value.rank):
            handle = self.op("ExpandDims", handle, 0)
        return Value(handle, rank)
