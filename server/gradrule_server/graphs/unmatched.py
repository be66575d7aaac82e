"""Explains why an override matches no node, with suggestions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from gradrule.common.dtypes import dtype_name
from gradrule_server.errors import did_you_mean
from gradrule_server.graphs.findings import Finding, Findings, Reason, quote, similar_name_hint
from gradrule_server.graphs.selector_index import NameIndex
from gradrule_server.graphs.selectors import OverrideMatcher, op_types_of

_SHOWN_REGIONS = 12


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """Op type and public name of a node that selectors were matched against."""

    op_type: str
    name: str


class Unmatched:
    """Creates findings for overrides without matches; one pass over the nodes serves all overrides.

    `regions`: names of the custom-gradient regions in the graph.
    """

    def __init__(
        self, unused: Sequence[OverrideMatcher], nodes: Sequence[NodeInfo], regions: Sequence[str], findings: Findings
    ) -> None:
        self._numbers = {id(matcher): number for number, matcher in enumerate(unused)}
        self._names = NameIndex(unused)
        self._nodes = nodes
        self._regions = regions
        self._findings = findings
        self._by_op_types: dict[frozenset[str] | None, list[str]] = {}

    def finding(self, matcher: OverrideMatcher) -> Finding:
        """Returns UNMATCHED_OVERRIDE with the failing condition and suggestions."""
        spec = matcher.spec
        if matcher.shadowed_by:
            count = sum(matcher.shadowed_by.values())
            nodes = f"all {count} nodes that it matches are" if count > 1 else "the only node that it matches is"
            by = ", ".join(quote(label) for label in matcher.shadowed_by)
            message = f"Override {quote(spec.label)} takes no node: {nodes} taken by an earlier override ({by})."
        elif spec.selector.region_name:
            message = f"Override {quote(spec.label)}: {self._no_region(spec.selector.region_name)}"
        else:
            message = f"Override {quote(spec.label)} matches no node of the graph: {self._missing(matcher)}"
        return Finding(Reason.ERROR_REASON_UNMATCHED_OVERRIDE, message, field=spec.field)

    def _no_region(self, name: str) -> str:
        regions = self._regions
        hint = self._findings.suggest(lambda: did_you_mean(name, regions))
        known = ", ".join(map(quote, regions[:_SHOWN_REGIONS])) or "none: no function in it has a gradient of its own"
        more = f" and {len(regions) - _SHOWN_REGIONS} more" if len(regions) > _SHOWN_REGIONS else ""
        return f"the graph brings no region {quote(name)} along.{hint} Its regions: {known}{more}."

    def _missing(self, matcher: OverrideMatcher) -> str:
        selector = matcher.spec.selector
        suggest = self._findings.suggest
        for word in matcher.words:
            if op_types_of(word).isdisjoint(self._op_types):
                members = f" ({', '.join(sorted(op_types_of(word)))})" if word.startswith("@") else ""
                hint = suggest(lambda word=word: did_you_mean(word, self._op_types))  # type: ignore[misc]
                return f"there is no {word}{members}.{hint}"
        kind = f"of op type {matcher.words[-1]} " if matcher.words else ""
        in_scope, named, meant = self._met_conditions(matcher)
        if selector.scope and not in_scope:
            hint = suggest(lambda: similar_name_hint(selector.scope, self._scopes(matcher)))
            return f"no node {kind}has a name that starts with {quote(matcher.prefix)}.{hint}"
        if selector.node and not named:
            hint = suggest(lambda: similar_name_hint(selector.node, self._names_of(matcher)))
            return f"no node {kind}is named {quote(selector.node)}.{hint}"
        if not meant:
            if selector.node_regex:
                return f"no node {kind}has a name that {quote(selector.node_regex)} matches as a whole."
            return "the graph has no nodes." if not self._names_of(matcher) else f"no node {kind}has such a name."
        reasons = []
        if matcher.is_chain:
            reasons.append(
                f"no chain {' → '.join(matcher.words)} in which each takes the output of the one before and is alone "
                f"in doing so"
            )
        if selector.dtype:
            reasons.append(f"the first output {dtype_name(selector.dtype)}")
        if selector.attrs:
            reasons.append(f"these attributes: {', '.join(sorted(selector.attrs))}")
        if selector.depends_on:
            reasons.append(f"dependence on {', '.join(map(quote, selector.depends_on))}")
        if selector.HasField("position"):
            reasons.append("this place on the path from xs to ys")
        if not reasons:
            return f"no node {kind}is one: what an add is depends on which of its sides depend on the xs."
        return f"no node {kind}with such a name has {' and '.join(reasons)}."

    def _met_conditions(self, matcher: OverrideMatcher) -> tuple[bool, bool, bool]:
        """Returns whether nodes of the op types meet the scope, `node`, and all conditions on names together."""
        bit = 1 << self._numbers[id(matcher)]
        op_types: Iterable[str] = self._conditions_by_op if matcher.op_types is None else matcher.op_types
        found = [self._conditions_by_op[op_type] for op_type in op_types if op_type in self._conditions_by_op]
        in_scope, named, meant = (any(bits[condition] & bit for bits in found) for condition in range(3))
        return in_scope, named, meant

    @cached_property
    def _conditions_by_op(self) -> dict[str, list[int]]:
        """For each op type: bits of the overrides whose scope, `node` and name conditions a node of that type meets."""
        met: dict[str, list[int]] = {}
        for node in self._nodes:
            bits = met.setdefault(node.op_type, [0, 0, 0])
            for condition, found in enumerate(self._names.conditions(node.name)):
                bits[condition] |= found
        return met

    @cached_property
    def _op_types(self) -> list[str]:
        return sorted({item.op_type for item in self._nodes})

    def _names_of(self, matcher: OverrideMatcher) -> list[str]:
        """Returns the names of the nodes of the override's op types."""
        wanted = matcher.op_types
        if wanted not in self._by_op_types:
            self._by_op_types[wanted] = [item.name for item in self._nodes if wanted is None or item.op_type in wanted]
        return self._by_op_types[wanted]

    def _scopes(self, matcher: OverrideMatcher) -> list[str]:
        return sorted({name[:slash] for name in self._names_of(matcher) for slash in _slashes(name)})


def _slashes(name: str) -> list[int]:
    return [position for position, character in enumerate(name) if character == "/"]
