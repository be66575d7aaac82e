"""Subgraphs that get one rule: chains of ops, regions. Each becomes one node that gradients meet.

As `tf.custom_gradient` does it, an IdentityN passes on the subgraph's outputs, and takes its inputs too: what uses the
outputs uses the IdentityN's from then on, so that all gradients meet it and nothing flows through the inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from gradrule._dtypes import as_dt
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.graphs.groups import BIAS, PLAIN_ADDS, STEP, op_types_of
from gradrule_server.graphs.ir import ARG, DIFFERENTIABLE, Body, Node, Ref
from gradrule_server.graphs.paths import Flows, consumers_of, flows_to, in_order


@dataclass(slots=True, eq=False)
class Subgraph:
    """Nodes of one body that count as one op. `inputs`, `outputs`: tensors of the body."""

    body: Body
    members: tuple[int, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    # The op's input is the first input less the second: a step.
    is_step: bool = False


class Chains:
    """Finds chains of ops. `changes`: whether a tensor of a body is one of the xs or depends on one."""

    def __init__(self, changes: Callable[[Body, Ref], bool], kept: AbstractSet[tuple[int, int]], flows: Flows) -> None:
        self._changes = changes
        self._flows = flows
        # Nodes, as (id of body, index), that are ys, xs or constants: no gradient may pass them by.
        self._kept = kept
        self._consumers: dict[int, list[list[int]]] = {}

    def ending_at(self, body: Body, last: int, words: Sequence[str]) -> Subgraph | None:
        """The chain of these op types or groups whose last node this is."""
        members = self._back(body, last, words)
        if members is None:
            return None
        nodes = body.nodes
        outputs = tuple((last, number) for number in range(len(nodes[last].outputs or ())))
        if words[0] == STEP:
            sides = tuple(nodes[members[0]].inputs)
            dtypes = {(nodes[producer].outputs or (0,))[output] for producer, output in sides}
            if not dtypes <= DIFFERENTIABLE or (nodes[last].outputs or (0,))[0] not in DIFFERENTIABLE:
                return None
            return Subgraph(body, members, sides, outputs, is_step=True)
        inside = set(members)
        inputs = [
            ref
            for place, member in enumerate(members)
            for ref in nodes[member].inputs
            if place == 0 or ref[0] not in inside
        ]
        return Subgraph(body, members, tuple(inputs), outputs)

    def is_bias(self, node: Node, body: Body) -> bool:
        """Whether an op adds something that does not depend on the xs."""
        if node.op not in (*PLAIN_ADDS, "AddN"):
            return True
        return not all(self._changes(body, ref) for ref in node.inputs)

    def _back(self, body: Body, last: int, words: Sequence[str]) -> tuple[int, ...] | None:
        node = body.nodes[last]
        if node.op not in op_types_of(words[-1]) or (words[-1] == BIAS and not self.is_bias(node, body)):
            return None
        if len(words) == 1:
            return (last,)
        for producer in dict.fromkeys(producer for producer, _ in node.inputs):
            if body.nodes[producer].op == ARG or not self._is_alone(body, producer, last):
                continue
            before = self._back(body, producer, words[:-1])
            if before is not None:
                return (*before, last)
        return None

    def _is_alone(self, body: Body, producer: int, consumer: int) -> bool:
        """Whether nothing else takes the producer's outputs."""
        if id(body) not in self._consumers:
            self._consumers[id(body)] = consumers_of(body, self._flows)
        users = self._consumers[id(body)][producer]
        is_result = any(ref[0] == producer for ref in body.results)
        return users == [consumer] and not is_result and (id(body), producer) not in self._kept


def region(body: Body, inputs: Sequence[Ref], outputs: Sequence[Ref]) -> tuple[Subgraph, list[Ref]]:
    """The nodes that lie between the tensors, in order, and what they take from elsewhere."""
    border = set(inputs)
    behind: set[int] = set()
    pending = [producer for producer, output in outputs if (producer, output) not in border]
    while pending:
        position = pending.pop()
        if position not in behind:
            behind.add(position)
            pending += [ref[0] for ref in body.nodes[position].inputs if ref not in border]
    members: list[int] = []
    depends: set[int] = set()
    for position in in_order(body):
        if position in behind and any(ref in border or ref[0] in depends for ref in body.nodes[position].inputs):
            depends.add(position)
            members.append(position)
    elsewhere = [
        ref for member in members for ref in body.nodes[member].inputs if ref not in border and ref[0] not in depends
    ]
    return Subgraph(body, tuple(members), tuple(inputs), tuple(outputs)), list(dict.fromkeys(elsewhere))


def side_exits(
    subgraph: Subgraph, leads_on: AbstractSet[int], kept: AbstractSet[Ref], flows: Flows
) -> list[tuple[int, str]]:
    """Tensors inside that something outside uses and that gradients come back from: member, name of the user."""
    body, inside, outputs = subgraph.body, set(subgraph.members), set(subgraph.outputs)
    exits = [
        (ref[0], node.name)
        for position, node in enumerate(body.nodes)
        if position not in inside and id(node) in leads_on
        for index, ref in enumerate(node.inputs)
        if ref[0] in inside and ref not in outputs and flows_to(node, index, flows)
    ]
    asked = [*body.results, *sorted(kept)]
    exits += [(ref[0], "the results") for ref in asked if ref[0] in inside and ref not in outputs]
    return exits


def weave(subgraphs: Iterable[tuple[Subgraph, str]], unique: Callable[[Body, str], str]) -> tuple[list[Node], Moves]:
    """Puts an IdentityN behind each subgraph (given with a name for it); returns these nodes and where outputs went."""
    moves: dict[int, dict[Ref, tuple[Ref, frozenset[int]]]] = {}
    bodies: dict[int, Body] = {}
    woven = []
    for subgraph, name in subgraphs:
        body = bodies.setdefault(id(subgraph.body), subgraph.body)
        inputs = (_difference(subgraph, unique(body, f"{name}/step_input")),) if subgraph.is_step else subgraph.inputs
        refs = [*subgraph.outputs, *inputs]
        types = tuple((body.nodes[producer].outputs or ())[output] for producer, output in refs)
        attrs = {"T": AttrValue(list=AttrValue.ListValue(type=map(as_dt, types)))}
        body.nodes.append(Node(unique(body, f"{name}/subgraph"), "IdentityN", refs, [], attrs, types, watched=True))
        woven.append(body.nodes[-1])
        knot = len(body.nodes) - 1
        inside = frozenset({*subgraph.members, knot})
        for number, ref in enumerate(subgraph.outputs):
            moves.setdefault(id(body), {})[ref] = ((knot, number), inside)
    for key, moved in moves.items():
        body = bodies[key]
        for position, node in enumerate(body.nodes):
            if any(ref in moved for ref in node.inputs):
                node.inputs = [_moved(ref, position, moved) for ref in node.inputs]
        body.results = [_moved(ref, -1, moved) for ref in body.results]
    return woven, {key: {ref: target for ref, (target, _) in moved.items()} for key, moved in moves.items()}


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
