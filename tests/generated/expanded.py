"""Reads a GraphDef into bodies of nodes: calls are copied in, and each loop body and branch is a body of its own.

Written from the words of design.md (section 4) and override.proto alone; nothing of the server is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gradrule.v1 import graph_pb2
from gradrule.v1.tensor_pb2 import Dt

Ref: TypeAlias = tuple[int, int]
"""A tensor of a body: index of the node, index of the output."""

FLOATS = frozenset({Dt.DT_FLOAT, Dt.DT_DOUBLE})
CALLS = frozenset({"PartitionedCall"})
BRANCHES = {"StatelessIf": ("then_branch", "else_branch"), "StatelessCase": ("branches",)}
LOOPS = {"StatelessWhile": ("cond", "body")}
BOOLEAN = frozenset({"Greater", "Less"})


@dataclass(eq=False)
class Item:
    """A node or a call that overrides can match.

    name: public name. function: the graph's function that holds it. around: the calls, loops and branches that hold it,
    outermost first.
    """

    name: str
    op: str
    function: str
    body: Body
    around: tuple[Item, ...]

    @property
    def is_call(self) -> bool:
        return isinstance(self, Call)


@dataclass(eq=False)
class Node(Item):
    """A node that runs. dtypes: of its outputs. bodies: of a loop (condition, body) or branch."""

    inputs: list[Ref]
    attrs: Mapping[str, Any]
    dtypes: list[int]
    index: int = -1
    bodies: list[Body] = field(default_factory=list)

    @property
    def is_container(self) -> bool:
        return bool(self.bodies)

    @property
    def is_loop(self) -> bool:
        return self.op in LOOPS

    def argument_of(self, body: Body, arg: int) -> int:
        """The index of the input that the argument of one of its bodies is."""
        return arg if self.is_loop else arg + 1


@dataclass(eq=False)
class Call(Item):
    """A function call. members: the nodes that its function became, in the body that holds the call."""

    inputs: list[Ref]
    results: list[Ref] = field(default_factory=list)
    members: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Body:
    """The top level, a loop's condition or body, or a branch. The first nodes are its arguments, of op `_Arg`."""

    arguments: int = 0
    nodes: list[Node] = field(default_factory=list)
    results: list[Ref] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    """Nodes except arguments, and calls; each call, loop and branch before what it holds, of this body only."""

    def dtype(self, ref: Ref) -> int:
        return self.nodes[ref[0]].dtypes[ref[1]]


@dataclass
class Expanded:
    """A graph. places: the body and outputs of nodes and calls by public name; two branches may share a name."""

    top: Body
    items: list[Item]
    places: dict[str, list[tuple[Body, list[Ref]]]]

    def tensors(self, name: str) -> list[tuple[Body, Ref]]:
        """The tensors `node` or `node:output`."""
        node, _, text = name.partition(":")
        output = int(text or 0)
        return [(body, outputs[output]) for body, outputs in self.places.get(node, []) if output < len(outputs)]


def bodies(top: Body) -> Iterator[Body]:
    """The body and all bodies in it."""
    yield top
    for node in top.nodes:
        for body in node.bodies:
            yield from bodies(body)


def inside(item: Item) -> list[Item]:
    """The items of a call, loop or branch, of whatever depth."""
    if isinstance(item, Call):
        own = [one for one in item.body.items if item in one.around]
    else:
        assert isinstance(item, Node)
        own = [one for body in item.bodies for one in body.items]
    deeper = [one for held in own if isinstance(held, Node) and held.bodies for one in inside(held)]
    return [*own, *deeper]


def expand(graph: graph_pb2.Graph) -> Expanded:
    reader = _Reader({function.signature.name: function for function in graph.library.function})
    top = Body()
    reader.read(top, graph.node, "", "", (), {})
    places: dict[str, list[tuple[Body, list[Ref]]]] = {}
    for body in bodies(top):
        for node in body.nodes:
            outputs = [(node.index, output) for output in range(len(node.dtypes))]
            places.setdefault(node.name, []).append((body, outputs))
        for item in body.items:
            # Outputs of calls have names at the top level only.
            if isinstance(item, Call) and body is top and not item.around:
                places.setdefault(item.name, []).append((body, item.results))
    return Expanded(top, reader.items, places)


class _Reader:
    def __init__(self, functions: Mapping[str, graph_pb2.Function]) -> None:
        self._functions = functions
        self.items: list[Item] = []

    def read(
        self,
        body: Body,
        nodes: Sequence[Any],
        prefix: str,
        function: str,
        around: tuple[Item, ...],
        known: dict[str, list[Ref]],
    ) -> dict[str, list[Ref]]:
        """Adds nodes to a body. `known`: the tensors of arguments by name; returns those of all nodes."""
        tensors = dict(known)
        for proto in nodes:
            inputs = [_tensor(tensors, text) for text in proto.input if not text.startswith("^")]
            name = prefix + proto.name
            if proto.op in CALLS:
                called = self._functions[proto.attr["f"].func.name]
                call = Call(name, proto.op, function, body, around, inputs)
                self._add(body, call)
                before = len(body.nodes)
                args = {arg.name: [ref] for arg, ref in zip(called.signature.input_arg, inputs, strict=True)}
                inner = self.read(body, called.node_def, f"{name}/", called.signature.name, (*around, call), args)
                call.members = list(range(before, len(body.nodes)))
                call.results = [_tensor(inner, called.ret[arg.name]) for arg in called.signature.output_arg]
                tensors[proto.name] = call.results
                continue
            node = Node(name, proto.op, function, body, around, inputs, proto.attr, _dtypes(proto))
            self._append(body, node)
            self._add(body, node)
            for attr in (*BRANCHES.get(node.op, ()), *LOOPS.get(node.op, ())):
                value = proto.attr[attr]
                for named in value.list.func or [value.func]:
                    node.bodies.append(self._function(named.name, f"{name}/", (*around, node)))
            tensors[proto.name] = [(node.index, output) for output in range(len(node.dtypes))]
        return tensors

    def _function(self, name: str, prefix: str, around: tuple[Item, ...]) -> Body:
        function, body = self._functions[name], Body()
        args = {}
        for arg in function.signature.input_arg:
            node = Node(prefix + arg.name, "_Arg", name, body, around, [], {}, [arg.type])
            self._append(body, node)
            args[arg.name] = [(node.index, 0)]
        body.arguments = len(args)
        inner = self.read(body, function.node_def, prefix, name, around, args)
        body.results = [_tensor(inner, function.ret[arg.name]) for arg in function.signature.output_arg]
        return body

    def _append(self, body: Body, node: Node) -> None:
        node.index = len(body.nodes)
        body.nodes.append(node)

    def _add(self, body: Body, item: Item) -> None:
        body.items.append(item)
        self.items.append(item)


def _tensor(tensors: Mapping[str, list[Ref]], text: str) -> Ref:
    """`node`, `node:1` (top level), `node:output_name:1` or an argument's name (functions)."""
    parts = text.split(":")
    return tensors[parts[0]][int(parts[-1]) if len(parts) > 1 else 0]


def _dtypes(proto: Any) -> list[int]:
    attr = proto.attr
    if proto.op in BOOLEAN:
        return [Dt.DT_BOOL]
    if proto.op == "Cast":
        return [attr["DstT"].type]
    if proto.op in ("Const", "Placeholder"):
        return [attr["dtype"].type]
    if proto.op in ("Split",):
        return [attr["T"].type] * attr["num_split"].i
    if proto.op in BRANCHES:
        return list(attr["Tout"].list.type)
    if proto.op in LOOPS or proto.op == "IdentityN":
        return list(attr["T"].list.type)
    return [attr["T"].type]
