"""What is asked of a graph, and what expanding it answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradrule import _opdefs
from gradrule._dtypes import as_dt
from gradrule.v1.graph_pb2 import Graph, Versions
from gradrule.v1.tensor_pb2 import Dt, TensorShape
from gradrule_server.errors import error
from gradrule_server.graphs.check import check
from gradrule_server.graphs.copying import UNKNOWN_SHAPE, Copy, copy_graph
from gradrule_server.graphs.embedded_rules import expand_embedded_rules
from gradrule_server.graphs.findings import Findings, Reason, quote
from gradrule_server.graphs.gc_pause import paused_collection
from gradrule_server.graphs.ir import PLACEHOLDER_WITH_DEFAULT, PLACEHOLDERS, Body, Limits, Node, Ref, is_call
from gradrule_server.graphs.marks import Mark, mark
from gradrule_server.graphs.node_gradients import NodeGradients
from gradrule_server.graphs.prune import bodies_of, nodes_of, prune
from gradrule_server.graphs.resolution_context import Match, RequestTensors, ResolutionContext
from gradrule_server.graphs.resolve import Resolver
from gradrule_server.graphs.rewrites import check_rewrites, rewrite
from gradrule_server.graphs.selectors import OverrideSpec, matchers
from gradrule_server.graphs.subgraphs import insert_custom_gradient_nodes
from gradrule_server.graphs.tensor_names import TensorNames, canonical, parse_tensor_name
from gradrule_server.graphs.variable_ops import SOURCES
from gradrule_server.graphs.variable_table import Variable, VariableTable, fed_in_place
from gradrule_server.graphs.variables import lower_variables
from gradrule_server.graphs.write import tensor_name, write_graph
from gradrule_server.graphs.write_rule import write_rule
from gradrule_server.policy import Fault, op_fault


def _no_rule(name: str, _: str) -> int:
    raise error(Reason.ERROR_REASON_UNKNOWN_RULE, f"there is no rule {quote(name)}")


def _no_place(label: str) -> int:
    raise error(Reason.ERROR_REASON_UNSUPPORTED, f"there is no place for {quote(label)}, a rule of the graph's own")


@dataclass(frozen=True, slots=True)
class ExpandRequest:
    """Names of tensors as requests write them. `known_rule`: index of the rule that an attribute of an op of some
    type names; UNKNOWN_RULE if there is none. `bring`: a new index, under a label, for a rule that the graph brings
    along."""

    fetches: Sequence[str] = ()
    ys: Sequence[str] = ()
    xs: Sequence[str] = ()
    grad_y_tensors: Sequence[str] = ()
    stop_gradients: Sequence[str] = ()
    fed: Sequence[str] = ()
    overrides: Sequence[OverrideSpec] = ()
    rewrites: Sequence[str] = ()
    # The field of the request that asks for derivatives, and whether gradients are differentiated again.
    derivative: str = "vjp"
    second_order: bool = False
    known_rule: Callable[[str, str], int] = _no_rule
    add_embedded_rule: Callable[[str], int] = _no_place
    # Starts the names of all functions: those of other programs in the same process must differ.
    namespace: str = "gr"
    # Names of variables that have values, and whether what the graph assigns to variables is wanted too.
    variables: Sequence[str] = ()
    with_updates: bool = False
    # Whether all variables have values outside: those of a session.
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A placeholder, a variable, or another fed tensor, of the expanded graph: `x` or `h:1`.

    `optional`: it has a default, or a value. `aliases`: further names that calls may use.
    """

    name: str
    dtype: Dt.ValueType
    shape: TensorShape
    optional: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class Expanded:
    """A graph as the engine takes it."""

    graph_bytes: bytes
    # How many there are, in functions and rules too.
    nodes: int
    marks: list[Mark]
    # Public name of its container by name of function.
    scopes: dict[str, str]
    matches: list[Match]
    inputs: list[GraphInput]
    # Public names of the nodes that rewrites replaced.
    rewritten: list[str]
    # Name in the expanded graph, and element type, by the name asked; a stop_gradient off the path has no such name.
    tensor_names: dict[str, str]
    dtypes: dict[str, Dt.ValueType]
    # Graphs of the rules that the graph brings along, by index: variables are placeholders, results `dx`, `dx1`, …
    brought: dict[int, bytes]
    brought_nodes: dict[int, int]
    # Names of the uploaded graph's placeholders and variables that a call may feed as they are, needed or not.
    placeholders: list[str] = field(default_factory=list)
    # Variables by the name that the request gives them values under, needed or not.
    variables: dict[str, GraphInput] = field(default_factory=dict)
    # Tensor with the new value by name of variable, if asked.
    updates: dict[str, str] = field(default_factory=dict)

    def dtype_of(self, name: str) -> Dt.ValueType:
        """Element type of an asked tensor."""
        return self.dtypes[name]


def placeholders(graph: Graph, variables: Iterable[str] = ()) -> frozenset[str]:
    """Names of the top level's placeholders and variables that a call may feed as they are.

    `variables`: names of those that have values.
    """
    return frozenset(node.name for node in graph.node if node.op in PLACEHOLDERS) | fed_in_place(graph, variables)


def expand(graph: Graph, request: ExpandRequest, limits: Limits | None = None) -> Expanded:
    """Checks the graph and the request, resolves overrides, inlines calls, and leaves what the asked tensors need.

    Raises `GradruleError` with all findings.
    """
    with paused_collection():
        return _expand(graph, request, limits or Limits())


def _expand(graph: Graph, request: ExpandRequest, limits: Limits) -> Expanded:
    findings = Findings()
    top, library = check(graph, limits, findings)
    table = VariableTable(top)
    names = TensorNames(top, findings, {alias: item.name for alias, item in table.names.items()})
    asked = _asked(request, names)
    fed = _fed(request, names, findings)
    wishes = NodeGradients(
        request.known_rule, request.add_embedded_rule, library.gradients, library.foreign, bool(request.ys), findings
    )
    resolver = Resolver(
        matchers(request.overrides, library, findings),
        wishes,
        bool(request.ys),
        findings,
        request.second_order,
        limits.inlined_nodes,
    )
    check_rewrites(request.rewrites, findings)
    given = table.given(request.variables, "spec.variables", findings)
    findings.raise_if_any()

    cut: dict[int, set[int]] = {}
    for position, output in fed.values():
        if top.nodes[position].op not in PLACEHOLDERS | SOURCES:
            cut.setdefault(position, set()).add(output)
    apart = {asked[name] for name in (*request.xs, *request.stop_gradients)}
    named = _selected(request.overrides, names)
    copy = copy_graph(top, resolver, cut, {*asked.values(), *fed.values(), *named.values()}, apart, request.namespace)
    roots = [*(asked[name] for name in _computed(request)), *fed.values()]
    updates: dict[Variable, Ref] = {}
    if table:
        outside = {
            *given.values(),
            *(table.names[names.node(ref)] for ref in fed.values() if names.node(ref) in table.names),
        }
        outside.update(table.all() if request.stateful else ())
        updates = lower_variables(copy, table, [copy.tensors[root] for root in roots], outside, findings)
    if request.with_updates:
        roots += _keep_updates(copy, updates)
    dtypes = {name: _copied_dtype(copy, ref) for name, ref in asked.items()}
    rewritten = rewrite(copy, request.rewrites, {copy.tensors[asked[name]] for name in request.xs})
    scene = _resolve(copy, resolver, request, asked, named, limits, findings)
    matches = resolver.matches(scene)
    findings.all += resolver.unmatched(scene) if request.ys else []
    # What only stop_gradients name is on no path: it stops nothing, and needs no feed.
    places = _prune(copy, set(roots))
    rules = expand_embedded_rules(wishes, request.namespace)
    bodies = [copy.body, *rules.bodies.values()]
    _check_runnable(bodies, {**copy.scopes, **rules.scopes}, limits, findings)
    findings.raise_if_any()
    marks = mark(bodies, {**copy.resolved, **scene.resolved, **rules.resolved})
    # Marks are written onto nodes: those within gradients, too, for gradients of gradients.
    brought = _write_brought(rules.bodies, wishes.brought, graph.versions, limits)
    return Expanded(
        graph_bytes=write_graph(copy.body, rules.bodies.values(), graph.versions),
        nodes=sum(len(body.nodes) for root in bodies for body in bodies_of(root)),
        marks=marks,
        scopes={body.name: copy.scopes[body.name] for body in bodies_of(copy.body) if body.name},
        matches=matches,
        rewritten=rewritten,
        brought=brought,
        brought_nodes={index: len(rules.bodies[name].nodes) for (name, _), index in wishes.brought.items()},
        inputs=_inputs(top, copy.body, cut, fed, table, set(given.values())),
        tensor_names={name: tensor_name(copy.body, places[ref]) for name, ref in asked.items() if ref in places},
        dtypes=dtypes,
        placeholders=[
            *(node.name for node in top.nodes if node.op in PLACEHOLDERS),
            *(name for name, item in table.names.items() if item in given.values() or not item.initialiser),
        ],
        variables={name: _variable_input(item, optional=True) for name, item in given.items()},
        updates={
            variable.name: tensor_name(copy.body, places[ref])
            for variable, ref in zip(updates, _update_keys(updates), strict=True)
            if ref in places
        },
    )


@dataclass(frozen=True, slots=True)
class VariableInfo:
    """A variable of a graph.

    `names`: all by which requests may call it, its own first. `initialised`: the graph computes its first value.
    """

    names: tuple[str, ...]
    dtype: Dt.ValueType
    shape: TensorShape
    initialised: bool


def variables(graph: Graph, limits: Limits | None = None) -> list[VariableInfo]:
    """The variables of a graph, which is checked. Raises `GradruleError` with all findings."""
    with paused_collection():
        findings = Findings()
        top, _ = check(graph, limits or Limits(), findings)
        findings.raise_if_any()
        return [
            VariableInfo((item.name, *sorted(item.aliases)), item.dtype, item.shape, bool(item.initialiser))
            for item in VariableTable(top).all()
        ]


def _update_keys(updates: Mapping[Variable, Ref]) -> list[Ref]:
    """Keys under which new values are kept among the copy's tensors: no tensor of the uploaded graph has these."""
    return [(-1 - number, 0) for number in range(len(updates))]


def _keep_updates(copy: Copy, updates: Mapping[Variable, Ref]) -> list[Ref]:
    keys = _update_keys(updates)
    copy.tensors.update(zip(keys, updates.values(), strict=True))
    return keys


def _asked(request: ExpandRequest, names: TensorNames) -> dict[str, Ref]:
    groups = (
        ("fetches", request.fetches),
        (f"{request.derivative}.ys", request.ys),
        (f"{request.derivative}.xs", request.xs),
        (f"{request.derivative}.grad_ys", request.grad_y_tensors),
        (f"{request.derivative}.stop_gradients", request.stop_gradients),
    )
    asked: dict[str, Ref] = {}
    for group, texts in groups:
        for position, text in enumerate(texts):
            ref = names.find(text, f"spec.{group}[{position}]")
            if ref is not None:
                asked[text] = ref
    return asked


def _fed(request: ExpandRequest, names: TensorNames, findings: Findings) -> dict[str, Ref]:
    fed: dict[str, Ref] = {}
    for position, text in enumerate(request.fed):
        ref = names.find(text, f"feeds[{position}]", is_feed=True)
        if ref is None:
            continue
        name = canonical(names.node(ref), ref[1])
        if name in fed:
            message = f"The tensor {quote(name)} is fed twice."
            findings.add(Reason.ERROR_REASON_UNKNOWN_FEED, message, field=f"feeds[{position}]")
        fed[name] = ref
    return fed


def _selected(overrides: Iterable[OverrideSpec], names: TensorNames) -> dict[str, Ref]:
    """Tensors of the top level that selectors name, by name; those in functions are found in the copy."""
    texts = {
        text
        for spec in overrides
        for text in (*spec.selector.region.inputs, *spec.selector.region.outputs, *spec.selector.depends_on)
    }
    found = ((text, names.look_up(text)) for text in texts)
    return {text: ref for text, ref in found if ref is not None}


def _resolve(
    copy: Copy,
    resolver: Resolver,
    request: ExpandRequest,
    asked: Mapping[str, Ref],
    named: Mapping[str, Ref],
    limits: Limits,
    findings: Findings,
) -> ResolutionContext:
    """Decides which node of the copy gets which rule, and ties up subgraphs that get one. LIMIT_EXCEEDED."""
    inner: dict[str, tuple[Body, int]] = {}

    def look_up(text: str) -> tuple[Body, Ref] | None:
        if text in named:
            return copy.body, copy.tensors[named[text]]
        if not inner:
            for body in bodies_of(copy.body):
                if body.name:
                    args = enumerate(body.nodes[: body.arg_count])
                    inner.update({f"{copy.scopes[body.name]}/{arg.name}": (body, index) for index, arg in args})
            inner.update({place.name: (place.body, place.index) for place in copy.places})
        name, output = parse_tensor_name(text) or ("", 0)
        found = inner.get(name)
        if found is None or output >= len(found[0].nodes[found[1]].outputs or ()):
            return None
        return found[0], (found[1], output)

    def find(text: str, field: str) -> tuple[Body, Ref] | None:
        found = look_up(text)
        if found is None:
            name, _ = parse_tensor_name(text) or ("", 0)
            message = f"There is no tensor {quote(text)}.{findings.near(name, inner)}"
            findings.add(Reason.ERROR_REASON_UNKNOWN_TENSOR, message, field=field)
        return found

    def moved(texts: Iterable[str]) -> frozenset[Ref]:
        return frozenset(copy.tensors[asked[text]] for text in texts)

    scene = ResolutionContext(
        copy.body,
        copy.places,
        copy.scopes,
        RequestTensors(moved(request.xs), moved(request.ys), moved(request.stop_gradients)),
        look_up,
        find,
    )
    looks = len(resolver.matchers) * len(copy.places)
    if looks > limits.selections:
        for matcher in resolver.matchers:
            matcher.faulty = True
        message = (
            f"{len(resolver.matchers)} overrides would look at {len(copy.places)} nodes each, {looks} in all; "
            f"{limits.selections} is the most (--max-selections). Select more nodes with fewer overrides."
        )
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message, field="spec.overrides")
    elif request.ys:
        resolver.resolve(scene)
    subgraphs = scene.subgraphs
    knots, moves = insert_custom_gradient_nodes([(subgraph, match.node) for subgraph, match in subgraphs], copy.unique)
    for custom_gradient, (_, match) in zip(knots, subgraphs, strict=True):
        scene.resolved[id(custom_gradient)] = [match]
    gone = moves.get(id(copy.body), {})
    copy.tensors = {ref: gone.get(place, place) for ref, place in copy.tensors.items()}
    return scene


def _computed(request: ExpandRequest) -> list[str]:
    return [*request.fetches, *request.ys, *request.xs, *request.grad_y_tensors]


def _prune(copy: Copy, roots: Iterable[Ref]) -> dict[Ref, Ref]:
    """Leaves what the roots need; returns where tensors went that are left."""
    moved = prune(copy.body, {copy.tensors[root][0] for root in roots})
    return {asked: (moved[node], output) for asked, (node, output) in copy.tensors.items() if node in moved}


def _check_runnable(roots: Iterable[Body], scopes: Mapping[str, str], limits: Limits, findings: Findings) -> None:
    """UNSUPPORTED_OP and OP_NOT_ALLOWED for nodes that are needed; what is not needed reaches no engine."""
    # Nodes share their attributes, and most are of few op types.
    known: dict[tuple[str, int], Fault | None] = {}
    for body, node in itertools.chain.from_iterable(map(nodes_of, roots)):
        reason, why = Reason.ERROR_REASON_UNSUPPORTED_OP, node.unsupported
        if not why and not (node.functions and is_call(node)):
            key = (node.op, id(node.attrs))
            if key not in known:
                op = _opdefs.find(node.op)
                known[key] = op_fault(op, node.attrs, limits) if op else None
            fault = known[key]
            if fault:
                reason, why = fault
        if why:
            name = f"{scopes[body.name]}/{node.name}" if body.name else node.name
            findings.add(reason, f"Node {quote(name)} ({node.op}) {why}.", name)


def _write_brought(
    bodies: Mapping[str, Body], labels: Mapping[tuple[str, str], int], versions: Versions, limits: Limits
) -> dict[int, bytes]:
    """Graphs of the gradients that the graph brings along, by index; those of one gradient are the same object.

    LIMIT_EXCEEDED for too many nodes or bytes: the engine gets them once per label.
    """
    nodes = sum(len(bodies[name].nodes) for name, _ in labels)
    if nodes > limits.inlined_nodes:
        raise error(
            Reason.ERROR_REASON_LIMIT_EXCEEDED,
            f"gradients that the graph brings along have {nodes} nodes, once for each region that they belong to; "
            f"{limits.inlined_nodes} is the most (--max-inlined-nodes)",
        )
    written = {name: write_rule(body, versions) for name, body in bodies.items()}
    added = sum(len(written[name]) for name, _ in labels) - sum(map(len, written.values()))
    if added > limits.inlined_bytes:
        raise error(
            Reason.ERROR_REASON_LIMIT_EXCEEDED,
            f"gradients that the graph brings along belong to so many regions that they take {added} bytes more; "
            f"{limits.inlined_bytes} is the most (--max-inlined-bytes)",
        )
    return {index: written[name] for (name, _), index in labels.items()}


def _inputs(
    top: Body,
    body: Body,
    cut: Container[int],
    fed: Mapping[str, Ref],
    table: VariableTable,
    given: Container[Variable],
) -> list[GraphInput]:
    """What calls give: placeholders and variables that are needed, then other tensors that are fed."""
    # Nodes of the top level keep their names, so a name tells whether one is still there.
    kept = {node.name for node in body.nodes if node.op in PLACEHOLDERS or node.op == PLACEHOLDER_WITH_DEFAULT}
    inputs = []
    for position, node in enumerate(top.nodes):
        if node.name not in kept or position in cut:
            continue
        if node.op in SOURCES:
            variable = table.names[node.name]
            inputs.append(_variable_input(variable, optional=variable in given))
        else:
            optional = node.op not in PLACEHOLDERS
            inputs.append(GraphInput(node.name, _dtype(top, (position, 0)), _shape(node), optional))
    for name, ref in fed.items():
        if ref[0] in cut:
            node = top.nodes[ref[0]]
            shape = _shape(node) if node.op == PLACEHOLDER_WITH_DEFAULT else UNKNOWN_SHAPE.shape
            inputs.append(GraphInput(name, _dtype(top, ref), shape))
    return inputs


def _variable_input(variable: Variable, *, optional: bool) -> GraphInput:
    return GraphInput(variable.name, variable.dtype, variable.shape, optional, tuple(sorted(variable.aliases)))


def _copied_dtype(copy: Copy, ref: Ref) -> Dt.ValueType:
    return _dtype(copy.body, copy.tensors[ref])


def _shape(node: Node) -> TensorShape:
    return node.attrs.get("shape", UNKNOWN_SHAPE).shape


def _dtype(top: Body, ref: Ref) -> Dt.ValueType:
    return as_dt((top.nodes[ref[0]].outputs or (0,) * (ref[1] + 1))[ref[1]])
