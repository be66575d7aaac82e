"""Inserts a custom-gradient node for each subgraph (chain or region) that has one rule.

Like `tf.custom_gradient`, it adds an IdentityN that takes the subgraph's outputs and inputs. Consumers of the outputs
use the IdentityN in their place, so all gradients reach it and none flow through the inner nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gradrule.common.dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.graphs.ir import Body, Node, Ref


@dataclass(slots=True, eq=False)
class Subgraph:
    """Nodes of one body that get one rule together. `inputs`, `outputs`: tensors of the body."""

    body: Body
    members: tuple[int, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    # A step function: the rule's input is the first input minus the second.
    is_step: bool = False


def insert_custom_gradient_nodes(
    subgraphs: Iterable[tuple[Subgraph, str]], unique: Callable[[Body, str], str]
) -> tuple[list[Node], Moves]:
    """Adds an IdentityN for each subgraph, given with its name; returns these nodes and the new output positions."""
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
"""Per body (by id): new tensors by old."""


def _moved(ref: Ref, position: int, moved: Mapping[Ref, tuple[Ref, frozenset[int]]]) -> Ref:
    target = moved.get(ref)
    return ref if target is None or position in target[1] else target[0]


def _difference(subgraph: Subgraph, name: str) -> Ref:
    """Adds left - right, so that the rule's gradient flows to both inputs, summed over broadcast axes."""
    body = subgraph.body
    producer, output = subgraph.inputs[0]
    dtype = (body.nodes[producer].outputs or ())[output]
    attrs = {"T": AttrValue(type=as_dt(dtype))}
    body.nodes.append(Node(name, "Sub", list(subgraph.inputs), [], attrs, (dtype,)))
    return len(body.nodes) - 1, 0
