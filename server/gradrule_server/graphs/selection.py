"""Finds the nodes that the overrides of a program select, for all overrides at once.

Conditions on a node itself take one lookup for each node. Dependence, chains and positions on the path take one walk of
the graph each. So the time grows with the number of nodes plus the number of overrides, not with their product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gradrule.v1 import override_pb2
from gradrule_server.graphs import paths
from gradrule_server.graphs.chains import Chains, is_bias
from gradrule_server.graphs.custom_gradients import Subgraph
from gradrule_server.graphs.ir import Ref
from gradrule_server.graphs.resolution_context import ResolutionContext
from gradrule_server.graphs.selector_index import SelectorIndex, columns
from gradrule_server.graphs.selectors import BIAS, SUM, OverrideMatcher

Flags = NDArray[np.bool_]
Numbers = NDArray[np.intp]

# Number of node sets that are ranked in one walk; each set needs four bytes for each node.
_RANKED_AT_ONCE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """The candidates that overrides select, assigned or not: a flag for each candidate, by id() of the matcher."""

    _flags: Mapping[int, Flags]
    _chains: Chains | None

    def members(self, matcher: OverrideMatcher) -> Numbers:
        """Returns the candidate numbers of the selected nodes or chains, one row for each, ordered by the last node."""
        ends = np.flatnonzero(self._flags[id(matcher)])
        if self._chains is None or not matcher.is_chain:
            return ends[:, np.newaxis]
        return self._chains.members(matcher.words, ends)

    def subgraph(self, matcher: OverrideMatcher, members: Sequence[int]) -> Subgraph | None:
        """Returns the subgraph of a row; None for a single node."""
        if self._chains is None or not matcher.is_chain:
            return None
        return self._chains.subgraph(matcher.words, members)


class Selection:
    """Computes which candidates the matchers select. `_meant` has a flag for each candidate, for each matcher."""

    def __init__(self, context: ResolutionContext, matchers: Sequence[OverrideMatcher]) -> None:
        self._context = context
        self._candidates = context.candidates
        self._choosers = matchers
        index = SelectorIndex(matchers)
        self._meant = columns(
            [index.node(candidate.node, candidate.name) for candidate in self._candidates], len(matchers)
        )

    def selected(self) -> Selected:
        """Evaluates all conditions."""
        self._limit_to_dependents()
        context, matchers = self._context, self._choosers
        patterns = [matcher.words for matcher in matchers if matcher.is_chain]
        chains = Chains(patterns, context) if patterns else None
        for number, matcher in enumerate(matchers):
            if chains is not None and matcher.is_chain:
                self._meant[number] &= chains.ends(matcher.words)
            elif matcher.words and matcher.words[0] in (BIAS, SUM):
                # The op type does not distinguish a bias add from a sum.
                self._meant[number] &= self._biases if matcher.words[0] == BIAS else ~self._biases
        placed = [number for number, matcher in enumerate(matchers) if matcher.spec.selector.HasField("position")]
        for start in range(0, len(placed), _RANKED_AT_ONCE):
            self._limit_to_positions(placed[start : start + _RANKED_AT_ONCE])
        return Selected({id(matcher): row for matcher, row in zip(matchers, self._meant, strict=True)}, chains)

    def _limit_to_dependents(self) -> None:
        """Applies depends_on: keeps candidates that depend on one of the named tensors."""
        sets: dict[tuple[str, ...], list[int]] = {}
        for number, matcher in enumerate(self._choosers):
            if matcher.spec.selector.depends_on:
                sets.setdefault(tuple(matcher.spec.selector.depends_on), []).append(number)
        if not sets:
            return
        seeds: dict[int, dict[Ref, int]] = {}
        for bit, names in enumerate(sets):
            for name in names:
                found = self._context.look_up(name)
                if found is not None:
                    own = seeds.setdefault(id(found[0]), {})
                    own[found[1]] = own.get(found[1], 0) | 1 << bit
        bits = paths.dependents_of_sets(self._context.top, seeds, self._context.orders)
        depends = columns([bits[id(candidate.body)][candidate.index] for candidate in self._candidates], len(sets))
        for row, numbers in zip(depends, sets.values(), strict=True):
            self._meant[numbers] &= row

    def _limit_to_positions(self, numbers: Sequence[int]) -> None:
        """Applies position: keeps candidates at that position on the path."""
        rows = np.array(numbers)
        self._meant[rows] &= self._on_path
        indices = [_index(self._choosers[number].spec.selector.position) for number in numbers]
        for is_from_xs in (True, False):
            asked = [column for column, index in enumerate(indices) if (index >= 0) == is_from_xs]
            if asked:
                wanted = [indices[column] if is_from_xs else -1 - indices[column] for column in asked]
                self._limit_to_ranks(rows[asked], np.array(wanted, np.int32), is_from_xs=is_from_xs)

    def _limit_to_ranks(self, rows: Numbers, wanted: paths.Counts, *, is_from_xs: bool) -> None:
        context = self._context
        by_place = np.ascontiguousarray(self._meant[rows].T)
        met = np.flatnonzero(by_place.any(axis=1)).tolist()
        members = {id(self._candidates[candidate].node): by_place[candidate] for candidate in met}
        ranking = paths.Ranking(members, wanted, context.path, context.flows, context.orders)
        at_place = ranking.from_xs(context.top) if is_from_xs else ranking.from_ys(context.top)
        found = np.zeros_like(by_place)
        for candidate in met:
            found[candidate] = at_place.get(id(self._candidates[candidate].node), False)
        self._meant[rows] = found.T

    @cached_property
    def _on_path(self) -> Flags:
        path = self._context.path
        return np.fromiter(
            (id(candidate.node) in path for candidate in self._candidates), np.bool_, len(self._candidates)
        )

    @cached_property
    def _biases(self) -> Flags:
        """Flags of the candidates that are bias adds."""
        flags = (is_bias(candidate.node, candidate.body, self._context.changes) for candidate in self._candidates)
        return np.fromiter(flags, np.bool_, len(self._candidates))


def _index(position: override_pb2.Position) -> int:
    """Returns the index on the path: 0, 1, … counted from the xs; -1, -2, … counted from the ys."""
    if position.WhichOneof("place") == "nearest":
        return 0 if position.nearest == override_pb2.POSITION_NEAREST_XS else -1
    return position.index
