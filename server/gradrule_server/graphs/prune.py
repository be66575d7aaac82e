"""Leaves what asked tensors need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gradrule_server.graphs.ir import Body, Node


def prune(body: Body, roots: Iterable[int]) -> dict[int, int]:
    """Drops all nodes that no root depends on, in place; returns new index by old."""
    nodes = body.nodes
    needed = bytearray(len(nodes))
    pending = list(roots)
    while pending:
        position = pending.pop()
        if not needed[position]:
            needed[position] = 1
            node = nodes[position]
            pending += [producer for producer, _ in node.inputs]
            pending += node.controls
    moved = {old: new for new, old in enumerate(old for old in range(len(nodes)) if needed[old])}
    body.nodes = [nodes[old] for old in moved]
    for node in body.nodes:
        node.inputs = tuple([(moved[producer], output) for producer, output in node.inputs])
        node.controls = [moved[control] for control in node.controls] if node.controls else ()
    return moved


def bodies_of(top: Body, seen: set[int] | None = None) -> Iterator[Body]:
    """The body, and all functions that it leads to; those that are in `seen` (by id), which grows, are left out."""
    pending = [top]
    while pending:
        body = pending.pop()
        if seen is not None:
            if id(body) in seen:
                continue
            seen.add(id(body))
        yield body
        pending += [inner for node in body.nodes for _, bodies in node.functions for inner in bodies]


def nodes_of(top: Body) -> Iterator[tuple[Body, Node]]:
    """All nodes that run, each with its body."""
    for body in bodies_of(top):
        for node in body.nodes[body.arg_count :]:
            yield body, node
