"""Variables within gradient functions become values: a rule takes tensors, and reads nothing by itself.

The gradient function of a region may have captured a variable's handle. The node then gets the variable's value
instead, and the function, with all that it calls, is copied with a value in the handle's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2

from gradrule._names import UniqueNames
from gradrule._tracing.bodies import GRADIENT_ATTR, data_inputs
from gradrule.errors import UnsupportedError

Node = node_def_pb2.NodeDef
Definition = function_pb2.FunctionDef

_READ = "ReadVariableOp"


def handles_to_values(
    definitions: dict[str, Definition], gradients: dict[str, str], ordinary: list[str], unique: Callable[[str], str]
) -> None:
    """Rewrites the regions' nodes in the ordinary functions, and adds the copies to definitions and gradients."""
    copies = _Copies(definitions, gradients, unique)
    for name in ordinary:
        copies.feed_values(definitions[name])


class _Copies:
    """Functions whose resource arguments became values, by name and by the arguments' places."""

    def __init__(
        self, definitions: dict[str, Definition], gradients: dict[str, str], unique: Callable[[str], str]
    ) -> None:
        self._definitions = definitions
        self._gradients = gradients
        self._unique = unique
        self._made: dict[tuple[str, tuple[str, ...]], str] = {}

    def feed_values(self, definition: Definition) -> None:
        """Gives the regions' nodes of an ordinary function values to pass on to their gradients."""
        names = UniqueNames()
        for name in [*(node.name for node in definition.node_def), *(a.name for a in definition.signature.input_arg)]:
            names.reserve(name)
        for node in list(definition.node_def):
            handles = self._handles(node)
            for index, dtype in handles.items():
                read = definition.node_def.add(name=names.make(f"{node.name}/{_READ}"), op=_READ)
                read.input.append(node.input[index])
                read.attr["dtype"].type = dtype
                node.input[index] = f"{read.name}:value:0"
            self._value_gradient(node, handles)

    def _handles(self, node: Node) -> dict[int, int]:
        """The places of handles among the inputs of a region's node, with the types of the variables."""
        gradient = self._gradients.get(node.attr[GRADIENT_ATTR].s.decode()) if GRADIENT_ATTR in node.attr else None
        if gradient is None or node.op != "IdentityN":
            return {}
        first = node.attr["_gradrule_outputs"].i
        arguments = {argument.name: argument for argument in self._definitions[gradient].signature.input_arg}
        found = {}
        for index, kind in enumerate(node.attr["T"].list.type):
            argument = arguments.get(_x(index - first))
            if kind == types_pb2.DT_RESOURCE and argument is not None:
                found[index] = _pointed(argument, node)
        return found

    def _value_gradient(self, node: Node, handles: Mapping[int, int]) -> None:
        """Lets a region's node have values at these places, and its gradient function take them."""
        if not handles:
            return
        first = node.attr["_gradrule_outputs"].i
        for index, dtype in handles.items():
            node.attr["T"].list.type[index] = dtype
        old = self._gradients[node.attr[GRADIENT_ATTR].s.decode()]
        new = self._copy(old, {_x(index - first): dtype for index, dtype in handles.items()})
        self._gradients[new] = new
        node.attr[GRADIENT_ATTR].s = new.encode()

    def _copy(self, name: str, values: Mapping[str, int]) -> str:
        key = (name, tuple(sorted(values)))
        if key not in self._made:
            self._made[key] = copy = self._unique(name)
            definition = Definition()
            definition.CopyFrom(self._definitions[name])
            definition.signature.name = copy
            self._definitions[copy] = definition
            self._rewrite(definition, values)
        return self._made[key]

    def _rewrite(self, definition: Definition, values: Mapping[str, int]) -> None:
        known = dict(values)
        for argument in definition.signature.input_arg:
            if argument.name in known:
                argument.type = known[argument.name]
                del argument.handle_data[:]
        left = list(definition.node_def)
        # What passes a handle on makes one more value, so nodes are looked at until nothing is new.
        while hit := [node for node in left if any(text in known for text in data_inputs(node))]:
            for node in hit:
                left = [other for other in left if other is not node]
                places = {i: known[text] for i, text in enumerate(data_inputs(node)) if text in known}
                known.update(self._take_values(definition, node, places))
        for output in definition.signature.output_arg:
            output.type = known.get(definition.ret[output.name], output.type)

    def _take_values(self, definition: Definition, node: Node, places: Mapping[int, int]) -> dict[str, int]:
        """Lets a node take values at these places; returns its outputs that are now values too."""
        simple = _SIMPLE.get(node.op)
        if simple is not None:
            simple(definition, node, places[0])
            return {}
        if node.op == "Identity":
            node.attr["T"].type = places[0]
            return {f"{node.name}:output:0": places[0]}
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
            return {f"{node.name}:output:{index}": dtype for index, dtype in places.items()}
        if node.op == "IdentityN":
            handles = {index: dtype for index, dtype in self._handles(node).items() if index in places}
            if len(handles) == len(places):
                self._value_gradient(node, handles)
                return {}
        raise UnsupportedError(
            f"gradient function {definition.signature.name!r}: {node.op} node {node.name!r} does more with a variable "
            "than read it; gradients only read"
        )

    def _call(self, node: Node, functions: list[Any], places: Mapping[int, int], first: int, types: str = "Tin") -> None:
        for function in functions:
            arguments = self._definitions[function.name].signature.input_arg
            named = {arguments[index - first].name: dtype for index, dtype in places.items()}
            function.name = self._copy(function.name, named)
        for index, dtype in places.items():
            node.attr[types].list.type[index - first] = dtype


def _x(index: int) -> str:
    return f"x{index}" if index else "x"


def _pointed(argument: Any, node: Node) -> int:
    if len(argument.handle_data) != 1:
        raise UnsupportedError(
            f"the gradient of region {node.attr['_gradrule_region'].s.decode()!r} at node {node.name!r} uses a "
            "resource that is no variable; it can travel only if the gradient does without"
        )
    return int(argument.handle_data[0].dtype)


def _read(definition: Definition, node: Node, dtype: int) -> None:
    _retyped(definition, node, "Identity", {"T": dtype})
    _rerouted(definition, f"{node.name}:value:0", f"{node.name}:output:0")


def _shape(definition: Definition, node: Node, dtype: int) -> None:
    _retyped(definition, node, "Shape", {"T": dtype, "out_type": node.attr["out_type"].type})


def _gather_nd(definition: Definition, node: Node, dtype: int) -> None:
    _retyped(definition, node, "GatherNd", {"Tparams": dtype, "Tindices": node.attr["Tindices"].type})


def _gather(definition: Definition, node: Node, dtype: int) -> None:
    batch_dims, indices = node.attr["batch_dims"].i, node.attr["Tindices"].type
    names = UniqueNames()
    for other in definition.node_def:
        names.reserve(other.name)
    axis = definition.node_def.add(name=names.make(f"{node.name}/axis"), op="Const")
    axis.attr["dtype"].type = types_pb2.DT_INT32
    axis.attr["value"].tensor.dtype = types_pb2.DT_INT32
    axis.attr["value"].tensor.tensor_shape.SetInParent()
    axis.attr["value"].tensor.int_val.append(batch_dims)
    _retyped(definition, node, "GatherV2", {"Tparams": dtype, "Tindices": indices, "Taxis": types_pb2.DT_INT32})
    node.attr["batch_dims"].i = batch_dims
    node.input.insert(2, f"{axis.name}:output:0")


def _retyped(definition: Definition, node: Node, op_type: str, types: Mapping[str, int]) -> None:
    node.op = op_type
    node.attr.clear()
    for name, value in types.items():
        node.attr[name].type = value


def _rerouted(definition: Definition, old: str, new: str) -> None:
    for node in definition.node_def:
        for index, text in enumerate(node.input):
            if text == old:
                node.input[index] = new
    for name in list(definition.ret):
        if definition.ret[name] == old:
            definition.ret[name] = new


_SIMPLE: dict[str, Callable[[Definition, Node, int], None]] = {
    _READ: _read,
    "ResourceGather": _gather,
    "ResourceGatherNd": _gather_nd,
    "VariableShape": _shape,
}
