"""Defines `GradruleError`, the only error type that the server's own code raises once it has started.

`front.calls` converts it into a `google.rpc.Status`, and the engine into a `Fault` message. This module imports
neither gRPC nor TensorFlow.
"""

from __future__ import annotations

import difflib
import errno
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError, EncodeError

from gradrule.v1 import errors_pb2

Reason = errors_pb2.ErrorReason

_PREFIX = "ERROR_REASON_"


class CannotStartError(Exception):
    """The server cannot start; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: its reason, a sentence, and its place: the name of a node or a field of the request."""

    reason: errors_pb2.ErrorReason.ValueType
    message: str
    node: str = ""
    field: str = ""


@dataclass(frozen=True, slots=True)
class Resource:
    """The resource that an error is about."""

    type: str
    name: str


@dataclass
class GradruleError(Exception):
    """An error with at least one finding; the first finding determines its reason and status code.

    Attributes:
        findings: The problems, the most important first.
        retry_after_s: Seconds after which the same request may succeed; None: not known.
        resource: The resource that the error is about.
        resources: The resources, if there are several.
    """

    findings: Sequence[Finding]
    retry_after_s: float | None = None
    resource: Resource | None = None
    resources: Sequence[Resource] = ()

    @property
    def reason(self) -> errors_pb2.ErrorReason.ValueType:
        return self.findings[0].reason

    @property
    def message(self) -> str:
        return self.findings[0].message

    def __str__(self) -> str:
        return f"{reason_name(self.reason)}: {self.message}"


@dataclass
class NoMemoryLeft(GradruleError):
    """A process had no memory left for a request: MEMORY_EXCEEDED. Another process may have enough.

    Attributes:
        holds_nothing: Whether the process holds next to nothing, so that another one would have no more memory.
        is_alone: Whether the process has loaded no other program and runs nothing else.
    """

    holds_nothing: bool = False
    is_alone: bool = False


def lacks_memory(cause: BaseException | None) -> bool:
    """Returns whether an exception reports that this process could not get memory, or a thread with its stack."""
    if isinstance(cause, DecodeError):
        return "alloc" in str(cause)
    if isinstance(cause, RuntimeError):
        return "can't start new thread" in str(cause)
    # No message has required fields, so only lack of memory prevents that it is serialized.
    return isinstance(cause, (MemoryError, EncodeError)) or (isinstance(cause, OSError) and cause.errno == errno.ENOMEM)


def error(
    reason: errors_pb2.ErrorReason.ValueType,
    message: str,
    *,
    node: str = "",
    field: str = "",
    retry_after_s: float | None = None,
    resource: Resource | None = None,
) -> GradruleError:
    """Returns a `GradruleError` with one finding; the caller raises it."""
    return GradruleError([Finding(reason, message, node, field)], retry_after_s, resource)


def reason_name(reason: errors_pb2.ErrorReason.ValueType) -> str:
    """Returns the reason's name without its prefix: `UNKNOWN_RULE`."""
    return errors_pb2.ErrorReason.Name(reason).removeprefix(_PREFIX)


# Comparing two names takes up to 0.1 µs for each pair of characters. Callers choose both names, so the time is limited.
_MAX_CHARACTER_PAIRS = 1_000_000
_MAX_NAME_LENGTH = 128


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a hint such as ` Did you mean 'Sign'?` if a known name is similar to `name`, else an empty string.

    Names with the same last part, as in `a/b`, come first. `name` itself is never suggested, because a lookup
    of it has just failed.
    """
    close = _similar_names(name, known) if len(name) <= _MAX_NAME_LENGTH else []
    return f" Did you mean {' or '.join(repr(candidate) for candidate in close)}?" if close else ""


def _similar_names(name: str, known: Iterable[str]) -> list[str]:
    candidates = [candidate for candidate in known if len(candidate) <= _MAX_NAME_LENGTH and candidate != name]
    last = name.rpartition("/")[2]
    same_part = [candidate for candidate in candidates if candidate.rpartition("/")[2] == last]
    if same_part:
        return same_part[:3]
    if len(name) * sum(map(len, candidates)) > _MAX_CHARACTER_PAIRS:
        # Compare the likeliest candidates only: same first letter first, then similar length.
        first, length = name[:1].lower(), len(name)
        candidates.sort(key=lambda candidate: (candidate[:1].lower() != first, abs(len(candidate) - length)))
        pairs = itertools.accumulate(len(name) * len(candidate) for candidate in candidates)
        candidates = [
            candidate for candidate, total in zip(candidates, pairs, strict=True) if total <= _MAX_CHARACTER_PAIRS
        ]
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)
    return close or [candidate for candidate in candidates if candidate.lower() == name.lower()][:3]


# Responses hold at most 4 KiB of findings, so more would only cost time with hostile graphs.
MAX_FINDINGS = 500
# Each suggestion compares a name with many others, so only the first unknown names get one.
MAX_SUGGESTIONS = 20
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

    def add(self, reason: errors_pb2.ErrorReason.ValueType, message: str, node: str = "", field: str = "") -> None:
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
        return self.suggest(lambda: did_you_mean(name, known))

    def raise_if_any(self) -> None:
        """Raises `GradruleError` with all findings, if there are any."""
        if self.all:
            raise GradruleError(self.all)
