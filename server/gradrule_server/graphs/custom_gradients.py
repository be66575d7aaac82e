"""Knots that a graph brings along: an IdentityN that passes on what a function with a gradient of its own computed.

`tf.custom_gradient` leaves one behind. Notes on it say how many of its inputs are the function's results, how many are
what the function was given (its inputs), and the function's name; further inputs are what its gradient needs besides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gradrule.v1 import graph_pb2
from gradrule_server.graphs.ir import Node

OUTPUTS_ATTR = "_gradrule_outputs"
INPUTS_ATTR = "_gradrule_inputs"
REGION_ATTR = "_gradrule_region"
CUSTOM_GRADIENT_ATTRS = frozenset({OUTPUTS_ATTR, INPUTS_ATTR, REGION_ATTR})

_ARGUMENT = re.compile(r"(x|y|dy)(0|[1-9][0-9]{0,5})?")
_RESULT = re.compile(r"dx(0|[1-9][0-9]{0,5})?")


@dataclass(frozen=True, slots=True)
class CustomGradientNode:
    """How an IdentityN's inputs are laid out: so many results, so many inputs of the region, the rest."""

    outputs: int
    inputs: int
    region: str

    @property
    def results(self) -> range:
        """Its inputs to which gradients go that pass through the inside."""
        return range(self.outputs)

    @property
    def arguments(self) -> range:
        """Its inputs to which a rule gives gradients."""
        return range(self.outputs, self.outputs + self.inputs)


def read_custom_gradient(node: Node) -> CustomGradientNode | None:
    """What the notes say; None for a node without. ValueError, which says why, where they do not fit the node."""
    if CUSTOM_GRADIENT_ATTRS.isdisjoint(node.attrs):
        return None
    if node.op != "IdentityN":
        raise ValueError(
            f"{', '.join(sorted(CUSTOM_GRADIENT_ATTRS & node.attrs.keys()))} can stand on an IdentityN only"
        )
    counts = []
    for note, least in ((OUTPUTS_ATTR, 1), (INPUTS_ATTR, 0)):
        value = node.attrs.get(note)
        if value is None or value.WhichOneof("value") != "i" or value.i < least:
            raise ValueError(f"{note} is a number from {least} on")
        counts.append(value.i)
    outputs, inputs = counts
    if outputs + inputs > len(node.inputs):
        raise ValueError(f"{OUTPUTS_ATTR} and {INPUTS_ATTR} count {outputs + inputs} inputs; it has {len(node.inputs)}")
    region = node.attrs.get(REGION_ATTR)
    return CustomGradientNode(outputs, inputs, "" if region is None else region.s.decode(errors="replace"))


def is_rule(signature: graph_pb2.OpSignature) -> bool:
    """Whether a function is a rule: its arguments are named as a rule's variables, its results `dx`, `dx1`, …"""
    return all(_ARGUMENT.fullmatch(arg.name) for arg in signature.input_arg) and all(
        _RESULT.fullmatch(arg.name) for arg in signature.output_arg
    )


def gradient_index(result: str) -> int:
    """Which input the result `dx`, `dx1`, … of a rule is for."""
    return int(result.removeprefix("dx") or 0)
