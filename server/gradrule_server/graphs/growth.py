"""Counts the nodes that a graph has once its calls are inlined, from the message alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from gradrule.v1.graph_pb2 import AttrValue, Graph, Node
from gradrule_server.graphs.ir import CALLS, CONTAINERS


def count_inlined(graph: Graph) -> int:
    """Nodes at least: arguments of functions, and calls of functions that a call names by an attribute, come on top.

    Each function is counted once, and its count is taken as often as it is used. No function may call itself.
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


def _used(nodes: Iterable[Node], functions: Container[str]) -> Counter[str]:
    """How often nodes call each function, or run it as a loop's or branch's part."""
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
