"""Ranks nodes by their position on the path of gradients: by how many others of a set are before or behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradrule_server.graphs.ir import Body, Ref
from gradrule_server.graphs.paths import Cut, Orders, flows_to, inner_bodies

Flags = NDArray[np.bool_]
Counts = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Ranks the members of several node sets along the gradient path, all sets at once.

    Attributes:
        members: For each node, by id(): a flag for each set that says whether the set contains the node.
        wanted: The requested rank for each set.
        path: The nodes on the path, by id().
        xs: The top-level tensors where paths start.
        cut: Where gradients stop.
        orders: The topological orders of the bodies.
    """

    members: Mapping[int, Flags]
    wanted: Counts
    path: AbstractSet[int]
    xs: AbstractSet[Ref]
    cut: Cut
    orders: Orders

    def from_xs(self, top: Body) -> dict[int, Flags]:
        """Returns for each member, by id(), a flag for each set: whether its rank from the xs is the wanted rank.

        The rank is the largest number of other members on one path that leads to the node. In loops, the first
        iteration counts in which such a path leads to it.
        """
        ranks = _RanksFromXs(self)
        ranks.run(top, (), is_loop_body=False)
        return ranks.found

    def from_ys(self, top: Body) -> dict[int, Flags]:
        """Returns the same flags for the rank from the ys, which counts members on paths from the node to the ys."""
        found: dict[int, Flags] = {}
        self._backward(top, np.zeros_like(self.wanted), found)
        return found

    def _backward(self, body: Body, base: Counts, found: dict[int, Flags]) -> Counts:
        """Ranks the members of a body with `base` counts at its results; returns the largest at the arguments."""
        nodes, members = body.nodes, self.members
        ahead = [base] * len(nodes)
        for position in reversed(self.orders.get(body)):
            node = nodes[position]
            key = id(node)
            if key not in self.path:
                continue
            count = before = ahead[position]
            if key in members:
                found[key] = (count == self.wanted) & members[key]
                before = count + members[key]
            for inner, _, _ in inner_bodies(node):
                before = np.maximum(before, self._backward(inner, count, found))
            for index, (producer, _) in enumerate(node.inputs):
                if flows_to(node, index, self.cut.flows):
                    ahead[producer] = _largest((before, ahead[producer]), base)
            for producer, _ in self.cut.shortcuts.get(key, ()):
                ahead[producer] = _largest((before, ahead[producer]), base)
        return _largest(ahead[: body.arg_count], base)


class _RanksFromXs:
    """Ranks the members of node sets along the paths from the xs.

    Each node is ranked once, in the first iteration in which a path leads to it.
    """

    def __init__(self, ranking: Ranking) -> None:
        self.found: dict[int, Flags] = {}
        self._ranking = ranking
        self._zero: Counts = np.zeros_like(ranking.wanted)
        # For each body, by id(): the counts behind its nodes; None for those that no path leads to so far.
        self._bodies: dict[int, list[Counts | None]] = {}

    def run(self, body: Body, args: Sequence[Counts | None], *, is_loop_body: bool) -> Counts:
        """Ranks the members that paths through the arguments lead to; returns the largest counts at the results.

        `args`: the counts at the arguments; None for those that no path leads to so far.
        `is_loop_body`: whether the results are the arguments of the next iteration of a loop.
        """
        changed = id(body) not in self._bodies
        behind = self._bodies.setdefault(id(body), [None] * len(body.nodes))
        while True:
            for arg, count in enumerate(args):
                if count is not None and behind[arg] is None:
                    behind[arg], changed = count, True
            if changed:
                for position in self._ranking.orders.get(body):
                    self._visit(body, behind, position)
            results = [behind[producer] for producer, _ in body.results]
            if not changed or not is_loop_body:
                return _largest((count for count in results if count is not None), self._zero)
            args, changed = results, False

    def _visit(self, body: Body, behind: list[Counts | None], position: int) -> None:
        """Ranks a node if a path leads to it, and the nodes in it."""
        ranking, node = self._ranking, body.nodes[position]
        key, is_new = id(node), behind[position] is None
        if position < body.arg_count or key not in ranking.path or not (is_new or node.functions):
            return
        before = [
            self._count(body, behind, ref) if flows_to(node, index, ranking.cut.flows) else None
            for index, ref in enumerate(node.inputs)
        ]
        passed = (self._count(body, behind, ref) for ref in ranking.cut.shortcuts.get(key, ()))
        counts = [count for count in (*before, *passed) if count is not None]
        if not counts:
            return
        count = after = _largest(counts, self._zero)
        if is_new and key in ranking.members:
            self.found[key] = (count == ranking.wanted) & ranking.members[key]
            after = count + ranking.members[key]
        for inner, offset, is_loop_body in inner_bodies(node):
            after = np.maximum(after, self.run(inner, before[offset:], is_loop_body=is_loop_body))
        if is_new:
            behind[position] = after

    def _count(self, body: Body, behind: Sequence[Counts | None], ref: Ref) -> Counts | None:
        """Returns the count behind a tensor; None if no path leads to it so far."""
        count = behind[ref[0]]
        return self._zero if count is None and not body.name and ref in self._ranking.xs else count


def _largest(counts: Iterable[Counts], least: Counts) -> Counts:
    """Returns the largest count for each set, at least `least`. Does not compare an array with itself."""
    largest = least
    for item in counts:
        if item is not least and item is not largest:
            largest = item if largest is least else np.maximum(largest, item)
    return largest
