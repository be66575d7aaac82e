"""Holds the state of override resolution: candidate nodes, dependence between nodes, and the matches found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gradrule.v1 import override_pb2
from gradrule_server.errors import quote
from gradrule_server.graphs import paths
from gradrule_server.graphs.ir import DIFFERENTIABLE, Body, CustomGradientNode, Node, Ref, bodies_of, short_tensor_name
from gradrule_server.graphs.selectors import OWN_GRADIENT, CandidateNode, OverrideMatcher, OverrideSpec
from gradrule_server.graphs.subgraphs import (
    RegionBorder,
    Regions,
    Subgraph,
    call_subgraph,
    insert_custom_gradient_nodes,
    positions_of,
)

Tensor = tuple[Body, Ref]
Numbers = NDArray[np.intp]


@dataclass(slots=True, eq=False)
class Match:
    """A node or subgraph with the rule that was assigned to it.

    Attributes:
        rule: Index of the rule.
        resolution: What callers see of the match. Its node is the last node of a subgraph.
        override: `index` of the override's spec; -1: an attribute of the node requests the rule.
        differentiable: Whether its element types have gradients.
        rank: Rank of the outputs to which the match applies; None: all ranks.
        outputs: Number of outputs of a subgraph; 0 for a single node.
        inputs: Number of inputs that the rule receives; None: all.
        is_step: As in `Subgraph`.
        every_order: Whether the match applies to gradients of gradients too.
        depends_on_xs: Whether gradients of the node can reach one of the xs; if not, its rule does not run.
        mark: Index of the mark; None if the node was pruned.
        required: Whether an attribute of the node names the rule, which must have an effect on one node of its op type.
    """

    rule: int
    resolution: override_pb2.Resolution
    override: int
    differentiable: bool
    rank: int | None = None
    outputs: int = 0
    inputs: int | None = None
    is_step: bool = False
    every_order: bool = False
    depends_on_xs: bool = True
    mark: int | None = None
    required: bool = False

    def set_custom_gradient(self, custom_gradient: CustomGradientNode | None) -> None:
        """Applies the rule to a custom-gradient node's region; `default` uses the gradients of the inner nodes."""
        if custom_gradient is not None and self.rule != OWN_GRADIENT:
            self.outputs, self.inputs = custom_gradient.outputs, custom_gradient.inputs


@dataclass(slots=True, eq=False)
class ForeignGradient:
    """A node that no override matched and that requests, by `name`, a gradient registered in another process."""

    node: str
    name: str


Resolved = list[Match | ForeignGradient]
"""The matches of a node: first those that apply to one rank, then at most one that applies to all ranks."""


@dataclass(slots=True, eq=False)
class RequestTensors:
    """The request's tensors that path-dependent selectors need, as tensors of the copy's top level."""

    xs: AbstractSet[Ref] = frozenset()
    ys: AbstractSet[Ref] = frozenset()
    stop_gradients: AbstractSet[Ref] = frozenset()


class ResolutionContext:
    """The expanded graph during override resolution, with the matches found so far.

    Args:
        top: The top level of the graph.
        candidates: The nodes that overrides can match.
        scopes: Public names of the loops, branches and calls that contain functions, by name of the function.
        requested: The tensors of the request.
        look_up: Returns the tensors that have a name: several, if nodes of two branches share it.
        find: Does the same, and adds a finding about the given request field if no tensor has the name.
    """

    def __init__(
        self,
        top: Body,
        candidates: Sequence[CandidateNode],
        scopes: Mapping[str, str],
        requested: RequestTensors | None = None,
        look_up: Callable[[str], Sequence[Tensor]] = lambda name: (),
        find: Callable[[str, str], Sequence[Tensor]] = lambda name, field: (),
    ) -> None:
        for candidate in candidates:
            if candidate.call is not None:
                candidate.call.detach()
        self.top = top
        self._scopes = scopes
        self.candidates = candidates
        self.subgraphs: list[tuple[Subgraph, Match]] = []
        self.resolved: dict[int, Resolved] = {}
        # Candidates that are custom-gradient nodes, by name of the region; the inputs of each that receive gradients,
        # by id() of the node.
        self.custom_gradients: dict[str, list[int]] = {}
        self.flows: dict[int, range] = {}
        # Where rules pass gradients on and ops do not. Complete before `path` is used.
        self.shortcuts: dict[int, tuple[Ref, ...]] = {}
        # Matches of nodes and of subgraphs, with candidate numbers.
        self._matches: list[tuple[int, Match]] = []
        self.requested = requested or RequestTensors()
        self.look_up = look_up
        self._find = find
        self.orders = paths.Orders()
        self._positions: dict[int, Mapping[int, int]] = {}
        # Candidate numbers, by id() of the body and index of the node; -1: the node is not a candidate.
        self.numbers: dict[int, list[int]] = {}
        for number, candidate in enumerate(candidates):
            own = self.numbers.get(id(candidate.body))
            if own is None:
                own = self.numbers[id(candidate.body)] = [-1] * len(candidate.body.nodes)
            if candidate.call is None:
                own[candidate.index] = number
        # For each candidate: the number of the label of its override; -1: it has no override.
        self.assigned_labels: Numbers = np.full(len(candidates), -1, np.intp)
        self._labels: dict[str, int] = {}

    def assign(self, number: int, label: str) -> None:
        """Assigns a candidate to an override, by its label."""
        self.candidates[number].label = label
        self.assigned_labels[number] = self._labels.setdefault(label, len(self._labels))

    def assign_with_functions(self, number: int, label: str) -> None:
        """Assigns a candidate, and unassigned candidates in its functions, to an override."""
        self.assign(number, label)
        for item in self.inside(number):
            if self.candidates[item].label is None:
                self.assign(item, label)

    def unassigned(self, rows: Numbers | Sequence[tuple[int, ...]]) -> list[Sequence[int]]:
        """Returns the rows of candidates none of which is assigned."""
        assigned = self.assigned_labels
        if isinstance(rows, np.ndarray):
            free: list[Sequence[int]] = rows[(assigned[rows] < 0).all(axis=1)].tolist()
            return free
        return [row for row in rows if (assigned[list(row)] < 0).all()]

    def count_assigned(self, rows: Numbers | Sequence[tuple[int, ...]]) -> dict[str, int]:
        """Counts the rows that have an assigned member, by the label of the first assigned member of the row."""
        if not isinstance(rows, np.ndarray):
            first_assigned = (next((item for item in row if self.assigned_labels[item] >= 0), row[-1]) for row in rows)
            rows = np.array(list(first_assigned), np.intp)[:, np.newaxis]
        assigned_labels = self.assigned_labels[rows]
        held = (assigned_labels >= 0).argmax(axis=1)
        found, first, counts = np.unique(
            assigned_labels[np.arange(len(held)), held], return_index=True, return_counts=True
        )
        labels = list(self._labels)
        return {labels[found[item]]: int(counts[item]) for item in np.argsort(first) if found[item] >= 0}

    def record(self, number: int, what: Match | ForeignGradient) -> None:
        """Records a match of a candidate."""
        candidate = self.candidates[number]
        if isinstance(what, Match):
            self._matches.append((number, what))
        for node in candidate.marked_nodes:
            node.watched |= candidate.call is not None and any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())
            self.resolved.setdefault(id(node), []).append(what)

    def record_subgraph(self, number: int, match: Match, subgraph: Subgraph) -> None:
        """Records a match of a subgraph: a chain or region that ends at this candidate, or this call."""
        self._matches.append((number, match))
        match.outputs, match.is_step = len(subgraph.outputs), subgraph.is_step
        # A call without results has no gradient.
        if subgraph.outputs:
            self.subgraphs.append((subgraph, match))

    def insert_custom_gradient_nodes(self, unique: Callable[[Body, str], str]) -> Mapping[Ref, Ref]:
        """Inserts nodes for the subgraphs that have rules; returns the new positions of tensors of the top level.

        `unique`: returns an unused name in a body.
        """
        named = [(subgraph, match.resolution.node) for subgraph, match in self.subgraphs]
        inserted, moves = insert_custom_gradient_nodes(named, unique)
        for node, (_, match) in zip(inserted, self.subgraphs, strict=True):
            self.resolved[id(node)] = [match]
        return moves.get(id(self.top), {})

    def find_dependence(self) -> None:
        """Finds which matches depend on the xs. To be called after all matches are recorded.

        TensorFlow asks for more gradients: of the nodes that compute an x, of what other outputs of such a node lead
        to, and of what depends on other inputs of a loop or branch than the xs.
        """
        seeds: dict[int, dict[Ref, int]] = {id(self.top): dict.fromkeys(self.requested.xs, 1)}
        # Rules pass gradients on where their nodes do not: a comparison in a subgraph, a StopGradient.
        waiting = [(one.body, one.inputs, one.outputs) for one, _ in self.subgraphs]
        for number, match in self._matches:
            candidate = self.candidates[number]
            if match.rule != OWN_GRADIENT and candidate.call is None and candidate.node.op == "StopGradient":
                waiting.append((candidate.body, tuple(candidate.node.inputs), ((candidate.index, 0),)))
        reached = self._behind_xs

        def depends(body: Body, refs: Sequence[Ref]) -> bool:
            own = seeds.get(id(body), {})
            return any(ref in own or id(body.nodes[ref[0]]) in reached for ref in refs)

        depending = [depends(body, inputs) for body, inputs, _ in waiting]
        while True:
            for (body, _, outputs), found in zip(waiting, depending, strict=True):
                if found:
                    seeds.setdefault(id(body), {}).update(dict.fromkeys(outputs, 1))
            reached = paths.reached(self.top, seeds, paths.Cut(), self.orders)
            # What a rule passes gradients on to may depend on the xs only by way of other rules.
            waiting = [one for one, found in zip(waiting, depending, strict=True) if not found]
            depending = [depends(body, inputs) for body, inputs, _ in waiting]
            if not any(depending):
                break
        for number, match in self._matches:
            candidate = self.candidates[number]
            match.depends_on_xs = not reached.isdisjoint(map(id, candidate.marked_nodes)) or (
                match.rule != OWN_GRADIENT and candidate.call is None and depends(candidate.body, candidate.node.inputs)
            )
        for subgraph, match in self.subgraphs:
            match.depends_on_xs = depends(subgraph.body, subgraph.inputs)

    @property
    def match_count(self) -> int:
        """Number of matches recorded so far."""
        return len(self._matches)

    def matches(self) -> list[Match]:
        """Returns all matches in candidate order."""
        return [match for _, match in sorted(self._matches, key=lambda item: item[0])]

    def candidate_numbers(self, subgraph: Subgraph) -> list[int]:
        """Returns the candidate numbers of a subgraph's nodes."""
        numbers = (self.number(subgraph.body, member) for member in subgraph.members)
        return [number for number in numbers if number >= 0]

    def named_region(self, name: str) -> Numbers:
        """Returns the candidate numbers of the custom-gradient regions that have a name, one row for each."""
        return np.array(self.custom_gradients.get(name, ()), np.intp)[:, np.newaxis]

    def number(self, body: Body, index: int) -> int:
        """Returns the candidate number of a node; -1 for nodes that expansion added."""
        return self.numbers[id(body)][index] if id(body) in self.numbers else -1

    def inside(self, number: int) -> list[int]:
        """Returns all candidates in a call, loop or branch."""
        candidate = self.candidates[number]
        if candidate.call is not None:
            return self._in_calls.get(id(candidate), [])
        functions = candidate.node.functions
        if not functions:
            return []
        bodies = [id(inner) for _, own in functions for body in own for inner in bodies_of(body)]
        return [item for body in bodies for item in self._by_body.get(body, ())]

    @cached_property
    def _by_body(self) -> Mapping[int, list[int]]:
        """The candidate numbers of the nodes and calls of each body, by id()."""
        found: dict[int, list[int]] = {}
        for number, candidate in enumerate(self.candidates):
            found.setdefault(id(candidate.body), []).append(number)
        return found

    @cached_property
    def _in_calls(self) -> Mapping[int, list[int]]:
        """The candidate numbers in each call, by id() of the call's candidate."""
        found: dict[int, list[int]] = {}
        for number, candidate in enumerate(self.candidates):
            for call in candidate.calls_around:
                found.setdefault(id(call), []).append(number)
        return found

    @cached_property
    def calls(self) -> list[int]:
        """The candidate numbers of calls."""
        return [number for number, candidate in enumerate(self.candidates) if candidate.call is not None]

    def call_subgraph(self, candidate: CandidateNode) -> Subgraph:
        """Returns the subgraph of a call."""
        body = candidate.body
        if id(body) not in self._positions:
            self._positions[id(body)] = positions_of(body)
        return call_subgraph(candidate, self._positions[id(body)])

    def entry_into_call(self, number: int, subgraph: Subgraph) -> str:
        """Returns a tensor that enters a call, depends on the xs and is no argument; an empty string if none does."""
        body = subgraph.body
        inside = [self.candidates[one] for one in self.inside(number)]
        members = {candidate.index for candidate in inside if candidate.body is body and candidate.call is None}
        # Nodes that are no candidates pass tensors of inner calls and branches on.
        for member in sorted(members):
            for ref in body.nodes[member].inputs:
                is_outside = ref[0] not in members and self.number(body, ref[0]) >= 0
                if is_outside and ref not in subgraph.inputs and self.changes(body, ref):
                    return self._text(body, ref)
        return ""

    def is_differentiable(self, number: int, subgraph: Subgraph | None) -> bool:
        """Returns whether gradients can pass through the node or subgraph."""
        if subgraph is None:
            candidate = self.candidates[number]
            return is_differentiable(candidate.node, candidate.input_types)
        nodes = subgraph.body.nodes
        borders = (
            [(nodes[ref[0]].outputs or ())[ref[1]] for ref in refs] for refs in (subgraph.inputs, subgraph.outputs)
        )
        return all(not DIFFERENTIABLE.isdisjoint(types) for types in borders)

    def check_depends_on(self, matcher: OverrideMatcher) -> None:
        """Adds UNKNOWN_TENSOR if the selector names a tensor that does not exist."""
        for number, name in enumerate(matcher.spec.selector.depends_on):
            if not self._find(name, f"{matcher.spec.field}.selector.depends_on[{number}]"):
                matcher.faulty = True

    def regions(self, specs: Sequence[OverrideSpec]) -> Mapping[int, list[tuple[Subgraph, str]]]:
        """Returns the regions whose tensors exist, by id() of the spec, each with its problem or an empty string.

        A spec has a region in each branch that has tensors of the names.
        """
        borders: dict[int, list[tuple[OverrideSpec, RegionBorder]]] = {}
        for spec in specs:
            for border in self._borders(spec):
                borders.setdefault(id(border.body), []).append((spec, border))
        found: dict[int, list[tuple[Subgraph, str]]] = {}
        for same_body in borders.values():
            regions = Regions([border for _, border in same_body], self)
            for number, (spec, _) in enumerate(same_body):
                subgraph, problem = regions.subgraph(number), regions.problem(number, self._text)
                if not problem and not self.candidate_numbers(subgraph):
                    problem = "it contains no node: the function returns its inputs unchanged"
                found.setdefault(id(spec), []).append((subgraph, problem))
        return found

    def find_border_problem(self, spec: OverrideSpec) -> str | None:
        """Returns the problem with the tensors that define a region; None after adding findings for missing ones."""
        wanted = spec.selector.region
        found = [
            self._find(name, f"{spec.field}.selector.region.{kind}[{number}]")
            for kind, names in (("inputs", wanted.inputs), ("outputs", wanted.outputs))
            for number, name in enumerate(names)
        ]
        if not all(found):
            return None
        return "its tensors lie in different functions, loops or branches"

    def _borders(self, spec: OverrideSpec) -> list[RegionBorder]:
        """Returns the borders of a region, one for each body that has all of its tensors."""
        wanted = spec.selector.region
        names = [*wanted.inputs, *wanted.outputs]
        bodies: dict[int, Body] = {}
        refs: dict[int, list[Ref]] = {}
        for name in names:
            for body, ref in self.look_up(name):
                bodies[id(body)] = body
                refs.setdefault(id(body), []).append(ref)
        count = len(wanted.inputs)
        return [
            RegionBorder(bodies[key], own[:count], own[count:]) for key, own in refs.items() if len(own) == len(names)
        ]

    def kept(self, body: Body) -> AbstractSet[Ref]:
        """Returns the tensors of a body that the request names."""
        if body is not self.top:
            return frozenset()
        return self.requested.xs | self.requested.ys | self.requested.stop_gradients

    @cached_property
    def kept_nodes(self) -> AbstractSet[tuple[int, int]]:
        """The nodes whose tensors the request names, as id() of the body and index of the node."""
        return {(id(self.top), ref[0]) for ref in self.kept(self.top)}

    def changes(self, body: Body, ref: Ref) -> bool:
        """Returns whether a tensor is one of the xs or depends on one."""
        return id(body.nodes[ref[0]]) in self._behind_xs or self.is_x(body, ref)

    def xs_behind(self, body: Body, ref: Ref) -> int:
        """Returns a bit for each x that a tensor is or depends on."""
        own = self._xs_bits.get(ref, 0) if body is self.top else 0
        return own | self._bits_behind[id(body)][ref[0]]

    @cached_property
    def _xs_bits(self) -> Mapping[Ref, int]:
        return {ref: 1 << number for number, ref in enumerate(sorted(self.requested.xs))}

    @cached_property
    def _bits_behind(self) -> Mapping[int, Sequence[int]]:
        return paths.dependents_of_sets(self.top, {id(self.top): self._xs_bits}, self.orders)

    def is_x(self, body: Body, ref: Ref) -> bool:
        """Returns whether a tensor is one of the xs."""
        return body is self.top and ref in self.requested.xs

    def _text(self, body: Body, ref: Ref) -> str:
        number = self.number(body, ref[0])
        own = body.nodes[ref[0]].name
        # Arguments of loops and branches are not candidates.
        name = self.candidates[number].name if number >= 0 else f"{self._scopes[body.name]}/{own}" if body.name else own
        return quote(short_tensor_name(name, ref[1]))

    @cached_property
    def _behind_xs(self) -> AbstractSet[int]:
        return paths.dependents(self.top, self.top, self.requested.xs, orders=self.orders)

    def add_shortcuts(self, subgraph: Subgraph) -> None:
        """Lets the path lead from the outputs of a subgraph that has a rule to its inputs."""
        for producer, _ in subgraph.outputs:
            key = id(subgraph.body.nodes[producer])
            self.shortcuts[key] = (*self.shortcuts.get(key, ()), *subgraph.inputs)

    @cached_property
    def cut(self) -> paths.Cut:
        """Where gradients stop."""
        return paths.Cut(self.requested.stop_gradients, self.flows, self.shortcuts)

    @cached_property
    def path(self) -> AbstractSet[int]:
        """Nodes (by id) on the path of gradients from the ys to the xs."""
        return paths.dependents(self.top, self.top, self.requested.xs, self.cut, self.orders) & paths.dependencies(
            self.top, self.requested.ys, self.cut, self.orders
        )

    @cached_property
    def before_ys(self) -> AbstractSet[int]:
        """Nodes (by id) that the ys depend on."""
        return paths.dependencies(self.top, self.requested.ys, orders=self.orders)


def is_differentiable(node: Node, input_types: Sequence[int]) -> bool:
    """Returns whether gradients can pass through a node: an output, and an input if any, has a differentiable type."""
    takes = not input_types or any(dtype in DIFFERENTIABLE for dtype in input_types)
    return takes and any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())
