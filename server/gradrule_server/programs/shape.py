"""The structure of calls: what of a call decides which program it needs."""

from __future__ import annotations

from dataclasses import dataclass

from gradrule.v1 import evaluate_pb2


@dataclass(frozen=True, slots=True)
class CallShape:
    """What of a call's structure, not of its values, a program depends on. Names are canonical: `y`, not `y:0`.

    Without tangents (vectors), where they are taken, all xs have one.
    """

    feeds: frozenset[str] = frozenset()
    grad_ys: frozenset[str] = frozenset()
    derivative: evaluate_pb2.Derivative.ValueType = evaluate_pb2.DERIVATIVE_UNSPECIFIED
    tangents: frozenset[str] = frozenset()
    vectors: frozenset[str] = frozenset()
    stacked_grad_ys: bool = False
    session: bool = False
    """Variables have the values of a session, and what the graph assigns to them is wanted."""
    split: bool = False
    """The forward part runs now, and is pulled back later: grad_ys come then."""


def canonical(name: str) -> str:
    """`y:0` and `y` are one tensor."""
    return name.removesuffix(":0")
