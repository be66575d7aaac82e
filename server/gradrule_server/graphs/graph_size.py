"""Limits how large a graph may grow when calls are inlined: its nodes, bytes and call depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule.v1.graph_pb2 import Node as NodeMessage
from gradrule_server.graphs.findings import Findings, Reason
from gradrule_server.graphs.ir import CALLS, CONTAINERS, Body, Limits, Node, is_call

# Inlining adds up to two control nodes for each call: one before the call and one after it.
_NODES_PER_CALL = 2


def count_inlined(graph: Graph) -> int:
    """Returns a lower bound for the number of nodes after inlining, from the message alone.

    The nodes of each function are counted once and multiplied by the number of its uses. Arguments of functions are not
    counted, nor are functions that a call receives as attributes. The graph must have no recursive functions.
    """
    if not graph.library.function:
        return len(graph.node)
    functions = {function.signature.name: function.node_def for function in reversed(graph.library.function)}
    uses: dict[str, Counter[str]] = {}
    counts: dict[str, int] = {}
    top = _used(graph.node, functions)
    stack = list(top)
    while stack:
        name = stack[-1]
        if name not in uses:
            uses[name] = _used(functions[name], functions)
            stack += [inner for inner in uses[name] if inner not in counts]
            continue
        stack.pop()
        counts[name] = len(functions[name]) + sum(times * counts[inner] for inner, times in uses[name].items())
    return len(graph.node) + sum(times * counts[name] for name, times in top.items())


def check_size(roots: Sequence[Body], limits: Limits, findings: Findings) -> None:
    """Adds LIMIT_EXCEEDED if the graph, with one copy of a function for each use, is too large or nests too deep.

    `roots`: the top level and the embedded gradients, each of which is copied once.
    """
    sizes: dict[int, int] = {}
    weights: dict[int, int] = {}
    attributes = _AttributeSizes()
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
        # Names of inner nodes start with the name of the call, loop or branch that contains them.
        own = sum(attributes.measure(node) for node in body.nodes)
        once += own
        weights[id(body)] = own + sum(
            weights[id(inner)] + (len(node.name) + 1) * sizes[id(inner)] for node, inner in used
        )
        depths[id(body)] = 1 + max((depths[id(inner)] for _, inner in used), default=-1)
    size, depth = sum(sizes[id(root)] for root in roots), max(depths[id(root)] for root in roots)
    added = sum(weights[id(root)] for root in roots) - once
    if size > limits.inlined_nodes:
        refuse_size(size, limits, findings)
    elif added > limits.inlined_bytes:
        message = (
            f"Inlining calls adds {added} bytes of names and attributes, constants included, to the graph's {once}; "
            f"{limits.inlined_bytes} is the most (--max-inlined-bytes). Give constants to functions as arguments."
        )
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)
    if depth > limits.call_depth:
        message = f"Calls, loops and branches nest {depth} deep; {limits.call_depth} is the most (--max-call-depth)."
        findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)


def refuse_size(size: int, limits: Limits, findings: Findings) -> None:
    """Adds LIMIT_EXCEEDED for a graph that has `size` nodes after inlining."""
    message = (
        f"With every call inlined the graph has {size} nodes; {limits.inlined_nodes} is the most (--max-inlined-nodes)."
    )
    findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message)


class _AttributeSizes:
    """Measures the bytes of nodes' names and attributes; attributes that nodes share are measured once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def measure(self, node: Node) -> int:
        """Returns the bytes of one node. `node.attrs` must outlive this object, because it is keyed by id()."""
        key = id(node.attrs)
        if key not in self._known:
            self._known[key] = sum(len(name) + value.ByteSize() for name, value in node.attrs.items())
        return len(node.name) + self._known[key]


def _used(nodes: Iterable[NodeMessage], functions: Container[str]) -> Counter[str]:
    """Counts how often the nodes use each function: in calls, loops and branches."""
    found: Counter[str] = Counter()
    for node in nodes:
        if node.op in functions:
            found[node.op] += 1
            continue
        for attr in ("f",) if node.op in CALLS else CONTAINERS.get(node.op, ()):
            if attr in node.attr:
                found.update(name for name in _names(node.attr[attr]) if name in functions)
    return found


def _names(value: AttrValue) -> list[str]:
    if value.WhichOneof("value") == "list":
        return [function.name for function in value.list.func]
    return [value.func.name]
