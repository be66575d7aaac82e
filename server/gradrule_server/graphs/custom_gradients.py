"""Reads custom-gradient nodes: the IdentityN that `tf.custom_gradient` adds behind a function with its own gradient.

Attributes of the node give the number of the function's results among its inputs, the number of the function's own
inputs that follow them, and the region's name; further inputs are other tensors that the gradient needs.
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
    """The input layout of a custom-gradient node: results of the region, then inputs of the region, then the rest."""

    outputs: int
    inputs: int
    region: str

    @property
    def results(self) -> range:
        """Indices of the inputs that receive gradients if gradients flow through the region's nodes."""
        return range(self.outputs)

    @property
    def arguments(self) -> range:
        """Indices of the inputs that receive gradients from a rule for the region."""
        return range(self.outputs, self.outputs + self.inputs)


def read_custom_gradient(node: Node) -> CustomGradientNode | None:
    """Returns the input layout; None for a node without these attributes. ValueError if they do not fit the node."""
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
    """Returns whether a function has a rule's signature: arguments `x`, `y`, `dy`, results `dx`, `dx1`, …."""
    return all(_ARGUMENT.fullmatch(arg.name) for arg in signature.input_arg) and all(
        _RESULT.fullmatch(arg.name) for arg in signature.output_arg
    )


def gradient_index(result: str) -> int:
    """Returns the index of the input that the result `dx`, `dx1`, … of a rule belongs to."""
    return int(result.removeprefix("dx") or 0)
