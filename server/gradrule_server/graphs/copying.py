"""Copies a graph with all calls inlined, so that every node that runs exists once and has a unique name.

The nodes of a call's function go into the body that contains the call, with the call's name as prefix. The function of
a loop or branch becomes a new function per use.
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
    copier = _Copier(resolver, namespace)
    separate_outputs: dict[int, set[int]] = {}
    for node, output in separate:
        separate_outputs.setdefault(node, set()).add(output)
    copied = _BodyCopy(copier, top, copier.destination(Body(""), "", ""), fed=fed, separate=separate_outputs)
    copied.run(())
    return copier.copy(copied.into.body, {ref: copied.ref(ref) for ref in requested})


def copy_function(source: Body, scope: str, resolver: Resolver, namespace: str) -> Copy:
    """Copies a function and all functions that it uses; public names of its nodes start with `scope`."""
    copier = _Copier(resolver, namespace)
    return copier.copy(copier.copy_function(source, "rule", scope, scope, None), {})


class _Copier:
    """The state of one copy: the new bodies and candidates."""

    def __init__(self, resolver: Resolver, namespace: str) -> None:
        self.resolver = resolver
        self.candidates: list[CandidateNode] = []
        self._namespace = namespace
        self._scopes: dict[str, str] = {}
        self._qualified_scopes: dict[str, str] = {}
        self._destinations: dict[int, Destination] = {}

    def copy(self, body: Body, tensors: dict[Ref, Ref]) -> Copy:
        """Returns the finished copy."""
        return Copy(body, tensors, self._scopes, self._qualified_scopes, self.candidates, self._unique)

    def destination(self, body: Body, public: str, qualified: str) -> Destination:
        """Creates the destination of nodes in a new body."""
        self._destinations[id(body)] = Destination(body, public, qualified)
        return self._destinations[id(body)]

    def copy_function(self, source: Body, attr: str, public: str, qualified: str, around: CandidateNode | None) -> Body:
        """Returns a copy of a function under a new name."""
        name = f"{self._namespace}_{len(self._scopes):04d}_{attr}"
        self._scopes[name], self._qualified_scopes[name] = public, qualified
        body = Body(
            name,
            arg_notes=source.arg_notes,
            arg_count=source.arg_count,
            result_names=source.result_names,
            result_types=source.result_types,
            is_stateful=source.is_stateful,
        )
        into = self.destination(body, public, qualified)
        args = []
        for arg in source.nodes[: source.arg_count]:
            args.append((into.add(Node(into.unique(arg.name), ARG, [], [], {}, arg.outputs)), 0))
        copied = _BodyCopy(self, source, into, around=around)
        copied.run(args)
        body.results = [copied.ref(ref) for ref in source.results]
        body.control_results = [(result, copied.nodes[position]) for result, position in source.control_results]
        return body

    def _unique(self, body: Body, name: str) -> str:
        return self._destinations[id(body)].unique(name)


@dataclass(slots=True, eq=False)
class _BodyCopy:
    """Copies the nodes of one body into a destination, and maps them to their copies.

    Attributes:
        copier: The state of the whole copy.
        source: The body.
        into: The destination.
        prefix: Prefix of the names of the copied nodes.
        gate: The node that all copied nodes must wait for; None: no such node.
        around: The innermost call that contains the nodes; None: no call does.
        fed: The fed outputs of each node, by index of the node.
        separate: Outputs of calls that need a tensor of their own, by index of the call.
        nodes: The index of the copied node, by index of the source node; control inputs use it.
        outputs: The copied output tensors of nodes whose outputs other nodes of the copy compute.
    """

    copier: _Copier
    source: Body
    into: Destination
    prefix: str = ""
    gate: int | None = None
    around: CandidateNode | None = None
    fed: Mapping[int, AbstractSet[int]] = field(default_factory=dict)
    separate: Mapping[int, AbstractSet[int]] = field(default_factory=dict)
    nodes: list[int] = field(init=False)
    outputs: dict[int, list[Ref]] = field(default_factory=dict)

    def ref(self, ref: Ref) -> Ref:
        """Returns the copy of a tensor."""
        outputs = self.outputs.get(ref[0])
        return (self.nodes[ref[0]], ref[1]) if outputs is None else outputs[ref[1]]

    def run(self, args: Sequence[Ref]) -> None:
        """Copies the nodes. `args`: the tensors that replace the arguments."""
        source = self.source
        names = [self.into.unique(self.prefix + node.name) for node in source.nodes[source.arg_count :]]
        self.nodes = [-1] * len(source.nodes)
        for position, ref in enumerate(args):
            self.nodes[position], self.outputs[position] = ref[0], [ref]
        awaited = {control for node in source.nodes for control in node.controls}
        awaited.update(position for _, position in source.control_results)
        for position in source.order:
            if source.nodes[position].op == ARG:
                continue
            name = names[position - source.arg_count]
            if is_call(source.nodes[position]):
                self._inline(position, name, is_awaited=position in awaited)
            else:
                self._copy_node(position, name)
            if position in self.fed:
                self._feed(position, name)

    def _new_node(self, position: int, name: str) -> Node:
        """Returns the copy of a node, under another name if its outputs are fed."""
        node = self.source.nodes[position]
        inputs = tuple([self.ref(ref) for ref in node.inputs])
        controls: Sequence[int] = [self.nodes[control] for control in node.controls] if node.controls else ()
        if self.gate is not None and (is_call(node) or all(ref[0] < self.source.arg_count for ref in node.inputs)):
            controls = [*controls, self.gate]
        name = self.into.unique(f"{name}/computed") if position in self.fed else name
        return Node(name, node.op, inputs, controls, node.attrs, node.outputs, unsupported=node.unsupported)

    def _add_candidate(self, name: str, index: int, call: InlinedCall | None = None) -> CandidateNode:
        names = self.into.public(name), self.into.qualified(name)
        candidate = CandidateNode(*names, self.source.name, self.into.body, index, self.around, call)
        self.copier.candidates.append(candidate)
        return candidate

    def _copy_node(self, position: int, name: str) -> None:
        """Copies a node that is no call, with the functions of a loop or a branch."""
        node, copy, into = self.source.nodes[position], self._new_node(position, name), self.into
        if node.op in BRANCHES:
            _separate_inputs(copy, [_type(self.source, ref) for ref in node.inputs], into)
        self.nodes[position] = into.add(copy)
        if self.copier.resolver.matchers or GRADIENT_ATTR in node.attrs or OUTPUTS_ATTR in node.attrs:
            self._add_candidate(name, self.nodes[position])
        copy.watched = bool(copy.inputs) and any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())
        public, qualified = into.public(copy.name), into.qualified(copy.name)
        functions = []
        for attr, bodies in node.functions:
            copies = [
                self.copier.copy_function(body, attr, public, f"{qualified}[{_branch_name(attr, number)}]", self.around)
                for number, body in enumerate(bodies)
            ]
            functions.append((attr, tuple(copies)))
        copy.functions = tuple(functions)

    def _inline(self, position: int, name: str, *, is_awaited: bool) -> None:
        """Copies the nodes of a call's function.

        A call that can get a rule has an Identity for each result, and for each repeated argument: its subgraph has
        inputs and outputs that differ. Without overrides, only such a call is a candidate.
        """
        node, call, into = self.source.nodes[position], self._new_node(position, name), self.into
        resolver, body = self.copier.resolver, node.functions[0][1][0]
        may_match = resolver.may_match_call(node, into.public(name), into.qualified(name))
        inlined, around = InlinedCall(node, may_match), self.around
        if may_match or resolver.matchers:
            around = self._add_candidate(name, -1, inlined)
        gate = None
        if len(call.controls) == 1:
            gate = call.controls[0]
        elif call.controls:
            gate = into.add(Node(into.unique(f"{call.name}/before"), "NoOp", [], call.controls, {}, ()))
        args = call.inputs
        if may_match:
            args = _separate(args, body.arg_types, f"{call.name}/argument", into)
            inlined.arguments = Node(into.unique(f"{call.name}/arguments"), "NoOp", args, (), {}, ())
            into.add(inlined.arguments)
        inner = _BodyCopy(self.copier, body, into, f"{call.name}/", gate, around)
        inner.run(args)
        ends = [inner.nodes[control] for _, control in body.control_results]
        outputs = self.outputs[position] = []
        for number, ref in enumerate(body.results):
            output = inner.ref(ref)
            # An Identity is needed in three cases: the output is an argument that must wait for the gate; a requested
            # tensor must differ from the tensor that nodes inside the call use; the call itself can get a rule.
            waits = [] if gate is None or ref[0] >= body.arg_count else [gate]
            waits += _not_behind(into.body, output[0], ends)
            if number in self.separate.get(position, ()) or may_match or waits:
                result = _identity(into, f"{call.name}/result_{number}", output, body.result_types[number], waits)
                output = (into.add(result), 0)
                inlined.results += [result] if may_match else []
            outputs.append(output)
        if is_awaited:
            after = {*(producer for producer, _ in outputs), *ends, *(() if gate is None else (gate,))}
            self.nodes[position] = into.add(Node(call.name, "NoOp", [], sorted(after), {}, ()))

    def _feed(self, position: int, name: str) -> None:
        """Replaces fed outputs by placeholders under the node's public name."""
        node, into, fed = self.source.nodes[position], self.into, sorted(self.fed[position])
        types = node.outputs or ()
        outputs = [self.ref((position, output)) for output in range(len(types))]
        if fed == [0]:
            alias = into.add(_placeholder(name, types[0], node.attrs.get("shape") if len(types) == 1 else None))
            outputs[0] = alias, 0
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
        self.outputs[position], self.nodes[position] = outputs, alias


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
