"""Defines handles of a graph's tensors and nodes, which the builder takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from gradrule._builder.notebook_text import short_repr
from gradrule.common.dtypes import dtype_name, without_ref
from gradrule.errors import UnknownTensorError
from gradrule.v1.graph_pb2 import AttrValue
from gradrule.v1.graph_pb2 import Node as NodeMessage
from gradrule.v1.tensor_pb2 import Dt

if TYPE_CHECKING:
    from gradrule._builder.graph import Graph


class TensorHandle:
    """Refers to one output of a node. Operators add nodes to the graph.

    `==` compares identity, so that handles can be dict keys. `& | ^ ~` are logical on bools and bitwise on integers.
    `h[1:, ..., None, -1]` is TensorFlow's strided slice.

    Attributes:
        graph: the graph of the tensor.
        name: `node:index`.
        index: position among the node's outputs.
        number: element type as the number of TensorFlow's `DataType`; 0: unknown.
    """

    # Without these, `array + handle` would call NumPy's operator.
    __array_priority__ = 100
    __array_ufunc__ = None
    __slots__ = ("graph", "index", "name", "number")

    def __init__(self, graph: Graph, node: str, index: int, number: int) -> None:
        self.graph = graph
        self.index = index
        self.name = f"{node}:{index}"
        self.number = number

    @property
    def node(self) -> Node:
        """The node that computes this tensor."""
        return self.graph.node(self.name.rpartition(":")[0])

    @property
    def dtype(self) -> str:
        """Name of the element type, for example `float32`."""
        return dtype_name(self.number)

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """Sizes, None for an unknown size; None if the node holds no shape; placeholders and constants do."""
        return self.graph.stated_shape(self.name)

    def __repr__(self) -> str:
        return short_repr(f"<{self.node.op_type} {self.name!r} {self.dtype}>")

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self.name!r} is a tensor of a graph and has no value here; use `where` for choices")

    def __iter__(self) -> NoReturn:
        raise TypeError(f"{self.name!r} is one tensor and cannot be iterated over; use `unstack`")

    def __add__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("AddV2", self, other)

    def __radd__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("AddV2", other, self)

    def __sub__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("Sub", self, other)

    def __rsub__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("Sub", other, self)

    def __mul__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("Mul", self, other)

    def __rmul__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("Mul", other, self)

    def __truediv__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("RealDiv", self, other)

    def __rtruediv__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("RealDiv", other, self)

    def __floordiv__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("FloorDiv", self, other)

    def __rfloordiv__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("FloorDiv", other, self)

    def __mod__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("FloorMod", self, other)

    def __rmod__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("FloorMod", other, self)

    def __pow__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("Pow", self, other)

    def __rpow__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("Pow", other, self)

    def __matmul__(self, other: Any) -> TensorHandle:
        return self.graph.matmul(self, other)

    def __rmatmul__(self, other: Any) -> TensorHandle:
        return self.graph.matmul(other, self)

    def __neg__(self) -> TensorHandle:
        return self.graph.op_output("Neg", self)

    def __pos__(self) -> TensorHandle:
        return self

    def __invert__(self) -> TensorHandle:
        return self.graph.op_output("Invert" if self._is_integer() else "LogicalNot", self)

    def __and__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("BitwiseAnd" if self._is_integer() else "LogicalAnd", self, other)

    def __rand__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("BitwiseAnd" if self._is_integer() else "LogicalAnd", other, self)

    def __or__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("BitwiseOr" if self._is_integer() else "LogicalOr", self, other)

    def __ror__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("BitwiseOr" if self._is_integer() else "LogicalOr", other, self)

    def __xor__(self, other: Any) -> TensorHandle:
        return self._xor(self, other)

    def __rxor__(self, other: Any) -> TensorHandle:
        return self._xor(other, self)

    def __getitem__(self, key: Any) -> TensorHandle:
        return self.graph.slice_tensor(self, key)

    def __abs__(self) -> TensorHandle:
        return self.graph.op_output("Abs", self)

    def __lt__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("Less", self, other)

    def __le__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("LessEqual", self, other)

    def __gt__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("Greater", self, other)

    def __ge__(self, other: Any) -> TensorHandle:
        return self.graph.op_output("GreaterEqual", self, other)

    def _is_integer(self) -> bool:
        return dtype_name(without_ref(self.number)).startswith(("int", "uint"))

    def _xor(self, left: Any, right: Any) -> TensorHandle:
        if self._is_integer():
            return self.graph.op_output("BitwiseXor", left, right)
        # NotEqual accepts any type; T limits it to bools.
        return self.graph.op_output("NotEqual", left, right, T=Dt.DT_BOOL)


class Node:
    """Refers to a node of a graph. Nodes are equal if their graph and name are equal.

    Attributes:
        graph: The graph of the node.
        message: The node as a protobuf message.
    """

    __slots__ = ("graph", "message")

    def __init__(self, graph: Graph, message: NodeMessage) -> None:
        self.graph = graph
        self.message = message

    @property
    def name(self) -> str:
        """Unique name of the node."""
        return self.message.name

    @property
    def op_type(self) -> str:
        """Op type, for example `MatMul`."""
        return self.message.op

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the input tensors, followed by control inputs (`^node`)."""
        return tuple(self.message.input)

    @property
    def attrs(self) -> Mapping[str, AttrValue]:
        """Attributes by name, as protobuf messages."""
        return dict(self.message.attr)

    @property
    def outputs(self) -> tuple[TensorHandle, ...]:
        """Handles of the outputs."""
        return self.graph.outputs_of(self.name)

    def __repr__(self) -> str:
        return short_repr(f"<{self.op_type} {self.name!r}>")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and (self.graph, self.name) == (other.graph, other.name)

    def __hash__(self) -> int:
        return hash((id(self.graph), self.name))


def as_tensor(value: Any) -> Any:
    """Returns a node's only output, or any other value unchanged.

    Raises:
        UnknownTensorError: the node has several outputs or none.
    """
    if not isinstance(value, Node):
        return value
    outputs = value.outputs
    if len(outputs) == 1:
        return outputs[0]
    names = ", ".join(repr(output.name) for output in outputs)
    what = f"{len(outputs)} outputs, choose one: {names}" if outputs else "no output"
    raise UnknownTensorError(f"{value.op_type} node {value.name!r} is not a tensor: it has {what}")
