"""How large the parts of a graph may be, and whether the list of ops holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """What every node is held to, wherever it stands: in a graph, in a function, in a rule."""

    # Whether ops run that the list denies: the operator vouches for every caller.
    trusted: bool = False
    # Kernels of most ops know no higher.
    rank: int = 8
    # Outputs of one node, and steps of a loop at a time, by a number in an attribute: a few bytes can ask for millions.
    node_outputs: int = 1024
    # Outputs of one node by a list of types, which takes a byte for each.
    listed_outputs: int = 65_536
    # Of one constant: a message of 91 bytes can stand for gigabytes.
    constant_bytes: int = 256 << 20
    # Memory that a message may take for each of its bytes, besides what every message may.
    unpacking: int = 10


@dataclass(frozen=True, slots=True)
class Limits(Bounds):
    """How large a graph may be, besides what holds for each node."""

    # In the message, functions included.
    nodes: int = 200_000
    # After calls are inlined and loop bodies and branches are copied per use.
    inlined_nodes: int = 1_000_000
    # Of names and attributes that this adds: each use of a function has constants and long names of its own.
    inlined_bytes: int = 32 << 20
    call_depth: int = 32
    # Of a graph that does not come in a message, which has a limit of its own.
    graph_bytes: int = 1 << 30
    # Of all attributes that functions get from their calls: they can double with each level.
    attr_bytes: int = 4 << 20
    # Nodes of a program times its overrides: a byte is kept for each node and override while they are selected.
    selections: int = 10_000_000
    # That an engine may take; 0: any.
    engine_bytes: int = 0
