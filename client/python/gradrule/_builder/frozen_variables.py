"""Replaces variable handles by values, in gradient functions and in graphs to freeze.

Gradient functions are rules, and rules cannot read variables. If a region's gradient function captures a variable's
handle, the region's node gets the variable's value as an input instead. The function and the functions that it calls
are copied, and the copies take a value instead of a handle. Works on gradrule's and on TensorFlow's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gradrule._builder.graph_lookup import GRADIENT_ATTR
from gradrule._builder.names import UniqueNames
from gradrule.common import tensor_codec
from gradrule.errors import UnsupportedError
from gradrule.v1 import graph_pb2
from gradrule.v1.tensor_pb2 import Dt

# Messages of gradrule or of TensorFlow.
Node: TypeAlias = Any
Function: TypeAlias = Any

_READ = "ReadVariableOp"


@dataclass(frozen=True, slots=True)
class Value:
    """Describes what an edge carries instead of a handle.

    Attributes:
        dtype: The value's type.
        resource: What the handle refers to, if nodes need to know it; compared by identity.
        kind: The kind of resource in errors.
    """

    dtype: int
    resource: Any = None
    kind: str = "variable"


Reader: TypeAlias = Callable[[Any, Node, Value], None]
"""Changes a node of a body, which reads a resource, so that it takes the value as its first input instead."""


def handles_to_values(
    definitions: dict[str, Function], gradients: dict[str, str], ordinary: list[str], unique: Callable[[str], str]
) -> None:
    """Replaces handles by values at the nodes of regions and in their gradient functions.

    Args:
        definitions: Functions by name; gets the rewritten copies.
        gradients: Gradient functions by registered name; gets the rewritten copies.
        ordinary: Names of the forward functions, whose nodes are rewritten.
        unique: Returns an unused function name for a requested name.

    Raises:
        UnsupportedError: A gradient function does more with a variable than read it, or captures another resource.
    """
    copies = ValueCopies(definitions, gradients, unique)
    for name in ordinary:
        copies.feed_values(definitions[name])


def frozen(data: bytes, variables: Mapping[str, tensor_codec.Array]) -> bytes:
    """Replaces the variables of a serialized graph by constants.

    Args:
        data: Bytes of a GraphDef.
        variables: Values by the name of the variable's node; each has the variable's shape and dtype.

    Returns:
        Bytes of the frozen GraphDef, without functions that it does not use.

    Raises:
        UnsupportedError: A variable has no value, or the graph does more than read it.
    """
    graph = graph_pb2.Graph.FromString(data)
    definitions = {function.signature.name: function for function in graph.library.function}
    gradients = {item.registered_op_type: item.gradient_func for item in graph.library.registered_gradients}
    names = UniqueNames()
    for name in definitions:
        names.reserve(name)
    handles = {}
    for node in graph.node:
        if node.op == "VarHandleOp":
            if node.name not in variables:
                raise UnsupportedError(
                    f"the variable {node.name!r} has no value in graph.variables; freezing needs all values"
                )
            tensor = tensor_codec.to_message(variables[node.name], node.attr["dtype"].type)
            node.op = "Const"
            node.attr.clear()
            node.attr["dtype"].type = tensor.dtype
            node.attr["value"].tensor.CopyFrom(tensor)
            handles[node.name] = Value(int(tensor.dtype))
    ValueCopies(definitions, gradients, names.make).take_values_in(TopLevel(graph.node), handles)
    _keep_needed(graph, definitions, gradients)
    return graph.SerializeToString(deterministic=True)


def functions_of(node: Node) -> list[Any]:
    """Returns the functions that a node's attributes name."""
    found = []
    for key in sorted(node.attr):
        value = node.attr[key]
        if value.HasField("func"):
            found.append(value.func)
        found += value.list.func
    return found


def needed_functions(nodes: Any, definitions: Mapping[str, Function], gradients: Mapping[str, str]) -> set[str]:
    """Returns the names of all functions that nodes use directly or indirectly: calls, bodies and gradients."""
    needed: set[str] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        gradient = node.attr[GRADIENT_ATTR].s.decode() if GRADIENT_ATTR in node.attr else ""
        for name in [*(function.name for function in functions_of(node)), node.op, gradients.get(gradient, "")]:
            if name in definitions and name not in needed:
                needed.add(name)
                pending.extend(definitions[name].node_def)
    return needed


class TopLevel:
    """Gives a graph's nodes the interface of a function's body."""

    def __init__(self, nodes: Any) -> None:
        self.node_def = nodes
        self.ret: dict[str, str] = {}


def _keep_needed(graph: graph_pb2.Graph, definitions: Mapping[str, Function], gradients: Mapping[str, str]) -> None:
    needed = needed_functions(graph.node, definitions, gradients)
    kept = graph_pb2.FunctionLibrary(
        function=[definitions[name] for name in sorted(needed)],
        registered_gradients=[
            graph_pb2.RegisteredGradient(gradient_func=function, registered_op_type=name)
            for name, function in sorted(gradients.items())
            if function in needed
        ],
    )
    graph.library.CopyFrom(kept)


def _data_inputs(node: Node) -> list[str]:
    return [text for text in node.input if not text.startswith("^")]


class ValueCopies:
    """Copies functions so that they take values for resource arguments; caches copies by name and arguments.

    Args:
        definitions: Functions by name; gets the copies.
        gradients: Gradient functions by registered name; gets the copies.
        unique: Returns an unused function name for a requested name.
        readers: How ops that read a resource are changed, by op type; the default is for variables.
    """

    def __init__(
        self,
        definitions: dict[str, Function],
        gradients: dict[str, str],
        unique: Callable[[str], str],
        readers: Mapping[str, Reader] | None = None,
    ) -> None:
        self._definitions = definitions
        self._gradients = gradients
        self._unique = unique
        self._readers = _VARIABLE_READERS if readers is None else readers
        self._made: dict[tuple[str, tuple[tuple[str, Value], ...]], str] = {}

    def feed_values(self, definition: Function) -> None:
        """Adds reads of variables to a forward function and feeds the values to the nodes of regions."""
        names = UniqueNames()
        for name in [*(node.name for node in definition.node_def), *(a.name for a in definition.signature.input_arg)]:
            names.reserve(name)
        for node in list(definition.node_def):
            handles = self._handles(node)
            for index, value in handles.items():
                read = definition.node_def.add(name=names.make(f"{node.name}/{_READ}"), op=_READ)
                read.input.append(node.input[index])
                read.attr["dtype"].type = value.dtype
                node.input[index] = f"{read.name}:value:0"
            self._value_gradient(node, handles)

    def _handles(self, node: Node) -> dict[int, Value]:
        """Returns the variables among a region node's inputs by index."""
        gradient = self._gradients.get(node.attr[GRADIENT_ATTR].s.decode()) if GRADIENT_ATTR in node.attr else None
        if gradient is None or node.op != "IdentityN":
            return {}
        first = node.attr["_gradrule_outputs"].i
        arguments = {argument.name: argument for argument in self._definitions[gradient].signature.input_arg}
        found = {}
        for index, kind in enumerate(node.attr["T"].list.type):
            argument = arguments.get(_x(index - first))
            if kind == Dt.DT_RESOURCE and argument is not None:
                found[index] = Value(_pointed(argument, node))
        return found

    def _value_gradient(self, node: Node, handles: Mapping[int, Value]) -> None:
        """Changes the inputs at these indices to values, in a region's node and its gradient function."""
        if not handles:
            return
        first = node.attr["_gradrule_outputs"].i
        for index, value in handles.items():
            node.attr["T"].list.type[index] = value.dtype
        old = self._gradients[node.attr[GRADIENT_ATTR].s.decode()]
        new = self._copy(old, {_x(index - first): value for index, value in handles.items()})
        self._gradients[new] = new
        node.attr[GRADIENT_ATTR].s = new.encode()

    def _copy(self, name: str, values: Mapping[str, Value]) -> str:
        key = (name, tuple(sorted(values.items(), key=lambda item: item[0])))
        if key not in self._made:
            self._made[key] = copy = self._unique(name)
            definition = type(self._definitions[name])()
            definition.CopyFrom(self._definitions[name])
            definition.signature.name = copy
            self._definitions[copy] = definition
            self._rewrite(definition, values)
        return self._made[key]

    def _rewrite(self, definition: Function, values: Mapping[str, Value]) -> None:
        for index, argument in enumerate(definition.signature.input_arg):
            if argument.name in values:
                argument.type = values[argument.name].dtype
                del argument.handle_data[:]
                _forget_shapes(definition.attr, "_input_shapes", [index])
                if index in definition.arg_attr:
                    _forget_shapes(definition.arg_attr[index].attr, "_output_shapes", [0])
        known = self.take_values_in(definition, values)
        for output in definition.signature.output_arg:
            if definition.ret[output.name] in known:
                output.type = known[definition.ret[output.name]].dtype

    def take_values_in(self, body: Any, values: Mapping[str, Value]) -> dict[str, Value]:
        """Changes all nodes of a body to take values for handles; returns the tensors that are values."""
        known = dict(values)
        nodes = list(body.node_def)
        done: set[tuple[int, int]] = set()
        changed = True
        # A node that returned a handle now returns a value, so repeat until no node changes.
        while changed:
            changed = False
            for number, node in enumerate(nodes):
                texts = enumerate(_data_inputs(node))
                places = {i: known[text] for i, text in texts if text in known and (number, i) not in done}
                if places:
                    changed = True
                    done.update((number, index) for index in places)
                    for output, value in self._take_values(body, node, places).items():
                        known[_reference(body, node, "output", output)] = value
        return known

    def _take_values(self, body: Any, node: Node, places: Mapping[int, Value]) -> dict[int, Value]:
        """Changes a node to take values at these input indices; returns the outputs that become values."""
        reader = self._readers.get(node.op)
        if reader is not None and 0 in places:
            reader(body, node, places[0])
            return {}
        if node.op == "Identity":
            node.attr["T"].type = places[0].dtype
            return {0: places[0]}
        if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
            self._call(node, [node.attr["f"].func], places, 0)
            return {}
        if node.op in ("If", "StatelessIf"):
            self._call(node, [node.attr["then_branch"].func, node.attr["else_branch"].func], places, 1)
            return {}
        if node.op in ("Case", "StatelessCase"):
            self._call(node, list(node.attr["branches"].list.func), places, 1)
            return {}
        if node.op in ("While", "StatelessWhile"):
            self._call(node, [node.attr["cond"].func, node.attr["body"].func], places, 0, "T")
            _forget_shapes(node.attr, "output_shapes", places)
            return dict(places)
        if node.op == "IdentityN":
            handles = {index: value for index, value in self._handles(node).items() if index in places}
            if len(handles) == len(places):
                self._value_gradient(node, handles)
                return {}
        kind = next(iter(places.values())).kind
        where = "in the gradient function of a region or in a graph to freeze" if kind == "variable" else "in a graph"
        raise UnsupportedError(
            f"{node.op} node {node.name!r} does more with a {kind} than read it; this is not supported {where}"
        )

    def _call(
        self, node: Node, functions: list[Any], places: Mapping[int, Value], first: int, types: str = "Tin"
    ) -> None:
        for function in functions:
            arguments = self._definitions[function.name].signature.input_arg
            named = {arguments[index - first].name: value for index, value in places.items()}
            function.name = self._copy(function.name, named)
        for index, value in places.items():
            node.attr[types].list.type[index - first] = value.dtype


def _forget_shapes(attrs: Any, name: str, places: Iterable[int]) -> None:
    """Clears the shapes of handles (scalars) in an attribute; values may have other shapes."""
    shapes = attrs[name].list.shape if name in attrs else ()
    for index in places:
        if index < len(shapes):
            shapes[index].Clear()
            shapes[index].unknown_rank = True


def _reference(body: Any, node: Node, slot: str, index: int) -> str:
    """Returns the name by which other nodes of the body refer to a node's output."""
    if isinstance(body, TopLevel):
        return f"{node.name}:{index}" if index else str(node.name)
    return f"{node.name}:{slot}:{index}"


def _x(index: int) -> str:
    return f"x{index}" if index else "x"


def _pointed(argument: Any, node: Node) -> int:
    if len(argument.handle_data) != 1:
        raise UnsupportedError(
            f"the gradient of region {node.attr['_gradrule_region'].s.decode()!r} at node {node.name!r} uses a "
            "resource that is not a variable, which cannot be sent; remove the resource from the gradient function"
        )
    return int(argument.handle_data[0].dtype)


def _read(body: Any, node: Node, value: Value) -> None:
    old = _reference(body, node, "value", 0)
    _retyped(node, "Identity", {"T": value.dtype})
    _rerouted(body, old, _reference(body, node, "output", 0))


def _shape(body: Any, node: Node, value: Value) -> None:
    _retyped(node, "Shape", {"T": value.dtype, "out_type": node.attr["out_type"].type})


def _gather_nd(body: Any, node: Node, value: Value) -> None:
    _retyped(node, "GatherNd", {"Tparams": value.dtype, "Tindices": node.attr["Tindices"].type})


def _gather(body: Any, node: Node, value: Value) -> None:
    batch_dims, indices = node.attr["batch_dims"].i, node.attr["Tindices"].type
    names = UniqueNames()
    for other in body.node_def:
        names.reserve(other.name)
    axis = body.node_def.add(name=names.make(f"{node.name}/axis"), op="Const")
    axis.attr["dtype"].type = Dt.DT_INT32
    axis.attr["value"].tensor.dtype = Dt.DT_INT32
    axis.attr["value"].tensor.tensor_shape.SetInParent()
    axis.attr["value"].tensor.int_val.append(batch_dims)
    _retyped(node, "GatherV2", {"Tparams": value.dtype, "Tindices": indices, "Taxis": Dt.DT_INT32})
    node.attr["batch_dims"].i = batch_dims
    node.input.insert(2, _reference(body, axis, "output", 0))


def _retyped(node: Node, op_type: str, types: Mapping[str, int]) -> None:
    node.op = op_type
    node.attr.clear()
    for name, value in types.items():
        node.attr[name].type = value


def _rerouted(body: Any, old: str, new: str) -> None:
    for node in body.node_def:
        for index, text in enumerate(node.input):
            if text == old:
                node.input[index] = new
    for name in list(body.ret):
        if body.ret[name] == old:
            body.ret[name] = new


_VARIABLE_READERS: dict[str, Reader] = {
    _READ: _read,
    "ResourceGather": _gather,
    "ResourceGatherNd": _gather_nd,
    "VariableShape": _shape,
}
