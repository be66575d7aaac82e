"""What a compile worker asks the front end for: rules by name, and blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import GradruleError, Resource, error
from gradrule_server.link.faults import error_of
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import check_blob_name, missing_blobs
from gradrule_server.preparation.rule_lookup import ResolvedRule, read_rule

Ask = Callable[[link_pb2.Question], link_pb2.Told]
"""Asks the front end, and waits for the answer."""

_BATCH_NAMES = 500
# What is wrong with a name that is close to another takes the front end milliseconds to say.
_MAX_EXPLAINED = 20
# More names than there are rules; those beyond have none.
_MAX_NAMES = 20_000
# Longer than names of rules can be, prefixes included: no such rule needs to be asked for.
_MAX_NAME_CHARS = 200


class FrontEndRules:
    """Rules as the front end's registry has them now."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: dict[str, ResolvedRule | None] = {}
        self._explained = 0
        self.used: dict[str, None] = {}
        """Names of rules that were resolved, in the order of their first use."""

    def fetch(self, names: Iterable[str]) -> None:
        """Asks for rules that are likely to be resolved, many at a time."""
        wanted = [name for name in dict.fromkeys(names) if name not in self._known and len(name) <= _MAX_NAME_CHARS]
        wanted = wanted[: max(0, _MAX_NAMES - len(self._known))]
        while wanted:
            batch = wanted[:_BATCH_NAMES]
            answer = _raise_fault(self._ask(link_pb2.Question(rules=link_pb2.Names(names=batch))))
            self._known.update(dict.fromkeys(batch))
            complete = [rule for rule in answer.rules if not _lacks_definition(rule)]
            self._known.update((rule.aliases[0], read_rule(rule)) for rule in complete)
            wanted = [rule.aliases[0] for rule in answer.rules if _lacks_definition(rule)] + wanted[_BATCH_NAMES:]

    def resolve(self, name: str) -> ResolvedRule:
        """Returns the rule of that name. UNKNOWN_RULE if there is none."""
        if name not in self._known:
            self.fetch([name])
        rule = self._known.get(name)
        if rule is None:
            raise self._unknown(name)
        self.used[name] = None
        return rule

    def _unknown(self, name: str) -> GradruleError:
        self._explained += 1
        if self._explained <= _MAX_EXPLAINED and len(name) <= _MAX_NAME_CHARS:
            return error_of(self._ask(link_pb2.Question(unknown_rule=name)).fault)
        bare = name.removeprefix("rules/")
        return error(
            errors_pb2.ERROR_REASON_UNKNOWN_RULE,
            f"there is no rule {bare!r}.",
            field="name",
            resource=Resource("gradrule.v1.Rule", f"rules/{bare}"),
        )


class FrontEndBlobs:
    """The caller's blobs: the front end knows their sizes and checks their bytes, which are read here.

    Args:
        ask: Asks the front end.
        read: Returns the bytes of a blob that the front end has checked.
    """

    def __init__(self, ask: Ask, read: Callable[[str], bytes]) -> None:
        self._ask = ask
        self._read = read
        self._sizes: dict[str, int] = {}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns those that are not there, each once. MALFORMED_REQUEST for what is no hash."""
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            check_blob_name(name)
        for start in range(0, len(wanted), _BATCH_NAMES):
            batch = wanted[start : start + _BATCH_NAMES]
            answer = _raise_fault(self._ask(link_pb2.Question(blob_sizes=link_pb2.Names(names=batch))))
            self._sizes.update(zip(batch, answer.sizes, strict=True))
        return [name for name in wanted if self._sizes[name] < 0]

    def size(self, name: str) -> int:
        """Returns the number of bytes. BLOB_NOT_FOUND."""
        check_blob_name(name)
        if name not in self._sizes:
            self.missing([name])
        if self._sizes[name] < 0:
            raise missing_blobs([name])
        return self._sizes[name]

    def read(self, name: str) -> bytes:
        """Returns the bytes. BLOB_NOT_FOUND."""
        _raise_fault(self._ask(link_pb2.Question(blob=name)))
        return self._read(name)


def _lacks_definition(rule: rule_pb2.Rule) -> bool:
    """Returns whether the definition of a rule is to be asked for again: it had no room in the answer."""
    return rule.kind == rule_pb2.RULE_KIND_USER and not rule.HasField("definition")


def _raise_fault(answer: link_pb2.Told) -> link_pb2.Told:
    """Raises the error that the front end answer."""
    if answer.HasField("fault"):
        raise error_of(answer.fault)
    return answer
