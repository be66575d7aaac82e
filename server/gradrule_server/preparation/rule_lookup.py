"""Resolves a program's rules by name: from the front end for new programs, else from the program's snapshot."""

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
    """A rule with its content; None: the gradient that TensorFlow registers for the op type `name`.

    `embedded`: whether the rule is part of the graph; its content is then set after the graph is expanded.
    """

    name: str
    content: RuleContent | None
    embedded: bool = False


class RuleLookup(Protocol):
    """Resolves rules by name."""

    def fetch(self, names: Iterable[str]) -> None:
        """Fetches rules that are likely to be resolved, in one request."""
        ...

    def resolve(self, name: str) -> ResolvedRule:
        """Returns the rule `name`. Raises UNKNOWN_RULE if no rule has this name."""
        ...


class SnapshotLookup:
    """Resolves rules as they were when a program was compiled, regardless of later registry changes."""

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
        """Does nothing, because the snapshot holds all rules."""

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
    """Reads a rule that the front end sent. Content of built-in rules comes from the catalogue."""
    if rule.kind == rule_pb2.RULE_KIND_OP:
        return ResolvedRule(rule.name, None)
    name = rule.name.removeprefix(BUILTIN_PREFIX)
    if rule.kind == rule_pb2.RULE_KIND_BUILTIN:
        return ResolvedRule(rule.name, BUILTINS[name].content)
    return ResolvedRule(rule.name, RuleContent.from_stored(name, rule.definition))
