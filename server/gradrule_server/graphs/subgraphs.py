"""Finds the nodes of regions, checks the regions, and inserts a custom-gradient node for each subgraph with a rule.

A subgraph is a region or a chain of nodes with one rule. Like `tf.custom_gradient`, `insert_custom_gradient_nodes` adds
an IdentityN that takes the outputs and inputs of the subgraph. Consumers of the outputs use the IdentityN instead, so
all gradients reach it and none flow through the inner nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gradrule.common.dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.graphs.ir import Body, Node, Ref
from gradrule_server.graphs.paths import columns, flows_to
from gradrule_server.graphs.selectors import CandidateNode

if TYPE_CHECKING:
    from gradrule_server.graphs.resolution_context import ResolutionContext

Changes = Callable[[Body, Ref], bool]
"""Returns whether a tensor of a body is one of the xs or depends on one."""


@dataclass(slots=True, eq=False)
class Subgraph:
    """Nodes of one body that share one rule. `inputs` and `outputs` are tensors of the body."""

    body: Body
    members: tuple[int, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    # Whether this is a step function; the rule's input is then the first input minus the second.
    is_step: bool = False


Moves = Mapping[int, Mapping[Ref, Ref]]
"""For each body, by id(): the new tensors, by old tensor."""


def positions_of(body: Body) -> dict[int, int]:
    """Returns the index of each node of a body, by id()."""
    return {id(node): position for position, node in enumerate(body.nodes)}


def call_subgraph(candidate: CandidateNode, positions: Mapping[int, int]) -> Subgraph:
    """Returns the subgraph of a call that can get a rule.

    `positions`: those of the nodes in the body that contains the call.
    """
    call = candidate.call
    assert call is not None
    results = tuple(positions[id(node)] for node in call.results)
    return Subgraph(candidate.body, results, tuple(call.inputs), tuple((position, 0) for position in results))


@dataclass(frozen=True, slots=True, eq=False)
class RegionBorder:
    """The tensors that define a region: its nodes depend on an input, and an output depends on them."""

    body: Body
    inputs: Sequence[Ref]
    outputs: Sequence[Ref]


class Regions:
    """The regions of one body, by number. Each node has a bit per region that contains it."""

    def __init__(self, borders: Sequence[RegionBorder], context: ResolutionContext) -> None:
        self._borders = borders
        self._body = borders[0].body
        self._context = context
        self._order = context.orders.get(self._body)
        self._inputs: dict[Ref, int] = {}
        self._outputs: dict[Ref, int] = {}
        for number, border in enumerate(borders):
            for refs, bits in ((border.inputs, self._inputs), (border.outputs, self._outputs)):
                for ref in refs:
                    bits[ref] = bits.get(ref, 0) | 1 << number
        self._inside = self._find_members()
        self._columns: NDArray[np.bool_] = columns([self._inside[position] for position in self._order], len(borders))
        # For each region: the first tensor that enters it, depends on the xs and is not one of its inputs.
        self._entries: dict[int, Ref] = {}
        # For each region: the first inner tensor that is used outside but is not an output, and the name of its user.
        self._exits: dict[int, tuple[Ref, str]] = {}
        self._find_problems()

    def subgraph(self, number: int) -> Subgraph:
        """Returns the subgraph of a region, nodes in topological order."""
        border = self._borders[number]
        members = tuple(self._order[place] for place in np.flatnonzero(self._columns[number]))
        return Subgraph(self._body, members, tuple(border.inputs), tuple(border.outputs))

    def problem(self, number: int, text: Callable[[Body, Ref], str]) -> str:
        """Returns why a region is invalid, or an empty string. `text`: formats the name of a tensor."""
        border = self._borders[number]
        seen: set[Ref] = set()
        for ref in (*border.inputs, *border.outputs):
            if ref in seen:
                return f"{text(self._body, ref)} is named twice"
            seen.add(ref)
        for ref in border.outputs:
            if not self._inside[ref[0]] >> number & 1:
                return f"its output {text(self._body, ref)} does not depend on its inputs"
        if number in self._entries:
            name = text(self._body, self._entries[number])
            return f"{name} enters it from outside and depends on the xs; make it one of the inputs"
        if number in self._exits:
            ref, user = self._exits[number]
            name = text(self._body, (ref[0], 0))
            return f"{name} inside it is used outside, by {user}; make it one of the outputs"
        return ""

    def _find_members(self) -> list[int]:
        nodes = self._body.nodes
        behind, inside = [0] * len(nodes), [0] * len(nodes)
        for ref, bits in self._outputs.items():
            behind[ref[0]] |= bits & ~self._inputs.get(ref, 0)
        for position in reversed(self._order):
            if behind[position]:
                for ref in nodes[position].inputs:
                    behind[ref[0]] |= behind[position] & ~self._inputs.get(ref, 0)
        for position in self._order:
            if behind[position]:
                for ref in nodes[position].inputs:
                    inside[position] |= (self._inputs.get(ref, 0) | inside[ref[0]]) & behind[position]
        return inside

    def _find_problems(self) -> None:
        body, inside, context = self._body, self._inside, self._context
        seen = 0
        for position in self._order:
            for ref in body.nodes[position].inputs if inside[position] else ():
                enters = inside[position] & ~inside[ref[0]] & ~self._inputs.get(ref, 0) & ~seen
                if enters and context.changes(body, ref):
                    self._entries.update(dict.fromkeys(_numbers(enters), ref))
                    seen |= enters
        seen = 0
        for position, node in enumerate(body.nodes):
            for index, ref in enumerate(node.inputs):
                leaves = inside[ref[0]] & ~inside[position] & ~self._outputs.get(ref, 0) & ~seen
                if leaves and id(node) in context.before_ys and flows_to(node, index, context.flows):
                    self._exits.update(dict.fromkeys(_numbers(leaves), (ref, node.name)))
                    seen |= leaves
        for ref in (*body.results, *sorted(context.kept(body))):
            leaves = inside[ref[0]] & ~self._outputs.get(ref, 0) & ~seen
            self._exits.update(dict.fromkeys(_numbers(leaves), (ref, "the results")))
            seen |= leaves


def _numbers(bits: int) -> list[int]:
    """Returns the positions of the set bits."""
    return [number for number in range(bits.bit_length()) if bits >> number & 1]


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
