"""Converts a TensorFlow function graph to a `Graph` with variables, gradients and aliases."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from gradrule._builder.frozen_variables import handles_to_values, needed_functions
from gradrule._builder.graph import Graph
from gradrule._builder.graph_lookup import GRADIENT_ATTR
from gradrule._builder.names import UniqueNames
from gradrule._tracing import tf_private
from gradrule._tracing.bodies import Body, Definition, Library, output_slots
from gradrule._tracing.function_names import name_functions_by_use
from gradrule._tracing.gradients import attach_gradients, drop_unused
from gradrule._tracing.lookup_tables import NotTableError, Table, eager_table, replace_tables
from gradrule._tracing.returned import return_tensors_directly
from gradrule._tracing.signatures import add_aliases, node_name
from gradrule.common.tensor_codec import Array
from gradrule.errors import Detail, UnsupportedError

if TYPE_CHECKING:
    from gradrule._tracing.keras_models import TracedCall

_ROOT = "gradrule_top"


@dataclass(eq=False, slots=True)
class Variable:
    """Holds a variable: requested or final name, value, and static shape."""

    name: str
    value: Array
    dtype: int
    shape: Any
    trainable: bool = True
    is_named: bool = False

    def take_name(self, name: str) -> str:
        """Sets the final name."""
        self.name, self.is_named = name, True
        return name

    def write(self, node: node_def_pb2.NodeDef) -> None:
        """Writes the attributes of the variable's node."""
        node.attr["dtype"].type = self.dtype
        node.attr["shape"].shape.CopyFrom(self.shape)
        node.attr["shared_name"].s = self.name.encode()
        node.attr["container"].s = b""


def split_captures(
    captured: Mapping[str, Any], library: Library, paths: Mapping[Hashable, str]
) -> tuple[dict[str, Variable], dict[str, Table], dict[str, Any]]:
    """Returns variables, lookup tables and constants by top-level argument.

    Args:
        captured: Captured tensors by top-level argument.
        library: The functions that use them.
        paths: Names of variables by identity of the handle; TensorFlow's names hold for other variables.

    Raises:
        UnsupportedError: A capture is neither a variable, nor a lookup table, nor a constant.
    """
    known = _known_variables(library)
    made: dict[Any, Variable] = {}
    variables: dict[str, Variable] = {}
    tables: dict[str, Table] = {}
    known_tables: dict[Any, Table] = {}
    constants: dict[str, Any] = {}
    refused: list[Detail] = []
    for argument, tensor in captured.items():
        if not tf_private.is_eager(tensor):
            message = f"it captures the tensor {tensor.name!r} of another graph; pass it as an argument"
            refused.append(Detail(UnsupportedError.REASON, message, node=tensor.name))
        elif tensor.dtype not in (tf.resource, tf.variant):
            constants[argument] = tensor
        else:
            key = tf_private.identity_of(tensor)
            try:
                if tensor.dtype == tf.resource and tf_private.handle_data(tensor) is None:
                    if key not in known_tables:
                        known_tables[key] = eager_table(tensor, argument)
                    tables[argument] = known_tables[key]
                    continue
                if key not in made:
                    name, trainable = known.get(key, (argument, True))
                    made[key] = _variable(tensor, paths.get(key, name), trainable)
                variables[argument] = made[key]
            except (_NotVariableError, NotTableError) as cause:
                refused.append(Detail(UnsupportedError.REASON, _refusal(library, argument, str(cause)), node=argument))
    if refused:
        raise UnsupportedError(refused[0].message, details=refused)
    return variables, tables, constants


class _NotVariableError(Exception):
    """Describes a resource without a value."""


def _variable(handle: Any, name: str, trainable: bool) -> Variable:
    data = None if handle.dtype != tf.resource else tf_private.handle_data(handle)
    if data is None or len(data) != 1:
        raise _NotVariableError("it is no variable")
    try:
        value = tf_private.read_variable(handle, tf.as_dtype(data[0].dtype))
    except tf.errors.OpError:
        raise _NotVariableError("it is a variable without a value") from None
    return Variable(name, value, data[0].dtype, data[0].shape, trainable)


def _known_variables(library: Library) -> dict[Any, tuple[str, bool]]:
    """Returns the names of the function graphs' variables, and whether they are trainable, by handle."""
    found = {}
    for body in library.bodies.values():
        for variable in getattr(body.graph, "variables", ()):
            if tf_private.is_eager(variable.handle):
                name = variable.name.removesuffix(":0")
                found[tf_private.identity_of(variable.handle)] = name, bool(variable.trainable)
    return found


def _refusal(library: Library, argument: str, why: str) -> str:
    users = [f"{node.op} node {node.name!r}" for node in library.root.definition.node_def if argument in node.input]
    return (
        f"the function uses the resource {argument!r} ({', '.join(users) or 'unused'}), which cannot be sent: {why}. "
        "Remove this part from the function and feed its result"
    )


def assembled(
    graph: Any,
    input_names: Sequence[str],
    aliases: Sequence[str],
    calls: Sequence[TracedCall] = (),
    paths: Mapping[Hashable, str] | None = None,
) -> Graph:
    """Converts a function graph to a `Graph`.

    Args:
        graph: TensorFlow's function graph.
        input_names: Names of the first inputs; the other inputs are captures.
        aliases: Aliases of the outputs.
        calls: Calls of layers, which become `Graph.layers`.
        paths: Names of variables by identity of the handle, instead of TensorFlow's names.

    Raises:
        UnsupportedError: The function captures a value that cannot be sent, or a gradient cannot be converted.
    """
    definition = tf_private.definition_of(graph, f"{_ROOT}_{id(graph)}")
    arguments = [argument.name for argument in definition.signature.input_arg]
    library = Library(Body(definition, graph, list(arguments)))
    attach_gradients(library)
    drop_unused(library)
    _fill_with_zeros(library)
    return_tensors_directly(library)
    externals = [external for external, _ in tf_private.captures(graph)]
    outer = dict(zip(arguments[len(input_names) :], externals, strict=True))
    variables, tables, constants = split_captures({**outer, **library.root_captures}, library, paths or {})
    definitions = {name: body.definition for name, body in library.bodies.items()}
    ordinary = [name for name, body in library.bodies.items() if library.runs_forward(body)]
    handles_to_values(definitions, library.gradients, ordinary, library.unique_gradient)
    top = _Top(library, definitions)
    result = top.build(graph, arguments[: len(input_names)], input_names, variables, tables, constants)
    wrapped = Graph.from_bytes(result.SerializeToString(deterministic=True))
    order = {node_name(path): index for index, path in enumerate((paths or {}).values())}
    for variable in sorted(variables.values(), key=lambda variable: order.get(variable.name, len(order))):
        wrapped.variables[variable.name] = variable.value
    wrapped.non_trainable.update(variable.name for variable in variables.values() if not variable.trainable)
    add_aliases(wrapped, top.input_aliases, zip(aliases, top.outputs, strict=True))
    wrapped.layers.extend(call.named(top.name_of) for call in calls)
    return wrapped


def _fill_with_zeros(library: Library) -> None:
    """Replaces Empty nodes that TensorFlow fills with zeros; servers refuse Empty, as it may return any memory."""
    for body in library.bodies.values():
        for node in list(body.definition.node_def):
            if node.op == "Empty" and node.attr["init"].b:
                dtype = node.attr["dtype"].type
                zero = body.add_node("Const", f"{node.name}/zero", [])
                zero.attr["dtype"].type = dtype
                zero.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(0, tf.as_dtype(dtype), []))
                node.op = "Fill"
                node.input.insert(1, f"{zero.name}:output:0")
                del node.attr["init"], node.attr["dtype"]
                node.attr["T"].type = dtype
                node.attr["index_type"].type = tf.int32.as_datatype_enum


class _Top:
    """Converts a function's body to the graph's top level."""

    def __init__(self, library: Library, definitions: dict[str, Definition]) -> None:
        self._library = library
        self._definitions = definitions
        self._root = library.root.definition
        self._slots: dict[str, dict[str, int]] = {}
        self._names: dict[str, str] = {}
        self._arguments: dict[str, str] = {}
        self.input_aliases: dict[str, str] = {}
        self.outputs: list[str] = []

    def build(
        self,
        graph: Any,
        arguments: Sequence[str],
        input_names: Sequence[str],
        variables: dict[str, Variable],
        tables: dict[str, Table],
        constants: dict[str, Any],
    ) -> graph_pb2.GraphDef:
        """Returns the GraphDef."""
        result = graph_pb2.GraphDef()
        result.versions.producer = tf.version.GRAPH_DEF_VERSION
        taken = UniqueNames()
        for argument, name, tensor in zip(arguments, input_names, graph.inputs, strict=False):
            self._arguments[argument] = taken.make(node_name(name))
            if self._arguments[argument] != name:
                self.input_aliases[name] = self._arguments[argument]
            node = result.node.add(name=self._arguments[argument], op="Placeholder")
            node.attr["dtype"].type = tensor.dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tensor.shape.as_proto())
        for argument, variable in variables.items():
            variable.name = self._named(variable, taken)
            self._arguments[argument] = variable.name
            if all(node.name != variable.name for node in result.node):
                variable.write(result.node.add(name=variable.name, op="VarHandleOp"))
        handles = {table: taken.make("lookup_table") for table in dict.fromkeys(tables.values())}
        for argument, table in tables.items():
            self._arguments[argument] = handles[table]
        result.node.extend(node_def_pb2.NodeDef(name=name) for name in handles.values())
        for argument, value in constants.items():
            self._arguments[argument] = taken.make("captured")
            node = result.node.add(name=self._arguments[argument], op="Const")
            node.attr["dtype"].type = value.dtype.as_datatype_enum
            node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
        for node in self._root.node_def:
            self._names[node.name] = taken.make(node.name)
            first = 0
            slots = self._slots[node.name] = {}
            for slot, count in output_slots(node, self._library):
                slots[slot] = first
                first += count
        returned = {text.partition(":")[0] for text in self._root.ret.values()}
        for node in self._root.node_def:
            copy = result.node.add()
            copy.CopyFrom(node)
            copy.name = self._names[node.name]
            del copy.input[:]
            copy.input.extend(map(self._flat, node.input))
            _clean(copy)
            if node.name in returned:
                count = sum(number for _, number in output_slots(node, self._library))
                _state_shapes(copy, graph.get_operation_by_name(node.name), count)
        self.outputs = [self._flat(self._root.ret[output.name]) for output in self._root.signature.output_arg]
        by_handle = {name: table for table, name in handles.items()}
        replace_tables(result.node, self._definitions, self._library.gradients, by_handle)
        self._write_library(result)
        return result

    def name_of(self, tensor: Any) -> str | None:
        """Returns the new name of a function graph's tensor; None for tensors of other graphs."""
        body = self._library.root
        if tf_private.is_eager(tensor) or tensor.graph is not body.graph:
            return None
        text = body.name_of(tensor, self._library)
        return None if text is None else self._flat(text)

    def _named(self, variable: Variable, taken: UniqueNames) -> str:
        return variable.name if variable.is_named else variable.take_name(taken.make(node_name(variable.name)))

    def _flat(self, text: str) -> str:
        """Converts a reference within a function's body to one between nodes of a graph."""
        if text.startswith("^"):
            return "^" + (self._names.get(text[1:]) or self._arguments[text[1:]])
        node, colon, rest = text.partition(":")
        if not colon:
            return self._arguments[node]
        slot, _, index = rest.partition(":")
        number = self._slots[node][slot] + int(index)
        return f"{self._names[node]}:{number}" if number else self._names[node]

    def _write_library(self, result: graph_pb2.GraphDef) -> None:
        """Adds the functions that the graph uses."""
        needed = needed_functions(result.node, self._definitions, self._library.gradients)
        for name in sorted(needed):
            function = result.library.function.add()
            function.CopyFrom(self._definitions[name])
            for node in function.node_def:
                _clean(node)
        for registered, gradient in sorted(self._library.gradients.items()):
            if gradient in needed:
                result.library.registered_gradients.add(gradient_func=gradient, registered_op_type=registered)
        name_functions_by_use(result, self._library.gradients.values())


def _state_shapes(node: node_def_pb2.NodeDef, op: Any, count: int) -> None:
    """Stores the shapes of an output's node, so that the graph has them without TensorFlow.

    Tracing may have added outputs, which loops and regions pass through; their shapes are unknown.
    """
    shapes = node.attr["_output_shapes"].list.shape
    del shapes[:]
    shapes.extend(tensor.shape.as_proto() for tensor in op.outputs)
    for _ in range(count - len(op.outputs)):
        shapes.add(unknown_rank=True)


def _clean(node: node_def_pb2.NodeDef) -> None:
    """Removes attributes that only the tracing process understands."""
    node.device = ""
    node.ClearField("experimental_debug_info")
    # Old versions of TensorFlow store a call's gradient here; gradrule differentiates the function.
    if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
        node.attr.pop(GRADIENT_ATTR, None)
