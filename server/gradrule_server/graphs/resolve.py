"""Which node gets which rule: regions, the request's overrides, what nodes themselves say, presets; first match wins.

Calls are decided while the graph is copied, because a call that an override takes is not inlined. All other nodes are
decided on the copy, where every node that runs has one place and dependence can be followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gradrule_server.graphs.findings import Finding, Findings, Reason, quote
from gradrule_server.graphs.ir import GRADIENT_ATTR, Node
from gradrule_server.graphs.scene import Foreign, Match, Scene, is_differentiable
from gradrule_server.graphs.selectors import (
    OWN_GRADIENT,
    Chooser,
    OverrideSpec,
    Place,
    Seen,
    unmatched,
)
from gradrule_server.graphs.subgraphs import Subgraph
from gradrule_server.graphs.wishes import Wishes

FOREIGN_GRADIENT = -2


@dataclass(eq=False)
class Resolver:
    """Decides."""

    choosers: Sequence[Chooser]
    wishes: Wishes
    differentiates: bool
    findings: Findings
    # Whether gradients are differentiated again, so that overrides may meet nodes that gradients make.
    again: bool = False
    _calls: list[tuple[Seen, Match | None]] = field(default_factory=list)

    @cached_property
    def _stages(self) -> tuple[list[Chooser], list[Chooser], list[Chooser]]:
        """Regions, other overrides of the request, presets."""
        regions = [item for item in self.choosers if item.is_region]
        plain = [item for item in self.choosers if not item.is_region]
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
            or self.wishes.match(node, name, function, differentiable)
            or self._whole(presets, node, name, function, differentiable)
        )
        if match is None:
            foreign = self.wishes.foreign_at(node, name)
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
        for place in scene.places:
            knot = self.wishes.knot(place.node, place.name)
            if knot is not None:
                scene.knots.append((place, knot))
                scene.flows[id(place.node)] = knot.arguments
        for chooser in regions:
            if chooser.spec.selector.region_name:
                self._take_named(chooser, scene)
            else:
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
                foreign = self.wishes.foreign_at(place.node, place.name)
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
            if not any(chooser.taken or chooser.faulty for chooser in group)
            and not group[0].spec.optional
            and not (self.again and any(chooser.spec.made_op_types for chooser in group))
        ]
        if not idle:
            return []
        seen = [seen for seen, _ in self._calls] + [Seen(place.node.op_type, place.name) for place in scene.places]
        regions = sorted({knot.region for _, knot in scene.knots if knot.region})
        return [
            _nothing_of_preset(group) if group[0].spec.is_preset else unmatched(group[0], seen, regions)
            for group in idle
        ]

    def _take(self, chooser: Chooser, scene: Scene) -> None:
        """Gives the chooser's rule to all places that it means and that nothing took before."""
        spec = chooser.spec
        for place, chain in scene.chosen(chooser):
            members = [place] if chain is None else [scene.place(chain.body, member) for member in chain.members]
            holder = next((member.label for member in members if member.label is not None), None)
            if holder is not None:
                chooser.shadowed_by[holder] = chooser.shadowed_by.get(holder, 0) + 1
                continue
            open_member = next((member for member in members if member.by_rank), None)
            if chain is not None and open_member is not None:
                chooser.faulty = True
                message = (
                    f"Override {quote(spec.label)}: node {quote(open_member.name)} of its chain belongs to the earlier "
                    f"override {quote(open_member.by_rank)} if its rank is the right one, which is known only later; "
                    f"put the chain first, or select without rank."
                )
                self.findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, open_member.name, spec.field)
                continue
            chooser.taken += 1
            match = _match(spec, place.name, place.node.op_type, place.function, scene.is_differentiable(place, chain))
            match.tie(self.wishes.knot(place.node, place.name) if chain is None else None)
            if spec.selector.HasField("rank"):
                match.rank = spec.selector.rank
                place.by_rank = spec.label
            else:
                for member in members:
                    member.label = spec.label
                    # A loop or branch is taken as a whole.
                    for inner in scene.inside(member):
                        inner.label = inner.label or spec.label
            if chain is None:
                scene.note(place, match)
            else:
                self._note_subgraph(match, chain, members, scene)

    def _take_named(self, chooser: Chooser, scene: Scene) -> None:
        """Gives the chooser's rule to the regions of its name that the graph brings along."""
        spec = chooser.spec
        for place, knot in scene.knots:
            if knot.region != spec.selector.region_name:
                continue
            if place.label is not None:
                chooser.shadowed_by[place.label] = chooser.shadowed_by.get(place.label, 0) + 1
                continue
            chooser.taken += 1
            place.label = spec.label
            match = _match(spec, place.name, place.node.op, place.function, scene.is_differentiable(place, None))
            match.tie(knot)
            if match.rule == OWN_GRADIENT:
                scene.flows[id(place.node)] = knot.results
            scene.note(place, match)

    def _take_region(self, chooser: Chooser, scene: Scene) -> None:
        spec = chooser.spec
        found = scene.region(spec, self.findings)
        if found is None:
            chooser.faulty = True
            return
        members = [scene.place(found.body, member) for member in found.members]
        taken = [*members, *(inner for member in members for inner in scene.inside(member))]
        overlap = next((place for place in taken if place.label is not None), None)
        if overlap is not None:
            message = (
                f"Regions overlap: node {quote(overlap.name)} lies in {quote(overlap.label or '')} and in "
                f"{quote(spec.label)}."
            )
            self.findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, overlap.name, spec.field)
            chooser.faulty = True
            return
        chooser.taken += 1
        for place in taken:
            place.label = spec.label
        last = scene.place(found.body, found.outputs[0][0])
        match = _match(spec, last.name, last.node.op_type, last.function, scene.is_differentiable(last, found))
        self._note_subgraph(match, found, members, scene)

    def _note_subgraph(self, match: Match, subgraph: Subgraph, members: Sequence[Place], scene: Scene) -> None:
        match.nodes = tuple(member.name for member in members)
        match.op_type = (
            "+".join(member.node.op_type for member in members) if len(members) <= _NAMED_OPS else match.op_type
        )
        if match.rule == OWN_GRADIENT or not all(member.live for member in members):
            scene.idle.append((members[-1], match))
            return
        match.outputs, match.is_step = len(subgraph.outputs), subgraph.is_step
        scene.subgraphs.append((subgraph, match))

    def _take_wish(self, place: Place, scene: Scene) -> None:
        """Gives a place the rule that its node asks for."""
        match = self.wishes.match(place.node, place.name, place.function, scene.is_differentiable(place, None))
        if match is not None:
            place.label = match.label
            scene.note(place, match)


_NAMED_OPS = 4
"""Up to so many ops a subgraph is told by all of them."""


def _match(spec: OverrideSpec, name: str, op_type: str, function: str, differentiable: bool) -> Match:
    return Match(
        spec.rule_index,
        name,
        op_type,
        function,
        spec.rule_name,
        spec.label,
        spec.index,
        differentiable,
        every_order=spec.every_order,
    )


def _nothing_of_preset(group: Sequence[Chooser]) -> Finding:
    spec = group[0].spec
    wanted = sorted({word for chooser in group for word in chooser.words})
    message = f"Preset {quote(spec.label)} matches no node of the graph: it is for {', '.join(wanted)}."
    return Finding(Reason.ERROR_REASON_UNMATCHED_OVERRIDE, message, field=spec.field)
