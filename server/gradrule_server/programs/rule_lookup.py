"""Rules that a compile worker asks for, as the registry has them now."""

from __future__ import annotations

from collections.abc import Iterable

from gradrule.v1 import rule_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.registry.rule_names import RuleEntry
from gradrule_server.registry.rules import RuleRegistry

# An answer is made on the event loop, and copied several times. One rule has at most 1 MiB.
_MOST_ANSWER_BYTES = 4 << 20


class RegistryLookup:
    """Answers for one task; a name means the same rule throughout."""

    def __init__(self, registry: RuleRegistry) -> None:
        self._registry = registry
        self._found: dict[str, RuleEntry | None] = {}

    def find(self, names: Iterable[str]) -> list[rule_pb2.Rule]:
        """Returns the rules of these names, each with the name asked for as its alias; names without a rule are left
        out. A rule of the catalogue comes without its definition, which every process has. So do rules of users once
        an answer has 4 MiB: they are to be asked for again.
        """
        found, left = [], _MOST_ANSWER_BYTES
        for name in names:
            if name not in self._found:
                self._found[name] = self._registry.find(name)
            entry = self._found[name]
            if entry is not None:
                found.append(_message(name, entry, is_complete=entry.kind == rule_pb2.RULE_KIND_USER and left > 0))
                left -= entry.size
        return found

    def unknown(self, name: str) -> GradruleError:
        """Returns why there is no rule of this name."""
        return self._registry.unknown(name)

    def snapshot(self, names: Iterable[str]) -> bytes:
        """Returns the rules of these names, which were found, as bytes that a program can keep."""
        rules = [
            _message(name, entry, is_complete=True)
            for name in dict.fromkeys(names)
            if (entry := self._found.get(name)) is not None
        ]
        return rule_pb2.ListRulesResponse(rules=rules).SerializeToString(deterministic=True)


def _message(asked: str, entry: RuleEntry, *, is_complete: bool) -> rule_pb2.Rule:
    definition = entry.content.to_definition() if is_complete and entry.content is not None else None
    return rule_pb2.Rule(name=entry.op_type or entry.name, definition=definition, kind=entry.kind, aliases=[asked])
