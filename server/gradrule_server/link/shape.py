"""The structure of calls: what of a call decides which program it needs."""

from __future__ import annotations

from dataclasses import dataclass

from gradrule.v1 import evaluate_pb2
from gradrule_server.link.v1 import link_pb2


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


def shape_message(call: CallShape) -> link_pb2.CallShape:
    """Returns the message that `read_shape` reads."""
    return link_pb2.CallShape(
        feeds=call.feeds,
        grad_ys=call.grad_ys,
        derivative=call.derivative,
        tangents=call.tangents,
        vectors=call.vectors,
        stacked_grad_ys=call.stacked_grad_ys,
        session=call.session,
        split=call.split,
    )


def read_shape(message: link_pb2.CallShape) -> CallShape:
    """Returns the structure that a message says."""
    return CallShape(
        feeds=frozenset(message.feeds),
        grad_ys=frozenset(message.grad_ys),
        derivative=message.derivative,
        tangents=frozenset(message.tangents),
        vectors=frozenset(message.vectors),
        stacked_grad_ys=message.stacked_grad_ys,
        session=message.session,
        split=message.split,
    )


def sampled_gradient(index: int) -> str:
    """Returns the name under which a call that samples a rule fetches the gradient of an input."""
    return f"sampled_gradient_{index}"
