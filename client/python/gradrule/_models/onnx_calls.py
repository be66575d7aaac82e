"""Describes calls of ONNX operations, and holds the table of their conversions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx

from gradrule._builder.handles import TensorHandle
from gradrule._models.model_graph import ModelGraph, UnsupportedOpError, Value

if TYPE_CHECKING:
    from gradrule._models.onnx_graph import Body

Array: TypeAlias = "np.ndarray[Any, Any]"
Result: TypeAlias = "Value | TensorHandle | Array | Tensor | None"
Converted: TypeAlias = "Result | Sequence[Result]"
Convert: TypeAlias = "Callable[[OpCall], Converted]"

DTYPES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.INT16: "int16",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.UINT32: "uint32",
    onnx.TensorProto.UINT64: "uint64",
    onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.COMPLEX64: "complex64",
    onnx.TensorProto.COMPLEX128: "complex128",
}
"""Names of the element types of tensors that graphs may hold."""

NARROW = {
    onnx.TensorProto.INT4: "int4",
    onnx.TensorProto.UINT4: "uint4",
    onnx.TensorProto.INT2: "int2",
    onnx.TensorProto.UINT2: "uint2",
}
"""Element types that only QuantizeLinear and DequantizeLinear use: graphs hold them as floating-point numbers."""

FLOATS = ("float32", "float64", "float16", "bfloat16")


class MissingTensorError(Exception):
    """Reports that a call needs the result of one that cannot be converted."""


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor of an ONNX model, with what is known of it before the graph runs.

    Attributes:
        dtype: Name of the element type; empty if it is none that graphs hold.
        shape: Sizes, None for unknown ones; None if the number of axes is unknown.
        array: Its value, if it is known.
        weight: Name of the variable that holds it; empty if there is none.
        value: The tensor in the graph; None as long as no node needs it.
        quantised: The integers as floating-point numbers, if a quantising operation computed them.
    """

    dtype: str
    shape: tuple[int | None, ...] | None
    array: Array | None = None
    weight: str = ""
    value: Value | None = None
    quantised: Value | None = None


def known_tensor(array: np.ndarray[Any, Any], data_type: int) -> Tensor:
    """Returns a tensor whose value is known. Narrow integers have no element type in graphs."""
    dtype = DTYPES.get(data_type, "")
    if data_type in NARROW:
        array = array.astype(np.int8)
    return Tensor(dtype, array.shape, array)


class OpCall:
    """A node of an ONNX model.

    Args:
        body: The graph under construction.
        node: The node.
        schema: The definition of its operation in the opset of the model.
    """

    def __init__(self, body: Body, node: onnx.NodeProto, schema: Any) -> None:
        self.body = body
        self.model: ModelGraph = body.model
        self.node = node
        self.since: int = schema.since_version
        self._schema = schema
        self._attributes = {attribute.name: attribute for attribute in node.attribute}
        self._read_attributes: set[str] = set()
        self._read_inputs: set[int] = set()

    # Attributes.

    def attr(self, name: str, default: Any = None) -> Any:
        """Returns an attribute, its default in ONNX, or `default`."""
        self._read_attributes.add(name)
        if name in self._attributes:
            value = onnx.helper.get_attribute_value(self._attributes[name])
            return value.decode() if isinstance(value, bytes) else value
        declared = self._schema.attributes.get(name)
        if declared is not None and declared.default_value.type:
            value = onnx.helper.get_attribute_value(declared.default_value)
            return value.decode() if isinstance(value, bytes) else value
        return default

    def check_all_read(self) -> None:
        """Raises `UnsupportedOpError` if the node has an attribute or input that the conversion did not read."""
        unread = [name for name in self._attributes if name not in self._read_attributes]
        if unread:
            raise UnsupportedOpError(f"with the attribute {unread[0]!r}, which is not supported")
        for index, name in enumerate(self.node.input):
            if name and index not in self._read_inputs:
                raise UnsupportedOpError(f"with the input {name!r}, which is not supported")

    # Inputs.

    def __len__(self) -> int:
        return len(self.node.input)

    def has(self, index: int) -> bool:
        """Returns whether an input is given."""
        self._read_inputs.add(index)
        return index < len(self.node.input) and self.node.input[index] != ""

    def tensor(self, index: int) -> Tensor:
        """Returns an input with what is known of it."""
        self._read_inputs.add(index)
        return self.body.tensor(self.node.input[index])

    def value(self, index: int) -> Value:
        """Returns an input in the graph."""
        self._read_inputs.add(index)
        return self.body.value(self.node.input[index])

    def x(self, index: int = 0) -> TensorHandle:
        """Returns an input in the graph, its axes in the order of the model."""
        return self.model.natural(self.value(index))

    def dtype(self, index: int = 0) -> str:
        """Returns the element type of an input."""
        return self.tensor(index).dtype

    def rank(self, index: int = 0) -> int:
        """Returns the number of axes of an input, which must be known."""
        found = self.tensor(index)
        return found.value.rank if found.value is not None else len(self.shape(index))

    def shape(self, index: int = 0) -> tuple[int | None, ...]:
        """Returns the sizes of an input, None for unknown ones; their number must be known."""
        found = self.tensor(index)
        if found.shape is not None:
            return found.shape
        if found.value is None:
            raise UnsupportedOpError(f"of the tensor {self.node.input[index]!r}, whose number of axes is not known")
        return (None,) * found.value.rank

    def known_shape(self, index: int = 0) -> tuple[int, ...]:
        """Returns the sizes of an input, which must be known."""
        sizes = self.shape(index)
        if any(size is None for size in sizes):
            raise UnsupportedOpError(f"of the tensor {self.node.input[index]!r}, whose sizes {sizes} are not all known")
        return tuple(size for size in sizes if size is not None)

    def array(self, index: int) -> Array | None:
        """Returns the value of an input if it is known, else None."""
        return self.tensor(index).array if self.has(index) else None

    def known(self, index: int) -> Array:
        """Returns the value of an input, which must be known."""
        found = self.array(index)
        if found is None:
            raise UnsupportedOpError(f"whose input {self._schema.inputs[index].name!r} is computed by other nodes")
        return found

    def axis(self, name: str = "axis", default: int = 0, rank: int | None = None) -> int:
        """Returns the attribute of an axis of the first input, as a number >= 0."""
        count = self.rank() if rank is None else rank
        found = int(self.attr(name, default))
        if not -count <= found < max(count, 1):
            raise UnsupportedOpError(f"with {name} {found} of {count} axes")
        return found % count if count else 0

    def axes(self, index: int, name: str = "axes") -> list[int] | None:
        """Returns axes >= 0 of the first input, from an input or an attribute; None if neither is given."""
        found = self.known(index).tolist() if self.has(index) else self.attr(name)
        rank = self.rank()
        return None if found is None else [int(axis) % rank if rank else 0 for axis in found]

    # Results.

    def output_rank(self, index: int = 0) -> int:
        """Returns the number of axes of an output, which must be known."""
        shape = self.output_shape(index)
        if shape is None:
            raise UnsupportedOpError("with a result whose number of axes is not known")
        return len(shape)

    def output_shape(self, index: int = 0) -> tuple[int | None, ...] | None:
        """Returns the sizes of an output as ONNX infers them."""
        return self.body.info(self.node.output[index])[1]

    def output_dtype(self, index: int = 0) -> str:
        """Returns the element type of an output."""
        found = self.body.info(self.node.output[index])[0]
        if not found:
            raise UnsupportedOpError("with a result of an element type that graphs do not have, or none that is known")
        return found

    def wants(self, index: int) -> bool:
        """Returns whether an output has a name, so that other nodes may use it."""
        return index < len(self.node.output) and self.node.output[index] != ""

    # Nodes.

    def op(self, op_type: str, *inputs: Any, **attrs: Any) -> TensorHandle:
        """Adds a node with one output."""
        return self.model.op(op_type, *inputs, **attrs)

    def const(self, value: Any, dtype: str = "") -> TensorHandle:
        """Returns a constant of the first input's element type, or of another."""
        return self.model.constant(value, dtype or self.dtype())

    def cast(self, x: TensorHandle, dtype: str) -> TensorHandle:
        """Returns a tensor in another element type."""
        return x if Value(x, 0).dtype == dtype else self.model.op("Cast", x, DstT=dtype)


@dataclass(frozen=True, slots=True)
class OnnxOp:
    """A row of the table.

    Attributes:
        convert: Adds the nodes of a call; returns its results. None: the operation is refused.
        nodes: What the graph has in its place, as overrides name it.
        differentiable: Whether gradients pass.
        refuses: What is refused, and why; empty if all calls are converted.
    """

    convert: Convert | None
    nodes: str = ""
    differentiable: bool = True
    refuses: str = ""


ONNX_OPS: dict[str, OnnxOp] = {}
"""Conversions by the name of the operation."""


def converts(
    *names: str, nodes: str = "", differentiable: bool = True, refuses: str = ""
) -> Callable[[Convert], Convert]:
    """Adds a function to the table as the conversion of operations."""

    def add(function: Convert) -> Convert:
        for name in names:
            add_op(name, OnnxOp(function, nodes, differentiable, refuses))
        return function

    return add


def add_op(name: str, op: OnnxOp) -> None:
    """Adds a row to the table. Raises `ValueError` if it has one of this name."""
    if name in ONNX_OPS:
        raise ValueError(f"{name} is in the table already")
    ONNX_OPS[name] = op
