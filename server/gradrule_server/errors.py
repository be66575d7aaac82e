"""The one error type that the server raises.

Pure: no gRPC, no TensorFlow. Domain code raises `GradruleError`; `front.status` turns it into a `google.rpc.Status`,
and the engine into a `Fault`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradrule.v1 import errors_pb2

Reason = errors_pb2.ErrorReason

_PREFIX = "ERROR_REASON_"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: reason, sentence, and where, as a node's name or a field of the request."""

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
    """A refusal with at least one finding; the first one decides reason and code.

    `retry_after_s`: seconds after which the same request may work. `resource`: what the error is about; `resources`:
    where these are several.
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


def error(
    reason: errors_pb2.ErrorReason.ValueType,
    message: str,
    *,
    node: str = "",
    field: str = "",
    retry_after_s: float | None = None,
    resource: Resource | None = None,
) -> GradruleError:
    """A `GradruleError` with one finding."""
    return GradruleError([Finding(reason, message, node, field)], retry_after_s, resource)


def reason_name(reason: errors_pb2.ErrorReason.ValueType) -> str:
    """The reason without its prefix: `UNKNOWN_RULE`."""
    return errors_pb2.ErrorReason.Name(reason).removeprefix(_PREFIX)


# Comparing takes time that grows with the product of the lengths, up to 0.1 µs for each pair of characters: callers
# choose the names on both sides, and must not choose how long it takes.
_MAX_COMPARED = 1_000_000
_MAX_NAME = 128


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'Sign'?` for a near miss, else nothing. The name itself is none: it was just not found."""
    close = _close(name, known) if len(name) <= _MAX_NAME else []
    return f" Did you mean {' or '.join(repr(candidate) for candidate in close)}?" if close else ""


def _close(name: str, known: Iterable[str]) -> list[str]:
    candidates = [candidate for candidate in known if len(candidate) <= _MAX_NAME and candidate != name]
    if len(name) * sum(map(len, candidates)) > _MAX_COMPARED:
        # The likeliest: those that begin alike, then those of about the same length.
        first, length = name[:1].lower(), len(name)
        candidates.sort(key=lambda candidate: (candidate[:1].lower() != first, abs(len(candidate) - length)))
        budget = itertools.accumulate(len(name) * len(candidate) for candidate in candidates)
        candidates = [candidate for candidate, spent in zip(candidates, budget, strict=True) if spent <= _MAX_COMPARED]
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)
    return close or [candidate for candidate in candidates if candidate.lower() == name.lower()][:3]
