"""Assigns a rule to each node; the first match wins: regions, overrides, attributes of the node, presets.

Calls, chains and regions with a rule are subgraphs of the copied graph. A match of a call, loop or branch also takes
the nodes in it that no earlier override has taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gradrule_server.errors import MAX_FINDINGS, MAX_SUGGESTIONS, Finding, Findings, Reason, quote
from gradrule_server.graphs.ir import GRADIENT_ATTR, Limits, Node
from gradrule_server.graphs.layers import applies_parameters
from gradrule_server.graphs.matching import SelectorIndex, UnmatchedOverrides
from gradrule_server.graphs.node_gradients import NodeGradients
from gradrule_server.graphs.resolution_context import Match, ResolutionContext
from gradrule_server.graphs.selection import Selection
from gradrule_server.graphs.selectors import OWN_GRADIENT, CandidateNode, OverrideMatcher, OverrideSpec
from gradrule_server.graphs.subgraphs import Subgraph

FOREIGN_GRADIENT = -2
NO_GRADIENT = -3
VARIABLE_VALUE = -4


@dataclass(eq=False)
class Resolver:
    """Assigns rules to the nodes and calls of the copied graph."""

    matchers: Sequence[OverrideMatcher]
    node_gradients: NodeGradients
    differentiates: bool
    findings: Findings
    # Whether gradients are differentiated again, so that overrides may match nodes that gradients create.
    second_order: bool = False
    most_matches: int = Limits().inlined_nodes

    @cached_property
    def _stages(self) -> tuple[list[OverrideMatcher], list[OverrideMatcher], list[OverrideMatcher]]:
        """Matchers of regions, of other overrides of the request, and of presets."""
        regions = [item for item in self.matchers if item.is_region]
        plain = [item for item in self.matchers if not item.is_region]
        return (
            regions,
            [item for item in plain if not item.spec.is_preset],
            [item for item in plain if item.spec.is_preset],
        )

    @cached_property
    def _index(self) -> SelectorIndex:
        """Index of all matchers but those of regions."""
        _, plain, presets = self._stages
        return SelectorIndex([*plain, *presets])

    def may_match_call(self, node: Node, name: str, qualified_name: str) -> bool:
        """Returns whether an override selects a call, or an attribute of the call names its gradient."""
        return self.node_gradients.names_gradient(node) or bool(
            self.matchers and self._index.call(node.op, name, qualified_name)
        )

    def resolve(self, context: ResolutionContext) -> None:
        """Assigns rules to all candidates of the context and records matches and subgraphs in it."""
        regions, plain, presets = self._stages
        for number, candidate in enumerate(context.candidates):
            custom_gradient = self.node_gradients.find_custom_gradient(candidate.node, candidate.name)
            if custom_gradient is not None:
                context.custom_gradients.setdefault(custom_gradient.region, []).append(number)
                context.flows[id(candidate.node)] = custom_gradient.arguments
        self._apply_regions(regions, context)
        selected = Selection(context, [*plain, *presets]) if plain or presets else None
        for matcher in plain:
            self._apply(matcher, context, selected)
        with_gradient_attr = [
            number for number, candidate in enumerate(context.candidates) if GRADIENT_ATTR in candidate.node.attrs
        ]
        # The gradient of a custom-gradient node is part of a layer such as silu, for which presets have rules.
        in_layers = {number for numbers in context.custom_gradients.values() for number in numbers}
        for number in with_gradient_attr:
            if context.candidates[number].label is None and number not in in_layers:
                self._apply_node_gradient(number, context)
        for matcher in presets:
            self._apply(matcher, context, selected)
        self._check_parameters(presets, context)
        for number in with_gradient_attr:
            candidate = context.candidates[number]
            if candidate.label is None and number in in_layers:
                self._apply_node_gradient(number, context)
            if candidate.label is None:
                foreign = self.node_gradients.find_foreign(candidate.node, candidate.name)
                if foreign is not None:
                    context.record(number, foreign)

    def unmatched(self, context: ResolutionContext) -> list[Finding]:
        """Returns at most `MAX_FINDINGS` UNMATCHED_OVERRIDE for overrides that are not optional and matched no node."""
        by_index: dict[int, list[OverrideMatcher]] = {}
        for matcher in self.matchers:
            by_index.setdefault(matcher.spec.index, []).append(matcher)
        unused = [
            group
            for group in by_index.values()
            if not any(matcher.match_count or matcher.faulty for matcher in group)
            and not group[0].spec.optional
            and not (group[0].spec.part_of_graph and group[0].shadowed_by)
            and not (self.second_order and any(matcher.spec.made_op_types for matcher in group))
        ][:MAX_FINDINGS]
        if not unused:
            return []
        regions = sorted(name for name in context.custom_gradients if name)
        # An explanation takes a look at all nodes, and an error holds few of them.
        unmatched = UnmatchedOverrides(unused[:MAX_SUGGESTIONS], context.candidates, regions, self.findings)
        found = []
        for number, group in enumerate(unused):
            spec = group[0].spec
            is_explained = number < MAX_SUGGESTIONS
            plain = f"Override {quote(spec.label)} matches no node of the graph."
            message = unmatched.explain(number) if is_explained else plain
            found.append(Finding(Reason.ERROR_REASON_UNMATCHED_OVERRIDE, message, field=spec.field))
        return found

    def _apply(self, matcher: OverrideMatcher, context: ResolutionContext, selected: Selection | None) -> None:
        """Assigns the rule of an override to all unassigned candidates that the override selects.

        `selected`: None for the custom-gradient regions that have the name in the selector.
        """
        spec = matcher.spec
        context.check_depends_on(matcher)
        rows = context.named_region(spec.selector.region_name) if selected is None else selected.members(matcher)
        free = context.unassigned(rows)
        has_rank = spec.selector.HasField("rank")
        if has_rank:
            self._check_count(matcher, context.match_count + len(free))
        for members in free:
            candidates = [context.candidates[member] for member in members]
            # An earlier chain of this override may share a member.
            if any(candidate.label is not None for candidate in candidates):
                continue
            number, candidate = members[-1], candidates[-1]
            chain = None if selected is None else selected.subgraph(matcher, members)
            if chain is not None and not self._check_ranks(matcher, candidates):
                continue
            matcher.match_count += 1
            match = _match(spec, candidate, context.is_differentiable(number, chain))
            if has_rank:
                match.rank = spec.selector.rank
                candidate.by_rank = spec.label
            else:
                for member in members:
                    context.assign_with_functions(member, spec.label)
            if chain is not None:
                self._record_chain(match, chain, members, context)
                continue
            custom_gradient = self.node_gradients.find_custom_gradient(candidate.node, candidate.name)
            match.set_custom_gradient(custom_gradient)
            if selected is None and custom_gradient is not None and _changes_flows(matcher):
                context.flows[id(candidate.node)] = custom_gradient.results
            self._record_node(number, match, context)
        if not matcher.match_count and len(rows):
            matcher.shadowed_by = context.count_assigned(rows)

    def _check_count(self, matcher: OverrideMatcher, count: int) -> None:
        """Raises LIMIT_EXCEEDED for too many matches, because several overrides with a rank may match the same node."""
        if count <= self.most_matches:
            return
        message = (
            f"Several overrides with a rank can match one node: up to {quote(matcher.spec.label)} there are {count} "
            f"matches; {self.most_matches} is the most (--max-inlined-nodes)."
        )
        self.findings.add(Reason.ERROR_REASON_LIMIT_EXCEEDED, message, field=matcher.spec.field)
        self.findings.raise_if_any()

    def _check_parameters(self, presets: Sequence[OverrideMatcher], context: ResolutionContext) -> None:
        """Adds UNMATCHED_OVERRIDE for ops with parameters on the path that a preset for all layers leaves out."""
        spec = next((matcher.spec for matcher in presets if matcher.spec.is_for_all_layers), None)
        if spec is None or spec.optional:
            return
        for candidate in context.candidates:
            if candidate.label is None and candidate.call is None and applies_parameters(candidate, context):
                message = (
                    f"Preset {quote(spec.label)} has no rule for node {quote(candidate.name)} "
                    f"({candidate.node.op_type}), which applies parameters to what depends on the xs. Override the "
                    f"node: the rule 'default' keeps its own gradient."
                )
                self.findings.add(Reason.ERROR_REASON_UNMATCHED_OVERRIDE, message, candidate.name, spec.field)

    def _check_ranks(self, matcher: OverrideMatcher, candidates: Sequence[CandidateNode]) -> bool:
        """Adds INVALID_OVERRIDE and returns False if an earlier override with a rank may match a node of a chain."""
        undecided = next((candidate for candidate in candidates if candidate.by_rank), None)
        if undecided is None:
            return True
        matcher.faulty = True
        message = (
            f"Override {quote(matcher.spec.label)}: node {quote(undecided.name)} of its chain may belong to the "
            f"earlier override {quote(undecided.by_rank)}, depending on its rank, which is known only at run time; "
            f"put the chain first, or select without rank."
        )
        reason = Reason.ERROR_REASON_INVALID_OVERRIDE
        self.findings.add(reason, message, undecided.name, matcher.spec.field)
        return False

    def _apply_regions(self, matchers: Sequence[OverrideMatcher], context: ResolutionContext) -> None:
        pending = deque(matchers)
        while pending:
            # A named region with its own gradient changes gradient flow, which later region checks depend on.
            together: list[OverrideMatcher] = []
            while pending and not (together and _changes_flows(together[-1])):
                together.append(pending.popleft())
            found = context.regions([matcher.spec for matcher in together if not matcher.spec.selector.region_name])
            for matcher in together:
                if matcher.spec.selector.region_name:
                    self._apply(matcher, context, None)
                elif not self._apply_region(matcher, context, found.get(id(matcher.spec), ())):
                    matcher.faulty = True

    def _apply_region(
        self, matcher: OverrideMatcher, context: ResolutionContext, found: Sequence[tuple[Subgraph, str]]
    ) -> bool:
        """Assigns an override's rule to its regions, one for each branch; returns False after adding a finding."""
        spec = matcher.spec
        problem = next((problem for _, problem in found if problem), "") if found else context.find_border_problem(spec)
        if problem:
            message = f"Override {quote(spec.label)}: the region is invalid: {problem}."
            self.findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, field=spec.field)
        if problem or not found:
            return False
        return all(self._assign_region(matcher, subgraph, context) for subgraph, _ in found)

    def _assign_region(self, matcher: OverrideMatcher, subgraph: Subgraph, context: ResolutionContext) -> bool:
        """Assigns an override's rule to one region; returns False after adding a finding."""
        spec = matcher.spec
        members = context.candidate_numbers(subgraph)
        taken = {number for member in members for number in (member, *context.inside(member))}
        taken.update(call for call in context.calls if context.inside(call) and taken.issuperset(context.inside(call)))
        overlap = next(
            (context.candidates[number] for number in sorted(taken) if context.candidates[number].label is not None),
            None,
        )
        if overlap is not None:
            message = (
                f"Regions overlap: node {quote(overlap.name)} lies in {quote(overlap.label or '')} and in "
                f"{quote(spec.label)}."
            )
            self.findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, overlap.name, spec.field)
            return False
        matcher.match_count += 1
        for number in taken:
            context.assign(number, spec.label)
        number = context.number(subgraph.body, subgraph.outputs[0][0])
        last = context.candidates[number if number >= 0 else members[-1]]
        match = _match(spec, last, context.is_differentiable(members[-1], subgraph))
        self._record_chain(match, subgraph, members, context)
        return True

    def _record_chain(
        self, match: Match, subgraph: Subgraph, members: Sequence[int], context: ResolutionContext
    ) -> None:
        """Records the match of a chain or region."""
        candidates = [context.candidates[member] for member in members]
        match.resolution.nodes.extend(candidate.name for candidate in candidates)
        if len(candidates) <= _NAMED_OPS:
            match.resolution.op_type = "+".join(candidate.node.op_type for candidate in candidates)
        context.record_subgraph(members[-1], match, subgraph)

    def _record_node(self, number: int, match: Match, context: ResolutionContext) -> None:
        """Records the match of a node or call; adds INVALID_OVERRIDE for a call that its rule cannot see as a whole."""
        candidate = context.candidates[number]
        if candidate.call is None or match.rule == OWN_GRADIENT:
            context.record(number, match)
            return
        subgraph = context.call_subgraph(candidate)
        entry = context.entry_into_call(number, subgraph)
        if entry:
            message = (
                f"Override {quote(match.resolution.label)}: the call {quote(candidate.name)} uses {entry}, which "
                f"depends on the xs and is none of its arguments."
            )
            self.findings.add(Reason.ERROR_REASON_INVALID_OVERRIDE, message, candidate.name)
        context.record_subgraph(number, match, subgraph)

    def _apply_node_gradient(self, number: int, context: ResolutionContext) -> None:
        """Assigns to a candidate the rule that its node requests by attribute."""
        candidate = context.candidates[number]
        match = self.node_gradients.find_match(candidate, context.is_differentiable(number, None))
        if match is not None:
            context.assign_with_functions(number, match.resolution.label)
            self._record_node(number, match, context)


_NAMED_OPS = 4
"""Largest subgraph whose `op_type` lists all of its ops."""


def _match(spec: OverrideSpec, candidate: CandidateNode, differentiable: bool) -> Match:
    resolution = candidate.resolution(spec.rule_name, spec.label)
    return Match(spec.rule_index, resolution, spec.index, differentiable, every_order=spec.every_order)


def _changes_flows(matcher: OverrideMatcher) -> bool:
    """Returns whether an override makes gradients flow through the inner nodes of custom-gradient regions."""
    return bool(matcher.spec.selector.region_name) and matcher.spec.rule_index == OWN_GRADIENT
