"""Fetches rules and blobs from the front end while a compile worker prepares a program."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gradrule.v1 import errors_pb2, rule_pb2
from gradrule_server.errors import GradruleError, Resource, error
from gradrule_server.link.messages import error_from_fault
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import check_blob_name, missing_blobs
from gradrule_server.preparation.rule_lookup import ResolvedRule, read_rule

Ask = Callable[[link_pb2.Question], link_pb2.Answer]
"""Sends a question to the front end and returns its answer."""

_BATCH_NAMES = 500
# Largest number of unknown names with suggestions, because the front end needs milliseconds for each.
_MAX_EXPLAINED = 20
# Largest number of looked-up names, more than any registry has rules; further names count as unknown.
_MAX_NAMES = 20_000
# Names of rules with prefixes are shorter than this; longer names count as unknown without a request.
_MAX_NAME_CHARS = 200


class FrontEndRules:
    """Looks up rules in the front end's registry."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: dict[str, ResolvedRule | None] = {}
        self._explained = 0
        self.used: dict[str, None] = {}
        """Names of the resolved rules, in the order of their first use."""

    def fetch(self, names: Iterable[str]) -> None:
        """Fetches rules that are likely to be resolved, in batches."""
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
        """Returns the rule `name`. Raises UNKNOWN_RULE if no rule has this name."""
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
            return error_from_fault(self._ask(link_pb2.Question(unknown_rule=name)).fault)
        bare = name.removeprefix("rules/")
        return error(
            errors_pb2.ERROR_REASON_UNKNOWN_RULE,
            f"there is no rule {bare!r}.",
            field="name",
            resource=Resource("gradrule.v1.Rule", f"rules/{bare}"),
        )


class FrontEndBlobs:
    """Reads the caller's blobs; the front end gives their sizes and verifies their bytes.

    Args:
        ask: Sends a question to the front end.
        read: Returns the bytes of a blob that the front end has checked.
    """

    def __init__(self, ask: Ask, read: Callable[[str], bytes]) -> None:
        self._ask = ask
        self._read = read
        self._sizes: dict[str, int] = {}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Returns the missing blobs, each once. Raises MALFORMED_REQUEST for a name that is not a hash."""
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            check_blob_name(name)
        for start in range(0, len(wanted), _BATCH_NAMES):
            batch = wanted[start : start + _BATCH_NAMES]
            answer = _raise_fault(self._ask(link_pb2.Question(blob_sizes=link_pb2.Names(names=batch))))
            self._sizes.update(zip(batch, answer.sizes, strict=True))
        return [name for name in wanted if self._sizes[name] < 0]

    def size(self, name: str) -> int:
        """Returns the size of a blob in bytes. Raises BLOB_NOT_FOUND."""
        check_blob_name(name)
        if name not in self._sizes:
            self.missing([name])
        if self._sizes[name] < 0:
            raise missing_blobs([name])
        return self._sizes[name]

    def read(self, name: str) -> bytes:
        """Returns the bytes of a blob. Raises BLOB_NOT_FOUND."""
        _raise_fault(self._ask(link_pb2.Question(blob=name)))
        return self._read(name)


def _lacks_definition(rule: rule_pb2.Rule) -> bool:
    """Returns whether a rule must be requested again, because its definition did not fit into the answer."""
    return rule.kind == rule_pb2.RULE_KIND_USER and not rule.HasField("definition")


def _raise_fault(answer: link_pb2.Answer) -> link_pb2.Answer:
    """Returns the answer, or raises the error in it."""
    if answer.HasField("fault"):
        raise error_from_fault(answer.fault)
    return answer
