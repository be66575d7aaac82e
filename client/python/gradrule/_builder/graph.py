"""Builds graphs in the style of TensorFlow 1, without TensorFlow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from gradrule._builder import blob_values
from gradrule._builder.arguments import Conversion, assign_arguments
from gradrule._builder.attribute_values import attr_value, free_value, natural
from gradrule._builder.by_name import ByName
from gradrule._builder.graph_types import GraphTypes
from gradrule._builder.handles import Node, TensorHandle, as_tensor
from gradrule._builder.indexing import index
from gradrule._builder.layer_calls import LayerCall
from gradrule._builder.names import UniqueNames, bare, glob, is_node_name, near, split
from gradrule._builder.ops import GraphOps
from gradrule._builder.override_contexts import GRADIENT_ATTR, OverrideContexts
from gradrule._builder.overrides import Override
from gradrule._builder.rules import OverrideValue
from gradrule._builder.tensor_specs import TensorSpec
from gradrule._builder.variables import Variables
from gradrule.common import op_definitions, tensor_codec
from gradrule.common.dtypes import as_dt, dtype_name, without_ref
from gradrule.common.op_inference import InferenceError, complete
from gradrule.errors import (
    InvalidAttrError,
    InvalidGraphError,
    InvalidOverrideError,
    InvalidTensorError,
    TypeMismatchError,
    UnknownOpTypeError,
    UnknownTensorError,
    of_reason,
)
from gradrule.v1 import graph_pb2
from gradrule.v1.graph_pb2 import AttrValue

_VARIABLE_OPS = ("VarHandleOp", "VariableV2", "Variable")
_INPUT_OPS = ("Placeholder", "PlaceholderV2", "PlaceholderWithDefault")


class Graph(GraphOps):
    """Holds a TensorFlow graph with the values of its variables, and adds nodes to it.

    `placeholder`, `constant`, `variable`, `op`, operators on handles, and any op type's name in snake case
    (`g.relu(x)`) add nodes. Attributes that the inputs determine are set. Node names are made unique by TensorFlow's
    scheme (`Relu`, `Relu_1`).

    Attributes:
        variables: read-only arrays by the name of the variable's node; every request sends them.
        non_trainable: names of the variables that a session's steps do not change by default.
        aliases: more names of tensors, valid wherever a tensor's name is. If an alias equals a node's name, the node's
            first output must be written `node:0`.
        layers: calls of Keras layers; empty if the graph was not traced from a Keras model.
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
        return f"<Graph of {len(self)} nodes>"

    @property
    def node_overrides(self) -> tuple[Override, ...]:
        """Overrides of single nodes that `gradient_override_map` recorded; the overrides of a request precede them."""
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
        try:
            array = (
                natural(value) if dtype is None else tensor_codec.from_value(value, tensor_codec.dtype_number(dtype))
            )
            message = tensor_codec.to_message(array, dtype)
        except ValueError as cause:
            raise InvalidTensorError(f"constant {name or ''}: {cause}") from None
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
        try:
            value = (
                natural(initial_value)
                if dtype is None
                else tensor_codec.from_value(initial_value, tensor_codec.dtype_number(dtype))
            )
            number = tensor_codec.number_of_array(value)
        except ValueError as cause:
            raise InvalidTensorError(f"variable {name}: {cause}") from None
        full = self._unique(name)
        attrs = {
            "dtype": AttrValue(type=as_dt(number)),
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
        known = {attr.name: attr for attr in definition.attrs}
        messages: dict[str, AttrValue] = {}
        for key, value in attrs.items():
            if key in known:
                messages[key] = attr_value(known[key], value, where)
            elif key.startswith("_"):
                messages[key] = free_value(key, value, where)
            else:
                raise InvalidAttrError(
                    f"{where} has no attribute {key!r}; it has: {', '.join(known)}.{near(key, known)}"
                )
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
        controls = [f"^{control.name}" for control in self._controls(control_inputs, where)]
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

    def _controls(self, given: Any, where: str) -> list[Node]:
        controls = []
        for control in [given] if isinstance(given, Node | TensorHandle) else given:
            node = control.node if isinstance(control, TensorHandle) else control
            if not isinstance(node, Node):
                raise TypeMismatchError(
                    f"{where}: control_inputs are nodes or handles, not {control!r}; g.node(name) finds a node"
                )
            if node.graph is not self:
                raise InvalidGraphError(f"{where}: control input {node.name!r} belongs to another graph")
            controls.append(node)
        return controls

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
            raise of_reason(cause.kind, f"{op_type} node {name!r}: {cause.message}") from None
        node = self._message.node.add(name=name, op=op_type)
        node.input.extend(tensor.name.removesuffix(":0") for tensor in inputs)
        node.input.extend(controls or ())
        for key, value in completed.attrs.items():
            node.attr[key].CopyFrom(value)
        self._contexts.apply(node)
        self._bytes = b""
        self._types.added(node, completed.outputs)
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
            optional: raises no error if no node of an op type is added.

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

    # Finding nodes and tensors.

    def node(self, name: str) -> Node:
        """Finds a node by name.

        Args:
            name: Full name of the node, with scopes.

        Returns:
            The handle of the node.

        Raises:
            UnknownTensorError: The graph has no such node.
        """
        message = self._types.node(name)
        if message is None:
            raise UnknownTensorError(f"the graph has no node {name!r}.{near(name, self._types.names())}")
        return Node(self, message)

    def tensor(self, name: str) -> TensorHandle:
        """Finds a tensor by name.

        Args:
            name: `node` (its first output), `node:output`, or an alias.

        Returns:
            The handle of the tensor.

        Raises:
            UnknownTensorError: The graph has no such node, or the node has no such output.
        """
        node, index = split(self.aliases.get(name, name))
        if self._types.node(node) is None:
            known = f" Aliases: {', '.join(map(repr, self.aliases))}." if self.aliases else ""
            hint = near(node, [*self._types.names(), *self.aliases])
            raise UnknownTensorError(f"the graph has no tensor {name!r}.{hint}{known}")
        handles = self.outputs_of(node)
        if index >= len(handles):
            raise UnknownTensorError(f"the graph has no tensor {name!r}: node {node!r} has {len(handles)} outputs")
        return handles[index]

    def value_of(self, name: str) -> TensorHandle:
        """Returns the handle of a tensor or of a variable's value.

        Args:
            name: Name of a tensor; or a variable's name or shared name: the handle then has the variable's type.

        Returns:
            The handle.

        Raises:
            UnknownTensorError: The graph has neither a tensor nor a variable of this name.
        """
        node, index = split(name)
        message = self._types.node(node)
        if message is None:
            message = next((item for item in self._message.node if _is_shared(item, node)), None)
        if message is not None and index == 0 and message.op in _VARIABLE_OPS and "dtype" in message.attr:
            return TensorHandle(self, message.name, 0, message.attr["dtype"].type)
        return self.tensor(name)

    def _variable_type(self, name: str) -> int:
        try:
            return without_ref(self.value_of(name).number)
        except UnknownTensorError:
            return 0

    def find(self, op_type: str | None = None, *, node: str | None = None, scope: str | None = None) -> list[Node]:
        """Returns the nodes that match all selectors, in the order of the graph.

        Args:
            op_type: op type of the nodes.
            node: name or glob; `*` and `?` match within a part between slashes, `**` matches across slashes.
            scope: matches the nodes whose names start with `scope/`.

        Returns:
            The nodes; empty if none matches.
        """
        pattern = None if node is None else glob(node)
        return [
            Node(self, message)
            for message in self._message.node
            if (op_type is None or message.op == op_type)
            and (pattern is None or pattern.fullmatch(message.name))
            and (scope is None or message.name.startswith(scope.rstrip("/") + "/"))
        ]

    def outputs_of(self, node: str) -> tuple[TensorHandle, ...]:
        """Returns the handles of a node's outputs.

        Args:
            node: Name of the node.
        """
        return tuple(TensorHandle(self, node, index, number) for index, number in enumerate(self._types.outputs(node)))

    def stated_shape(self, tensor: str) -> tuple[int | None, ...] | None:
        """Returns a tensor's shape if its node holds it (placeholder, constant, `_output_shapes`), else None.

        Args:
            tensor: Name of the tensor.

        Returns:
            The sizes, None for an unknown size; None if the node holds no shape.
        """
        node, index = split(tensor)
        message = self._types.node(node)
        assert message is not None
        if message.op in _INPUT_OPS and "shape" in message.attr:
            return tensor_codec.shape_tuple(message.attr["shape"].shape)
        if message.op == "Const":
            return tensor_codec.shape_tuple(message.attr["value"].tensor.tensor_shape)
        if "_output_shapes" in message.attr:
            shapes = message.attr["_output_shapes"].list.shape
            return tensor_codec.shape_tuple(shapes[index]) if index < len(shapes) else None
        return None

    def op_types_with_rule_names(self) -> set[str]:
        """Returns the op types of the nodes that name a rule in an attribute, including nodes in functions.

        The params of a call refer to such rules by op type.
        """
        bodies = [self._message.node, *(function.node_def for function in self._message.library.function)]
        return {node.op for body in bodies for node in body if GRADIENT_ATTR in node.attr}

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """Specs of the placeholders (name, dtype, shape), by alias or name."""
        return self._by_alias(
            [
                self._spec(node.name, optional=node.op == "PlaceholderWithDefault")
                for node in self._message.node
                if node.op in _INPUT_OPS
            ]
        )

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """Specs of the outputs (name, dtype, shape), by alias or name.

        Outputs are the tensors with an alias, placeholders excluded. Without aliases, they are the outputs of nodes
        that no other node uses, placeholders and constants excluded.
        """
        named = {
            alias: self._spec(tensor)
            for alias, tensor in self.aliases.items()
            if (node := self._types.node(split(tensor)[0])) is not None and node.op not in _INPUT_OPS
        }
        if named:
            return ByName(named, self.aliases)
        used = {split(name.removeprefix("^"))[0] for node in self._message.node for name in node.input}
        return self._by_alias(
            [
                self._spec(handle.name)
                for node in self._message.node
                if node.name not in used and node.op != "Const" and node.op not in _INPUT_OPS
                for handle in self.outputs_of(node.name)
            ]
        )

    def _by_alias(self, specs: list[TensorSpec]) -> Mapping[str, TensorSpec]:
        aliases = {bare(tensor): alias for alias, tensor in self.aliases.items()}
        return ByName({aliases.get(bare(spec.name), bare(spec.name)): spec for spec in specs}, self.aliases)

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

    def _spec(self, tensor: str, *, optional: bool = False) -> TensorSpec:
        node, index = split(tensor)
        types = self._types.outputs(node)
        dtype = dtype_name(types[index]) if index < len(types) else dtype_name(as_dt(0))
        return TensorSpec(tensor, dtype, self.stated_shape(tensor), optional)


def _is_shared(node: graph_pb2.Node, name: str) -> bool:
    if node.op not in _VARIABLE_OPS or "shared_name" not in node.attr:
        return False
    return node.attr["shared_name"].s.decode(errors="replace") == name
