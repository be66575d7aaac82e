"""Resolves names of rules: one namespace of USER, BUILTIN and OP rules, and the order of their listing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from gradrule.v1 import rule_pb2
from gradrule_server.registry.rule_entries import RuleEntry
from gradrule_server.rules.catalogue.presets import BUILTIN_PREFIX

ListPosition = tuple[int, str]
"""The sort key of a rule in the listing: kind (USER, BUILTIN, OP), then name."""


@dataclass(frozen=True)
class RuleNames:
    """The rules of a tenant at one moment, by name. Immutable, so that readers need no lock.

    A bare name means the USER rule, else the BUILTIN rule, else the OP rule. A USER rule can hide another rule only if
    an upgrade added that rule later; the name then keeps its meaning. `builtin/NAME` always means the BUILTIN rule.

    Attributes:
        user: USER rules by name.
        builtin: BUILTIN rules by name and by alias.
        op: OP rules by op type.
    """

    user: Mapping[str, RuleEntry]
    builtin: Mapping[str, RuleEntry]
    op: Mapping[str, RuleEntry]

    def find(self, name: str) -> RuleEntry | None:
        """Returns the rule that a name means; None if there is none."""
        if name.startswith(BUILTIN_PREFIX):
            return self._builtin(name.removeprefix(BUILTIN_PREFIX))
        return self.user.get(name) or self._builtin(name) or self.op.get(name)

    @cached_property
    def clashes(self) -> tuple[str, ...]:
        """Names of USER rules that hide a BUILTIN or OP rule."""
        return tuple(sorted(name for name in self.user if name in self.builtin or name in self.op))

    def all_names(self) -> Iterator[str]:
        """Yields every name and alias; yields a name once for each rule that has it."""
        yield from self.user
        yield from self.builtin
        yield from self.op

    def list_after(
        self, kind: rule_pb2.RuleKind.ValueType, position: ListPosition, count: int
    ) -> list[tuple[ListPosition, RuleEntry]]:
        """Returns at most `count` rules of a kind (unspecified: any) after `position`, each with its position."""
        entries = self._ordered
        start = bisect_right(entries, position, key=lambda item: item[0])
        chosen = (item for item in entries[start:] if kind in (rule_pb2.RULE_KIND_UNSPECIFIED, item[1].kind))
        return list(islice(chosen, count))

    @cached_property
    def _ordered(self) -> list[tuple[ListPosition, RuleEntry]]:
        entries = [((0, name), entry) for name, entry in self.user.items()]
        entries += [((1, name), self._reachable(entry)) for name, entry in self.builtin.items() if name == entry.name]
        # Omit hidden OP rules, because no name means them.
        entries += [((2, name), entry) for name, entry in self.op.items() if self.find(name) is entry]
        return sorted(entries, key=lambda item: item[0])

    def _builtin(self, name: str) -> RuleEntry | None:
        entry = self.builtin.get(name)
        return None if entry is None else self._reachable(entry)

    def _reachable(self, entry: RuleEntry) -> RuleEntry:
        """Returns the BUILTIN rule with a name that means it: `builtin/NAME` if a USER rule hides it."""
        return replace(entry, name=BUILTIN_PREFIX + entry.name) if entry.name in self.user else entry
