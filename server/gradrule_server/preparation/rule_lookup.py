"""Where a program's rules come from: the front end when the program is new, its own snapshot ever after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import Resource, error
from gradrule_server.rules import RuleContent
from gradrule_server.rules.catalogue import BUILTINS
from gradrule_server.rules.catalogue.presets import BUILTIN_PREFIX


@dataclass(frozen=True, slots=True)
class ResolvedRule:
    """A rule by content: an expression or graph, or (None) the gradient that TensorFlow registers for `name`.

    `embedded`: the graph brings it along; its content is known once the graph is expanded.
    """

    name: str
    content: RuleContent | None
    embedded: bool = False


class RuleLookup(Protocol):
    """Rules by name."""

    def fetch(self, names: Iterable[str]) -> None:
        """Announces names that are likely to be resolved, so that they are looked up together."""
        ...

    def resolve(self, name: str) -> ResolvedRule:
        """Returns the rule of that name; UNKNOWN_RULE if there is none."""
        ...


class SnapshotLookup:
    """Rules as they were when a program was compiled, whatever happened to their names since."""

    def __init__(self, snapshot: bytes) -> None:
        self._rules = {
            rule.aliases[0]: ResolvedRule(
                rule.name,
                None
                if rule.kind == rule_pb2.RULE_KIND_OP
                else RuleContent.from_stored(rule.name.removeprefix(BUILTIN_PREFIX), rule.definition),
            )
            for rule in rule_pb2.ListRulesResponse.FromString(snapshot).rules
        }

    def fetch(self, names: Iterable[str]) -> None:
        """Does nothing: all rules are there."""

    def resolve(self, name: str) -> ResolvedRule:
        rule = self._rules.get(name)
        if rule is None:
            raise error(
                errors_pb2.ERROR_REASON_UNKNOWN_RULE,
                f"the program was compiled without a rule {name!r}",
                resource=Resource("gradrule.v1.Rule", f"rules/{name}"),
            )
        return rule


def read_rule(rule: rule_pb2.Rule) -> ResolvedRule:
    """Returns the rule that the front end sent. One of the catalogue comes without its content."""
    if rule.kind == rule_pb2.RULE_KIND_OP:
        return ResolvedRule(rule.name, None)
    name = rule.name.removeprefix(BUILTIN_PREFIX)
    if rule.kind == rule_pb2.RULE_KIND_BUILTIN:
        return ResolvedRule(rule.name, BUILTINS[name].content)
    return ResolvedRule(rule.name, RuleContent.from_stored(name, rule.definition))
