"""Finds the selectors that match a node by its own properties, and explains why an override matches no node.

One lookup per property serves all selectors.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

import re2

from gradrule.common.dtypes import dtype_name
from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.errors import Findings, quote
from gradrule_server.graphs.ir import ADDED_ATTR, Node
from gradrule_server.graphs.selectors import (
    ANY_TEXT,
    CandidateNode,
    OverrideMatcher,
    compile_regex,
    op_types_of,
    re2_options,
)

# Cached pattern combinations; the limit keeps hostile graphs from filling the memory.
_MAX_KEPT = 4096
_SET_SIZE = 128

_SHOWN_REGIONS = 12


class SelectorIndex:
    """Matches nodes against all selectors; bit i of a result is the i-th matcher."""

    def __init__(self, matchers: Sequence[OverrideMatcher]) -> None:
        selectors = [matcher.spec.selector for matcher in matchers]
        self._calls = _bits(number for number, matcher in enumerate(matchers) if matcher.accepts_calls)
        self._op_types = _Lookup()
        self._dtypes = _Lookup()
        self.names = NameIndex(matchers)
        for number, (matcher, selector) in enumerate(zip(matchers, selectors, strict=True)):
            self._op_types.add(number, matcher.op_types)
            self._dtypes.add(number, (selector.dtype,) if selector.dtype else None)
        attr_names = sorted({name for selector in selectors for name in selector.attrs})
        self._attrs = {name: _Lookup() for name in attr_names}
        for number, selector in enumerate(selectors):
            for name in attr_names:
                given = (attr_key(selector.attrs[name]),) if name in selector.attrs else None
                self._attrs[name].add(number, given)
        self._attr_bits: dict[int, tuple[Mapping[str, AttrValue], int]] = {}

    def call(self, op_type: str, name: str, qualified_name: str) -> int:
        """Returns the selectors that match a whole call."""
        found = self._calls & self._op_types.matching(op_type)
        return found and found & self.names.match(name, qualified_name)

    def node(self, node: Node, name: str, qualified_name: str) -> int:
        """Returns the selectors whose conditions on op type, element type, attributes and name a node meets."""
        found = self._op_types.matching(node.op_type) & self._dtypes.matching(node.outputs[0] if node.outputs else 0)
        if found and self._attrs:
            found &= self._attrs_of(node.attrs)
        if found and ADDED_ATTR in node.attrs:
            found &= self.names.naming(name)
        return found and found & self.names.match(name, qualified_name)

    def _attrs_of(self, attrs: Mapping[str, AttrValue]) -> int:
        # Cached by id(), because nodes share attribute objects.
        known = self._attr_bits.get(id(attrs))
        if known is None:
            found = -1
            for name, lookup in self._attrs.items():
                found &= lookup.matching(attr_key(attrs[name])) if name in attrs else lookup.unconditional
            known = self._attr_bits[id(attrs)] = (attrs, found)
        return known[1]


class NameIndex:
    """Matches public and qualified names against the scope, node names and node_regex of all selectors."""

    def __init__(self, matchers: Sequence[OverrideMatcher]) -> None:
        self._scopes = _Lookup()
        self._exact = _Lookup()
        for number, matcher in enumerate(matchers):
            # An empty tuple: no public name matches, but a qualified name may.
            scopes = () if matcher.qualified_scope else (matcher.prefix,)
            self._scopes.add(number, scopes if matcher.prefix else None)
            self._exact.add(number, matcher.exact if matcher.exact or matcher.globs or matcher.qualified else None)
        self._longest_scope = max((len(matcher.prefix) for matcher in matchers), default=0)
        with_regex = (number for number, matcher in enumerate(matchers) if matcher.regex or matcher.qualified_regex)
        self._without_regex = ~_bits(with_regex)
        self._public = _NamePatterns([((), one.globs, (one.regex,)) for one in matchers])
        self._qualified = _NamePatterns(
            [((one.qualified_scope,), one.qualified, (one.qualified_regex,)) for one in matchers]
        )

    def match(self, name: str, qualified_name: str) -> int:
        """Returns the selectors that match the name."""
        _, _, found = self.conditions(name, qualified_name)
        return found

    def naming(self, name: str) -> int:
        """Returns the selectors that contain the exact name."""
        return self._exact.requiring(name)

    def conditions(self, name: str, qualified_name: str) -> tuple[int, int, int]:
        """Returns the selectors whose scope matches a name, those whose node names match it, and those that match it.

        The last need scope, node names and `node_regex` to match.
        """
        scope, node, regex = self._scope(name), self._exact.matching(name), self._without_regex
        for bits in (self._public.matching(name), self._qualified.matching(qualified_name)):
            scope, node, regex = scope | bits[0], node | bits[1], regex | bits[2]
        return scope, node, scope & node & regex

    def _scope(self, name: str) -> int:
        """Returns the selectors whose scope contains the name."""
        found = self._scopes.unconditional
        slash = name.find("/") if self._longest_scope else -1
        while 0 <= slash < self._longest_scope:
            found |= self._scopes.requiring(name[: slash + 1])
            slash = name.find("/", slash + 1)
        return found


class _NamePatterns:
    """Selectors by the expressions for their scope, node names and node_regex.

    `conditions`: for each selector, its expressions for each of the three; empty expressions do not count.
    """

    def __init__(self, conditions: Iterable[Sequence[Sequence[str]]]) -> None:
        by_pattern: dict[str, list[int]] = {}
        for number, own in enumerate(conditions):
            for place, patterns in enumerate(own):
                for pattern in filter(None, patterns):
                    by_pattern.setdefault(pattern, [0, 0, 0])[place] |= 1 << number
        self._bits = list(by_pattern.values())
        self._patterns = PatternSet(list(by_pattern))
        self._kept: dict[tuple[int, ...], Sequence[int]] = {(): (0, 0, 0)}

    def matching(self, name: str) -> Sequence[int]:
        """Returns the selectors whose scope, node names and node_regex match a name, as three numbers."""
        matching = self._patterns.matching(name)
        found = self._kept.get(matching)
        if found is None:
            found = [
                functools.reduce(operator.or_, bits)
                for bits in zip(*map(self._bits.__getitem__, matching), strict=True)
            ]
            if len(self._kept) < _MAX_KEPT:
                self._kept[matching] = found
        return found


class _Lookup:
    """Selectors by the value of one condition; selectors without the condition match every value."""

    def __init__(self) -> None:
        self.unconditional = 0
        self._by_value: dict[Hashable, int] = {}

    def add(self, number: int, values: Sequence[Hashable] | frozenset[str] | None) -> None:
        """Adds a selector that requires one of the values; None: any value."""
        if values is None:
            self.unconditional |= 1 << number
        for value in values or ():
            self._by_value[value] = self._by_value.get(value, 0) | 1 << number

    def matching(self, value: Hashable) -> int:
        """Returns the selectors that match a value."""
        return self.unconditional | self._by_value.get(value, 0)

    def requiring(self, value: Hashable) -> int:
        """Returns the selectors that require this value."""
        return self._by_value.get(value, 0)


def attr_key(value: AttrValue) -> bytes:
    """Returns a key that equal attributes share."""
    return value.SerializeToString(deterministic=True)


class PatternSet:
    """Matches whole names against many RE2 expressions; one pass over the name serves up to `_SET_SIZE` of them."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._sets = [_Set(patterns[start : start + _SET_SIZE], start) for start in range(0, len(patterns), _SET_SIZE)]

    def matching(self, name: str) -> tuple[int, ...]:
        """Returns the indices of the matching expressions."""
        return tuple([number for item in self._sets for number in item.matching(name)])


class _Set:
    def __init__(self, patterns: Sequence[str], first: int) -> None:
        self._first = first
        self._patterns = patterns
        self._single: list[re2._Regexp] = []
        self._set: re2.Set | None = re2.Set.FullMatchSet(re2_options())
        for pattern in patterns:
            self._set.Add(pattern)
        # This pattern always matches: a result without it means that the set ran out of memory.
        self._anything = self._set.Add(ANY_TEXT)
        try:
            self._set.Compile()
        except re2.error:
            self._set = None

    def matching(self, name: str) -> list[int]:
        found = None if self._set is None else self._set.Match(name)
        if found is None:
            self._single = self._single or [compile_regex(pattern) for pattern in self._patterns]
            return [self._first + number for number, one in enumerate(self._single) if one.fullmatch(name)]
        return [self._first + number for number in found if number != self._anything]


def _bits(numbers: Iterable[int]) -> int:
    found = 0
    for number in numbers:
        found |= 1 << number
    return found


class UnmatchedOverrides:
    """Explains why overrides take no node; one pass over the nodes serves all of them.

    Args:
        unused: The matchers of each override: one, or all of a preset.
        nodes: The nodes of the graph.
        regions: Names of the custom-gradient regions in the graph.
        findings: Limits the suggestions.
    """

    def __init__(
        self,
        unused: Sequence[Sequence[OverrideMatcher]],
        nodes: Sequence[CandidateNode],
        regions: Sequence[str],
        findings: Findings,
    ) -> None:
        self._unused = unused
        self._nodes = nodes
        self._regions = regions
        self._findings = findings
        self._op_types = [one.node.op_type for one in nodes]
        index = NameIndex([group[0] for group in unused])
        self._met = [index.conditions(one.name, one.qualified_name) for one in nodes]

    def explain(self, number: int) -> str:
        """Returns why an override takes no node, with the condition that fails and similar names."""
        group = self._unused[number]
        matcher = group[0]
        label, selector = quote(matcher.spec.label), matcher.spec.selector
        if matcher.spec.is_preset:
            wanted = sorted({word for one in group for word in (*one.words, one.layer) if word})
            return f"Preset {label} matches no node of the graph: it is for {', '.join(wanted)}."
        if matcher.shadowed_by:
            count = sum(matcher.shadowed_by.values())
            taken = f"all {count} nodes that it matches are" if count > 1 else "the only node that it matches is"
            by = ", ".join(quote(other) for other in matcher.shadowed_by)
            return f"Override {label} takes no node: {taken} taken by an earlier override ({by})."
        if selector.region_name:
            return f"Override {label}: {self._no_region(selector.region_name)}"
        return f"Override {label} matches no node of the graph: {self._missing(number, matcher)}"

    def _no_region(self, name: str) -> str:
        regions = self._regions
        hint = self._findings.suggest_similar(name, regions)
        known = (
            ", ".join(map(quote, regions[:_SHOWN_REGIONS])) or "none, because no function in it has its own gradient"
        )
        more = f" and {len(regions) - _SHOWN_REGIONS} more" if len(regions) > _SHOWN_REGIONS else ""
        return f"the graph has no custom-gradient region {quote(name)}.{hint} Its regions: {known}{more}."

    def _missing(self, number: int, matcher: OverrideMatcher) -> str:
        """Returns the first condition of a selector that no node meets together with those before it."""
        selector, suggest = matcher.spec.selector, self._findings.suggest_similar
        op_types = set(self._op_types)
        for word in matcher.words:
            if op_types_of(word).isdisjoint(op_types):
                members = f" ({', '.join(sorted(op_types_of(word)))})" if word.startswith("@") else ""
                return f"there is no {word}{members}.{suggest(word, sorted(op_types))}"
        if matcher.layer and not any((selector.scope, selector.node, selector.node_regex)):
            return f"there is no layer of kind {matcher.layer}."
        wanted = matcher.op_types
        fitting = [place for place, op_type in enumerate(self._op_types) if wanted is None or op_type in wanted]
        in_scope, named, matched = ([self._met[place][item] >> number & 1 for place in fitting] for item in range(3))
        nodes = [self._nodes[place] for place in fitting]
        names = [one.qualified_name if matcher.names_branches else one.name for one in nodes]
        kind = f"of op type {matcher.words[-1]} " if matcher.words else ""
        if selector.scope and not any(in_scope):
            scopes = {name[: slash.start()] for name in names for slash in re.finditer("/", name)}
            return (
                f"no node {kind}has a name that starts with {quote(matcher.prefix)}."
                f"{suggest(selector.scope, sorted(scopes))}"
            )
        first = selector.node or next(iter(selector.nodes), "")
        if first and not any(named):
            more = f" or like {len(selector.nodes) - 1} other names" if len(selector.nodes) > 1 else ""
            return f"no node {kind}is named {quote(first)}{more}.{suggest(first, names)}"
        if not any(matched):
            if selector.node_regex:
                return f"no node {kind}has a name that {quote(selector.node_regex)} matches as a whole."
            return f"no node {kind}has such a name." if names else "the graph has no nodes."
        chain = " → ".join(matcher.words)
        reasons = {
            f"no chain {chain} in which each op is the only consumer of the op before it": matcher.is_chain,
            f"a layer of kind {matcher.layer} that ends there": matcher.layer,
            f"a first output of type {dtype_name(selector.dtype)}": selector.dtype,
            f"these attributes: {', '.join(sorted(selector.attrs))}": selector.attrs,
            f"dependence on {', '.join(map(quote, selector.depends_on))}": selector.depends_on,
            "this position on the path from xs to ys": selector.HasField("position"),
        }
        failing = [reason for reason, is_condition in reasons.items() if is_condition]
        if not failing:
            return f"no node {kind}qualifies: an add is a sum if both inputs depend on the xs, else a bias."
        return f"no node {kind}with such a name has {' and '.join(failing)}."
