"""Holds the limits on the size of a graph, with their defaults; `settings` has a flag for most of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Limits for each node, in graphs, functions and rules alike.

    Attributes:
        trusted: Whether denied ops may run: the operator trusts all callers.
        rank: Largest rank of a shape. Kernels of most ops support no higher rank.
        node_outputs: Most outputs that a number in an attribute can request; a few bytes could request millions. Also
            limits the parallel iterations of a loop.
        listed_outputs: Most outputs that a list of types can request; it has a byte for each.
        constant_bytes: Largest size of a constant: a message of 91 bytes can declare gigabytes.
        unpacking: Memory that a parsed message may take for each of its bytes, besides `parsed_size.FREE_BYTES`.
    """

    trusted: bool = False
    rank: int = 8
    node_outputs: int = 1024
    listed_outputs: int = 65_536
    constant_bytes: int = 256 << 20
    unpacking: int = 10


@dataclass(frozen=True, slots=True)
class Limits(NodeLimits):
    """Limits for a whole graph, besides those for each node.

    Attributes:
        nodes: Most nodes of a graph with its functions, as sent.
        inlined_nodes: Most nodes after calls are inlined, and loop bodies and branches are copied for each use.
        inlined_bytes: Most bytes of names and attributes that inlining may add.
        call_depth: Largest depth of calls, loops and branches within each other.
        graph_bytes: Largest graph that is uploaded as a blob. Graphs in messages are limited by the message.
        attr_bytes: Most bytes of attributes that functions get from their calls; they can double with each level.
        selections: Largest product of nodes and overrides: selecting needs a byte for each pair.
        engine_bytes: Memory of an engine; 0: not limited.
    """

    nodes: int = 200_000
    inlined_nodes: int = 1_000_000
    inlined_bytes: int = 32 << 20
    call_depth: int = 32
    graph_bytes: int = 1 << 30
    attr_bytes: int = 4 << 20
    selections: int = 10_000_000
    engine_bytes: int = 0
