"""Subgraphs that get one rule: chains of ops, regions. Each becomes one node that gradients meet.

As `tf.custom_gradient` does it, an IdentityN passes on the subgraph's outputs, and takes its inputs too: what uses the
outputs uses the IdentityN's from then on, so that all gradients meet it and nothing flows through the inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gradrule._dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.graphs.ir import Body, Node, Ref


@dataclass(slots=True, eq=False)
class Subgraph:
    """Nodes of one body that count as one op. `inputs`, `outputs`: tensors of the body."""

    body: Body
    members: tuple[int, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    # The op's input is the first input less the second: a step.
    is_step: bool = False


def insert_custom_gradient_nodes(
    subgraphs: Iterable[tuple[Subgraph, str]], unique: Callable[[Body, str], str]
) -> tuple[list[Node], Moves]:
    """Puts an IdentityN behind each subgraph (given with a name for it); returns these nodes and where outputs went."""
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
"""Per body (by id): where tensors went."""


def _moved(ref: Ref, position: int, moved: Mapping[Ref, tuple[Ref, frozenset[int]]]) -> Ref:
    target = moved.get(ref)
    return ref if target is None or position in target[1] else target[0]


def _difference(subgraph: Subgraph, name: str) -> Ref:
    """Adds left - right, through which the rule's gradient goes to both sides, summed where one was broadcast."""
    body = subgraph.body
    producer, output = subgraph.inputs[0]
    dtype = (body.nodes[producer].outputs or ())[output]
    attrs = {"T": AttrValue(type=as_dt(dtype))}
    body.nodes.append(Node(name, "Sub", list(subgraph.inputs), [], attrs, (dtype,)))
    return len(body.nodes) - 1, 0
