"""Finds chains of ops that match patterns; one walk over the nodes serves all patterns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from gradrule_server.graphs.custom_gradients import Subgraph
from gradrule_server.graphs.ir import ARG, DIFFERENTIABLE, Body, Node
from gradrule_server.graphs.paths import consumers_of
from gradrule_server.graphs.regions import Changes
from gradrule_server.graphs.resolution_context import ResolutionContext
from gradrule_server.graphs.selectors import BIAS, PLAIN_ADDS, STEP, op_types_of

Words = tuple[str, ...]
Numbers = NDArray[np.intp]

_ADDS = PLAIN_ADDS | {"AddN"}
# Marks nodes with several producers that can continue a chain.
_SEVERAL = -2


class Chains:
    """Finds chains of nodes in which each node is the only consumer of the node before it.

    Each word of each pattern has a bit. A node has the bit of a word if its op type fits the word, and either the word
    is the first of its pattern, or a producer that only this node uses has the bit of the word before.
    """

    def __init__(self, patterns: Iterable[Words], context: ResolutionContext) -> None:
        self._context = context
        self._candidates = candidates = context.candidates
        self._first: dict[Words, int] = {}
        self._starts = self._biases = bits = 0
        self._fitting: dict[str, int] = {}
        for words in dict.fromkeys(patterns):
            self._first[words] = bits
            self._starts |= 1 << bits
            for word in words:
                self._biases |= (word == BIAS) << bits
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
            if fitting & self._biases and not is_bias(node, body, context.changes):
                fitting &= ~self._biases
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
