"""The one namespace of rules: what each name means, and in which order they are listed."""

from __future__ import annotations

import datetime
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from gradrule.v1 import rule_pb2
from gradrule_server.rules import RuleContent
from gradrule_server.rules.catalogue import presets

BUILTIN_PREFIX = presets.BUILTIN_PREFIX

Place = tuple[int, str]
"""Where a rule stands in the list: kind (USER, BUILTIN, OP), then name."""


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """A rule under its name. An OP rule has no content, digest or time: it is the gradient of `op_type`.

    `hides_builtin`: a USER rule whose name a BUILTIN rule has too. `size`: bytes that a USER rule keeps.
    """

    name: str
    kind: rule_pb2.RuleKind.ValueType
    content: RuleContent | None = None
    op_type: str = ""
    description: str = ""
    op_types: tuple[str, ...] = ()
    reference: str = ""
    digest: str = ""
    create_time: datetime.datetime | None = None
    per_sample: bool | None = None
    aliases: tuple[str, ...] = ()
    formula: str = ""
    family: str = ""
    true_gradient: bool = False
    hides_builtin: bool = False
    size: int = 0


@dataclass(frozen=True)
class Names:
    """All rules at one moment. Never changed, only replaced, so that it is read without a lock.

    A bare name means the USER rule, else the BUILTIN, else the OP rule. A USER rule hides others only where they
    arrived later, with an upgrade: nobody's rule changes its meaning by that. `builtin/NAME` always means the BUILTIN.
    """

    user: Mapping[str, RuleEntry]
    builtin: Mapping[str, RuleEntry]
    """By name and by alias."""
    op: Mapping[str, RuleEntry]

    def find(self, name: str) -> RuleEntry | None:
        """What the name means, if anything."""
        if name.startswith(BUILTIN_PREFIX):
            return self._builtin(name.removeprefix(BUILTIN_PREFIX))
        return self.user.get(name) or self._builtin(name) or self.op.get(name)

    @cached_property
    def clashes(self) -> tuple[str, ...]:
        """Names of USER rules that hide a BUILTIN or OP rule."""
        return tuple(sorted(name for name in self.user if name in self.builtin or name in self.op))

    def all(self) -> Iterator[str]:
        """Every name."""
        yield from self.user
        yield from self.builtin
        yield from self.op

    def after(self, kind: rule_pb2.RuleKind.ValueType, place: Place, count: int) -> list[tuple[Place, RuleEntry]]:
        """At most `count` entries of the kind (unspecified: any) that come after `place`, each with its place."""
        entries = self._ordered
        start = bisect_right(entries, place, key=lambda item: item[0])
        chosen = (item for item in entries[start:] if kind in (rule_pb2.RULE_KIND_UNSPECIFIED, item[1].kind))
        return list(islice(chosen, count))

    @cached_property
    def _ordered(self) -> list[tuple[Place, RuleEntry]]:
        places = [((0, name), entry) for name, entry in self.user.items()]
        # A hidden OP rule is left out, since no name means it.
        places += [((1, name), self._shown(entry)) for name, entry in self.builtin.items() if name == entry.name]
        places += [((2, name), entry) for name, entry in self.op.items() if self.find(name) is entry]
        return sorted(places, key=lambda item: item[0])

    def _builtin(self, name: str) -> RuleEntry | None:
        entry = self.builtin.get(name)
        return None if entry is None else self._shown(entry)

    def _shown(self, entry: RuleEntry) -> RuleEntry:
        """The entry under a name that means it: `builtin/NAME` where a USER rule hides it."""
        return replace(entry, name=BUILTIN_PREFIX + entry.name) if entry.name in self.user else entry


def by_name(entries: Iterable[RuleEntry]) -> dict[str, RuleEntry]:
    """Entries by name and by alias."""
    found = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            found[name] = entry
    return found
