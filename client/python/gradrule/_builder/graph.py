"""Builds graphs in the style of TensorFlow 1, without TensorFlow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from gradrule._builder import blob_values
from gradrule._builder.graph_lookup import GraphLookup, GraphTypes
from gradrule._builder.handles import Node, TensorHandle, as_tensor
from gradrule._builder.indexing import index
from gradrule._builder.names import UniqueNames, counted, is_node_name
from gradrule._builder.node_arguments import (
    Conversion,
    array_of_type,
    assign_arguments,
    attr_values,
    control_input_names,
)
from gradrule._builder.ops import GraphOps
from gradrule._builder.override_contexts import OverrideContexts
from gradrule._builder.overrides import Override
from gradrule._builder.rules import OverrideValue
from gradrule._builder.specs import LayerCall
from gradrule._builder.variables import Variables
from gradrule.common import op_definitions, tensor_codec
from gradrule.common.dtypes import as_dt
from gradrule.common.op_inference import InferenceError, complete
from gradrule.errors import (
    InvalidGraphError,
    InvalidOverrideError,
    InvalidTensorError,
    UnknownOpTypeError,
    error_for_reason,
)
from gradrule.v1 import graph_pb2
from gradrule.v1.graph_pb2 import AttrValue

if TYPE_CHECKING:
    from gradrule.optimizers import OptimizerState


class Graph(GraphLookup, GraphOps):
    """Holds a TensorFlow graph with the values of its variables, and adds nodes to it.

    `placeholder`, `constant`, `variable`, `op`, operators on handles, and any op type's name in snake case
    (`g.relu(x)`) add nodes. Attributes that the inputs determine are set. Node names are made unique by TensorFlow's
    scheme (`Relu`, `Relu_1`).

    Attributes:
        variables: read-only arrays by the name of the variable's node; every request sends them.
        non_trainable: names of the variables that a session's steps do not change by default.
        optimizer_state: slots of a session's optimizer, from `Session.save`; sessions of this graph continue with them.
        aliases: more names of tensors, valid wherever a tensor's name is. If an alias equals a node's name, the node's
            first output must be written `node:0`.
        layers: calls of Keras layers; empty if the graph was not traced from a Keras model. The path of a layer with
            one output is valid wherever a tensor's name is, unless a node or alias has this name.
    """

    def __init__(self) -> None:
        # Set a version: TensorFlow applies the semantics of very old graphs without one (unknown scalar shapes).
        versions = graph_pb2.Versions(producer=op_definitions.graph_version())
        self._start(graph_pb2.Graph(versions=versions), b"")

    def _start(self, message: graph_pb2.Graph, data: bytes) -> None:
        self._message = message
        self._bytes = data
        self.aliases: dict[str, str] = {}
        self.layers: list[LayerCall] = []
        self.non_trainable: set[str] = set()
        self.optimizer_state: OptimizerState | None = None
        self._types = GraphTypes(message)
        self._names = UniqueNames()
        for node in message.node:
            self._names.reserve(node.name)
        self._scope = ""
        self._contexts = OverrideContexts(message)
        self._sha256: tuple[bytes, str] = (b"", "")
        self.variables = Variables(self._variable_type)

    @classmethod
    def from_bytes(cls, data: bytes) -> Graph:
        """Reads a serialized GraphDef; keeps unknown fields.

        Args:
            data: Bytes of a GraphDef.

        Returns:
            The graph, without values of variables.

        Raises:
            InvalidGraphError: The bytes are not a GraphDef.
        """
        try:
            message = graph_pb2.Graph.FromString(data)
        except DecodeError as cause:
            raise InvalidGraphError(f"these {len(data)} bytes are no GraphDef: {cause}") from None
        graph = cls()
        graph._start(message, data)
        return graph

    def to_bytes(self) -> bytes:
        """Returns the serialized GraphDef.

        Equal graphs give equal bytes. An unchanged loaded graph gives the bytes it was loaded from.

        Raises:
            InvalidOverrideError: `gradient_override_map` gave a node a rule that is not registered, or a rule with
                params; a GraphDef holds only a rule's name.
        """
        self._contexts.refuse_export()
        return self.to_bytes_without_overrides()

    def to_bytes_without_overrides(self) -> bytes:
        """Returns the serialized GraphDef without `node_overrides`, which a request sends in a separate field."""
        if not self._bytes:
            self._bytes = self._message.SerializeToString(deterministic=True)
        return self._bytes

    def sha256(self) -> str:
        """Returns the SHA-256 of `to_bytes_without_overrides` in hex; cached until the graph changes."""
        data = self.to_bytes_without_overrides()
        if self._sha256[0] is not data:
            self._sha256 = data, blob_values.digest(data)
        return self._sha256[1]

    def __len__(self) -> int:
        return len(self._message.node)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Graph of {counted(len(self), 'node')}>"

    @property
    def node_overrides(self) -> tuple[Override, ...]:
        """Overrides of nodes that `gradient_override_map` recorded; the overrides of a request precede them."""
        return self._contexts.recorded

    # Adding nodes.

    def placeholder(self, name: str, dtype: tensor_codec.DtypeLike, shape: Any = None) -> TensorHandle:
        """Adds a tensor that requests feed.

        Args:
            name: name of the node.
            dtype: element type, by name or NumPy dtype.
            shape: sizes, None for an unknown size; None instead of a list: unknown rank.

        Returns:
            The handle of the tensor.

        Raises:
            InvalidAttrError: `dtype` or `shape` is not valid.
            InvalidGraphError: the name is not a valid node name.
        """
        return self.op_output("Placeholder", name=name, dtype=dtype, shape=shape)

    def constant(self, value: Any, dtype: tensor_codec.DtypeLike = None, *, name: str | None = None) -> TensorHandle:
        """Adds a constant.

        Args:
            value: a number, string, nested list or array of any shape.
            dtype: element type, by name or NumPy dtype. Default: an array's own type; float32 for Python floats and
                int32 for Python ints.
            name: name of the node; made unique. Default: `Const`.

        Returns:
            The handle of the constant.

        Raises:
            InvalidTensorError: the value is not a tensor of this type.
        """
        where = f"constant {name or ''}"
        try:
            message = tensor_codec.to_message(array_of_type(value, dtype, where), dtype)
        except ValueError as cause:
            raise InvalidTensorError(f"{where}: {cause}") from None
        attrs = {"dtype": AttrValue(type=message.dtype), "value": AttrValue(tensor=message)}
        return self._add("Const", self._unique(name or "Const"), [], attrs)[0]

    def variable(self, name: str, initial_value: Any, dtype: tensor_codec.DtypeLike = None) -> TensorHandle:
        """Adds a variable and stores its value in `variables`.

        In `xs`, `fetches` and feeds, the variable's name refers to its value.

        Args:
            name: name of the variable's node.
            initial_value: a number, nested list or array of any shape.
            dtype: element type; default as for `constant`.

        Returns:
            The handle of the node that reads the variable.

        Raises:
            InvalidTensorError: the value is not a tensor of this type.
        """
        value = array_of_type(initial_value, dtype, f"variable {name}")
        full = self._unique(name)
        attrs = {
            "dtype": AttrValue(type=as_dt(tensor_codec.number_of_array(value))),
            "shape": AttrValue(shape=tensor_codec.shape_message(value.shape)),
            "shared_name": AttrValue(s=full.encode()),
        }
        handle = self._add("VarHandleOp", full, [], attrs)[0]
        read = self._add("ReadVariableOp", self._names.make(f"{full}/Read"), [handle], {"dtype": attrs["dtype"]})
        self.variables[full] = value
        return read[0]

    def op(self, op_type: str, *inputs: Any, name: str | None = None, control_inputs: Any = (), **attrs: Any) -> Any:
        """Adds a node of any op type.

        Args:
            op_type: an op type, such as `MatMul`, or a function of the graph.
            inputs: one entry per input of the op, in the order of `tf.raw_ops`: a handle; a list of handles for a list
                input; or a number or array, which becomes a constant of the type that the op needs. If the op has
                exactly one list input, its tensors may be separate arguments. Inputs may also be keyword arguments.
            name: name of the node; made unique. Default: the op type.
            control_inputs: nodes or handles that must run before this node.
            attrs: attributes by name; element types by name or dtype, shapes as lists, functions by name.

        Returns:
            The handle of the only output; a tuple of handles for several outputs or an output list; the `Node` if the
            op has no outputs.

        Raises:
            UnknownOpTypeError: neither an op type nor a function of the graph.
            TypeMismatchError: number or types of the inputs do not fit the op.
            InvalidAttrError: an attribute is unknown, has a wrong value, or is missing and cannot be inferred.
            InvalidTensorError: a value cannot become a constant of the needed type.
            InvalidGraphError: the name is not a valid node name, or an input belongs to another graph.
        """
        definition = self._definition(op_type)
        # A function's name may start with `_`, a node's name may not.
        full_name = self._unique(name or op_type.lstrip("_"))
        where = f"{op_type} node {full_name!r}"
        by_name = {arg.name: attrs.pop(arg.name) for arg in definition.inputs if arg.name in attrs}
        messages = attr_values(definition, attrs, where)
        arguments = [
            (arg, [as_tensor(entry) for entry in entries])
            for arg, entries in assign_arguments(definition, inputs, by_name, where)
        ]
        conversion = Conversion(definition, messages, where)
        conversion.set_types(arguments)
        tensors = [
            entry if isinstance(entry, TensorHandle) else self._constant_input(full_name, arg, entry, conversion)
            for arg, entries in arguments
            for entry in entries
        ]
        for tensor in tensors:
            if tensor.graph is not self:
                raise InvalidGraphError(f"{where}: input {tensor.name!r} belongs to another graph")
        controls = control_input_names(self, control_inputs, where)
        handles = self._add(op_type, full_name, tensors, messages, controls)
        if not handles:
            return self.node(full_name)
        single = len(definition.outputs) == 1 and not (
            definition.outputs[0].number_attr or definition.outputs[0].type_list_attr
        )
        return handles[0] if single else handles

    def slice_tensor(self, tensor: TensorHandle, key: Any) -> TensorHandle:
        """Adds the node for `tensor[key]`.

        Args:
            tensor: Tensor of this graph.
            key: Integers, slices, `...` and None; or one bool tensor or array, which selects entries.

        Returns:
            The handle of the node's output.

        Raises:
            TypeMismatchError: A part of the key has a wrong type.
            InvalidGraphError: The key has two `...`, or a slice has step 0.
        """
        return index(tensor, key)

    def op_output(self, op_type: str, *inputs: Any, name: str | None = None, **attrs: Any) -> TensorHandle:
        """Adds a node of an op type that has exactly one output.

        Args:
            op_type: As for `op`.
            inputs: As for `op`.
            name: As for `op`.
            attrs: As for `op`, `control_inputs` included.

        Returns:
            The handle of the output.

        Raises:
            UnknownOpTypeError, TypeMismatchError, InvalidAttrError, InvalidTensorError: as `op`.
        """
        handle = self.op(op_type, *inputs, name=name, **attrs)
        assert isinstance(handle, TensorHandle)
        return handle

    def add_function(self, function: graph_pb2.Function) -> None:
        """Adds a function, unless the graph has one of this name; nodes call it by its name as their op type.

        Args:
            function: The function's message.
        """
        if function.signature.name not in self._types.functions():
            self._types.add_function(function)
            self._bytes = b""

    def messages(self) -> Sequence[graph_pb2.Node]:
        """Returns the messages of all nodes at the top level; they must not be changed."""
        return self._message.node

    def functions(self) -> Sequence[graph_pb2.Function]:
        """Returns the messages of all functions; they must not be changed."""
        return self._message.library.function

    def definition(self, op_type: str) -> op_definitions.OpDef:
        """Returns the definition of an op type or of a function of the graph.

        Args:
            op_type: Its name.

        Raises:
            UnknownOpTypeError: There is none.
        """
        return self._definition(op_type)

    def _node_handle(self, message: graph_pb2.Node) -> Node:
        return Node(self, message)

    def _tensor_handle(self, node: str, index: int, number: int) -> TensorHandle:
        return TensorHandle(self, node, index, number)

    def _definition(self, op_type: str) -> op_definitions.OpDef:
        definition = self._types.definition(op_type) if isinstance(op_type, str) else None
        if definition is None:
            hint = op_definitions.suggest(str(op_type), self._types.functions())
            raise UnknownOpTypeError(f"{op_type!r} is neither an op type nor a function of the graph.{hint}")
        return definition

    def _constant_input(
        self, node: str, arg: op_definitions.ArgDef, value: Any, conversion: Conversion
    ) -> TensorHandle:
        message = conversion.to_message(arg, value)
        attrs = {"dtype": AttrValue(type=message.dtype), "value": AttrValue(tensor=message)}
        return self._add("Const", self._names.make(f"{node}/{arg.name}"), [], attrs)[0]

    def _add(
        self,
        op_type: str,
        name: str,
        inputs: list[TensorHandle],
        attrs: Mapping[str, AttrValue],
        controls: list[str] | None = None,
    ) -> tuple[TensorHandle, ...]:
        definition = self._definition(op_type)
        try:
            completed = complete(definition, attrs, [tensor.number for tensor in inputs])
        except InferenceError as cause:
            raise error_for_reason(cause.kind, f"{op_type} node {name!r}: {cause.message}") from None
        node = self._message.node.add(name=name, op=op_type)
        node.input.extend(tensor.name.removesuffix(":0") for tensor in inputs)
        node.input.extend(controls or ())
        for key, value in completed.attrs.items():
            node.attr[key].CopyFrom(value)
        self._contexts.apply(node)
        self._bytes = b""
        self._types.add(node, completed.outputs)
        return self.outputs_of(name)

    def _unique(self, name: str) -> str:
        full = self._scope + name
        if not is_node_name(full):
            raise InvalidGraphError(
                f"{full!r} is no node name; allowed: letters, digits, and _ . - / \\ > after the first"
            )
        return self._names.make(full)

    # Contexts.

    @contextlib.contextmanager
    def name_scope(self, name: str) -> Iterator[str]:
        """Puts `name/` before the names of nodes that are added inside the context.

        Args:
            name: Name of the scope; made unique, unless it ends with `/`.

        Yields:
            The full scope, with `/` at its end.
        """
        outer = self._scope
        self._scope = name if name.endswith("/") else self._unique(name) + "/"
        try:
            yield self._scope
        finally:
            self._scope = outer

    def gradient_override_map(
        self, overrides: Mapping[str, OverrideValue], *, optional: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Assigns rules by op type to the nodes that are added inside the context; an inner context wins.

        Args:
            overrides: op type to a rule's name, a `gr.Rule`, or either with params: `(rule, {"alpha": 2.0})`.
            optional: raises no error if no node of an op type is added, or if no gradient of a request reaches one.

        Returns:
            The context manager.

        Raises:
            InvalidOverrideError: `overrides` is not a dict of op types to rules.
            UnknownOpTypeError: a key is not an op type.
            UnmatchedOverrideError: at the end of the context, no node of an op type was added.
        """
        if not isinstance(overrides, Mapping):
            raise InvalidOverrideError(
                f"gradient_override_map takes a dict of op type to rule, not {type(overrides).__name__}"
            )
        for op_type in overrides:
            self._definition(op_type)
        return self._contexts.entered(overrides, optional)

    def save(self, path: str | os.PathLike[str], *, freeze: bool = False) -> None:
        """Writes the graph to a `.pb` file, and its variables and aliases, if any, to a `.npz` file beside it.

        `gr.load` reads both files.

        Args:
            path: path of the `.pb` file.
            freeze: replaces variables by constants.

        Raises:
            InvalidOverrideError: as `to_bytes`.
            UnsupportedError: a variable cannot be frozen or written.
        """
        from gradrule._builder.saving import save

        save(self, path, freeze=freeze)
