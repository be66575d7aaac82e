"""Where a program's rules come from: the registry when it is new, its own snapshot ever after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import Resource, error
from gradrule_server.registry.names import BUILTIN_PREFIX
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.rules import RuleContent


@dataclass(frozen=True, slots=True)
class ResolvedRule:
    """A rule by content: an expression or graph, or (None) the gradient that TensorFlow registers for `name`.

    `brought`: the graph brings it along; its content is known once the graph is expanded.
    """

    name: str
    content: RuleContent | None
    brought: bool = False


class RuleLookup(Protocol):
    """Rules by name."""

    def resolve(self, name: str) -> ResolvedRule:
        """The rule of that name; UNKNOWN_RULE if there is none."""
        ...


class RegistryLookup:
    """Rules as the registry has them now; remembers what was asked for, so that a program can keep it."""

    def __init__(self, registry: RuleRegistry) -> None:
        self._registry = registry
        self._used: dict[str, rule_pb2.Rule] = {}

    def resolve(self, name: str) -> ResolvedRule:
        entry = self._registry.get(name)
        definition = None if entry.content is None else entry.content.to_definition()
        self._used[name] = rule_pb2.Rule(name=entry.op_type or entry.name, kind=entry.kind, definition=definition)
        return ResolvedRule(entry.op_type or entry.name, entry.content)

    def snapshot(self) -> bytes:
        """The rules asked for, under the names they were asked for."""
        rules = [
            rule_pb2.Rule(name=rule.name, definition=rule.definition, kind=rule.kind, aliases=[asked])
            for asked, rule in self._used.items()
        ]
        return rule_pb2.ListRulesResponse(rules=rules).SerializeToString(deterministic=True)


class SnapshotLookup:
    """Rules as they were when a program was compiled, whatever happened to their names since."""

    def __init__(self, snapshot: bytes) -> None:
        self._rules = {
            rule.aliases[0]: ResolvedRule(
                rule.name,
                None
                if rule.kind == rule_pb2.RULE_KIND_OP
                else RuleContent.from_kept(rule.name.removeprefix(BUILTIN_PREFIX), rule.definition),
            )
            for rule in rule_pb2.ListRulesResponse.FromString(snapshot).rules
        }

    def resolve(self, name: str) -> ResolvedRule:
        rule = self._rules.get(name)
        if rule is None:
            raise error(
                errors_pb2.ERROR_REASON_UNKNOWN_RULE,
                f"the program was compiled without a rule {name!r}",
                resource=Resource("gradrule.v1.Rule", f"rules/{name}"),
            )
        return rule
