"""Collects all findings about a graph, so that one error reports them together."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from gradrule.v1.errors_pb2 import ErrorReason
from gradrule_server.errors import Finding, GradruleError, Reason

# Responses hold at most 4 KiB of findings, so more would only cost time with hostile graphs.
MAX_FINDINGS = 500
# Each suggestion compares a name with many others, so only the first unknown names get one.
MAX_SUGGESTIONS = 20
MAX_CANDIDATES = 2000
MAX_QUOTED = 200


def quote(name: str) -> str:
    """Returns the name in quotes, shortened to `MAX_QUOTED` characters."""
    return repr(name) if len(name) <= MAX_QUOTED else f"{name[:MAX_QUOTED]!r}… ({len(name)} characters)"


class Findings:
    """A list of findings that stops growing at `MAX_FINDINGS`."""

    def __init__(self) -> None:
        self.all: list[Finding] = []
        self._suggestions = 0

    def __bool__(self) -> bool:
        return bool(self.all)

    @property
    def full(self) -> bool:
        """Whether the limit is reached, so that further findings are dropped."""
        return len(self.all) >= MAX_FINDINGS

    def add(self, reason: ErrorReason.ValueType, message: str, node: str = "", field: str = "") -> None:
        """Adds one finding, unless the limit is reached."""
        if len(self.all) < MAX_FINDINGS:
            self.all.append(Finding(reason, message, node[:MAX_QUOTED], field))

    def suggest(self, make: Callable[[], str]) -> str:
        """Returns the suggestion of `make` (` Did you mean …?`), for the first `MAX_SUGGESTIONS` names only."""
        if self._suggestions >= MAX_SUGGESTIONS:
            return ""
        self._suggestions += 1
        return make()

    def suggest_similar(self, name: str, known: Iterable[str]) -> str:
        """Returns ` Did you mean …?` with similar node names, or nothing; counts toward `MAX_SUGGESTIONS`."""
        return self.suggest(lambda: similar_name_hint(name, known))

    def raise_if_any(self) -> None:
        """Raises `GradruleError` with all findings, if there are any."""
        if self.all:
            raise GradruleError(self.all)


def similar_name_hint(name: str, known: Iterable[str]) -> str:
    """Returns ` Did you mean 'a/b'?`: names with the same last part, or else names of similar length and spelling."""
    last, folded = name.rsplit("/", 1)[-1], name.lower()
    same_part: list[str] = []
    similar: list[str] = []
    for candidate in known:
        if candidate.lower() == folded:
            return f" Did you mean {candidate!r}?"
        if candidate.rsplit("/", 1)[-1] == last and len(same_part) < 3:
            same_part.append(candidate)
        elif abs(len(candidate) - len(name)) <= max(2, len(name) // 3) and len(similar) < MAX_CANDIDATES:
            similar.append(candidate)
    close = same_part or difflib.get_close_matches(name[:MAX_QUOTED], similar, n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(quote(candidate) for candidate in close)}?" if close else ""


__all__ = ["Finding", "Findings", "GradruleError", "Reason", "similar_name_hint", "quote"]
