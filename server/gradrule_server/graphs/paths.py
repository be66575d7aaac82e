"""What depends on what in an expanded graph, loop bodies and branches included.

Nodes are told apart by identity. A loop's or branch's node counts as one: what goes into it reaches all that comes out.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from gradrule_server.graphs.ir import DIFFERENTIABLE, LOOPS, Body, Node, Ref, is_call

Ranks = dict[int, int]

Flows = Mapping[int, range]
"""Per node (by id) the inputs that gradients go to; for a node that is not there, all."""


def in_order(body: Body) -> list[int]:
    """Indices of the body's nodes, producers before consumers. Control inputs do not count: no gradient goes there."""
    nodes = body.nodes
    waits = [len(node.inputs) for node in nodes]
    consumers = consumers_of(body)
    order = [position for position, count in enumerate(waits) if not count]
    for position in order:
        for consumer in consumers[position]:
            waits[consumer] -= 1
            if not waits[consumer]:
                order.append(consumer)
    return order


def consumers_of(body: Body, flows: Flows | None = None) -> list[list[int]]:
    """Per node the nodes that take its outputs, one entry per input; with `flows`, those that gradients come from."""
    consumers: list[list[int]] = [[] for _ in body.nodes]
    for position, node in enumerate(body.nodes):
        for index, (producer, _) in enumerate(node.inputs):
            if flows is None or flows_to(node, index, flows):
                consumers[producer].append(position)
    return consumers


def flows_to(node: Node, index: int, flows: Flows) -> bool:
    """Whether gradients of the node go to one of its inputs."""
    return id(node) not in flows or index in flows[id(node)]


@dataclass(frozen=True, slots=True)
class Cut:
    """What gradients do not follow: tensors of the top level that count as constants, inputs that get no gradient."""

    constants: AbstractSet[Ref] = frozenset()
    flows: Flows = field(default_factory=dict)

    @staticmethod
    def passes(node: Node) -> bool:
        """Whether gradients can pass through a node at all."""
        return node.op != "StopGradient" and any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())


def dependents(top: Body, home: Body, seeds: Collection[Ref], cut: Cut | None = None) -> set[int]:
    """Nodes (by id) that depend on one of the tensors of `home`; their own producers only if they depend on another.

    `cut`: dependence that gradients follow, not any.
    """
    walk = _Forward(home, frozenset(seeds), cut)
    walk.run(top, set())
    return walk.found


def dependencies(top: Body, targets: Collection[Ref], cut: Cut | None = None) -> set[int]:
    """Nodes (by id) that one of the tensors depends on, their producers included. `cut`: as for `dependents`."""
    found: set[int] = set()
    _backward(top, {producer for producer, _ in targets}, cut, found)
    return found


def ranks_from_xs(top: Body, candidates: AbstractSet[int], path: AbstractSet[int], flows: Flows) -> Ranks:
    """Per candidate (by id): the largest number of other candidates on one way along the path that leads to it."""
    ranks: Ranks = {}
    _rank_forward(top, [], candidates, path, flows, ranks)
    return ranks


def ranks_from_ys(top: Body, candidates: AbstractSet[int], path: AbstractSet[int], flows: Flows) -> Ranks:
    """Per candidate (by id): the largest number of other candidates on one way along the path that leads on from it."""
    ranks: Ranks = {}
    _rank_backward(top, 0, candidates, path, flows, ranks)
    return ranks


def _inner(node: Node) -> Iterator[tuple[Body, int, bool]]:
    """Bodies of a loop, branch or call; how many inputs come before the arguments; whether results go round."""
    for attr, bodies in node.functions:
        for body in bodies:
            is_loop = node.op in LOOPS
            yield body, 0 if is_loop or is_call(node) else 1, is_loop and attr == "body"


class _Forward:
    """Notes dependents. Each body remembers which of its arguments depend, and is walked again only if more do."""

    def __init__(self, home: Body, seeds: AbstractSet[Ref], cut: Cut | None) -> None:
        self._home, self._seeds, self._cut = home, seeds, cut
        self.found: set[int] = set()
        self._known: dict[int, tuple[frozenset[int], set[int]]] = {}

    def run(self, body: Body, args: AbstractSet[int]) -> set[int]:
        """Walks a body of which these arguments depend; returns which results do."""
        known, results = self._known.get(id(body), (None, set()))
        if known is not None and args <= known:
            return results
        args = args | (known or frozenset())
        seeds = self._seeds if body is self._home else frozenset()
        constants = self._cut.constants if self._cut is not None and not body.name else frozenset()
        reached = set(args)
        self.found |= {id(body.nodes[position]) for position in args}
        for position in in_order(body):
            node = body.nodes[position]
            if self._cut is not None and not self._cut.passes(node):
                continue
            hit = [
                index
                for index, ref in enumerate(node.inputs)
                if (ref[0] in reached or ref in seeds)
                and ref not in constants
                and (self._cut is None or flows_to(node, index, self._cut.flows))
            ]
            is_reached = bool(hit)
            # A tensor of a loop's body may be a seed though nothing that goes into the loop depends on one.
            for inner, offset, goes_round in _inner(node) if hit or body is not self._home else ():
                live = {index - offset for index in hit if index >= offset}
                while not (out := self.run(inner, live)) <= live and goes_round:
                    live |= out
                is_reached |= bool(out)
            if is_reached:
                reached.add(position)
                self.found.add(id(node))
        results = {index for index, ref in enumerate(body.results) if ref[0] in reached}
        self._known[id(body)] = frozenset(args), results
        return results


def _backward(body: Body, roots: Container[int], cut: Cut | None, found: set[int]) -> None:
    nodes, needed = body.nodes, bytearray(len(body.nodes))
    constants = cut.constants if cut is not None and not body.name else frozenset()
    for position in reversed(in_order(body)):
        node = nodes[position]
        if (not needed[position] and position not in roots) or (cut is not None and not cut.passes(node)):
            continue
        found.add(id(node))
        for index, ref in enumerate(node.inputs):
            needed[ref[0]] |= ref not in constants and (cut is None or flows_to(node, index, cut.flows))
        for inner, _, _ in _inner(node):
            _backward(inner, {ref[0] for ref in inner.results}, cut, found)


def _rank_forward(
    body: Body, args: Sequence[int], candidates: AbstractSet[int], path: AbstractSet[int], flows: Flows, ranks: Ranks
) -> int:
    """Ranks a body's candidates; returns the largest rank behind one of its results."""
    behind = [0] * len(body.nodes)
    behind[: len(args)] = args
    for position in in_order(body):
        if position < len(args):
            continue
        node = body.nodes[position]
        if id(node) not in path:
            continue
        before = [
            behind[producer] if flows_to(node, index, flows) else 0 for index, (producer, _) in enumerate(node.inputs)
        ]
        rank = max(before, default=0)
        after = rank
        if id(node) in candidates:
            ranks[id(node)] = rank
            after += 1
        for inner, offset, _ in _inner(node):
            after = max(after, _rank_forward(inner, before[offset:], candidates, path, flows, ranks))
        behind[position] = after
    return max((behind[ref[0]] for ref in body.results), default=0)


def _rank_backward(
    body: Body, base: int, candidates: AbstractSet[int], path: AbstractSet[int], flows: Flows, ranks: Ranks
) -> int:
    """Ranks a body's candidates, `base` of which lie behind its results; returns the largest rank of its arguments."""
    ahead = [base] * len(body.nodes)
    for position in reversed(in_order(body)):
        node = body.nodes[position]
        if id(node) not in path:
            continue
        before = ahead[position]
        if id(node) in candidates:
            ranks[id(node)] = before
            before += 1
        for inner, _, _ in _inner(node):
            before = max(before, _rank_backward(inner, ahead[position], candidates, path, flows, ranks))
        for index, (producer, _) in enumerate(node.inputs):
            if flows_to(node, index, flows):
                ahead[producer] = max(ahead[producer], before)
    return max(ahead[: body.arg_count], default=base)
