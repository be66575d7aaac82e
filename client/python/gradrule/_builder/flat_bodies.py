"""Holds nodes of a graph or function with inputs as in a graph, copies parts of them, and writes them as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self

from gradrule._builder.names import UniqueNames
from gradrule.common import op_definitions, op_inference
from gradrule.common.dtypes import as_dt
from gradrule.v1 import graph_pb2
from gradrule.v1.graph_pb2 import AttrValue, Node
from gradrule.v1.tensor_pb2 import Dt

LOOP_OPS = {"Enter", "Exit", "NextIteration", "LoopCond"}
_ARG = "_Arg"


class UnsupportedControlFlowError(Exception):
    """Describes a graph whose control flow has another form than TensorFlow writes."""


def parsed(text: str) -> tuple[str, int]:
    name, _, output = text.removeprefix("^").partition(":")
    return name, int(output or 0)


def output_name(name: str, output: int) -> str:
    return f"{name}:{output}" if output else name


class FunctionWriter:
    """Adds functions to a graph's library."""

    def __init__(self, library: graph_pb2.FunctionLibrary, names: UniqueNames) -> None:
        self._library = library
        self.names = names

    def add(self, name: str, arguments: Sequence[int], body: FlatBody, results: Sequence[tuple[str, int]]) -> str:
        """Adds a function whose arguments are the nodes `arg0`, `arg1`, … of a body; returns its name."""
        function = self._library.function.add()
        function.signature.name = self.names.make(name)
        for index, dtype in enumerate(arguments):
            function.signature.input_arg.add(name=f"arg{index}", type=as_dt(dtype))
        for node in body.nodes.values():
            if node.op != _ARG:
                copy = function.node_def.add()
                copy.CopyFrom(node)
                del copy.input[:]
                for text in node.input:
                    copy.input.append(text if text.startswith("^") else self._reference(body, *parsed(text)))
        for index, (producer, output) in enumerate(results):
            function.signature.output_arg.add(name=f"result{index}", type=as_dt(body.dtype(producer, output)))
            function.ret[f"result{index}"] = self._reference(body, producer, output)
        return str(function.signature.name)

    def _reference(self, body: FlatBody, name: str, output: int) -> str:
        node = body.nodes[name]
        if node.op == _ARG:
            return name
        for slot, (first, count) in self._slots(node).items():
            if first <= output < first + count:
                return f"{name}:{slot}:{output - first}"
        raise UnsupportedControlFlowError(name)

    def _slots(self, node: Node) -> Mapping[str, tuple[int, int]]:
        for function in self._library.function:
            if function.signature.name == node.op:
                return {argument.name: (i, 1) for i, argument in enumerate(function.signature.output_arg)}
        op = op_definitions.find(node.op)
        if op is None:
            raise UnsupportedControlFlowError(node.op)
        return op_inference.output_slices(op, _attributes(op, node))

    def types(self, node: Node) -> list[int]:
        """Returns the types of a node's outputs."""
        for function in self._library.function:
            if function.signature.name == node.op:
                return [argument.type for argument in function.signature.output_arg]
        op = op_definitions.find(node.op)
        if op is None:
            raise UnsupportedControlFlowError(node.op)
        attributes = _attributes(op, node)
        found: list[int] = []
        for argument in op.outputs:
            if argument.type_list_attr:
                found += attributes[argument.type_list_attr].list.type
            else:
                count = attributes[argument.number_attr].i if argument.number_attr else 1
                found += [argument.type or attributes[argument.type_attr].type] * count
        return found


def _attributes(op: op_definitions.OpDef, node: Node) -> dict[str, AttrValue]:
    defaults = {attr.name: attr.default for attr in op.attrs if attr.default is not None}
    return {**defaults, **node.attr}


class FlatBody:
    """Holds the nodes of a graph or a function, by name; inputs are `node:output` as in a graph."""

    def __init__(self, nodes: dict[str, Node], library: FunctionWriter) -> None:
        self.nodes = nodes
        self._library = library

    def dtype(self, name: str, output: int) -> int:
        """Returns the type of an output."""
        node = self.nodes[name]
        return node.attr["T"].type if node.op == _ARG else self._library.types(node)[output]

    def all_inputs(self, node: Node) -> list[tuple[str, int]]:
        """Returns producers with their outputs; control inputs have output -1."""
        return [(text[1:], -1) if text.startswith("^") else parsed(text) for text in node.input]

    def controls(self, nodes: Iterable[Node]) -> list[str]:
        """Returns the control inputs of nodes, each once."""
        return self.waited_for(text for node in nodes for text in node.input if text.startswith("^"))

    def waited_for(self, controls: Iterable[str]) -> list[str]:
        """Returns control inputs, each once, without those from a Placeholder or argument, which have no effect."""
        return [text for text in dict.fromkeys(controls) if self.nodes[text[1:]].op not in ("Placeholder", _ARG)]

    def dependencies(self, names: Iterable[str], is_followed: Callable[[str], bool]) -> set[str]:
        """Returns nodes and what they depend on; follows inputs of a node only if `is_followed` accepts its name."""
        pending, seen = list(names), set[str]()
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                if is_followed(name):
                    pending += [producer for producer, _ in self.all_inputs(self.nodes[name])]
        return seen

    def copied(
        self,
        results: Sequence[str],
        arguments: Mapping[tuple[str, int], str],
        types: Sequence[int],
        is_inside: Callable[[str], bool],
    ) -> tuple[Self, list[tuple[str, int]]]:
        """Copies the nodes that results need into a body; tensors in `arguments` become its arguments."""
        nodes = {}
        for index, dtype in enumerate(types):
            nodes[f"arg{index}"] = Node(name=f"arg{index}", op=_ARG)
            nodes[f"arg{index}"].attr["T"].type = as_dt(dtype)

        def inner(text: str) -> tuple[str, int]:
            name, output = parsed(text)
            if (name, output) in arguments:
                return arguments[name, output], 0
            if not is_inside(name) or self.nodes[name].op in {"Placeholder", *LOOP_OPS}:
                raise UnsupportedControlFlowError(name)
            pending.append(name)
            return name, output

        pending: list[str] = []
        ends = [inner(text) for text in results]
        while pending:
            name = pending.pop()
            if name in nodes:
                continue
            copy = nodes[name] = Node()
            copy.CopyFrom(self.nodes[name])
            del copy.input[:]
            for text in self.nodes[name].input:
                if not text.startswith("^"):
                    copy.input.append(output_name(*inner(text)))
            for control, output in self.all_inputs(self.nodes[name]):
                is_boundary = any((control, number) in arguments for number in (0, 1))
                is_boundary |= self.nodes[control].op in {"Placeholder", *LOOP_OPS}
                if output < 0 and is_inside(control) and not is_boundary:
                    copy.input.append(f"^{control}")
                    pending.append(control)
        return type(self)(nodes, self._library), ends

    def add(self, requested: str, op: str, inputs: Iterable[str]) -> Node:
        node = Node(name=self._library.names.make(requested), op=op, input=list(inputs))
        self.nodes[node.name] = node
        return node

    def dependents(self, names: Iterable[str], is_passed: Callable[[Node], bool]) -> set[str]:
        """Returns nodes and all nodes that depend on them through nodes that `is_passed` accepts."""
        users: dict[str, list[Node]] = {}
        for node in self.nodes.values():
            for producer, _ in self.all_inputs(node):
                users.setdefault(producer, []).append(node)
        pending, found = list(names), set(names)
        while pending:
            for user in users.get(pending.pop(), ()):
                if user.name not in found and is_passed(user):
                    found.add(user.name)
                    pending.append(user.name)
        return found

    def remove(self, names: set[str]) -> None:
        """Removes nodes and all nodes that depend on them."""
        for name in self.dependents(names, lambda node: True):
            self.nodes.pop(name, None)

    def constant(self, requested: str, value: int) -> str:
        node = self.add(requested, "Const", [])
        node.attr["dtype"].type = Dt.DT_INT32
        tensor = node.attr["value"].tensor
        tensor.dtype = Dt.DT_INT32
        tensor.tensor_shape.SetInParent()
        tensor.int_val.append(value)
        return str(node.name)
