"""Which node gets which rule: regions, the request's overrides, what nodes themselves say, presets; first match wins.

Calls are decided while the graph is copied, because a call that an override takes is not inlined. All other nodes are
decided on the copy, where every node that runs has one place and dependence can be followed.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from gradrule.v1 import override_pb2
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.errors import GradruleError
from gradrule_server.graphs import paths
from gradrule_server.graphs.findings import Finding, Findings, Reason, quote
from gradrule_server.graphs.groups import BIAS, SUM
from gradrule_server.graphs.ir import DIFFERENTIABLE, Body, Node, Ref, is_call
from gradrule_server.graphs.prune import bodies_of
from gradrule_server.graphs.selectors import (
    DEFAULT_RULE,
    OWN_GRADIENT,
    Chooser,
    OverrideSpec,
    Place,
    Seen,
    unmatched,
)
from gradrule_server.graphs.subgraphs import Chains, Subgraph, region, side_exits

FOREIGN_GRADIENT = -2
GRADIENT_ATTR = "_gradient_op_type"

_FOREIGN = re.compile(r"CustomGradient-\d+")
# TensorFlow's own note on calls for which it had a gradient function at hand: it means the call's own gradient.
_CALL_NOTE = re.compile(r"(Stateful)?PartitionedCall-\d+")


@dataclass(slots=True, eq=False)
class Match:
    """A node that an override took.

    `mark` is None where no gradient can pass: the node is pruned. `override`: the spec's `index`, -1 for the node's own
    attribute. `function`: where in the uploaded graph the node lies. `differentiable`: whether its types have
    gradients. `rank`: it holds only for outputs of this rank. `nodes`: all nodes of a subgraph, `outputs`: how many
    tensors come out of it; 0 for a single node.
    """

    rule: int
    node: str
    op_type: str
    function: str
    rule_name: str
    label: str
    override: int
    differentiable: bool
    rank: int | None = None
    nodes: tuple[str, ...] = ()
    outputs: int = 0
    mark: int | None = None


@dataclass(slots=True, eq=False)
class Foreign:
    """A node that names a gradient of another process, and that no override took."""

    node: str
    name: str


Resolved = list[Match | Foreign]
"""What was resolved for a node: matches that hold for one rank only, then at most one that holds for all."""


@dataclass(slots=True, eq=False)
class Asked:
    """What of the request path-dependent selectors need, as tensors of the copy's top level."""

    xs: AbstractSet[Ref]
    ys: AbstractSet[Ref]
    stop_gradients: AbstractSet[Ref]


@dataclass(eq=False)
class Resolver:
    """Decides. `known_rule`: index of the rule of a name, for an op type; UNKNOWN_RULE if there is none."""

    choosers: Sequence[Chooser]
    known_rule: Callable[[str, str], int]
    differentiates: bool
    findings: Findings
    _rules: dict[tuple[str, str], int | GradruleError] = field(default_factory=dict)
    _calls: list[tuple[Seen, Match | None]] = field(default_factory=list)
    _unknown: set[str] = field(default_factory=set)

    @cached_property
    def _stages(self) -> tuple[list[Chooser], list[Chooser], list[Chooser]]:
        """Regions, other overrides of the request, presets."""
        regions = [item for item in self.choosers if item.spec.selector.HasField("region")]
        plain = [item for item in self.choosers if not item.spec.selector.HasField("region")]
        return (
            regions,
            [item for item in plain if not item.spec.is_preset],
            [item for item in plain if item.spec.is_preset],
        )

    # Calls, while the graph is copied.

    def whole(self, node: Node, name: str, types: Sequence[int], function: str) -> Match | Foreign | None:
        """What a call as a whole gets."""
        differentiable = is_differentiable(node, types)
        _, plain, presets = self._stages
        match = (
            self._whole(plain, node, name, function, differentiable)
            or self._own_wish(node, name, function, differentiable)
            or self._whole(presets, node, name, function, differentiable)
        )
        if match is None:
            foreign = self._foreign(node, name)
            if foreign is not None:
                return foreign
        if self.choosers or match is not None:
            self._calls.append((Seen(node.op, name), match))
        return match

    def _whole(
        self, choosers: Iterable[Chooser], node: Node, name: str, function: str, differentiable: bool
    ) -> Match | None:
        for chooser in choosers:
            if chooser.fits_call(node.op, name):
                chooser.taken += 1
                return _match(chooser.spec, name, node.op, function, differentiable)
        return None

    # All other nodes, on the copy.

    def resolve(self, scene: Scene) -> None:
        """Decides for all places of the scene: fills in what was resolved, and its subgraphs."""
        regions, plain, presets = self._stages
        for chooser in regions:
            self._take_region(chooser, scene)
        for place in scene.places:
            place.label = place.label or place.around
        for chooser in plain:
            self._take(chooser, scene)
        for place in scene.places:
            if place.label is None and GRADIENT_ATTR in place.node.attrs:
                self._take_wish(place, scene)
        for chooser in presets:
            self._take(chooser, scene)
        for place in scene.places:
            if place.label is None and GRADIENT_ATTR in place.node.attrs:
                foreign = self._foreign(place.node, place.name)
                if foreign is not None and place.live:
                    scene.note(place, foreign)

    def matches(self, scene: Scene) -> list[Match]:
        """All matches: those of calls, then those of nodes in their order."""
        return [*(match for _, match in self._calls if match is not None), *scene.matches()]

    def unmatched(self, scene: Scene) -> list[Finding]:
        """UNMATCHED_OVERRIDE for every override that took no node and is not optional."""
        by_index: dict[int, list[Chooser]] = {}
        for chooser in self.choosers:
            by_index.setdefault(chooser.spec.index, []).append(chooser)
        idle = [
            group
            for group in by_index.values()
            if not any(chooser.taken for chooser in group) and not group[0].spec.optional
        ]
        if not idle:
            return []
        seen = [seen for seen, _ in self._calls] + [Seen(place.node.op, place.name) for place in scene.places]
        return [_nothing_of_preset(group) if group[0].spec.is_preset else unmatched(group[0], seen) for group in idle]

    def _take(self, chooser: Chooser, scene: Scene) -> None:
        """Gives the chooser's rule to all places that it means and that nothing took before."""
        spec = chooser.spec
        for place, chain in scene.chosen(chooser):
            members = [place] if chain is None else [scene.place(chain.body, member) for member in chain.members]
            holder = next((member.label for member in members if member.label is not None), None)
            if holder is not None:
                chooser.shadowed_by[holder] = chooser.shadowed_by.get(holder, 0) + 1
                continue
            chooser.taken += 1
            match = _match(spec, place.name, place.node.op, place.function, scene.is_differentiable(place, chain))
            if spec.selector.HasField("rank"):
                match.rank = spec.selector.rank
            else:
                for member in members:
                    member.label = spec.label
                    # A loop or branch is taken as a whole.
                    for inner in scene.inside(member) if member.node.functions else ():
                        inner.label = inner.label or spec.label
            if chain is None:
                scene.note(place, match)
            else:
                self._note_subgraph(match, chain, members, scene)

    def _take_region(self, chooser: Chooser, scene: Scene) -> None:
        spec = chooser.spec
        found = scene.region(spec, self.findings)
        if found is None:
            return
        members = [scene.place(found.body, member) for member in found.members]
        overlap = next((member for member in members if member.label is not None), None)
        if overlap is not None:
            message = (
                f"Regions overlap: node {quote(overlap.name)} lies in {quote(overlap.label or '')} and in "
                f"{quote(spec.label)}."
            )
            self.findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, overlap.name, spec.field)
            return
        chooser.taken += 1
        for member in members:
            member.label = spec.label
        last = scene.place(found.body, found.outputs[0][0])
        match = _match(spec, last.name, last.node.op, last.function, scene.is_differentiable(last, found))
        self._note_subgraph(match, found, members, scene)

    def _note_subgraph(self, match: Match, subgraph: Subgraph, members: Sequence[Place], scene: Scene) -> None:
        match.nodes = tuple(member.name for member in members)
        match.op_type = "+".join(member.node.op for member in members) if len(members) <= _NAMED_OPS else match.op_type
        if match.rule == OWN_GRADIENT or not all(member.live for member in members):
            scene.idle.append((members[-1], match))
            return
        match.outputs = len(subgraph.outputs)
        scene.subgraphs.append((subgraph, match))

    # What nodes themselves say.

    def _take_wish(self, place: Place, scene: Scene) -> None:
        match = self._own_wish(place.node, place.name, place.function, scene.is_differentiable(place, None))
        if match is not None:
            place.label = match.label
            scene.note(place, match)

    def _own_wish(self, node: Node, name: str, function: str, differentiable: bool) -> Match | None:
        wish = _wish(node)
        if not wish:
            return None
        rule = self._rule(wish, node.op)
        if isinstance(rule, GradruleError):
            if not _FOREIGN.fullmatch(wish) and self.differentiates and wish not in self._unknown:
                self._unknown.add(wish)
                message = f"Node {quote(name)} wants the rule {quote(wish)} ({GRADIENT_ATTR}): {rule.message}"
                self.findings.add(Reason.ERROR_REASON_UNKNOWN_RULE, message, name)
            return None
        return Match(rule, name, node.op, function, wish, node.op, -1, differentiable)

    def _foreign(self, node: Node, name: str) -> Foreign | None:
        wish = _wish(node)
        is_foreign = _FOREIGN.fullmatch(wish) and isinstance(self._rule(wish, node.op), GradruleError)
        return Foreign(name, wish) if is_foreign else None

    def _rule(self, wish: str, op_type: str) -> int | GradruleError:
        if (wish, op_type) not in self._rules:
            try:
                self._rules[wish, op_type] = OWN_GRADIENT if wish == DEFAULT_RULE else self.known_rule(wish, op_type)
            except GradruleError as cause:
                self._rules[wish, op_type] = cause
        return self._rules[wish, op_type]


_NAMED_OPS = 4
"""Up to so many ops a subgraph is told by all of them."""


class Scene:
    """The expanded graph as overrides are resolved on it, and what comes of it.

    `find`: the tensor of a name, and its body; None after noting what is wrong under the field given.
    """

    def __init__(
        self, top: Body, places: Sequence[Place], asked: Asked, find: Callable[[str, str], tuple[Body, Ref] | None]
    ) -> None:
        self.top = top
        self.places = places
        self.subgraphs: list[tuple[Subgraph, Match]] = []
        # Subgraphs with a match but no rule to run, under their last place.
        self.idle: list[tuple[Place, Match]] = []
        self.resolved: dict[int, Resolved] = {}
        self._noted: list[tuple[Place, Match | Foreign]] = []
        self._asked = asked
        self._find = find
        kept = {(id(top), ref[0]) for ref in (*asked.xs, *asked.ys, *asked.stop_gradients)}
        self._chains = Chains(self._changes, kept)

    def note(self, place: Place, what: Match | Foreign) -> None:
        """Keeps what was resolved for a place."""
        self._noted.append((place, what))
        if place.live:
            self.resolved.setdefault(id(place.node), []).append(what)

    def matches(self) -> list[Match]:
        """All matches, in the order of places."""
        order = {id(place): number for number, place in enumerate(self.places)}
        found = [(order[id(place)], match) for place, match in self._noted if isinstance(match, Match)]
        found += [(order[id(place)], match) for place, match in self.idle]
        found += [(order[id(self.place(item.body, item.members[-1]))], match) for item, match in self.subgraphs]
        return [match for _, match in sorted(found, key=lambda item: item[0])]

    def place(self, body: Body, index: int) -> Place:
        """The place of a node."""
        return self._by_node[id(body), index]

    def inside(self, place: Place) -> list[Place]:
        """All places in the functions of a loop or branch."""
        bodies = {id(inner) for _, own in place.node.functions for body in own for inner in bodies_of(body)}
        return [item for item in self.places if id(item.body) in bodies]

    def is_differentiable(self, place: Place, subgraph: Subgraph | None) -> bool:
        """Whether gradients can pass through the node, or the subgraph."""
        if subgraph is None:
            return is_differentiable(place.node, place.input_types)
        nodes = subgraph.body.nodes
        borders = (
            [(nodes[ref[0]].outputs or ())[ref[1]] for ref in refs] for refs in (subgraph.inputs, subgraph.outputs)
        )
        return all(not DIFFERENTIABLE.isdisjoint(types) for types in borders)

    def chosen(self, chooser: Chooser) -> list[tuple[Place, Subgraph | None]]:
        """All places that the chooser means, taken or not, each with its chain if it wants one."""
        selector = chooser.spec.selector
        found: list[tuple[Place, Subgraph | None]] = []
        roots = self._depended_on(chooser.spec) if selector.depends_on else None
        for place in self._candidates(chooser):
            if not chooser.fits(place) or (roots is not None and id(place.node) not in roots):
                continue
            chain = None
            if len(chooser.words) > 1:
                chain = self._chains.ending_at(place.body, place.index, chooser.words)
                if chain is None:
                    continue
            elif chooser.words and not self._fits_alone(chooser, place):
                continue
            found.append((place, chain))
        return self._positioned(selector.position, found) if selector.HasField("position") else found

    def region(self, spec: OverrideSpec, findings: Findings) -> Subgraph | None:
        """The region of a spec; None after noting what is wrong."""
        wanted = spec.selector.region
        found: list[list[Ref]] = []
        bodies: set[int] = set()
        body = self.top
        for kind, names in (("inputs", wanted.inputs), ("outputs", wanted.outputs)):
            refs = []
            for number, name in enumerate(names):
                tensor = self._find(name, f"{spec.field}.selector.region.{kind}[{number}]")
                if tensor is not None:
                    body = tensor[0]
                    bodies.add(id(body))
                    refs.append(tensor[1])
            found.append(refs)
        inputs, outputs = found
        if len(inputs) < len(wanted.inputs) or len(outputs) < len(wanted.outputs):
            return None
        problem = "its tensors lie in different functions, loops or branches" if len(bodies) > 1 else ""
        if not problem:
            subgraph, elsewhere = region(body, inputs, outputs)
            problem = self._region_problem(subgraph, elsewhere)
        if problem:
            message = f"Override {quote(spec.label)}: the region cannot be: {problem}."
            findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, field=spec.field)
            return None
        return subgraph

    def _region_problem(self, subgraph: Subgraph, elsewhere: Iterable[Ref]) -> str:
        body, inside = subgraph.body, set(subgraph.members)
        for ref in subgraph.outputs:
            if ref[0] not in inside:
                return f"its output {self._text(body, ref)} does not depend on its inputs"
        for ref in elsewhere:
            if self._changes(body, ref):
                text = self._text(body, ref)
                return f"{text} goes into it from outside and depends on the xs; make it one of the inputs"
        kept = self._asked.xs | self._asked.ys | self._asked.stop_gradients if body is self.top else frozenset()
        for member, user in side_exits(subgraph, self._before_ys, kept)[:1]:
            text = self._text(body, (member, 0))
            return f"{text} inside it is used outside, by {user}; make it one of the outputs"
        return ""

    def _changes(self, body: Body, ref: Ref) -> bool:
        """Whether a tensor is one of the xs or depends on one."""
        return id(body.nodes[ref[0]]) in self._behind_xs or (body is self.top and ref in self._asked.xs)

    def _text(self, body: Body, ref: Ref) -> str:
        place = self._by_node.get((id(body), ref[0]))
        name = place.name if place is not None else body.nodes[ref[0]].name
        return quote(f"{name}:{ref[1]}" if ref[1] else name)

    def _candidates(self, chooser: Chooser) -> Iterator[Place]:
        if chooser.op_types is None:
            return iter(self.places)
        groups = [self._by_op.get(op_type, []) for op_type in sorted(chooser.op_types)]
        return (place for _, place in heapq.merge(*groups, key=lambda item: item[0]))

    def _fits_alone(self, chooser: Chooser, place: Place) -> bool:
        """A group may ask more than the op type: an add is either a bias's or a sum."""
        word = chooser.words[0]
        return word not in (BIAS, SUM) or self._chains.is_bias(place.node, place.body) == (word == BIAS)

    def _depended_on(self, spec: OverrideSpec) -> AbstractSet[int]:
        seeds = []
        for number, name in enumerate(spec.selector.depends_on):
            found = self._find(name, f"{spec.field}.selector.depends_on[{number}]")
            if found is not None:
                seeds.append(found)
        dependents: set[int] = set()
        for body, ref in seeds:
            dependents |= paths.dependents(self.top, body, {ref})
        return dependents

    def _positioned(
        self, position: override_pb2.Position, found: Sequence[tuple[Place, Subgraph | None]]
    ) -> list[tuple[Place, Subgraph | None]]:
        path = self._behind_xs & self._before_ys
        on_path = [item for item in found if id(item[0].node) in path]
        ids = {id(place.node) for place, _ in on_path}
        index = position.index
        if position.WhichOneof("place") == "nearest":
            index = 0 if position.nearest == override_pb2.POSITION_NEAREST_XS else -1
        ranks = paths.ranks_from_xs(self.top, ids) if index >= 0 else paths.ranks_from_ys(self.top, ids)
        wanted = index if index >= 0 else -1 - index
        return [item for item in on_path if ranks.get(id(item[0].node)) == wanted]

    @cached_property
    def _behind_xs(self) -> AbstractSet[int]:
        return paths.dependents(self.top, self.top, self._asked.xs)

    @cached_property
    def _before_ys(self) -> AbstractSet[int]:
        return paths.dependencies(self.top, self._asked.ys)

    @cached_property
    def _by_op(self) -> Mapping[str, list[tuple[int, Place]]]:
        found: dict[str, list[tuple[int, Place]]] = {}
        for number, place in enumerate(self.places):
            found.setdefault(place.node.op, []).append((number, place))
        return found

    @cached_property
    def _by_node(self) -> Mapping[tuple[int, int], Place]:
        return {(id(place.body), place.index): place for place in self.places}


def is_differentiable(node: Node, input_types: Sequence[int]) -> bool:
    """Whether gradients can pass through a node: some output, and some input if there are any, is of such a type."""
    takes = not input_types or any(dtype in DIFFERENTIABLE for dtype in input_types)
    return takes and any(dtype in DIFFERENTIABLE for dtype in node.outputs or ())


def _match(spec: OverrideSpec, name: str, op_type: str, function: str, differentiable: bool) -> Match:
    return Match(spec.rule_index, name, op_type, function, spec.rule_name, spec.label, spec.index, differentiable)


def _wish(node: Node) -> str:
    value: AttrValue | None = node.attrs.get(GRADIENT_ATTR)
    wish = "" if value is None else value.s.decode(errors="replace")
    return "" if is_call(node) and _CALL_NOTE.fullmatch(wish) else wish


def _nothing_of_preset(group: Sequence[Chooser]) -> Finding:
    spec = group[0].spec
    wanted = sorted({word for chooser in group for word in chooser.words})
    message = f"Preset {quote(spec.label)} matches no node of the graph: it is for {', '.join(wanted)}."
    return Finding(Reason.ERROR_REASON_UNMATCHED_OVERRIDE, message, field=spec.field)
