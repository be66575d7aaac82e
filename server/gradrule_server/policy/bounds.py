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
