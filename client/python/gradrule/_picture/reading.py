"""Reads a GraphDef into leaves and scopes; expands functions, loops and branches where they are used.

A call, loop or branch becomes a scope with its bodies and one leaf for the op itself, which produces the outputs.
Arguments and outputs have vertices of their own, so that dependencies are known for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gradrule._builder.names import split
from gradrule.v1.graph_pb2 import Function, Graph, Node

# Limits of expansion: functions may be recursive, or their number may grow exponentially with depth.
_MAX_CALLS = 32
_MAX_EXPANDED_NODES = 50_000
# Limit of nested scopes: a name may contain thousands of slashes.
_MAX_SCOPES = 48

ROOT = 0


@dataclass(slots=True)
class Leaf:
    """Describes a node.

    Attributes:
        name: Name as in overrides: `call/inner` for a node in a function.
        label: Last part of the name, which the box shows.
        function: Name of the function that contains the node; empty at the top level.
        scope: Index of the scope that contains the node.
        vertex: Index of the node's vertex.
        node: The node's message.
        calls: Whether the node is a call, loop or branch with expanded bodies.
    """

    name: str
    label: str
    function: str
    scope: int
    vertex: int
    node: Node
    calls: bool = False


@dataclass(frozen=True, slots=True)
class Wire:
    """Describes a tensor that one leaf passes to another.

    Attributes:
        source: Leaf that produces the tensor.
        target: Leaf that uses it.
        tail: Vertex of the tensor.
        head: Vertex that uses it; None if no gradient passes this wire.
    """

    source: int
    target: int
    tail: int
    head: int | None


@dataclass(slots=True)
class Structure:
    """Holds the structure of a graph.

    Attributes:
        leaves: All nodes.
        scopes: Parent and label of each scope; scope 0 is the whole graph.
        wires: All tensors between leaves.
        dependencies: For each vertex, the vertices that it depends on directly.
        top: Leaves of the top level by node name.
        outputs: Vertices of the outputs of calls, by leaf and output index.
        unexpanded: Names of the calls that were not expanded because of the limits.
    """

    leaves: list[Leaf] = field(default_factory=list)
    scopes: list[tuple[int, str]] = field(default_factory=lambda: [(ROOT, "")])
    wires: list[Wire] = field(default_factory=list)
    dependencies: list[list[int]] = field(default_factory=list)
    top: dict[str, int] = field(default_factory=dict)
    outputs: dict[tuple[int, int], int] = field(default_factory=dict)
    unexpanded: list[str] = field(default_factory=list)

    def vertex_of(self, tensor: str) -> int | None:
        """Returns the vertex of a top-level tensor, or None."""
        name, index = split(tensor)
        leaf = self.top.get(name)
        if leaf is None:
            return None
        return self.outputs.get((leaf, index)) if self.leaves[leaf].calls else self.leaves[leaf].vertex


def read_structure(graph: Graph) -> Structure:
    """Returns a graph's structure. Invalid parts are left out; the server reports them."""
    reader = _Reader(graph)
    reader.body(graph.node, _BodyContext(ROOT, "", "", set()), {}, 0)
    reader.finish()
    return reader.structure


@dataclass(frozen=True, slots=True)
class _BodyContext:
    """Describes where a body is added: scope, prefix of node names, function, and names already in use."""

    scope: int
    prefix: str
    function: str
    used_names: set[str]


@dataclass(frozen=True, slots=True)
class _Body:
    """Describes a function that a node uses: the attribute that names it, and a label for nodes with several."""

    attr: str
    label: str
    function: Function


class _Reader:
    def __init__(self, graph: Graph) -> None:
        self.structure = Structure()
        self._functions = {function.signature.name: function for function in graph.library.function}
        self._scopes: dict[tuple[int, str], int] = {}
        self._depths = [0]
        # Number of nodes of expanded functions, counted once per use.
        self._expanded_nodes = 0
        # For each vertex, the leaf where its wires start; for an argument, the leaf that produces the passed tensor.
        self._wire_sources: list[int] = []

    def body(self, nodes: Iterable[Node], context: _BodyContext, args: Mapping[str, int], depth: int) -> dict[str, int]:
        """Adds the nodes of the top level or of a function.

        Args:
            nodes: The nodes.
            context: Where to add them.
            args: Vertices of the function's arguments by name.
            depth: Number of enclosing calls.

        Returns:
            Leaves by node name.
        """
        known: dict[str, int] = {}
        expanded = []
        for node in nodes:
            leaf = self._leaf(node, context)
            known.setdefault(node.name, leaf)
            expanded.append((leaf, self._bodies(self.structure.leaves[leaf], depth)))
        for leaf, bodies in expanded:
            node = self.structure.leaves[leaf].node
            inputs = [self._vertex_of(text, known, args) for text in node.input if not text.startswith("^")]
            if bodies:
                self._expand(leaf, bodies, inputs, context, depth)
            elif node.op == "StopGradient":
                self._add_wires(inputs, leaf)
            else:
                self._add_dependencies(inputs, leaf)
        if not context.function:
            self.structure.top = known
        return known

    def finish(self) -> None:
        """Moves each node with the same name as a scope into the scope: `dense/MatMul` into `dense/MatMul/…`."""
        for leaf in self.structure.leaves:
            leaf.scope = self._scopes.get((leaf.scope, leaf.label), leaf.scope)

    def _leaf(self, node: Node, context: _BodyContext) -> int:
        name, number = context.prefix + node.name, 0
        while name in context.used_names:
            # The server makes equal names unique in the same way.
            number += 1
            name = f"{context.prefix}{node.name}_{number}"
        context.used_names.add(name)
        *scopes, label = node.name.split("/")
        free_levels = max(_MAX_SCOPES - self._depths[context.scope], 0)
        label = "/".join([*scopes[free_levels:], label])
        leaf = len(self.structure.leaves)
        vertex = self._vertex(leaf)
        scope = self._scope(context.scope, scopes[:free_levels])
        self.structure.leaves.append(Leaf(name, label, context.function, scope, vertex, node))
        return leaf

    def _scope(self, parent: int, labels: Iterable[str]) -> int:
        for label in labels:
            scope = self._scopes.get((parent, label))
            if scope is None:
                scope = self._scopes[parent, label] = len(self.structure.scopes)
                self.structure.scopes.append((parent, label))
                self._depths.append(self._depths[parent] + 1)
            parent = scope
        return parent

    def _vertex(self, wire_source: int, before: Iterable[int] = ()) -> int:
        self._wire_sources.append(wire_source)
        self.structure.dependencies.append(list(before))
        return len(self._wire_sources) - 1

    def _bodies(self, leaf: Leaf, depth: int) -> list[_Body]:
        """Returns the functions that a node uses; none if expanding them exceeds a limit."""
        node, found = leaf.node, []
        if node.op in self._functions:
            found.append(_Body("", "", self._functions[node.op]))
        for attr, value in sorted(node.attr.items()):
            funcs = [value.func] if value.HasField("func") else value.list.func if value.HasField("list") else []
            for number, func in enumerate(funcs):
                if func.name in self._functions:
                    label = attr if value.HasField("func") else f"{attr}[{number}]"
                    found.append(_Body(attr, label, self._functions[func.name]))
        more = sum(len(body.function.node_def) for body in found)
        if found and (depth >= _MAX_CALLS or self._expanded_nodes + more > _MAX_EXPANDED_NODES):
            self.structure.unexpanded.append(leaf.name)
            return []
        self._expanded_nodes += more
        leaf.calls = bool(found)
        return found

    def _expand(
        self, leaf: int, bodies: list[_Body], inputs: list[int | None], context: _BodyContext, depth: int
    ) -> None:
        at = self.structure.leaves[leaf]
        outer = self._scope(at.scope, [at.label])
        is_loop = {body.attr for body in bodies} == {"cond", "body"}
        arguments: list[tuple[_Body, list[int]]] = []
        results: list[tuple[_Body, list[int | None]]] = []
        for body in bodies:
            wanted = body.function.signature.input_arg
            # The inputs before the arguments select the branch.
            offset = max(len(inputs) - len(wanted), 0)
            self._add_wires(inputs[:offset], leaf)
            argument_vertices = []
            for given in inputs[offset : offset + len(wanted)]:
                wire_source = leaf if given is None else self._wire_sources[given]
                argument_vertices.append(self._vertex(wire_source, () if given is None else (given,)))
            args = {arg.name: argument_vertex for arg, argument_vertex in zip(wanted, argument_vertices, strict=False)}
            inner_scope = self._scope(outer, [body.label] if len(bodies) > 1 else [])
            # In a call, node names must differ from the caller's names, as on the server; loops and branches have
            # separate names.
            is_call = len(bodies) == 1 and body.attr in ("", "f")
            prefix = f"{at.name}/"
            used_names = context.used_names if is_call else set()
            inner = _BodyContext(inner_scope, prefix, body.function.signature.name, used_names)
            known = self.body(body.function.node_def, inner, args, depth + 1)
            ret = body.function.ret
            found = [
                self._vertex_of(ret[arg.name], known, args) if arg.name in ret else None
                for arg in body.function.signature.output_arg
            ]
            arguments.append((body, argument_vertices))
            results.append((body, found))
        for body, found in results:
            if is_loop and body.attr == "cond":
                self._add_wires(found, leaf)
                continue
            for number, result in enumerate(found):
                if result is None:
                    continue
                output = self._output(leaf, number)
                self.structure.dependencies[output].append(result)
                self._add_wire(result, leaf, output)
                for _, argument_vertices in arguments if is_loop else ():
                    if number < len(argument_vertices):
                        self.structure.dependencies[argument_vertices[number]].append(result)

    def _output(self, leaf: int, number: int) -> int:
        found = self.structure.outputs.get((leaf, number))
        if found is None:
            found = self.structure.outputs[leaf, number] = self._vertex(leaf)
        return found

    def _vertex_of(self, text: str, known: Mapping[str, int], args: Mapping[str, int]) -> int | None:
        """Returns the vertex of `node`, `node:1`, `node:output_name:1` or an argument; None if it does not exist."""
        name, *rest = text.split(":")
        if name in args:
            return args[name]
        leaf = known.get(name)
        if leaf is None:
            return None
        number = int(rest[-1]) if rest and rest[-1].isdecimal() else 0
        found = self.structure.leaves[leaf]
        function = self._functions.get(found.node.op)
        if function is not None and len(rest) == 2:
            names = [arg.name for arg in function.signature.output_arg]
            number += names.index(rest[0]) if rest[0] in names else 0
        return self._output(leaf, number) if found.calls else found.vertex

    def _add_dependencies(self, inputs: Iterable[int | None], leaf: int) -> None:
        vertex = self.structure.leaves[leaf].vertex
        for found in inputs:
            if found is not None:
                self.structure.dependencies[vertex].append(found)
                self._add_wire(found, leaf, vertex)

    def _add_wires(self, inputs: Iterable[int | None], leaf: int) -> None:
        for found in inputs:
            if found is not None:
                self._add_wire(found, leaf, None)

    def _add_wire(self, tail: int, leaf: int, head: int | None) -> None:
        source = self._wire_sources[tail]
        if source != leaf:
            self.structure.wires.append(Wire(source, leaf, tail, head))
