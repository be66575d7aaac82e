"""Copies a graph once, so that every node that runs has one place and one name.

There is one routine, `_copy`: it puts the nodes of a body into a destination. A call's body goes into the call's
destination, under its name; that of a loop or branch goes into a destination of its own, a new function per use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from gradrule._dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue
from gradrule.v1.tensor_pb2 import Dt, TensorShape
from gradrule_server.graphs.custom_gradients import OUTPUTS_ATTR
from gradrule_server.graphs.ir import ARG, BRANCHES, DIFFERENTIABLE, GRADIENT_ATTR, Body, Node, Ref, is_call, replaced
from gradrule_server.graphs.resolution_context import ForeignGradient, Match, Resolved
from gradrule_server.graphs.resolve import Resolver
from gradrule_server.graphs.selectors import OWN_GRADIENT, CandidateNode

UNKNOWN_SHAPE = AttrValue(shape=TensorShape(unknown_rank=True))


@dataclass(slots=True)
class Destination:
    """A body that nodes are put into. `scope`: public name of the container that it belongs to."""

    body: Body
    scope: str
    taken: set[str] = field(default_factory=set)
    # How often a name was taken already, so that finding a free one stays linear.
    counts: dict[str, int] = field(default_factory=dict)

    def unique(self, name: str) -> str:
        """The name, or the first of `name_1`, `name_2`, … that is free."""
        free = name
        while free in self.taken:
            self.counts[name] = self.counts.get(name, 0) + 1
            free = f"{name}_{self.counts[name]}"
        self.taken.add(free)
        return free

    def public(self, name: str) -> str:
        """The full path of a node of this destination."""
        return f"{self.scope}/{name}" if self.scope else name

    def add(self, node: Node) -> int:
        """Appends a node; returns its index."""
        self.body.nodes.append(node)
        return len(self.body.nodes) - 1


@dataclass(slots=True)
class _Placed:
    """Where the nodes of a source body went: the node that stands for each in control inputs; its outputs where they
    are not that node's."""

    nodes: list[int]
    outputs: dict[int, list[Ref]] = field(default_factory=dict)

    def ref(self, ref: Ref) -> Ref:
        outputs = self.outputs.get(ref[0])
        return (self.nodes[ref[0]], ref[1]) if outputs is None else outputs[ref[1]]


@dataclass(slots=True)
class Copy:
    """A copied graph: its top level (containers lead to their functions), where asked tensors went, what was found."""

    body: Body
    tensors: dict[Ref, Ref]
    # Public name of the container by name of the new function.
    scopes: dict[str, str]
    # Nodes that overrides may take; those that say nothing of their gradient only if there are overrides.
    places: list[CandidateNode]
    # What was resolved for calls, by the identity of the nodes that stand for them.
    resolved: dict[int, Resolved]
    # Gives free names in a body.
    unique: Callable[[Body, str], str]


def copy_graph(
    top: Body,
    resolver: Resolver,
    fed: Mapping[int, AbstractSet[int]],
    asked: AbstractSet[Ref],
    apart: AbstractSet[Ref],
    namespace: str,
) -> Copy:
    """Copies everything that `top` leads to.

    `fed`: outputs by node that requests give. `asked`: tensors whose new places are told. `apart`: outputs of calls
    that must be tensors of their own: a gradient with respect to them must not pass through what uses them inside.
    """
    copier = _Copier(resolver, fed, apart, namespace)
    destination = Destination(Body(""), "")
    placed = copier.copy(top, destination)
    tensors = {ref: placed.ref(ref) for ref in asked}
    return Copy(destination.body, tensors, copier.scopes, copier.places, copier.resolved, copier.unique)


def copy_function(source: Body, scope: str, resolver: Resolver, namespace: str) -> Copy:
    """Copies a function and everything that it leads to; its nodes are named under `scope`."""
    copier = _Copier(resolver, {}, frozenset(), namespace)
    body = copier.copy_function(source, "rule", scope, live=True, around=None)
    return Copy(body, {}, copier.scopes, copier.places, copier.resolved, copier.unique)


class _Copier:
    def __init__(
        self, resolver: Resolver, fed: Mapping[int, AbstractSet[int]], apart: AbstractSet[Ref], namespace: str
    ) -> None:
        self._resolver = resolver
        self._namespace = namespace
        self._fed = fed
        self._apart: dict[int, set[int]] = {}
        for node, output in apart:
            self._apart.setdefault(node, set()).add(output)
        self.scopes: dict[str, str] = {}
        self.places: list[CandidateNode] = []
        self.resolved: dict[int, Resolved] = {}
        self._destinations: dict[int, Destination] = {}

    def copy(self, top: Body, into: Destination) -> _Placed:
        """Copies the top level."""
        self._destinations[id(into.body)] = into
        return self._copy(top, into, "", [], None, live=True, around=None)

    def unique(self, body: Body, name: str) -> str:
        """A free name in a body that was made here."""
        return self._destinations[id(body)].unique(name)

    def _copy(
        self,
        source: Body,
        into: Destination,
        prefix: str,
        args: Sequence[Ref],
        gate: int | None,
        *,
        live: bool,
        around: str | None,
    ) -> _Placed:
        """Puts the nodes of `source` into `into`. `args`: what its arguments are there. `gate`: a node that all must
        wait for. `live`: whether gradients are asked node by node here. `around`: label of an override that took a call
        around this."""
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
            asks = calls and around is None
            resolved = self._call(node, into.public(public), source, live=live) if asks else None
            label = resolved.label if isinstance(resolved, Match) else around
            # A rule for a call replaces the gradient of the whole call, so the call must still be there.
            whole = isinstance(resolved, Match) and resolved.rule != OWN_GRADIENT
            if calls and not whole:
                apart = self._apart.get(position, set()) if is_top else set()
                self._inline(
                    node,
                    copy,
                    into,
                    position,
                    placed,
                    apart,
                    resolved,
                    live=live,
                    around=label,
                    awaited=position in awaited,
                )
            else:
                if node.op in BRANCHES:
                    _part(copy, [_type(source, ref) for ref in node.inputs], into)
                placed.nodes[position] = into.add(copy)
                if resolved is not None:
                    self.resolved[id(copy)] = [resolved]
                elif self._resolver.matchers or GRADIENT_ATTR in node.attrs or OUTPUTS_ATTR in node.attrs:
                    place = CandidateNode(
                        into.public(public), source.name, into.body, placed.nodes[position], live, None, around
                    )
                    self.places.append(place)
                copy.watched = live and bool(inputs) and any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())
                if node.functions:
                    self._copy_functions(node, copy, into.public(name), live=live and not calls, around=label)
            if fed:
                self._feed(node, public, sorted(fed), into, position, placed)
        return placed

    def _call(self, node: Node, public: str, source: Body, *, live: bool) -> Match | ForeignGradient | None:
        """Which rule a call as a whole gets, if gradients are asked node by node where it lies."""
        types = [_type(source, ref) for ref in node.inputs]
        resolved = self._resolver.whole(node, public, types, source.name)
        return resolved if live else None

    def _inline(
        self,
        node: Node,
        call: Node,
        into: Destination,
        position: int,
        placed: _Placed,
        apart: AbstractSet[int],
        resolved: Match | ForeignGradient | None,
        *,
        live: bool,
        around: str | None,
        awaited: bool,
    ) -> None:
        """Puts the body of a call where the call is."""
        body = node.functions[0][1][0]
        gate = None
        if len(call.controls) == 1:
            gate = call.controls[0]
        elif call.controls:
            gate = into.add(Node(into.unique(f"{call.name}/before"), "NoOp", [], call.controls, {}, ()))
        inner = self._copy(body, into, f"{call.name}/", call.inputs, gate, live=live, around=around)
        ends = [inner.nodes[control] for _, control in body.control_results]
        outputs = []
        for number, ref in enumerate(body.results):
            output = inner.ref(ref)
            # An argument that is handed back must still wait; an asked tensor must not be one that the inside uses
            # too; what was resolved for the call itself needs a node that gradients pass through.
            waits = [] if gate is None or ref[0] >= body.arg_count else [gate]
            waits += _not_behind(into.body, output[0], ends)
            if number in apart or resolved is not None or waits:
                result = _identity(into, call.name, number, output, body.result_types[number], waits)
                output = (into.add(result), 0)
                if resolved is not None:
                    self.resolved[id(result)] = [resolved]
                    result.watched = body.result_types[number] in DIFFERENTIABLE
            outputs.append(output)
        placed.outputs[position] = outputs
        if awaited:
            after = {producer for producer, _ in outputs}
            after.update(inner.nodes[control] for _, control in body.control_results)
            after.update(() if gate is None else (gate,))
            placed.nodes[position] = into.add(Node(call.name, "NoOp", [], sorted(after), {}, ()))

    def _copy_functions(self, node: Node, copy: Node, public: str, *, live: bool, around: str | None) -> None:
        """Gives a container, or a call that stays one, functions of its own."""
        functions = []
        for attr, bodies in node.functions:
            copies = (self.copy_function(body, attr, public, live=live, around=around) for body in bodies)
            functions.append((attr, tuple(copies)))
        copy.functions = tuple(functions)

    def copy_function(self, source: Body, attr: str, public: str, *, live: bool, around: str | None) -> Body:
        """A copy of a function, under a name of its own."""
        name = f"{self._namespace}_{len(self.scopes):04d}_{attr}"
        self.scopes[name] = public
        body = Body(
            name,
            arg_notes=source.arg_notes,
            arg_count=source.arg_count,
            result_names=source.result_names,
            result_types=source.result_types,
            is_stateful=source.is_stateful,
        )
        into = self._destinations[id(body)] = Destination(body, public)
        args = []
        for arg in source.nodes[: source.arg_count]:
            args.append((into.add(Node(into.unique(arg.name), ARG, [], [], {}, arg.outputs)), 0))
        placed = self._copy(source, into, "", args, None, live=live, around=around)
        body.results = [placed.ref(ref) for ref in source.results]
        body.control_results = [(result, placed.nodes[position]) for result, position in source.control_results]
        return body

    def _feed(
        self, node: Node, name: str, fed: Sequence[int], into: Destination, position: int, placed: _Placed
    ) -> None:
        """Gives the consumers of fed outputs placeholders, under the name that calls know."""
        outputs = [placed.ref((position, output)) for output in range(len(node.outputs or ()))]
        types = node.outputs or ()
        if fed == [0]:
            placeholder = into.add(_placeholder(name, types[0], node.attrs.get("shape") if len(types) == 1 else None))
            outputs[0], alias = (placeholder, 0), placeholder
        else:
            feeds = {}
            for output in fed:
                feeds[output] = into.add(_placeholder(into.unique(f"{name}/fed_{output}"), types[output], None))
            # Below the last fed output there must be as many inputs, whichever: nobody asks for those.
            filled = [feeds.get(output, feeds[fed[0]]) for output in range(fed[-1] + 1)]
            inner_types = [types[output] if output in feeds else types[fed[0]] for output in range(fed[-1] + 1)]
            attrs = {"T": AttrValue(list=AttrValue.ListValue(type=map(as_dt, inner_types)))}
            node_inputs = [(placeholder, 0) for placeholder in filled]
            alias = into.add(Node(name, "IdentityN", node_inputs, [], attrs, tuple(inner_types)))
            for output in fed:
                outputs[output] = (alias, output)
        placed.outputs[position], placed.nodes[position] = outputs, alias


def _not_behind(body: Body, result: int, ends: Sequence[int]) -> list[int]:
    """Those of the nodes that the result does not wait for already."""
    missing = dict.fromkeys(ends)
    if not missing:
        return []
    # Nodes are added producers first, so nothing before the first of them waits for one of them.
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


def _identity(into: Destination, call: str, number: int, ref: Ref, dtype: int, controls: list[int]) -> Node:
    attrs = {"T": AttrValue(type=as_dt(dtype))}
    return Node(into.unique(f"{call}/result_{number}"), "Identity", [ref], controls, attrs, (dtype,))


def _part(branch: Node, types: Sequence[int], into: Destination) -> None:
    """Gives the functions of a branch different tensors: one that comes twice comes the second time by an Identity.

    TensorFlow's gradient of a branch knows inputs by the tensor outside, and of two that are one forgets the first.
    """
    seen: set[Ref] = set()
    # The first is the predicate, or the branch's number: no function sees it.
    for number, ref in enumerate(branch.inputs[1:], start=1):
        if ref in seen and types[number] not in (0, Dt.DT_RESOURCE):
            attrs = {"T": AttrValue(type=as_dt(types[number]))}
            name = into.unique(f"{branch.name}/input_{number}")
            alias = (into.add(Node(name, "Identity", [ref], [], attrs, (types[number],))), 0)
            branch.inputs = replaced(branch.inputs, number, alias)
        seen.add(ref)


def _placeholder(name: str, dtype: int, shape: AttrValue | None) -> Node:
    attrs = {"dtype": AttrValue(type=as_dt(dtype)), "shape": shape or UNKNOWN_SHAPE}
    return Node(name, "Placeholder", [], [], attrs, (dtype,))
