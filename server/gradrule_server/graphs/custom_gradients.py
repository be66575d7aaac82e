"""Reads and inserts custom-gradient nodes: an IdentityN after a function or subgraph that has a gradient of its own.

`tf.custom_gradient` adds such nodes to uploaded graphs. The inputs of a node are the results of the function, then the
inputs of the function, then other tensors that the gradient needs. Attributes of the node hold the number of results,
the number of inputs and the name of the region.

Like `tf.custom_gradient`, `insert_custom_gradient_nodes` adds an IdentityN that takes the outputs and inputs of each
subgraph (chain or region) that has one rule. Consumers of the outputs use the IdentityN instead, so all gradients reach
it and none flow through the inner nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gradrule.common.dtypes import as_dt
from gradrule.v1 import graph_pb2
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.graphs.ir import Body, Node, Ref

OUTPUTS_ATTR = "_gradrule_outputs"
INPUTS_ATTR = "_gradrule_inputs"
REGION_ATTR = "_gradrule_region"
CUSTOM_GRADIENT_ATTRS = frozenset({OUTPUTS_ATTR, INPUTS_ATTR, REGION_ATTR})

_ARGUMENT = re.compile(r"(x|y|dy)(0|[1-9][0-9]{0,5})?")
_RESULT = re.compile(r"dx(0|[1-9][0-9]{0,5})?")


@dataclass(frozen=True, slots=True)
class CustomGradientNode:
    """The input layout of a custom-gradient node: results of the region, inputs of the region, other tensors.

    Attributes:
        outputs: Number of results of the region.
        inputs: Number of inputs of the region.
        region: Name of the region; may be empty.
    """

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
    """Returns the input layout of a node; None for other nodes. Raises `ValueError` for invalid attributes."""
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


@dataclass(slots=True, eq=False)
class Subgraph:
    """Nodes of one body that share one rule. `inputs` and `outputs` are tensors of the body."""

    body: Body
    members: tuple[int, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    # Whether this is a step function; the rule's input is then the first input minus the second.
    is_step: bool = False


def insert_custom_gradient_nodes(
    subgraphs: Iterable[tuple[Subgraph, str]], unique: Callable[[Body, str], str]
) -> tuple[list[Node], Moves]:
    """Adds a custom-gradient node for each subgraph.

    Args:
        subgraphs: The subgraphs, each with the prefix of the names of its new nodes.
        unique: Returns an unused name in a body.

    Returns:
        The new nodes, and the new position of each output of a subgraph.
    """
    moves: dict[int, dict[Ref, tuple[Ref, frozenset[int]]]] = {}
    bodies: dict[int, Body] = {}
    inserted = []
    for subgraph, name in subgraphs:
        body = bodies.setdefault(id(subgraph.body), subgraph.body)
        inputs = (_difference(subgraph, unique(body, f"{name}/step_input")),) if subgraph.is_step else subgraph.inputs
        refs = [*subgraph.outputs, *inputs]
        types = tuple((body.nodes[producer].outputs or ())[output] for producer, output in refs)
        attrs = {"T": AttrValue(list=AttrValue.ListValue(type=map(as_dt, types)))}
        body.nodes.append(Node(unique(body, f"{name}/subgraph"), "IdentityN", refs, [], attrs, types, watched=True))
        inserted.append(body.nodes[-1])
        custom_gradient = len(body.nodes) - 1
        inside = frozenset({*subgraph.members, custom_gradient})
        for number, ref in enumerate(subgraph.outputs):
            moves.setdefault(id(body), {})[ref] = ((custom_gradient, number), inside)
    for key, moved in moves.items():
        body = bodies[key]
        for position, node in enumerate(body.nodes):
            if any(ref in moved for ref in node.inputs):
                node.inputs = [_moved(ref, position, moved) for ref in node.inputs]
        body.results = [_moved(ref, -1, moved) for ref in body.results]
    return inserted, {key: {ref: target for ref, (target, _) in moved.items()} for key, moved in moves.items()}


Moves = Mapping[int, Mapping[Ref, Ref]]
"""For each body, by id(): the new tensors, by old tensor."""


def _moved(ref: Ref, position: int, moved: Mapping[Ref, tuple[Ref, frozenset[int]]]) -> Ref:
    target = moved.get(ref)
    return ref if target is None or position in target[1] else target[0]


def _difference(subgraph: Subgraph, name: str) -> Ref:
    """Adds the difference of a step's inputs; its gradient flows to both inputs and is summed over broadcast axes."""
    body = subgraph.body
    producer, output = subgraph.inputs[0]
    dtype = (body.nodes[producer].outputs or ())[output]
    attrs = {"T": AttrValue(type=as_dt(dtype))}
    body.nodes.append(Node(name, "Sub", list(subgraph.inputs), [], attrs, (dtype,)))
    return len(body.nodes) - 1, 0
