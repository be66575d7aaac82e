"""Errors as gRPC statuses: codes, details, and sizes that fit trailers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.rpc import error_details_pb2

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError, Resource, did_you_mean, error
from gradrule_server.front.calls import MAX_FINDINGS_BYTES, status_code, to_status

_PROTO = Path(__file__).resolve().parents[3] / "protos/gradrule/v1/errors.proto"
# With larger trailers gRPC replaces the error by one of its own; base64 adds a third.
_TRAILERS = 16 * 1024 * 3 // 4


def _documented_codes() -> dict[str, str]:
    """The code that errors.proto puts in brackets before each reason."""
    text = re.sub(r"\n\s*//", " ", _PROTO.read_text())
    return {name: code for code, name in re.findall(r"\[([A-Z_]+)\]\.\s+(ERROR_REASON_\w+) =", text)}


def test_every_reason_has_the_code_that_the_proto_documents() -> None:
    documented = _documented_codes()
    reasons = {name: number for name, number in errors_pb2.ErrorReason.items() if number}
    assert documented.keys() == reasons.keys()
    assert {name: status_code(errors_pb2.ErrorReason.Value(name)).name for name in reasons} == documented


def _details(status: object) -> dict[str, object]:
    found = {}
    for packed in status.details:  # type: ignore[attr-defined]
        for kind in ("ErrorInfo", "BadRequest", "RetryInfo", "ResourceInfo"):
            message = getattr(error_details_pb2, kind)()
            if packed.Is(message.DESCRIPTOR):
                packed.Unpack(message)
                found[kind] = message
    return found


def test_details_hold_reason_findings_delay_and_resource() -> None:
    cause = error(
        errors_pb2.ERROR_REASON_OVERLOADED, "full", retry_after_s=1.5, resource=Resource("gradrule.v1.Rule", "rules/a")
    )
    details = _details(to_status(cause))
    assert details["ErrorInfo"].reason == "OVERLOADED"  # type: ignore[attr-defined]
    assert details["ErrorInfo"].domain == "gradrule"  # type: ignore[attr-defined]
    assert details["RetryInfo"].retry_delay.ToSeconds() == 1  # type: ignore[attr-defined]
    assert details["ResourceInfo"].resource_name == "rules/a"  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["x" * 5000, "ü" * 5000])
def test_findings_are_cut_to_fit_trailers_and_counted(text: str) -> None:
    cause = GradruleError([Finding(errors_pb2.ERROR_REASON_DANGLING_INPUT, text, "n" * 900) for _ in range(500)])
    status = to_status(cause)
    details = _details(status)
    kept = len(details["BadRequest"].field_violations)  # type: ignore[attr-defined]
    assert 1 <= kept < 500
    assert details["BadRequest"].ByteSize() <= MAX_FINDINGS_BYTES  # type: ignore[attr-defined]
    assert details["ErrorInfo"].metadata["findings_total"] == "500"  # type: ignore[attr-defined]
    # What is sent: the status, and its message once more, percent-encoded.
    assert status.ByteSize() + 3 * len(status.message.encode()) < 9_000


def test_long_names_are_cut_and_the_error_stays() -> None:
    name = "ü" * 5_000_000
    cause = error(
        errors_pb2.ERROR_REASON_UNKNOWN_RULE,
        f"there is no rule {name!r}.{did_you_mean(name, ['ste'])}",
        node=name,
        field=name,
        resource=Resource("gradrule.v1.Rule", name),
    )
    status = to_status(cause)
    assert status.ByteSize() + 3 * len(status.message.encode()) < _TRAILERS
    assert len(status.details) == 3


def test_similar_names_are_found_among_many() -> None:
    known = [f"Rule{number}" for number in range(30_000)] + ["Surrogate", "x" * 1000]
    assert did_you_mean("Surogate", known) == " Did you mean 'Surrogate'?"
    assert did_you_mean("SURROGATE", ["surrogate"]) == " Did you mean 'surrogate'?"
    assert did_you_mean("Nothing", ["Sign"]) == ""
    assert did_you_mean("p1", ["p1", "p10"]) == " Did you mean 'p10'?"
    assert did_you_mean("p1", ["p1"]) == ""
    assert did_you_mean("x" * 1000, known) == ""
