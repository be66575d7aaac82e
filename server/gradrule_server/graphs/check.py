"""Checks a whole graph at once: every finding, not only the first. Afterwards each body is ordered and typed.

Functions count as part of the graph where its nodes use them. Nodes of ops that gradrule does not run are told only
where they are needed (`unsupported`), because exported graphs are full of savers that nothing needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule.v1.graph_pb2 import Node as NodeMessage
from gradrule_server.graphs.custom_gradients import OUTPUTS_ATTR
from gradrule_server.graphs.findings import Findings, Reason, quote
from gradrule_server.graphs.growth import count_inlined
from gradrule_server.graphs.ir import GRADIENT_ATTR, Body, Limits, Node, is_call
from gradrule_server.graphs.library import Library
from gradrule_server.graphs.order import chain_text, find_cycles, sort_nodes
from gradrule_server.graphs.read import Draft, read_top
from gradrule_server.graphs.type_inference import TypeInference
from gradrule_server.graphs.unsupported import CONTROL_FLOW_V1, LOOP_OPS

# An inlined call may add nodes of its own: one before, one after it.
_NODES_PER_CALL = 2


def check(graph: Graph, limits: Limits, findings: Findings) -> tuple[Body, Library]:
    """The graph's top level, which leads to all functions that it uses. Raises only what makes going on impossible."""
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
        _refuse_size(least, limits, findings)
        findings.raise_if_any()
    top = read_top(graph, findings)
    _check_body(top, library, limits, findings)
    for draft in library.drafts():
        _check_body(draft, library, limits, findings)
    _check_size([top.body, *library.gradients.values()], limits, findings)
    return top.body, library


def _check_body(draft: Draft, library: Library, limits: Limits, findings: Findings) -> None:
    sort_nodes(draft, findings)
    TypeInference(draft, library, limits, findings).run()
    for node in draft.body.nodes:
        if GRADIENT_ATTR in node.attrs:
            wish = node.attrs[GRADIENT_ATTR].s.decode(errors="replace")
            library.ask_gradient(wish, draft.where(node.name), node.name)
    _check_knots(draft, findings)
    loops = [node for node in draft.body.nodes if node.op in LOOP_OPS]
    if loops:
        first = loops[0]
        message = f"{draft.where(first.name)} ({first.op}; {len(loops)} nodes of this kind) {CONTROL_FLOW_V1}."
        findings.add(Reason.ERROR_REASON_UNSUPPORTED_OP, message, first.name)


def _check_knots(draft: Draft, findings: Findings) -> None:
    """INVALID_GRAPH where something takes what a knot passes on besides a region's results: no gradient comes back."""
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
    """GRAPH_CYCLE for functions that call themselves, themselves or through others. Names alone decide."""
    names = library.names()
    if not names:
        return False
    numbers = {name: number for number, name in enumerate(names)}
    edges: dict[int, list[int]] = {}
    pending = sorted(_mentioned(graph.node, numbers) | {numbers[name] for name in library.rules()})
    while pending:
        number = pending.pop()
        if number not in edges:
            edges[number] = sorted(_mentioned(library.message(names[number]).node_def, numbers))
            pending += edges[number]
    cycles = find_cycles(edges)
    for cycle in cycles:
        chain = [names[number] for number in cycle]
        message = f"Functions call themselves: {chain_text(chain)}. Recursion has no end here; use a While."
        findings.add(Reason.ERROR_REASON_GRAPH_CYCLE, message, chain[0])
    return bool(cycles)


def _mentioned(nodes: Iterable[NodeMessage], numbers: dict[str, int]) -> set[int]:
    found: set[int] = set()
    for node in nodes:
        if node.op in numbers:
            found.add(numbers[node.op])
        for value in node.attr.values():
            _mentioned_in(value, numbers, found)
    return found


def _mentioned_in(value: AttrValue, numbers: dict[str, int], found: set[int]) -> None:
    # Messages nest at most a hundred deep, so this recursion is bounded.
    field = value.WhichOneof("value")
    for function in [value.func] if field == "func" else value.list.func if field == "list" else ():
        if function.name in numbers:
            found.add(numbers[function.name])
        for inner in function.attr.values():
            _mentioned_in(inner, numbers, found)


def _check_size(roots: Sequence[Body], limits: Limits, findings: Findings) -> None:
    """LIMIT_EXCEEDED for too many nodes, too many bytes, or too deep calls, once everything is copied per use.

    `roots`: the top level, and gradients that the graph brings along, each of which is copied once.
    """
    sizes: dict[int, int] = {}
    weights: dict[int, int] = {}
    attributes = _Weights()
    once = 0
    depths: dict[int, int] = {}
    stack = [(root, False) for root in roots]
    while stack:
        body, ready = stack.pop()
        if id(body) in sizes:
            continue
        used = [(node, inner) for node in body.nodes for _, bodies in node.functions for inner in bodies]
        if not ready:
            stack.append((body, True))
            stack += [(inner, False) for _, inner in used if id(inner) not in sizes]
            continue
        calls = sum(1 for node, _ in used if is_call(node))
        sizes[id(body)] = len(body.nodes) + _NODES_PER_CALL * calls + sum(sizes[id(inner)] for _, inner in used)
        # What is inside has the name of what is around it before its own: in calls as a node, elsewhere in public.
        own = sum(attributes.of(node) for node in body.nodes)
        once += own
        weights[id(body)] = own + sum(
            weights[id(inner)] + (len(node.name) + 1) * sizes[id(inner)] for node, inner in used
        )
        depths[id(body)] = 1 + max((depths[id(inner)] for _, inner in used), default=-1)
    size, depth = sum(sizes[id(root)] for root in roots), max(depths[id(root)] for root in roots)
    added = sum(weights[id(root)] for root in roots) - once
    if size > limits.inlined_nodes:
        _refuse_size(size, limits, findings)
    elif added > limits.inlined_bytes:
        message = (
            f"Inlining calls adds {added} bytes of names and attributes, constants included, to the graph's {once}; "
            f"{limits.inlined_bytes} is the most (--max-inlined-bytes). Give constants to functions as arguments."
        )
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)
    if depth > limits.call_depth:
        message = f"Calls, loops and branches nest {depth} deep; {limits.call_depth} is the most (--max-call-depth)."
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)


def _refuse_size(size: int, limits: Limits, findings: Findings) -> None:
    message = (
        f"With every call inlined the graph has {size} nodes; {limits.inlined_nodes} is the most (--max-inlined-nodes)."
    )
    findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)


class _Weights:
    """Bytes of nodes' names and attributes; what nodes share is measured once and counts for each."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, node: Node) -> int:
        """Bytes of one node. `node.attrs` must outlive this."""
        key = id(node.attrs)
        if key not in self._known:
            self._known[key] = sum(len(name) + value.ByteSize() for name, value in node.attrs.items())
        return len(node.name) + self._known[key]
