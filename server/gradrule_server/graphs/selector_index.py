"""Finds the selectors that match a node by its own properties; one lookup per property serves all selectors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradrule.v1.graph_pb2 import AttrValue
from gradrule_server.graphs.ir import Node
from gradrule_server.graphs.name_patterns import PatternSet
from gradrule_server.graphs.selectors import OverrideMatcher

# Cached pattern combinations; the limit keeps hostile graphs from filling the memory.
_MAX_KEPT = 4096


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

    def call(self, op_type: str, name: str) -> int:
        """Returns the selectors that match a whole call."""
        found = self._calls & self._op_types.matching(op_type)
        return found and found & self.names.match(name)

    def node(self, node: Node, name: str) -> int:
        """Returns the selectors whose conditions on op type, element type, attributes and name a node meets."""
        found = self._op_types.matching(node.op_type) & self._dtypes.matching(node.outputs[0] if node.outputs else 0)
        if found and self._attrs:
            found &= self._attrs_of(node.attrs)
        return found and found & self.names.match(name)

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
    """Matches public names against the scope, node and node_regex of all selectors."""

    def __init__(self, matchers: Sequence[OverrideMatcher]) -> None:
        self._scopes = _Lookup()
        self._exact = _Lookup()
        numbers: dict[str, int] = {}
        with_pattern: list[list[int]] = [[], []]
        for number, matcher in enumerate(matchers):
            self._scopes.add(number, (matcher.prefix,) if matcher.prefix else None)
            self._exact.add(number, (matcher.exact,) if matcher.exact else None)
            for place, pattern in enumerate((matcher.glob, matcher.regex)):
                if pattern:
                    numbers.setdefault(pattern, len(numbers))
                    with_pattern[place].append(number)
        self._longest_scope = max((len(matcher.prefix) for matcher in matchers), default=0)
        self._patterns = PatternSet(list(numbers)) if numbers else None
        # Selectors without a glob, and those without a node_regex. For each pattern: the selectors that have it as
        # glob, and those that have it as node_regex.
        all_selectors = (1 << len(matchers)) - 1
        self._free = (all_selectors & ~_bits(with_pattern[0]), all_selectors & ~_bits(with_pattern[1]))
        self._by_pattern = [[0, 0] for _ in numbers]
        for number, matcher in enumerate(matchers):
            for place, pattern in enumerate((matcher.glob, matcher.regex)):
                if pattern:
                    self._by_pattern[numbers[pattern]][place] |= 1 << number
        self._kept: dict[tuple[int, ...], tuple[int, int]] = {}

    def match(self, name: str) -> int:
        """Returns the selectors that match the name."""
        first, second = self._matching(name)
        return self._scope(name) & self._exact.matching(name) & first & second

    def conditions(self, name: str) -> tuple[int, int, int]:
        """Returns the selectors whose scope matches a name, those whose `node` matches it, and those that match it.

        The last need scope, `node` and `node_regex` to match.
        """
        scope, (first, second) = self._scope(name), self._matching(name)
        node = self._exact.matching(name) & first
        return scope, node, scope & node & second

    def _scope(self, name: str) -> int:
        """Returns the selectors whose scope contains the name."""
        found = self._scopes.unconditional
        slash = name.find("/") if self._longest_scope else -1
        while 0 <= slash < self._longest_scope:
            found |= self._scopes.requiring(name[: slash + 1])
            slash = name.find("/", slash + 1)
        return found

    def _matching(self, name: str) -> tuple[int, int]:
        """Returns the selectors whose glob matches the name or is absent, and the same for node_regex."""
        if self._patterns is None:
            return -1, -1
        matching = self._patterns.matching(name)
        found = self._kept.get(matching)
        if found is None:
            glob, regex = self._free
            for number in matching:
                glob |= self._by_pattern[number][0]
                regex |= self._by_pattern[number][1]
            found = glob, regex
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


def columns(masks: Sequence[int], count: int) -> NDArray[np.bool_]:
    """Returns a matrix whose entry [c, m] is bit c of mask m. Negative masks have all bits set."""
    size = (count + 7) // 8
    everything = (1 << count) - 1
    data = b"".join([(mask & everything).to_bytes(size, "little") for mask in masks])
    rows = np.frombuffer(data, np.uint8).reshape(len(masks), size)
    bits = np.unpackbits(rows, axis=1, count=count, bitorder="little")
    return np.ascontiguousarray(bits.T).view(np.bool_)


def _bits(numbers: Iterable[int]) -> int:
    found = 0
    for number in numbers:
        found |= 1 << number
    return found
