"""Checks a whole graph and collects all findings; sorts the nodes of each body and infers their types.

Functions are checked if a node uses them. Unsupported ops are reported only if a result needs them (`unsupported`),
because exported graphs contain many nodes, such as savers, that no result needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from gradrule.common import op_definitions
from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule.v1.graph_pb2 import Node as NodeMessage
from gradrule_server.graphs.custom_gradients import OUTPUTS_ATTR
from gradrule_server.graphs.findings import Findings, Reason, quote
from gradrule_server.graphs.graph_size import check_size, count_inlined, refuse_size
from gradrule_server.graphs.ir import GRADIENT_ATTR, Body, Limits, is_call, nodes_of
from gradrule_server.graphs.library import Library
from gradrule_server.graphs.order import chain_text, find_cycles, sort_nodes
from gradrule_server.graphs.read import Draft, read_top
from gradrule_server.graphs.type_inference import TypeInference
from gradrule_server.graphs.unsupported import CONTROL_FLOW_V1, LOOP_OPS
from gradrule_server.policy import Fault, op_fault


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
    if _check_recursion(graph, library, findings):
        findings.raise_if_any()
    least = count_inlined(graph)
    if least > limits.inlined_nodes:
        refuse_size(least, limits, findings)
        findings.raise_if_any()
    top = read_top(graph, findings)
    _check_body(top, library, limits, findings)
    for draft in library.drafts():
        _check_body(draft, library, limits, findings)
    check_size([top.body, *library.gradients.values()], limits, findings)
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
                    f"{draft.where(node.name)} takes output {output} of {quote(nodes[producer].name)}, which passes on "
                    f"{results[producer]} results of a region; take the tensor from where it comes from."
                )
                findings.add(Reason.ERROR_REASON_INVALID_GRAPH, message, node.name)


def _check_recursion(graph: Graph, library: Library, findings: Findings) -> bool:
    """Adds GRAPH_CYCLE for functions that call themselves directly or indirectly; returns whether there are any."""
    names = library.names()
    if not names:
        return False
    numbers = {name: number for number, name in enumerate(names)}
    edges: dict[int, list[int]] = {}
    pending = sorted(_referenced_functions(graph.node, numbers) | {numbers[name] for name in library.rules()})
    while pending:
        number = pending.pop()
        if number not in edges:
            edges[number] = sorted(_referenced_functions(library.message(names[number]).node_def, numbers))
            pending += edges[number]
    cycles = find_cycles(edges)
    for cycle in cycles:
        chain = [names[number] for number in cycle]
        message = f"Functions call themselves: {chain_text(chain)}. Recursion has no end here; use a While."
        findings.add(Reason.ERROR_REASON_GRAPH_CYCLE, message, chain[0])
    return bool(cycles)


def _referenced_functions(nodes: Iterable[NodeMessage], numbers: dict[str, int]) -> set[int]:
    found: set[int] = set()
    for node in nodes:
        if node.op in numbers:
            found.add(numbers[node.op])
        for value in node.attr.values():
            _collect_functions(value, numbers, found)
    return found


def _collect_functions(value: AttrValue, numbers: dict[str, int], found: set[int]) -> None:
    # Messages nest at most a hundred deep, so this recursion is bounded.
    field = value.WhichOneof("value")
    for function in [value.func] if field == "func" else value.list.func if field == "list" else ():
        if function.name in numbers:
            found.add(numbers[function.name])
        for inner in function.attr.values():
            _collect_functions(inner, numbers, found)
