"""Checks a whole graph and collects all findings; sorts the nodes of each body and infers their types.

Functions are checked if a node uses them. Unsupported ops are reported only if a result needs them (`unsupported`),
because exported graphs contain many nodes, such as savers, that no result needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from gradrule.common import op_definitions
from gradrule.v1.graph_pb2 import Graph
from gradrule_server.errors import MAX_QUOTED, Finding, Findings, GradruleError, Reason, quote
from gradrule_server.graphs.ir import (
    GRADIENT_ATTR,
    OUTPUTS_ATTR,
    Body,
    Limits,
    is_call,
    nodes_of,
    topological_order,
)
from gradrule_server.graphs.library import Library
from gradrule_server.graphs.read import Draft, read_top
from gradrule_server.graphs.type_inference import CONTROL_FLOW_V1, LOOP_OPS, TypeInference
from gradrule_server.policy import Fault, op_fault

_MAX_SHOWN_IN_CYCLE = 12

# Inlining adds up to two control nodes for each call: one before the call and one after it.
_NODES_PER_CALL = 2


def check(graph: Graph, limits: Limits, findings: Findings) -> tuple[Body, Library]:
    """Checks a graph; returns its top level and its function library.

    Adds errors to `findings`. Raises `GradruleError` only if the check cannot continue.
    """
    count = len(graph.node) + sum(len(function.node_def) for function in graph.library.function)
    if count > limits.nodes:
        message = f"The graph has {count} nodes; {limits.nodes} is the most (--max-nodes)."
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)
        findings.raise_if_any()
    library = Library(graph, limits, findings)
    top = read_top(graph, findings)
    _check_body(top, library, limits, findings)
    bodies = [top.body]
    for draft in library.drafts():
        _check_body(draft, library, limits, findings)
        bodies.append(draft.body)
    _check_size(_inner_first(bodies, findings), [top.body, *library.gradients.values()], limits, findings)
    return top.body, library


def check_runnable(roots: Iterable[Body], scopes: Mapping[str, str], limits: Limits, findings: Findings) -> None:
    """Adds UNSUPPORTED_OP and OP_NOT_ALLOWED for nodes that may not run; to be called after pruning."""
    # Cache the results: nodes share attribute objects, and most nodes have one of few op types.
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


def _check_body(draft: Draft, library: Library, limits: Limits, findings: Findings) -> None:
    sort_nodes(draft, findings)
    TypeInference(draft, library, limits, findings).run()
    for node in draft.body.nodes:
        if GRADIENT_ATTR in node.attrs:
            gradient_name = node.attrs[GRADIENT_ATTR].s.decode(errors="replace")
            library.add_gradient(gradient_name, draft.where(node.name), node.name)
    _check_custom_gradients(draft, findings)
    loops = [node for node in draft.body.nodes if node.op in LOOP_OPS]
    if loops:
        first = loops[0]
        message = f"{draft.where(first.name)} ({first.op}; {len(loops)} nodes of this kind) {CONTROL_FLOW_V1}."
        findings.add(Reason.ERROR_REASON_UNSUPPORTED_OP, message, first.name)


def _check_custom_gradients(draft: Draft, findings: Findings) -> None:
    """Adds INVALID_GRAPH for nodes that use an output of a custom-gradient node beyond the results of its region.

    No gradient would flow back from such an output.
    """
    nodes = draft.body.nodes
    results: dict[int, int] = {}
    for position, node in enumerate(nodes):
        if OUTPUTS_ATTR in node.attrs:
            results[position] = node.attrs[OUTPUTS_ATTR].i
    for node in nodes if results else ():
        for producer, output in node.inputs:
            if output >= results.get(producer, output + 1):
                message = (
                    f"{draft.where(node.name)} takes output {output} of {quote(nodes[producer].name)}, which has "
                    f"{results[producer]} results of a region; use the tensor that is the node's input instead."
                )
                findings.add(Reason.ERROR_REASON_INVALID_GRAPH, message, node.name)


def _inner_first(bodies: Sequence[Body], findings: Findings) -> list[Body]:
    """Returns the bodies, each after those that it uses.

    Raises GRAPH_CYCLE for each cycle of functions that call each other, and the other findings after these.
    """
    numbers = {id(body): number for number, body in enumerate(bodies)}
    edges = [
        [numbers[id(inner)] for node in body.nodes for _, used in node.functions for inner in used] for body in bodies
    ]
    order = topological_order(edges)
    if len(order) == len(bodies):
        return [bodies[number] for number in order]
    found = []
    for cycle in find_cycles(dict(enumerate(edges))):
        names = [bodies[number].name for number in cycle]
        message = (
            f"Functions call themselves: {chain_text(names)}. Recursive functions are not supported; use a While loop."
        )
        found.append(Finding(Reason.ERROR_REASON_GRAPH_CYCLE, message, names[0][:MAX_QUOTED]))
    raise GradruleError([*found, *findings.all])


def sort_nodes(draft: Draft, findings: Findings) -> None:
    """Sets the body's `order`; adds GRAPH_CYCLE for cycles and omits their nodes and all dependents of these."""
    nodes = draft.body.nodes
    producers: list[list[int]] = []
    for node, sources in zip(nodes, draft.sources, strict=True):
        needs = [source[0] for source in sources if source[0] >= 0]
        if node.op == "Merge":
            # Ignore the cycles of version 1 loops: `check` reports these loops as unsupported.
            needs = [producer for producer in needs if nodes[producer].op != "NextIteration"]
        producers.append([*needs, *node.controls])
    order = draft.body.order = topological_order(producers)
    if len(order) < len(nodes):
        left = dict.fromkeys(range(len(nodes)))
        for position in order:
            del left[position]
        stuck = {position: [producer for producer in producers[position] if producer in left] for position in left}
        where = f" of function {quote(draft.body.name)}" if draft.body.name else ""
        for cycle in find_cycles(stuck):
            names = [nodes[position].name for position in reversed(cycle)]
            findings.add(
                Reason.ERROR_REASON_GRAPH_CYCLE, f"Nodes{where} depend on themselves: {chain_text(names)}.", names[0]
            )


def find_cycles(edges: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Returns cycles without common nodes, at least one if the graph has a cycle; each list follows the edges."""
    state: dict[int, int] = {}
    cycles: list[list[int]] = []
    for walk, start in enumerate(edges):
        if start in state:
            continue
        path, choices = [start], [iter(edges[start])]
        place = {start: 0}
        state[start] = walk
        while path:
            step = next(choices[-1], None)
            if step is None:
                place.pop(path.pop())
                choices.pop()
            elif step in place:
                cycles.append(path[place[step] :])
                break
            elif step not in state:
                state[step] = walk
                place[step] = len(path)
                path.append(step)
                choices.append(iter(edges.get(step, ())))
    return cycles


def chain_text(names: Sequence[str]) -> str:
    """Returns `'a' → 'b' → 'a'`, shortened in the middle if it is long."""
    shown = [quote(name) for name in names]
    if len(shown) > _MAX_SHOWN_IN_CYCLE:
        shown = [*shown[: _MAX_SHOWN_IN_CYCLE - 2], f"… {len(shown) - _MAX_SHOWN_IN_CYCLE + 1} more …", shown[-1]]
    return " → ".join(chain(shown, shown[:1]))


def _check_size(bodies: Iterable[Body], roots: Sequence[Body], limits: Limits, findings: Findings) -> None:
    """Adds LIMIT_EXCEEDED if the graph, with one copy of a function for each use, is too large or nests too deep.

    `bodies`: all bodies, each after those that it uses. `roots`: the top level and the embedded gradients, each of
    which is copied once.
    """
    sizes: dict[int, int] = {}
    weights: dict[int, int] = {}
    # Nodes share attributes: measure them once.
    attribute_bytes: dict[int, int] = {}
    once = 0
    depths: dict[int, int] = {}
    for body in bodies:
        used = [(node, inner) for node in body.nodes for _, functions in node.functions for inner in functions]
        calls = sum(1 for node, _ in used if is_call(node))
        sizes[id(body)] = len(body.nodes) + _NODES_PER_CALL * calls + sum(sizes[id(inner)] for _, inner in used)
        # Names of inner nodes start with the name of the call, loop or branch that contains them.
        own = 0
        for node in body.nodes:
            if id(node.attrs) not in attribute_bytes:
                attribute_bytes[id(node.attrs)] = sum(len(k) + value.ByteSize() for k, value in node.attrs.items())
            own += len(node.name) + attribute_bytes[id(node.attrs)]
        once += own
        weights[id(body)] = own + sum(
            weights[id(inner)] + (len(node.name) + 1) * sizes[id(inner)] for node, inner in used
        )
        depths[id(body)] = 1 + max((depths[id(inner)] for _, inner in used), default=-1)
    size, depth = sum(sizes[id(root)] for root in roots), max(depths[id(root)] for root in roots)
    added = sum(weights[id(root)] for root in roots) - once
    if size > limits.inlined_nodes:
        message = (
            f"With every call inlined the graph has {size} nodes; {limits.inlined_nodes} is the most "
            f"(--max-inlined-nodes)."
        )
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)
    elif added > limits.inlined_bytes:
        message = (
            f"Inlining calls adds {added} bytes of names and attributes, constants included, to the graph's {once}; "
            f"{limits.inlined_bytes} is the most (--max-inlined-bytes). Give constants to functions as arguments."
        )
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)
    if depth > limits.call_depth:
        message = f"Calls, loops and branches nest {depth} deep; {limits.call_depth} is the most (--max-call-depth)."
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)
