"""Expands a graph for one program: checks it, resolves overrides, inlines calls and removes unneeded nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gradrule.common import op_definitions
from gradrule.common.dtypes import as_dt
from gradrule.v1.graph_pb2 import Graph
from gradrule.v1.tensor_pb2 import Dt, TensorShape
from gradrule_server.errors import error
from gradrule_server.graphs.check import check
from gradrule_server.graphs.copying import UNKNOWN_SHAPE, Copy, copy_graph
from gradrule_server.graphs.embedded_rules import expand_embedded_rules, write_embedded_rules
from gradrule_server.graphs.findings import Findings, Reason, quote
from gradrule_server.graphs.gc_pause import paused_collection
from gradrule_server.graphs.ir import (
    PLACEHOLDER_WITH_DEFAULT,
    PLACEHOLDERS,
    Body,
    Limits,
    Node,
    Ref,
    bodies_of,
    is_call,
    nodes_of,
    prune,
)
from gradrule_server.graphs.marks import Mark, mark
from gradrule_server.graphs.node_gradients import NodeGradients
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
from gradrule_server.policy import Fault, op_fault


def _refuse_rule(name: str, _: str) -> int:
    raise error(Reason.ERROR_REASON_UNKNOWN_RULE, f"there is no rule {quote(name)}")


def _refuse_embedded_rule(label: str) -> int:
    raise error(Reason.ERROR_REASON_UNSUPPORTED, f"there is no place for {quote(label)}, a rule of the graph's own")


@dataclass(frozen=True, slots=True)
class ExpandRequest:
    """What a program computes from a graph; tensors are named as in requests.

    `known_rule`: returns the rule index for a name in a node's attribute and the node's op type; raises UNKNOWN_RULE.
    `add_embedded_rule`: adds a rule that the graph contains, under a label, and returns its index.
    """

    fetches: Sequence[str] = ()
    ys: Sequence[str] = ()
    xs: Sequence[str] = ()
    grad_y_tensors: Sequence[str] = ()
    stop_gradients: Sequence[str] = ()
    fed: Sequence[str] = ()
    overrides: Sequence[OverrideSpec] = ()
    rewrites: Sequence[str] = ()
    # Request field of the derivative, and whether gradients are themselves differentiated.
    derivative: str = "vjp"
    second_order: bool = False
    known_rule: Callable[[str, str], int] = _refuse_rule
    add_embedded_rule: Callable[[str], int] = _refuse_embedded_rule
    # Prefix of all function names: names must be unique among the programs of one engine process.
    namespace: str = "gr"
    # Variables that have values, and whether the values that the graph assigns to variables are returned.
    variables: Sequence[str] = ()
    with_updates: bool = False
    # Whether all variables get their values from a session.
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of the expanded graph: a placeholder, a variable or another fed tensor (`x` or `h:1`).

    `optional`: it has a default or a bound value. `aliases`: other names that calls may use.
    """

    name: str
    dtype: Dt.ValueType
    shape: TensorShape
    optional: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class Expanded:
    """A graph in the form that the engine compiles."""

    graph_bytes: bytes
    # Number of nodes, including those in functions and embedded rules.
    nodes: int
    marks: list[Mark]
    # Public name of the containing loop, branch or call by function name.
    scopes: dict[str, str]
    matches: list[Match]
    inputs: list[GraphInput]
    # Public names of the nodes that rewrites replaced.
    rewritten: list[str]
    # Name in the expanded graph and element type by requested name; stop_gradients off the path have no name.
    tensor_names: dict[str, str]
    dtypes: dict[str, Dt.ValueType]
    # Serialized graphs of embedded rules by index: arguments are placeholders, results `dx`, `dx1`, …
    embedded_rules: dict[int, bytes]
    embedded_rule_nodes: dict[int, int]
    # Placeholders and variables of the uploaded graph that calls may feed without a new program, needed or not.
    placeholders: list[str] = field(default_factory=list)
    # Variables by the name under which the request gives their values, needed or not.
    variables: dict[str, GraphInput] = field(default_factory=dict)
    # Tensor with the new value by variable name, if `with_updates` was set.
    updates: dict[str, str] = field(default_factory=dict)

    def dtype_of(self, name: str) -> Dt.ValueType:
        """Returns the element type of a requested tensor."""
        return self.dtypes[name]


def placeholders(graph: Graph, variables: Iterable[str] = ()) -> frozenset[str]:
    """Returns the names of top-level placeholders and variables that a call may feed without a new program.

    `variables`: names of the variables that have values.
    """
    return frozenset(node.name for node in graph.node if node.op in PLACEHOLDERS) | fed_in_place(graph, variables)


def expand(graph: Graph, request: ExpandRequest, limits: Limits | None = None) -> Expanded:
    """Checks graph and request, resolves overrides, inlines calls and keeps only nodes that requested tensors need.

    Raises `GradruleError` with all findings.
    """
    with paused_collection():
        return _expand(graph, request, limits or Limits())


def _expand(graph: Graph, request: ExpandRequest, limits: Limits) -> Expanded:
    findings = Findings()
    top, library = check(graph, limits, findings)
    table = VariableTable(top)
    names = TensorNames(top, findings, {alias: item.name for alias, item in table.names.items()})
    requested = _requested(request, names)
    fed = _fed(request, names, findings)
    node_gradients = NodeGradients(
        request.known_rule, request.add_embedded_rule, library.gradients, library.foreign, bool(request.ys), findings
    )
    resolver = Resolver(
        matchers(request.overrides, library, findings),
        node_gradients,
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
    separate = {requested[name] for name in (*request.xs, *request.stop_gradients)}
    named = _find_selected(request.overrides, names)
    copy = copy_graph(
        top, resolver, cut, {*requested.values(), *fed.values(), *named.values()}, separate, request.namespace
    )
    roots = [*(requested[name] for name in _result_names(request)), *fed.values()]
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
    dtypes = {name: _copied_dtype(copy, ref) for name, ref in requested.items()}
    rewritten = rewrite(copy, request.rewrites, {copy.tensors[requested[name]] for name in request.xs})
    context = _resolve(copy, resolver, request, requested, named, limits, findings)
    matches = resolver.matches(context)
    findings.all += resolver.unmatched(context) if request.ys else []
    # stop_gradients are no roots: one that nothing else needs has no effect and needs no feed.
    moved = _prune(copy, set(roots))
    rules = expand_embedded_rules(node_gradients, request.namespace)
    bodies = [copy.body, *rules.bodies.values()]
    _check_runnable(bodies, {**copy.scopes, **rules.scopes}, limits, findings)
    findings.raise_if_any()
    marks = mark(bodies, {**copy.resolved, **context.resolved, **rules.resolved})
    # Write the rules after marking: their nodes carry marks too, for gradients of gradients.
    embedded_rules = write_embedded_rules(rules.bodies, node_gradients.embedded_indices, graph.versions, limits)
    return Expanded(
        graph_bytes=write_graph(copy.body, rules.bodies.values(), graph.versions),
        nodes=sum(len(body.nodes) for root in bodies for body in bodies_of(root)),
        marks=marks,
        scopes={body.name: copy.scopes[body.name] for body in bodies_of(copy.body) if body.name},
        matches=matches,
        rewritten=rewritten,
        embedded_rules=embedded_rules,
        embedded_rule_nodes={
            index: len(rules.bodies[name].nodes) for (name, _), index in node_gradients.embedded_indices.items()
        },
        inputs=_inputs(top, copy.body, cut, fed, table, set(given.values())),
        tensor_names={name: tensor_name(copy.body, moved[ref]) for name, ref in requested.items() if ref in moved},
        dtypes=dtypes,
        placeholders=[
            *(node.name for node in top.nodes if node.op in PLACEHOLDERS),
            *(name for name, item in table.names.items() if item in given.values() or not item.initialiser),
        ],
        variables={name: _variable_input(item, optional=True) for name, item in given.items()},
        updates={
            variable.name: tensor_name(copy.body, moved[ref])
            for variable, ref in zip(updates, _update_keys(updates), strict=True)
            if ref in moved
        },
    )


@dataclass(frozen=True, slots=True)
class VariableInfo:
    """A variable of a graph.

    `names`: all names that requests may use, its own first. `initialised`: the graph computes its initial value.
    """

    names: tuple[str, ...]
    dtype: Dt.ValueType
    shape: TensorShape
    initialised: bool


def variables(graph: Graph, limits: Limits | None = None) -> list[VariableInfo]:
    """Checks a graph and returns its variables. Raises `GradruleError` with all findings."""
    with paused_collection():
        findings = Findings()
        top, _ = check(graph, limits or Limits(), findings)
        findings.raise_if_any()
        return [
            VariableInfo((item.name, *sorted(item.aliases)), item.dtype, item.shape, bool(item.initialiser))
            for item in VariableTable(top).all()
        ]


def _update_keys(updates: Mapping[Variable, Ref]) -> list[Ref]:
    """Returns keys for new variable values in `Copy.tensors`; negative, so no tensor of the uploaded graph has them."""
    return [(-1 - number, 0) for number in range(len(updates))]


def _keep_updates(copy: Copy, updates: Mapping[Variable, Ref]) -> list[Ref]:
    keys = _update_keys(updates)
    copy.tensors.update(zip(keys, updates.values(), strict=True))
    return keys


def _requested(request: ExpandRequest, names: TensorNames) -> dict[str, Ref]:
    groups = (
        ("fetches", request.fetches),
        (f"{request.derivative}.ys", request.ys),
        (f"{request.derivative}.xs", request.xs),
        (f"{request.derivative}.grad_ys", request.grad_y_tensors),
        (f"{request.derivative}.stop_gradients", request.stop_gradients),
    )
    requested: dict[str, Ref] = {}
    for group, texts in groups:
        for position, text in enumerate(texts):
            ref = names.find(text, f"spec.{group}[{position}]")
            if ref is not None:
                requested[text] = ref
    return requested


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


def _find_selected(overrides: Iterable[OverrideSpec], names: TensorNames) -> dict[str, Ref]:
    """Returns the top-level tensors that selectors name; tensors in functions are looked up in the copy later."""
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
    requested: Mapping[str, Ref],
    named: Mapping[str, Ref],
    limits: Limits,
    findings: Findings,
) -> ResolutionContext:
    """Assigns rules to nodes of the copy and adds custom-gradient nodes for subgraphs with rules.

    Adds LIMIT_EXCEEDED for too many overrides times nodes.
    """
    inner: dict[str, tuple[Body, int]] = {}

    def look_up(text: str) -> tuple[Body, Ref] | None:
        if text in named:
            return copy.body, copy.tensors[named[text]]
        if not inner:
            for body in bodies_of(copy.body):
                if body.name:
                    args = enumerate(body.nodes[: body.arg_count])
                    inner.update({f"{copy.scopes[body.name]}/{arg.name}": (body, index) for index, arg in args})
            inner.update({candidate.name: (candidate.body, candidate.index) for candidate in copy.candidates})
        name, output = parse_tensor_name(text) or ("", 0)
        found = inner.get(name)
        if found is None or output >= len(found[0].nodes[found[1]].outputs or ()):
            return None
        return found[0], (found[1], output)

    def find(text: str, field: str) -> tuple[Body, Ref] | None:
        found = look_up(text)
        if found is None:
            name, _ = parse_tensor_name(text) or ("", 0)
            message = f"There is no tensor {quote(text)}.{findings.suggest_similar(name, inner)}"
            findings.add(Reason.ERROR_REASON_UNKNOWN_TENSOR, message, field=field)
        return found

    def moved(texts: Iterable[str]) -> frozenset[Ref]:
        return frozenset(copy.tensors[requested[text]] for text in texts)

    context = ResolutionContext(
        copy.body,
        copy.candidates,
        copy.scopes,
        RequestTensors(moved(request.xs), moved(request.ys), moved(request.stop_gradients)),
        look_up,
        find,
    )
    checks = len(resolver.matchers) * len(copy.candidates)
    if checks > limits.selections:
        for matcher in resolver.matchers:
            matcher.faulty = True
        message = (
            f"{len(resolver.matchers)} overrides would each be checked against {len(copy.candidates)} nodes, "
            f"{checks} checks in all; "
            f"{limits.selections} is the most (--max-selections). Select more nodes with fewer overrides."
        )
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message, field="spec.overrides")
    elif request.ys:
        resolver.resolve(context)
    subgraphs = context.subgraphs
    custom_gradients, moves = insert_custom_gradient_nodes(
        [(subgraph, match.node) for subgraph, match in subgraphs], copy.unique
    )
    for custom_gradient, (_, match) in zip(custom_gradients, subgraphs, strict=True):
        context.resolved[id(custom_gradient)] = [match]
    gone = moves.get(id(copy.body), {})
    copy.tensors = {ref: gone.get(target, target) for ref, target in copy.tensors.items()}
    return context


def _result_names(request: ExpandRequest) -> list[str]:
    return [*request.fetches, *request.ys, *request.xs, *request.grad_y_tensors]


def _prune(copy: Copy, roots: Iterable[Ref]) -> dict[Ref, Ref]:
    """Removes nodes that no root needs; returns the new positions of the remaining tensors."""
    moved = prune(copy.body, {copy.tensors[root][0] for root in roots})
    return {requested: (moved[node], output) for requested, (node, output) in copy.tensors.items() if node in moved}


def _check_runnable(roots: Iterable[Body], scopes: Mapping[str, str], limits: Limits, findings: Findings) -> None:
    """Adds UNSUPPORTED_OP and OP_NOT_ALLOWED for the remaining nodes; removed nodes do not reach an engine."""
    # Cached, because nodes share attribute objects and most have one of few op types.
    known: dict[tuple[str, int], Fault | None] = {}
    for body, node in itertools.chain.from_iterable(map(nodes_of, roots)):
        reason, why = Reason.ERROR_REASON_UNSUPPORTED_OP, node.unsupported
        if not why and not (node.functions and is_call(node)):
            key = (node.op, id(node.attrs))
            if key not in known:
                op = op_definitions.find(node.op)
                known[key] = op_fault(op, node.attrs, limits) if op else None
            fault = known[key]
            if fault:
                reason, why = fault
        if why:
            name = f"{scopes[body.name]}/{node.name}" if body.name else node.name
            findings.add(reason, f"Node {quote(name)} ({node.op}) {why}.", name)


def _inputs(
    top: Body,
    body: Body,
    cut: Container[int],
    fed: Mapping[str, Ref],
    table: VariableTable,
    given: Container[Variable],
) -> list[GraphInput]:
    """Returns the inputs of calls: needed placeholders and variables, then other fed tensors."""
    # Top-level nodes keep their names, so a name shows whether a node remains.
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
