"""Names that callers choose, of any length and number, cost neither the server's time nor the error's reason."""

from __future__ import annotations

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Resource, did_you_mean, error
from gradrule_server.front.error_status import to_status

# What gRPC takes as trailers before it replaces the error by one of its own; base64 adds a third.
_TRAILERS = 16 * 1024 * 3 // 4


def test_a_long_name_leaves_the_error_what_it_is() -> None:
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


def test_near_names_are_found_among_many() -> None:
    known = [f"Rule{number}" for number in range(30_000)] + ["Surrogate", "x" * 1000]
    assert did_you_mean("Surogate", known) == " Did you mean 'Surrogate'?"
    assert did_you_mean("SURROGATE", ["surrogate"]) == " Did you mean 'surrogate'?"
    assert did_you_mean("Nothing", ["Sign"]) == ""
    assert did_you_mean("p1", ["p1", "p10"]) == " Did you mean 'p10'?"
    assert did_you_mean("p1", ["p1"]) == ""
    assert did_you_mean("x" * 1000, known) == ""
