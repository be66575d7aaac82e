"""Computes dependence between nodes of an expanded graph, including loop bodies and branches, and positions on paths.

Nodes are identified by id(). Every output of a loop or branch node counts as dependent on all inputs of the node.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gradrule_server.graphs.ir import DIFFERENTIABLE, LOOPS, Body, Node, Ref, topological_order

Flags = NDArray[np.bool_]
Counts = NDArray[np.int32]

Flows = Mapping[int, range]
"""For each node, by id(): the inputs that receive gradients. In nodes that are missing here, all inputs do."""

Shortcuts = Mapping[int, Sequence[Ref]]
"""For nodes, by id(): tensors of the same body to which a rule passes the node's gradients on, past the node's inputs.

The rule is that of a subgraph which ends at the node, or of a StopGradient.
"""

Seeds = Mapping[int, Mapping[Ref, int]]
"""For each body, by id(): the tensors where dependence starts, each with the bits of the sets that contain it."""


def consumers_of(body: Body, flows: Flows | None = None) -> list[list[int]]:
    """Returns the consumers of each node, one entry per input; with `flows`, only those that send gradients back."""
    consumers: list[list[int]] = [[] for _ in body.nodes]
    for position, node in enumerate(body.nodes):
        for index, (producer, _) in enumerate(node.inputs):
            if flows is None or flows_to(node, index, flows):
                consumers[producer].append(position)
    return consumers


def flows_to(node: Node, index: int, flows: Flows) -> bool:
    """Returns whether gradients of the node flow to the input `index`."""
    return id(node) not in flows or index in flows[id(node)]


class Orders:
    """Caches the topological order of each body, without control inputs, which carry no gradients.

    Bodies must not change and must outlive this object.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[int]] = {}

    def get(self, body: Body) -> list[int]:
        """Returns the topological order of a body, computed once."""
        order = self._known.get(id(body))
        if order is None:
            order = self._known[id(body)] = topological_order(
                [[producer for producer, _ in node.inputs] for node in body.nodes]
            )
        return order


@dataclass(frozen=True, slots=True)
class Cut:
    """Where gradients stop.

    Attributes:
        constants: Top-level tensors that count as constants.
        flows: The inputs that receive gradients.
        shortcuts: The tensors that get gradients from nodes behind which rules pass them on.
    """

    constants: AbstractSet[Ref] = frozenset()
    flows: Flows = field(default_factory=dict)
    shortcuts: Shortcuts = field(default_factory=dict)

    @staticmethod
    def passes(node: Node) -> bool:
        """Returns whether gradients can pass through a node."""
        return node.op != "StopGradient" and any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())


def dependents(
    top: Body, seed_body: Body, seeds: Collection[Ref], cut: Cut | None = None, orders: Orders | None = None
) -> set[int]:
    """Returns the nodes, by id(), that depend on at least one of the tensors `seeds` in the body `seed_body`.

    The producer of a seed is included only if it depends on another seed. With `cut`, dependence is followed only
    where gradients flow.
    """
    return reached(top, {id(seed_body): dict.fromkeys(seeds, 1)}, cut, orders or Orders())


def reached(top: Body, seeds: Seeds, cut: Cut | None, orders: Orders) -> set[int]:
    """Returns the nodes, by id(), that depend on at least one of the seeds, which may be in several bodies."""
    forward = _Forward(seeds, cut, orders)
    forward.run(top, (), is_loop_body=False)
    found: set[int] = set()
    for body, bits in forward.found():
        found.update(id(node) for node, depends in zip(body.nodes, bits, strict=True) if depends)
    return found


def dependents_of_sets(top: Body, seeds: Seeds, orders: Orders) -> Mapping[int, Sequence[int]]:
    """Returns the bits of the tensor sets that each node depends on, by id() of the body and index of the node.

    One walk serves all sets.
    """
    forward = _Forward(seeds, None, orders)
    forward.run(top, (), is_loop_body=False)
    return {id(body): bits for body, bits in forward.found()}


def dependencies(top: Body, targets: Collection[Ref], cut: Cut | None = None, orders: Orders | None = None) -> set[int]:
    """Returns the nodes, by id(), that a target depends on, with the targets' producers. `cut`: see `dependents`."""
    found: set[int] = set()
    _backward(top, {producer for producer, _ in targets}, cut, found, orders or Orders())
    return found


def inner_bodies(node: Node) -> Iterator[tuple[Body, int, bool]]:
    """Yields the bodies of a loop or branch.

    Each comes with the index of the node's input that is its first argument, and whether its results are the arguments
    of the next iteration.
    """
    for attr, bodies in node.functions:
        for body in bodies:
            is_loop = node.op in LOOPS
            yield body, 0 if is_loop else 1, is_loop and attr == "body"


class _Forward:
    """Propagates dependence from several tensor sets: each node gets the bits of the sets that it depends on."""

    def __init__(self, seeds: Seeds, cut: Cut | None, orders: Orders) -> None:
        self._seeds, self._cut, self._orders = seeds, cut, orders
        self._bodies: dict[int, tuple[Body, list[int]]] = {}

    def found(self) -> Iterable[tuple[Body, list[int]]]:
        """Returns each visited body with the bits of its nodes."""
        return self._bodies.values()

    def run(self, body: Body, args: Sequence[int], *, is_loop_body: bool) -> int:
        """Adds bits to the arguments; returns the bits of all results.

        `is_loop_body`: whether the results are the arguments of the next iteration of a loop.
        """
        changed = id(body) not in self._bodies
        _, bits = self._bodies.setdefault(id(body), (body, [0] * len(body.nodes)))
        while True:
            for arg, own in enumerate(args):
                changed |= bool(own & ~bits[arg])
                bits[arg] |= own
            if changed:
                for position in self._orders.get(body):
                    bits[position] |= self._bits_behind(body, bits, position)
            results = [self._bits_of(body, bits, ref) for ref in body.results]
            if not changed or not is_loop_body:
                return functools.reduce(operator.or_, results, 0)
            args, changed = results, False

    def _bits_of(self, body: Body, bits: Sequence[int], ref: Ref) -> int:
        """Returns the bits of a tensor: those of its node, and of the sets that contain it."""
        return bits[ref[0]] | self._seeds.get(id(body), {}).get(ref, 0)

    def _bits_behind(self, body: Body, bits: Sequence[int], position: int) -> int:
        """Returns the bits of the inputs of a node."""
        node = body.nodes[position]
        seeds = self._seeds.get(id(body), {})
        own = 0
        if self._cut is None:
            inputs = [bits[ref[0]] | seeds.get(ref, 0) for ref in node.inputs]
        else:
            constants = frozenset() if body.name else self._cut.constants
            for ref in self._cut.shortcuts.get(id(node), ()):
                own |= 0 if ref in constants else bits[ref[0]] | seeds.get(ref, 0)
            if not self._cut.passes(node):
                return own
            inputs = [
                bits[ref[0]] | seeds.get(ref, 0)
                if ref not in constants and flows_to(node, index, self._cut.flows)
                else 0
                for index, ref in enumerate(node.inputs)
            ]
        for item in inputs:
            own |= item
        for inner, offset, is_loop_body in inner_bodies(node) if node.functions else ():
            own |= self.run(inner, inputs[offset:], is_loop_body=is_loop_body)
        return own


def _backward(body: Body, roots: Container[int], cut: Cut | None, found: set[int], orders: Orders) -> None:
    nodes, needed = body.nodes, bytearray(len(body.nodes))
    constants = cut.constants if cut is not None and not body.name else frozenset()
    shortcuts = cut.shortcuts if cut is not None else {}
    for position in reversed(orders.get(body)):
        node = nodes[position]
        if not needed[position] and position not in roots:
            continue
        passed = shortcuts.get(id(node), ())
        for ref in passed:
            needed[ref[0]] |= ref not in constants
        passes = cut is None or cut.passes(node)
        if passes or passed:
            found.add(id(node))
        if not passes:
            continue
        for index, ref in enumerate(node.inputs):
            needed[ref[0]] |= ref not in constants and (cut is None or flows_to(node, index, cut.flows))
        for inner, _, _ in inner_bodies(node) if node.functions else ():
            _backward(inner, {ref[0] for ref in inner.results}, cut, found, orders)


def columns(masks: Sequence[int], count: int) -> NDArray[np.bool_]:
    """Returns a matrix whose entry [c, m] is bit c of mask m. Negative masks have all bits set."""
    size = (count + 7) // 8
    everything = (1 << count) - 1
    data = b"".join([(mask & everything).to_bytes(size, "little") for mask in masks])
    rows = np.frombuffer(data, np.uint8).reshape(len(masks), size)
    bits = np.unpackbits(rows, axis=1, count=count, bitorder="little")
    return np.ascontiguousarray(bits.T).view(np.bool_)


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
