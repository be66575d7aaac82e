"""Ranks nodes by their position on the path of gradients: by how many others of a set are before or behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from gradrule_server.graphs.ir import Body, Ref
from gradrule_server.graphs.paths import Cut, Links, Orders, flows_to, inner_bodies

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

    Each node is ranked once, in the first iteration in which a path leads to it. The first walk visits all nodes of a
    body, later ones only the nodes behind arguments that paths lead to in later iterations.
    """

    def __init__(self, ranking: Ranking) -> None:
        self.found: dict[int, Flags] = {}
        self._ranking = ranking
        self._zero: Counts = np.zeros_like(ranking.wanted)
        self._bodies: dict[int, _Ranked] = {}

    def run(self, body: Body, args: Sequence[Counts | None], *, is_loop_body: bool) -> Counts:
        """Ranks the members that paths through the arguments lead to; returns the largest counts at the results.

        `args`: the counts at the arguments; None for those that no path leads to so far.
        `is_loop_body`: whether the results are the arguments of the next iteration of a loop.
        """
        ranked = self._bodies.get(id(body))
        if ranked is None:
            ranked = self._bodies[id(body)] = _Ranked(body, self._ranking.orders.get(body), [None] * len(body.nodes))
            ranked.behind[: len(args)] = args
            changed = list(range(len(args)))
            changed += [position for position in ranked.order if self._visit(ranked, position)]
        else:
            changed = self._continue(ranked, ranked.add_arguments(dict(enumerate(args))))
        next_arguments = ranked.next_arguments() if is_loop_body else {}
        while next_arguments and changed:
            following = {
                arg: ranked.behind[position] for position in changed for arg in next_arguments.get(position, ())
            }
            changed = self._continue(ranked, ranked.add_arguments(following))
        return _largest((count for ref in body.results if (count := ranked.behind[ref[0]]) is not None), self._zero)

    def _continue(self, ranked: _Ranked, args: list[int]) -> list[int]:
        """Visits the nodes behind arguments that paths now lead to; returns all nodes that paths now lead to."""
        if not args:
            return []
        changed = list(args)
        consumers, numbers = ranked.consumers(self._ranking.cut), ranked.numbers()
        # A node comes after all of its producers, and after itself if it was added several times.
        waiting = [numbers[consumer] for position in args for consumer in consumers[position]]
        heapify(waiting)
        last = -1
        while waiting:
            number = heappop(waiting)
            if number != last and self._visit(ranked, ranked.order[number]):
                changed.append(ranked.order[number])
                for consumer in consumers[ranked.order[number]]:
                    heappush(waiting, numbers[consumer])
            last = number
        return changed

    def _visit(self, ranked: _Ranked, position: int) -> bool:
        """Ranks a node if a path leads to it, and the nodes in it; returns whether this is the first such path."""
        ranking, body, behind = self._ranking, ranked.body, ranked.behind
        node = body.nodes[position]
        key, is_new = id(node), behind[position] is None
        if position < body.arg_count or key not in ranking.path or not (is_new or node.functions):
            return False
        before = [
            self._count(ranked, ref) if flows_to(node, index, ranking.cut.flows) else None
            for index, ref in enumerate(node.inputs)
        ]
        passed = (self._count(ranked, ref) for ref in ranking.cut.shortcuts.get(key, ()))
        counts = [count for count in (*before, *passed) if count is not None]
        if not counts:
            return False
        count = after = _largest(counts, self._zero)
        if is_new and key in ranking.members:
            self.found[key] = (count == ranking.wanted) & ranking.members[key]
            after = count + ranking.members[key]
        for inner, offset, is_loop_body in inner_bodies(node):
            after = np.maximum(after, self.run(inner, before[offset:], is_loop_body=is_loop_body))
        if is_new:
            behind[position] = after
        return is_new

    def _count(self, ranked: _Ranked, ref: Ref) -> Counts | None:
        """Returns the count behind a tensor; None if no path leads to it so far."""
        count = ranked.behind[ref[0]]
        return self._zero if count is None and not ranked.body.name and ref in self._ranking.xs else count


@dataclass(slots=True, eq=False)
class _Ranked(Links):
    """The counts behind the nodes of a body; None for those that no path leads to so far."""

    order: Sequence[int]
    behind: list[Counts | None]
    _numbers: list[int] = field(default_factory=list, init=False)

    def add_arguments(self, counts: Mapping[int, Counts | None]) -> list[int]:
        """Sets the counts at the arguments that have none so far; returns the arguments that now have one."""
        new = [arg for arg, count in counts.items() if count is not None and self.behind[arg] is None]
        for arg in new:
            self.behind[arg] = counts[arg]
        return new

    def numbers(self) -> list[int]:
        """Returns the number of each node in topological order."""
        if not self._numbers:
            self._numbers = [0] * len(self.order)
            for number, position in enumerate(self.order):
                self._numbers[position] = number
        return self._numbers


def _largest(counts: Iterable[Counts], least: Counts) -> Counts:
    """Returns the largest count for each set, at least `least`. Does not compare an array with itself."""
    largest = least
    for item in counts:
        if item is not least and item is not largest:
            largest = item if largest is least else np.maximum(largest, item)
    return largest
