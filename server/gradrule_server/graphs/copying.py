"""Copies a graph with all calls inlined, so that every node that runs exists once and has a unique name.

`_copy` copies the nodes of a body into a destination. The body of a call goes into the destination of the call, with
the call's name as prefix; the body of a loop or branch becomes a new function per use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from gradrule.common.dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue
from gradrule.v1.tensor_pb2 import Dt, TensorShape
from gradrule_server.graphs.ir import (
    ARG,
    BRANCHES,
    DIFFERENTIABLE,
    GRADIENT_ATTR,
    OUTPUTS_ATTR,
    Body,
    Node,
    Ref,
    is_call,
)
from gradrule_server.graphs.resolve import Resolver
from gradrule_server.graphs.selectors import CandidateNode, InlinedCall

# Attribute with the functions of a Case.
_CASES = "branches"

UNKNOWN_SHAPE = AttrValue(shape=TensorShape(unknown_rank=True))


@dataclass(slots=True)
class Destination:
    """A body into which nodes are copied.

    `scope`: public name of the loop or branch that contains it; `qualified_scope`: its qualified name, with the branch.
    """

    body: Body
    scope: str
    qualified_scope: str = ""
    taken: set[str] = field(default_factory=set)
    # Uses per name, so that finding a free name takes constant time.
    counts: dict[str, int] = field(default_factory=dict)

    def unique(self, name: str) -> str:
        """Reserves and returns the name, or the first free one of `name_1`, `name_2`, …."""
        free = name
        while free in self.taken:
            self.counts[name] = self.counts.get(name, 0) + 1
            free = f"{name}_{self.counts[name]}"
        self.taken.add(free)
        return free

    def public(self, name: str) -> str:
        """Returns the public name of a node of this destination."""
        return f"{self.scope}/{name}" if self.scope else name

    def qualified(self, name: str) -> str:
        """Returns the qualified name of a node of this destination."""
        return f"{self.qualified_scope}/{name}" if self.qualified_scope else name

    def add(self, node: Node) -> int:
        """Appends a node and returns its index."""
        self.body.nodes.append(node)
        return len(self.body.nodes) - 1


@dataclass(slots=True)
class _Placed:
    """Maps nodes of a source body to their copies.

    Attributes:
        nodes: The index of the copied node, by index of the source node; control inputs use it.
        outputs: The copied output tensors of nodes whose outputs other nodes of the copy compute.
    """

    nodes: list[int]
    outputs: dict[int, list[Ref]] = field(default_factory=dict)

    def ref(self, ref: Ref) -> Ref:
        """Returns the copy of a tensor."""
        outputs = self.outputs.get(ref[0])
        return (self.nodes[ref[0]], ref[1]) if outputs is None else outputs[ref[1]]


@dataclass(slots=True)
class Copy:
    """A copied graph: its top level, and the new positions of the requested tensors."""

    body: Body
    tensors: dict[Ref, Ref]
    # Public and qualified name of the containing loop or branch, by name of the new function.
    scopes: dict[str, str]
    qualified_scopes: dict[str, str]
    # Nodes and calls that overrides can match, each call, loop and branch before the nodes in it. Without overrides:
    # only those with attributes about their gradient.
    candidates: list[CandidateNode]
    # Returns a free name in a body.
    unique: Callable[[Body, str], str]
    # Nodes of written values of variables, by id(); their gradients go to both inputs: the new value and the old one.
    variable_values: dict[int, Node] = field(default_factory=dict)


def copy_graph(
    top: Body,
    resolver: Resolver,
    fed: Mapping[int, AbstractSet[int]],
    requested: AbstractSet[Ref],
    separate: AbstractSet[Ref],
    namespace: str,
) -> Copy:
    """Copies the top level and all functions that it uses.

    Args:
        top: The top level.
        resolver: Tells which calls can get a rule.
        fed: The fed outputs of each node, by index of the node.
        requested: The tensors whose new positions are returned.
        separate: Outputs of calls that need a tensor of their own, because a gradient with respect to them must not
            include uses inside the call.
        namespace: Prefix of the names of copied functions.
    """
    copier = _Copier(resolver, fed, separate, namespace)
    destination = Destination(Body(""), "")
    placed = copier.copy(top, destination)
    tensors = {ref: placed.ref(ref) for ref in requested}
    return Copy(destination.body, tensors, copier.scopes, copier.qualified_scopes, copier.candidates, copier.unique)


def copy_function(source: Body, scope: str, resolver: Resolver, namespace: str) -> Copy:
    """Copies a function and all functions that it uses; public names of its nodes start with `scope`."""
    copier = _Copier(resolver, {}, frozenset(), namespace)
    body = copier.copy_function(source, "rule", scope, scope, None)
    return Copy(body, {}, copier.scopes, copier.qualified_scopes, copier.candidates, copier.unique)


class _Copier:
    def __init__(
        self, resolver: Resolver, fed: Mapping[int, AbstractSet[int]], separate: AbstractSet[Ref], namespace: str
    ) -> None:
        self._resolver = resolver
        self._namespace = namespace
        self._fed = fed
        self._separate: dict[int, set[int]] = {}
        for node, output in separate:
            self._separate.setdefault(node, set()).add(output)
        self.scopes: dict[str, str] = {}
        self.qualified_scopes: dict[str, str] = {}
        self.candidates: list[CandidateNode] = []
        self._destinations: dict[int, Destination] = {}

    def copy(self, top: Body, into: Destination) -> _Placed:
        """Copies the top level."""
        self._destinations[id(into.body)] = into
        return self._copy(top, into, "", [], None, None)

    def unique(self, body: Body, name: str) -> str:
        """Returns a free name in a body of the copy."""
        return self._destinations[id(body)].unique(name)

    def _copy(
        self,
        source: Body,
        into: Destination,
        prefix: str,
        args: Sequence[Ref],
        gate: int | None,
        around: CandidateNode | None,
    ) -> _Placed:
        """Copies the nodes of a body into a destination.

        Args:
            source: The body.
            into: The destination.
            prefix: Prefix of the names of the copied nodes.
            args: The tensors that replace the arguments.
            gate: The node that all copied nodes must wait for; None: no such node.
            around: The innermost call that contains the nodes; None: no call does.
        """
        nodes, is_top = source.nodes, not source.name
        names = [into.unique(prefix + node.name) for node in nodes[source.arg_count :]]
        placed = _Placed([-1] * len(nodes))
        for position, ref in enumerate(args):
            placed.nodes[position] = ref[0]
            placed.outputs[position] = [ref]
        awaited = {control for node in nodes for control in node.controls}
        awaited.update(position for _, position in source.control_results)
        for position in source.order:
            node = nodes[position]
            if node.op == ARG:
                continue
            name = public = names[position - source.arg_count]
            fed = self._fed.get(position) if is_top else None
            if fed:
                name = into.unique(f"{name}/computed")
            inputs = tuple([placed.ref(ref) for ref in node.inputs])
            controls: Sequence[int] = [placed.nodes[control] for control in node.controls] if node.controls else ()
            calls = is_call(node)
            if gate is not None and (calls or all(ref[0] < source.arg_count for ref in node.inputs)):
                controls = [*controls, gate]
            copy = Node(name, node.op, inputs, controls, node.attrs, node.outputs, unsupported=node.unsupported)
            if calls:
                candidate = self._call_candidate(node, into, public, source.name, around)
                separate = self._separate.get(position, set()) if is_top else set()
                self._inline(
                    node, copy, into, position, placed, separate, candidate or around, awaited=position in awaited
                )
            else:
                if node.op in BRANCHES:
                    _separate_inputs(copy, [_type(source, ref) for ref in node.inputs], into)
                placed.nodes[position] = into.add(copy)
                if self._resolver.matchers or GRADIENT_ATTR in node.attrs or OUTPUTS_ATTR in node.attrs:
                    self.candidates.append(
                        CandidateNode(
                            into.public(public),
                            into.qualified(public),
                            source.name,
                            into.body,
                            placed.nodes[position],
                            around,
                        )
                    )
                copy.watched = bool(inputs) and any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())
                if node.functions:
                    self._copy_functions(node, copy, into, around)
            if fed:
                self._feed(node, public, sorted(fed), into, position, placed)
        return placed

    def _call_candidate(
        self, node: Node, into: Destination, name: str, function: str, around: CandidateNode | None
    ) -> CandidateNode | None:
        """Adds and returns the candidate for a call; None without overrides and attributes about its gradient."""
        names = into.public(name), into.qualified(name)
        gets_rule = self._resolver.may_match_call(node, *names)
        if not gets_rule and not self._resolver.matchers:
            return None
        candidate = CandidateNode(*names, function, into.body, -1, around, InlinedCall(node, gets_rule))
        self.candidates.append(candidate)
        return candidate

    def _inline(
        self,
        node: Node,
        call: Node,
        into: Destination,
        position: int,
        placed: _Placed,
        separate: AbstractSet[int],
        around: CandidateNode | None,
        *,
        awaited: bool,
    ) -> None:
        """Inlines a call: copies the nodes of its function into the body that contains the call.

        A call that can get a rule has an Identity for each result, and for each repeated argument: its subgraph has
        inputs and outputs that differ. `around`: the candidate for the call, or else that for the call around it.
        """
        body = node.functions[0][1][0]
        gate = None
        if len(call.controls) == 1:
            gate = call.controls[0]
        elif call.controls:
            gate = into.add(Node(into.unique(f"{call.name}/before"), "NoOp", [], call.controls, {}, ()))
        inlined = around.call if around is not None and around.call is not None and around.call.node is node else None
        is_subgraph = inlined is not None and inlined.may_match
        args = call.inputs
        if inlined is not None and is_subgraph:
            args = _separate(args, body.arg_types, f"{call.name}/argument", into)
            inlined.arguments = Node(into.unique(f"{call.name}/arguments"), "NoOp", args, (), {}, ())
            into.add(inlined.arguments)
        inner = self._copy(body, into, f"{call.name}/", args, gate, around)
        ends = [inner.nodes[control] for _, control in body.control_results]
        outputs = []
        for number, ref in enumerate(body.results):
            output = inner.ref(ref)
            # An Identity is needed in three cases: the output is an argument that must wait for the gate; a requested
            # tensor must differ from the tensor that nodes inside the call use; the call itself can get a rule.
            waits = [] if gate is None or ref[0] >= body.arg_count else [gate]
            waits += _not_behind(into.body, output[0], ends)
            if number in separate or is_subgraph or waits:
                result = _identity(into, f"{call.name}/result_{number}", output, body.result_types[number], waits)
                output = (into.add(result), 0)
                if inlined is not None and is_subgraph:
                    inlined.results.append(result)
            outputs.append(output)
        placed.outputs[position] = outputs
        if awaited:
            after = {producer for producer, _ in outputs}
            after.update(inner.nodes[control] for _, control in body.control_results)
            after.update(() if gate is None else (gate,))
            placed.nodes[position] = into.add(Node(call.name, "NoOp", [], sorted(after), {}, ()))

    def _copy_functions(self, node: Node, copy: Node, into: Destination, around: CandidateNode | None) -> None:
        """Copies the functions of a loop or a branch."""
        functions = []
        public, qualified = into.public(copy.name), into.qualified(copy.name)
        for attr, bodies in node.functions:
            copies = [
                self.copy_function(body, attr, public, f"{qualified}[{_branch_name(attr, number)}]", around)
                for number, body in enumerate(bodies)
            ]
            functions.append((attr, tuple(copies)))
        copy.functions = tuple(functions)

    def copy_function(self, source: Body, attr: str, public: str, qualified: str, around: CandidateNode | None) -> Body:
        """Returns a copy of a function under a new name."""
        name = f"{self._namespace}_{len(self.scopes):04d}_{attr}"
        self.scopes[name], self.qualified_scopes[name] = public, qualified
        body = Body(
            name,
            arg_notes=source.arg_notes,
            arg_count=source.arg_count,
            result_names=source.result_names,
            result_types=source.result_types,
            is_stateful=source.is_stateful,
        )
        into = self._destinations[id(body)] = Destination(body, public, qualified)
        args = []
        for arg in source.nodes[: source.arg_count]:
            args.append((into.add(Node(into.unique(arg.name), ARG, [], [], {}, arg.outputs)), 0))
        placed = self._copy(source, into, "", args, None, around)
        body.results = [placed.ref(ref) for ref in source.results]
        body.control_results = [(result, placed.nodes[position]) for result, position in source.control_results]
        return body

    def _feed(
        self, node: Node, name: str, fed: Sequence[int], into: Destination, position: int, placed: _Placed
    ) -> None:
        """Replaces fed outputs by placeholders under the node's public name."""
        outputs = [placed.ref((position, output)) for output in range(len(node.outputs or ()))]
        types = node.outputs or ()
        if fed == [0]:
            placeholder = into.add(_placeholder(name, types[0], node.attrs.get("shape") if len(types) == 1 else None))
            outputs[0], alias = (placeholder, 0), placeholder
        else:
            feeds = {}
            for output in fed:
                feeds[output] = into.add(_placeholder(into.unique(f"{name}/fed_{output}"), types[output], None))
            # IdentityN needs one input for each output up to the last fed output; inputs for unused outputs repeat the
            # first fed one.
            filled = [feeds.get(output, feeds[fed[0]]) for output in range(fed[-1] + 1)]
            inner_types = [types[output] if output in feeds else types[fed[0]] for output in range(fed[-1] + 1)]
            attrs = {"T": AttrValue(list=AttrValue.ListValue(type=map(as_dt, inner_types)))}
            node_inputs = [(placeholder, 0) for placeholder in filled]
            alias = into.add(Node(name, "IdentityN", node_inputs, [], attrs, tuple(inner_types)))
            for output in fed:
                outputs[output] = (alias, output)
        placed.outputs[position], placed.nodes[position] = outputs, alias


def _branch_name(attr: str, number: int) -> str:
    """Returns the name in brackets of a function of a loop or branch: `then`, `else`, `cond`, `body`, or its index."""
    return str(number) if attr == _CASES else attr.removesuffix("_branch")


def _not_behind(body: Body, result: int, ends: Sequence[int]) -> list[int]:
    """Returns those nodes of `ends` that the node `result` does not depend on."""
    missing = dict.fromkeys(ends)
    if not missing:
        return []
    # Nodes are in topological order, so nodes before the first of `ends` cannot depend on any of them.
    first = min(missing)
    seen: set[int] = set()
    pending = [result]
    while pending and missing:
        position = pending.pop()
        if position >= first and position not in seen:
            seen.add(position)
            missing.pop(position, None)
            pending += [*(producer for producer, _ in body.nodes[position].inputs), *body.nodes[position].controls]
    return list(missing)


def _type(source: Body, ref: Ref) -> int:
    outputs = source.nodes[ref[0]].outputs
    return outputs[ref[1]] if outputs else 0


def _identity(into: Destination, name: str, ref: Ref, dtype: int, controls: Sequence[int]) -> Node:
    return Node(into.unique(name), "Identity", [ref], controls, {"T": AttrValue(type=as_dt(dtype))}, (dtype,))


def _separate_inputs(branch: Node, types: Sequence[int], into: Destination) -> None:
    """Makes the inputs of a branch distinct tensors.

    TensorFlow's gradient of a branch keys inputs by the outer tensor, and would drop the gradient of a repeated one.
    """
    # The first input is the predicate or branch index, which is not passed to the functions.
    branch.inputs = (branch.inputs[0], *_separate(branch.inputs[1:], types[1:], f"{branch.name}/input", into, first=1))


def _separate(refs: Sequence[Ref], types: Sequence[int], name: str, into: Destination, first: int = 0) -> list[Ref]:
    """Returns distinct tensors: adds an Identity for each repeated one that is no handle."""
    seen: set[Ref] = set()
    found = []
    for number, (ref, dtype) in enumerate(zip(refs, types, strict=True), start=first):
        if ref in seen and dtype not in (0, Dt.DT_RESOURCE):
            ref = into.add(_identity(into, f"{name}_{number}", ref, dtype, ())), 0
        found.append(ref)
        seen.add(ref)
    return found


def _placeholder(name: str, dtype: int, shape: AttrValue | None) -> Node:
    attrs = {"dtype": AttrValue(type=as_dt(dtype)), "shape": shape or UNKNOWN_SHAPE}
    return Node(name, "Placeholder", [], [], attrs, (dtype,))
