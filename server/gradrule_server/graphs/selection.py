"""Finds the nodes and chains of nodes that the overrides of a program select, for all overrides at once.

Conditions on a node itself take one lookup for each node. Dependence, chains and positions on the path take one walk of
the graph each. So the time grows with the number of nodes plus the number of overrides, not with their product.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gradrule.v1 import override_pb2
from gradrule_server.graphs import paths
from gradrule_server.graphs.ir import ARG, DIFFERENTIABLE, Body, Node, Ref
from gradrule_server.graphs.layers import Layers
from gradrule_server.graphs.matching import SelectorIndex
from gradrule_server.graphs.paths import Counts, Flags, Ranking, columns, consumers_of
from gradrule_server.graphs.resolution_context import ResolutionContext
from gradrule_server.graphs.selectors import (
    BIAS,
    OWN_GRADIENT,
    PLAIN_ADDS,
    STEP,
    SUM,
    OverrideMatcher,
    op_types_of,
)
from gradrule_server.graphs.subgraphs import Changes, Subgraph

Numbers = NDArray[np.intp]

# Number of node sets that are ranked in one walk; each set needs four bytes for each node.
_RANKED_AT_ONCE = 64

Words = tuple[str, ...]

_ADDS = PLAIN_ADDS | {"AddN"}
# Marks nodes with several producers that can continue a chain.
_SEVERAL = -2


class Selection:
    """The candidates that overrides select, assigned or not.

    `_flags` has a flag for each candidate, for each matcher.
    """

    def __init__(self, context: ResolutionContext, matchers: Sequence[OverrideMatcher]) -> None:
        self._context = context
        self._candidates = context.candidates
        self._matchers = matchers
        index = SelectorIndex(matchers)
        self._flags = columns(
            [
                index.node(candidate.node, candidate.name, candidate.qualified_name)
                if candidate.call is None
                else index.call(candidate.node.op, candidate.name, candidate.qualified_name)
                for candidate in self._candidates
            ],
            len(matchers),
        )
        self._limit_to_dependents()
        patterns = [matcher.words for matcher in matchers if matcher.is_chain]
        self._chains = Chains(patterns, context) if patterns else None
        self._layers = Layers(context) if any(matcher.layer for matcher in matchers) else None
        for number, matcher in enumerate(matchers):
            if self._layers is not None and matcher.layer:
                self._flags[number] &= self._layers.ends(matcher.layer)
            elif self._chains is not None and matcher.is_chain:
                self._flags[number] &= self._chains.ends(matcher.words)
            elif matcher.words and matcher.words[0] in (BIAS, SUM):
                # The op type does not distinguish a bias add from a sum.
                self._flags[number] &= self._biases if matcher.words[0] == BIAS else ~self._biases
        # The rows are views, which positions change in place.
        self._rows = {id(matcher): row for matcher, row in zip(matchers, self._flags, strict=True)}
        placed = [number for number, matcher in enumerate(matchers) if matcher.spec.selector.HasField("position")]
        if placed:
            self._add_shortcuts()
        for start in range(0, len(placed), _RANKED_AT_ONCE):
            self._limit_to_positions(placed[start : start + _RANKED_AT_ONCE])

    def members(self, matcher: OverrideMatcher) -> Numbers | list[tuple[int, ...]]:
        """Returns the candidate numbers of the selected nodes or chains, one row for each, ordered by the last node.

        Returns a list for layers, whose rows differ in length.
        """
        ends = np.flatnonzero(self._rows[id(matcher)])
        if self._layers is not None and matcher.layer:
            return [self._layers.members(end) for end in ends.tolist()]
        if self._chains is None or not matcher.is_chain:
            return ends[:, np.newaxis]
        return self._chains.members(matcher.words, ends)

    def subgraph(self, matcher: OverrideMatcher, members: Sequence[int]) -> Subgraph | None:
        """Returns the subgraph of a row of `members`; None for a single node."""
        if self._layers is not None and matcher.layer:
            return self._layers.subgraph(members[-1])
        if self._chains is None or not matcher.is_chain:
            return None
        return self._chains.subgraph(matcher.words, members)

    def _limit_to_dependents(self) -> None:
        """Applies depends_on: keeps candidates that depend on one of the named tensors."""
        sets: dict[tuple[str, ...], list[int]] = {}
        for number, matcher in enumerate(self._matchers):
            if matcher.spec.selector.depends_on:
                sets.setdefault(tuple(matcher.spec.selector.depends_on), []).append(number)
        if not sets:
            return
        seeds: dict[int, dict[Ref, int]] = {}
        for bit, names in enumerate(sets):
            for name in names:
                for body, ref in self._context.look_up(name):
                    own = seeds.setdefault(id(body), {})
                    own[ref] = own.get(ref, 0) | 1 << bit
        bits = paths.dependents_of_sets(self._context.top, seeds, self._context.orders)
        # Calls have no bits: an override with this condition does not select calls.
        depends = columns(
            [bits[id(one.body)][one.index] if one.call is None else 0 for one in self._candidates], len(sets)
        )
        for row, numbers in zip(depends, sets.values(), strict=True):
            self._flags[numbers] &= row

    def _add_shortcuts(self) -> None:
        """Lets the path lead through chains, calls and StopGradients to which overrides give a rule.

        The first override without a position takes a node. An override with a position opens the path at every node
        that its other conditions match, but takes no node yet: positions are counted on the finished path.
        """
        context = self._context
        for subgraph, match in context.subgraphs:
            if match.rule != OWN_GRADIENT:
                context.add_shortcuts(subgraph)
        taken = context.assigned_labels >= 0
        for matcher in self._matchers:
            rows = self.members(matcher)
            takes = not matcher.spec.selector.HasField("position")
            if not isinstance(rows, np.ndarray):
                # No layer blocks gradients.
                taken[[member for members in rows for member in members if takes]] = True
                continue
            free = rows[~taken[rows].any(axis=1)]
            if matcher.spec.rule_index != OWN_GRADIENT:
                for members in (free if matcher.is_chain else free[self._blocking[free[:, 0]]]).tolist():
                    self._add_shortcut(members, self.subgraph(matcher, members))
            if takes:
                taken[free] = True
                for number in free[self._containers[free[:, -1]], -1].tolist():
                    taken[context.inside(number)] = True

    def _add_shortcut(self, members: Sequence[int], chain: Subgraph | None) -> None:
        """Lets the path lead through one chain, call or StopGradient."""
        candidate = self._candidates[members[-1]]
        if chain is not None:
            self._context.add_shortcuts(chain)
        elif candidate.call is not None:
            self._context.add_shortcuts(self._context.call_subgraph(candidate))
        else:
            self._context.shortcuts[id(candidate.node)] = tuple(candidate.node.inputs)

    def _limit_to_positions(self, numbers: Sequence[int]) -> None:
        """Applies position: keeps candidates at that position on the path."""
        rows = np.array(numbers)
        self._flags[rows] &= self._on_path
        indices = [_index(self._matchers[number].spec.selector.position) for number in numbers]
        for is_from_xs in (True, False):
            same_end = [column for column, index in enumerate(indices) if (index >= 0) == is_from_xs]
            if same_end:
                wanted = [indices[column] if is_from_xs else -1 - indices[column] for column in same_end]
                self._limit_to_ranks(rows[same_end], np.array(wanted, np.int32), is_from_xs=is_from_xs)

    def _limit_to_ranks(self, rows: Numbers, wanted: Counts, *, is_from_xs: bool) -> None:
        context = self._context
        by_place = np.ascontiguousarray(self._flags[rows].T)
        met = np.flatnonzero(by_place.any(axis=1)).tolist()
        members = {id(self._candidates[candidate].node): by_place[candidate] for candidate in met}
        ranking = Ranking(members, wanted, context.path, context.requested.xs, context.cut, context.orders)
        at_place = ranking.from_xs(context.top) if is_from_xs else ranking.from_ys(context.top)
        found = np.zeros_like(by_place)
        for candidate in met:
            found[candidate] = at_place.get(id(self._candidates[candidate].node), False)
        self._flags[rows] = found.T

    @cached_property
    def _on_path(self) -> Flags:
        path = self._context.path
        return np.fromiter(
            (id(candidate.node) in path for candidate in self._candidates), np.bool_, len(self._candidates)
        )

    @cached_property
    def _blocking(self) -> Flags:
        """Flags of the candidates through which gradients may pass only by a rule: calls and StopGradients."""
        flags = (one.call is not None or one.node.op == "StopGradient" for one in self._candidates)
        return np.fromiter(flags, np.bool_, len(self._candidates))

    @cached_property
    def _containers(self) -> Flags:
        """Flags of the candidates that contain nodes: calls, loops and branches."""
        flags = (one.call is not None or bool(one.node.functions) for one in self._candidates)
        return np.fromiter(flags, np.bool_, len(self._candidates))

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


class Chains:
    """Finds chains of nodes in which each node is the only consumer of the node before it.

    Each word of each pattern has a bit. A node has the bit of a word if its op type fits the word, and either the word
    is the first of its pattern, or a producer that only this node uses has the bit of the word before.
    """

    def __init__(self, patterns: Iterable[Words], context: ResolutionContext) -> None:
        self._context = context
        self._candidates = candidates = context.candidates
        self._first: dict[Words, int] = {}
        self._starts = self._biases = self._sums = bits = 0
        self._fitting: dict[str, int] = {}
        for words in dict.fromkeys(patterns):
            self._first[words] = bits
            self._starts |= 1 << bits
            for word in words:
                self._biases |= (word == BIAS) << bits
                self._sums |= (word == SUM) << bits
                for op_type in op_types_of(word):
                    self._fitting[op_type] = self._fitting.get(op_type, 0) | 1 << bits
                bits += 1
        self._ends: dict[Words, NDArray[np.bool_]] = {}
        self._arrived = [0] * len(candidates)
        # Per candidate: the only producer that can continue a chain; -1 for none, -2 for several (see `_several`).
        self._before: Numbers = np.full(len(candidates), -1, np.intp)
        self._several: dict[int, list[int]] = {}
        for body in {id(candidate.body): candidate.body for candidate in candidates}.values():
            self._walk(body)
        size = (bits + 7) // 8
        data = b"".join([arrived.to_bytes(size, "little") for arrived in self._arrived])
        self._bytes = np.frombuffer(data, np.uint8).reshape(len(candidates), size)

    def ends(self, words: Words) -> NDArray[np.bool_]:
        """Returns a flag per candidate: whether a chain of these words ends there."""
        if words not in self._ends:
            byte, bit = divmod(self._first[words] + len(words) - 1, 8)
            found: NDArray[np.bool_] = (self._bytes[:, byte] >> bit & 1).astype(np.bool_)
            if words[0] == STEP:
                ends = np.flatnonzero(found)
                found[ends] = [self._passes_gradients(members) for members in self.members(words, ends).tolist()]
            self._ends[words] = found
        return self._ends[words]

    def members(self, words: Words, ends: Numbers) -> Numbers:
        """Returns the candidate numbers of the chains with these ends, one row per chain."""
        levels = [ends]
        for word in range(len(words) - 2, -1, -1):
            bit = 1 << (self._first[words] + word)
            before = self._before[levels[-1]]
            for row in np.flatnonzero(before == _SEVERAL):
                producers = self._several[levels[-1][row]]
                before[row] = next(producer for producer in producers if self._arrived[producer] & bit)
            levels.append(before)
        return np.stack(levels[::-1], axis=1)

    def subgraph(self, words: Words, members: Sequence[int]) -> Subgraph:
        """Returns the subgraph of a chain, given the candidate numbers of its nodes."""
        body = self._candidates[members[0]].body
        nodes = body.nodes
        indices = tuple(self._candidates[member].index for member in members)
        last = indices[-1]
        outputs = tuple((last, number) for number in range(len(nodes[last].outputs or ())))
        if words[0] == STEP:
            return Subgraph(body, indices, tuple(nodes[indices[0]].inputs), outputs, is_step=True)
        inside = set(indices)
        inputs = [
            ref
            for position, index in enumerate(indices)
            for ref in nodes[index].inputs
            if position == 0 or ref[0] not in inside
        ]
        return Subgraph(body, indices, tuple(inputs), outputs)

    def _passes_gradients(self, members: Sequence[int]) -> bool:
        """Returns whether the inputs of a step's comparison and the output of its Cast have differentiable types."""
        first, last = self._candidates[members[0]], self._candidates[members[-1]]
        nodes = first.body.nodes
        dtypes = {(nodes[producer].outputs or (0,))[output] for producer, output in first.node.inputs}
        return dtypes <= DIFFERENTIABLE and (last.node.outputs or (0,))[0] in DIFFERENTIABLE

    def _walk(self, body: Body) -> None:
        context = self._context
        nodes, numbers = body.nodes, context.numbers[id(body)]
        consumers, kept = consumers_of(body, context.flows), context.kept_nodes
        results = {producer for producer, _ in body.results}

        def is_alone(producer: int, consumer: int) -> bool:
            """Returns whether `consumer` is the only user of the producer's outputs."""
            return (
                len(consumers[producer]) == 1
                and consumers[producer][0] == consumer
                and producer not in results
                and (id(body), producer) not in kept
            )

        for position in context.orders.get(body):
            node, number = nodes[position], numbers[position]
            fitting = self._fitting.get(node.op, 0)
            if number < 0 or not fitting:
                continue
            if fitting & (self._biases | self._sums):
                # The op type does not distinguish a bias add from a sum.
                fitting &= ~(self._sums if is_bias(node, body, context.changes) else self._biases)
            producers = []
            arrived = 0
            for producer in dict.fromkeys(producer for producer, _ in node.inputs):
                before = numbers[producer]
                if before >= 0 and self._arrived[before] and is_alone(producer, position) and nodes[producer].op != ARG:
                    producers.append(before)
                    arrived |= self._arrived[before]
            self._arrived[number] = fitting & (arrived << 1 | self._starts)
            if len(producers) == 1:
                self._before[number] = producers[0]
            elif producers:
                self._before[number] = _SEVERAL
                self._several[number] = producers


def is_bias(node: Node, body: Body, changes: Changes) -> bool:
    """Returns whether an op adds a bias: a tensor that does not depend on the xs."""
    return node.op not in _ADDS or not all(changes(body, ref) for ref in node.inputs)
