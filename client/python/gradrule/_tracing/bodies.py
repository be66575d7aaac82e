"""Holds the functions of a traced graph in editable form: the top level, nested functions and gradient functions.

A body refers to its TensorFlow function graph, so that it can return the names of tensors in that graph. If a body
needs a tensor of an outer function or a variable, all calls between the two functions get an additional argument."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tensorflow.core.framework import function_pb2, node_def_pb2, types_pb2

from gradrule._builder.frozen_variables import functions_of
from gradrule._builder.names import UniqueNames
from gradrule._tracing import tf_private
from gradrule.errors import UnsupportedError

Node: TypeAlias = node_def_pb2.NodeDef
Definition: TypeAlias = function_pb2.FunctionDef

_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}
_LOOPS = {"While", "StatelessWhile"}


def output_slots(node: Node, library: Library) -> list[tuple[str, int]]:
    """Returns the names of a node's outputs in a function's body, each with its number of tensors."""
    definition = tf_private.op_definition(node.op)
    if definition is None:
        definition = library.bodies[node.op].definition.signature
    slots = []
    for output in definition.output_arg:
        if output.number_attr:
            count = node.attr[output.number_attr].i
        elif output.type_list_attr:
            count = len(node.attr[output.type_list_attr].list.type)
        else:
            count = 1
        slots.append((output.name, count))
    return slots


def append_input(node: Node, name: str) -> None:
    """Adds a data input, before the control inputs."""
    first_control = next((i for i, text in enumerate(node.input) if text.startswith("^")), len(node.input))
    node.input.insert(first_control, name)


def data_inputs(node: Node) -> list[str]:
    """Returns a node's inputs without the control inputs."""
    return [text for text in node.input if not text.startswith("^")]


@dataclass(eq=False)
class Body:
    """Holds one function.

    Attributes:
        definition: Its definition, which may be edited.
        graph: TensorFlow's function graph.
        arguments: Name of the argument for each input of the graph; None if the definition does not have it.
        gradient_of: The body and the node that a gradient function belongs to; None for other functions.
        users: The nodes that call the function, each with its body.
        passed: Names of added arguments, by identity of the tensor.
    """

    definition: Definition
    graph: Any
    arguments: list[str | None]
    gradient_of: tuple[Body, Node] | None = None
    users: list[tuple[Body, Node]] = field(default_factory=list)
    passed: dict[Hashable, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.definition.node_def}
        self._names = UniqueNames()
        for name in [*self.nodes, *(argument.name for argument in self.definition.signature.input_arg)]:
            self._names.reserve(name)
        self._inputs = {tf_private.identity_of(tensor): index for index, tensor in enumerate(self.graph.inputs)}
        self._captures = {tf_private.identity_of(outer): inner for outer, inner in tf_private.captures(self.graph)}

    @property
    def name(self) -> str:
        return str(self.definition.signature.name)

    def captured(self, tensor: Any) -> Any:
        """Returns the placeholder of this body for a captured tensor of another graph, or None."""
        return self._captures.get(tf_private.identity_of(tensor))

    def name_of(self, tensor: Any, library: Library) -> str | None:
        """Returns the reference to a tensor of the body's graph; None for an argument that was removed."""
        index = self._inputs.get(tf_private.identity_of(tensor))
        if index is not None:
            return self.arguments[index]
        offset = tensor.value_index
        for slot, count in output_slots(self.nodes[tensor.op.name], library):
            if offset < count:
                return f"{tensor.op.name}:{slot}:{offset}"
            offset -= count
        raise AssertionError(f"{tensor.name} is no output of {tensor.op.name}")

    def unique(self, requested: str) -> str:
        """Returns a name that no node or argument has."""
        return self._names.make(requested)

    def add_node(self, op_type: str, requested: str, inputs: list[str]) -> Node:
        """Adds a node; the caller sets its attributes."""
        node = self.definition.node_def.add(name=self.unique(requested), op=op_type)
        node.input.extend(inputs)
        self.nodes[node.name] = node
        return node

    def add_argument(self, tensor: Any, requested: str) -> str:
        """Adds an argument of a tensor's type at the end; returns its name."""
        signature = self.definition.signature
        argument = signature.input_arg.add(name=self.unique(requested), type=tensor.dtype.as_datatype_enum)
        note_handle(argument, tensor)
        if "_input_shapes" in self.definition.attr:
            self.definition.attr["_input_shapes"].list.shape.add(unknown_rank=True)
        return str(argument.name)


class Library:
    """Holds all bodies of a graph by name, including the top level."""

    def __init__(self, root: Body) -> None:
        self.root = root
        self.bodies: dict[str, Body] = {}
        self.gradients: dict[str, str] = {}
        """Gradient functions by the name in the attribute `_gradient_op_type`."""
        self.root_captures: dict[str, Any] = {}
        """Eager tensors by the top-level argument that represents them."""
        self._gradient_names = UniqueNames()
        self.add(root)

    def add(self, body: Body) -> None:
        """Adds a body and all functions that its nodes use."""
        self.bodies[body.name] = body
        pending = [body]
        while pending:
            user = pending.pop()
            for node in user.definition.node_def:
                names = {function.name for function in functions_of(node)}
                if tf_private.op_definition(node.op) is None:
                    names.add(node.op)
                for name in sorted(names):
                    known = self.bodies.get(name)
                    if known is None:
                        known = self._nested(user, name)
                        self.bodies[name] = known
                        pending.append(known)
                    known.users.append((user, node))

    def _nested(self, user: Body, name: str) -> Body:
        function = tf_private.function_in(user.graph, name)
        if function is None:
            raise UnsupportedError(f"function {name!r}, which a node of {user.graph.name!r} calls, is missing")
        definition = Definition()
        definition.CopyFrom(function.definition)
        return Body(definition, function.graph, [argument.name for argument in definition.signature.input_arg])

    def runs_forward(self, body: Body) -> bool:
        """Returns whether a function is reachable from the top level by calls; others run only in gradients."""
        pending, seen = [body], {body.name}
        while pending:
            current = pending.pop()
            if current is self.root:
                return True
            for user, _ in current.users:
                if user.name not in seen:
                    seen.add(user.name)
                    pending.append(user)
        return False

    def unique_gradient(self, requested: str) -> str:
        """Returns a name for a gradient function that no other function or op type has."""
        name = self._gradient_names.make(requested)
        while name in self.bodies or name in self.gradients or tf_private.op_definition(name) is not None:
            name = self._gradient_names.make(requested)
        return name

    def reach(self, body: Body, tensor: Any) -> str:
        """Returns the reference to a tensor in a body; adds arguments if it is outside of the body.

        Args:
            body: The function whose nodes use the tensor.
            tensor: A tensor of the body, of an outer function, or an eager resource.

        Raises:
            UnsupportedError: The tensor cannot be passed into the function.
        """
        inside = tensor if _graph_of(tensor) is body.graph else body.captured(tensor)
        name = None if inside is None else body.name_of(inside, self)
        if name is not None:
            return name
        key = tf_private.identity_of(tensor)
        if key not in body.passed:
            self._pass_in(body, tensor, key)
        return body.passed[key]

    def _pass_in(self, body: Body, tensor: Any, key: Hashable) -> None:
        """Adds an argument to a body and to all functions that the same nodes call."""
        widened: dict[str, Body] = {}
        nodes: list[tuple[Body, Node]] = []
        pending = [body]
        while pending:
            current = pending.pop()
            if current.name in widened:
                continue
            if (
                current.gradient_of is None
                and not current.users
                and not (current is self.root and tf_private.is_eager(tensor))
            ):
                raise UnsupportedError(_unreachable(body, tensor))
            widened[current.name] = current
            for user, node in current.users:
                if any(node is known for _, known in nodes):
                    continue
                if node.op not in _CALLS | _BRANCHES | _LOOPS:
                    raise UnsupportedError(f"{_unreachable(body, tensor)} {node.op} node {node.name!r} is in between")
                nodes.append((user, node))
                pending.extend(self.bodies[function.name] for function in functions_of(node))
        for current in widened.values():
            requested = f"x{self._count(current)}" if current.gradient_of else "passed"
            current.passed[key] = current.add_argument(tensor, requested)
            if current is self.root:
                self.root_captures[current.passed[key]] = tensor
        for current in widened.values():
            if current.gradient_of is not None:
                user, node = current.gradient_of
                self.append_to_region(user, node, tensor)
        for user, node in nodes:
            self._append_to_call(user, node, tensor, key)

    def _count(self, gradient: Body) -> int:
        """Returns the number of the next `x` of a region's gradient function."""
        assert gradient.gradient_of is not None
        node = gradient.gradient_of[1]
        return len(data_inputs(node)) - int(node.attr["_gradrule_outputs"].i)

    def append_to_region(self, user: Body, node: Node, tensor: Any) -> None:
        """Adds an input to a region's node, for use in its gradient function."""
        append_input(node, self.reach(user, tensor))
        node.attr["T"].list.type.append(tensor.dtype.as_datatype_enum)

    def _append_to_call(self, user: Body, node: Node, tensor: Any, key: Hashable) -> None:
        append_input(node, self.reach(user, tensor))
        kind = tensor.dtype.as_datatype_enum
        if node.op not in _LOOPS:
            node.attr["Tin"].list.type.append(kind)
            return
        types = node.attr["T"].list.type
        if node.attr["_num_original_outputs"].i == len(types):
            node.attr["_num_original_outputs"].i += 1
        types.append(kind)
        if node.attr["output_shapes"].list.shape:
            node.attr["output_shapes"].list.shape.add(unknown_rank=True)
        loop = self.bodies[node.attr["body"].func.name]
        result = loop.definition.signature.output_arg.add(name=loop.unique("passed_on"), type=kind)
        loop.definition.ret[result.name] = loop.passed[key]


def note_handle(argument: Any, tensor: Any) -> None:
    """Stores the dtype and shape of a resource argument's content in its definition."""
    if argument.type == types_pb2.DT_RESOURCE and not argument.handle_data:
        for item in tf_private.handle_data(tensor) or ():
            argument.handle_data.add(dtype=item.dtype, shape=item.shape)


def _graph_of(tensor: Any) -> Any:
    return None if tf_private.is_eager(tensor) else tensor.graph


def _unreachable(body: Body, tensor: Any) -> str:
    return (
        f"the gradient in function {body.graph.name!r} uses the tensor {getattr(tensor, 'name', tensor)!r} of another "
        "function, which cannot be passed in; give it to the function as an argument."
    )


def referenced(definition: Definition) -> set[str]:
    """Returns the names of all arguments and nodes that nodes or results use."""
    texts = [text for node in definition.node_def for text in node.input]
    return {text.removeprefix("^").partition(":")[0] for text in [*texts, *definition.ret.values()]}


def renamed(
    definition: Definition, old_names: Sequence[str], new_names: Sequence[str | None], *, nodes: bool = True
) -> None:
    """Renames arguments, and nodes whose names equal an argument's new name.

    Args:
        definition: The function to change.
        old_names: Names of the arguments.
        new_names: New names in the same order; None for unused arguments.
        nodes: False changes only references, not the names of arguments and nodes.
    """
    names = {old: new for old, new in zip(old_names, new_names, strict=True) if new is not None}
    moved: dict[str, str] = {}
    if nodes:
        taken = UniqueNames()
        for name in [*names.values(), *(node.name for node in definition.node_def)]:
            taken.reserve(name)
        wanted = set(names.values())
        for node in definition.node_def:
            if node.name in wanted:
                moved[node.name] = taken.make(node.name)
                node.name = moved[node.name]
        for argument in definition.signature.input_arg:
            argument.name = names.get(argument.name, argument.name)
    for node in definition.node_def:
        for index, text in enumerate(node.input):
            node.input[index] = _reference(text, names, moved)
    for key in list(definition.ret):
        definition.ret[key] = _reference(definition.ret[key], names, moved)
    for key in list(definition.control_ret):
        definition.control_ret[key] = moved.get(definition.control_ret[key], definition.control_ret[key])


def _reference(text: str, arguments: Mapping[str, str], nodes: Mapping[str, str]) -> str:
    if text.startswith("^"):
        return "^" + nodes.get(text[1:], text[1:])
    head, colon, rest = text.partition(":")
    if not colon:
        return arguments.get(head, head)
    return nodes.get(head, head) + colon + rest
