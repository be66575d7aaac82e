"""Which requests are admitted when the server is full."""

from __future__ import annotations

import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.front.admission import Admission, InFlight, InFlightLimits


def admission(requests: int = 8, size: int = 800, *, of_one: int = 100, size_of_one: int = 10_000) -> Admission:
    return Admission(InFlightLimits(requests, size), InFlightLimits(of_one, size_of_one))


def refused(pipeline: Admission, share: InFlight, size: int = 0) -> str:
    with pytest.raises(GradruleError) as refusal:
        pipeline.admit(share, size)
    assert reason_name(refusal.value.reason) == "OVERLOADED"
    assert refusal.value.retry_after_s == 0.2
    return refusal.value.message


def fill(pipeline: Admission, share: InFlight, count: int, size: int = 0) -> None:
    for _ in range(count):
        pipeline.admit(share, size)


def test_single_tenant_may_use_the_whole_server() -> None:
    pipeline, one = admission(), InFlight()
    fill(pipeline, one, 8)
    assert "--max-concurrent-requests" in refused(pipeline, one)
    pipeline.release(one, 0)
    fill(pipeline, one, 1)
    assert pipeline.in_flight == one.requests == 8


def test_tenant_is_limited_to_its_quota() -> None:
    pipeline, one = admission(of_one=3), InFlight()
    fill(pipeline, one, 3)
    assert "--tenant-requests" in refused(pipeline, one)
    fill(pipeline, InFlight(), 3)


def test_first_tenant_does_not_keep_others_out() -> None:
    pipeline, greedy, modest = admission(), InFlight(), InFlight()
    fill(pipeline, greedy, 8)
    # Two are here now: each may have half.
    fill(pipeline, modest, 4)
    refused(pipeline, modest)
    refused(pipeline, greedy)
    for _ in range(5):
        pipeline.release(greedy, 0)
    fill(pipeline, greedy, 1)


def test_fair_shares_are_limited() -> None:
    pipeline = admission()
    for _ in range(8):
        fill(pipeline, InFlight(), 1)
    # Nine share eight: no whole request is left for the ninth.
    refused(pipeline, InFlight())


def test_server_is_never_filled_beyond_twice_its_limit() -> None:
    pipeline, first = admission(), InFlight()
    fill(pipeline, first, 8)
    for others in range(1, 40):
        share = InFlight()
        for _ in range(8 // (others + 1)):
            if pipeline.find_refusal(share) is None:
                pipeline.admit(share, 0)
    assert pipeline.in_flight <= 16


def test_bytes_are_shared_like_requests() -> None:
    pipeline, greedy, modest = admission(100), InFlight(), InFlight()
    fill(pipeline, greedy, 8, 100)
    assert "--max-bytes-in-flight" in refused(pipeline, greedy, 1)
    fill(pipeline, modest, 4, 100)
    refused(pipeline, modest, 100)
    for _ in range(8):
        pipeline.release(greedy, 100)
    assert (greedy.requests, greedy.size) == (0, 0)
    pipeline.admit(greedy, 400)


def test_answers_of_one_tenant_do_not_refuse_others() -> None:
    pipeline, greedy, modest = admission(100), InFlight(), InFlight()
    # An answer that is alone may be of any size, and its client need not read it.
    pipeline.admit_bytes(greedy, 100_000)
    with pytest.raises(GradruleError):
        pipeline.admit_bytes(greedy, 1)
    pipeline.admit(modest, 400)
    pipeline.release(modest, 400)
    pipeline.adjust_bytes(greedy, -100_000)
    fill(pipeline, modest, 8, 100)
    assert "--max-bytes-in-flight" in refused(pipeline, modest, 1)


def test_only_request_of_a_tenant_may_have_any_size() -> None:
    pipeline, one = admission(size_of_one=50), InFlight()
    pipeline.admit(one, 5000)
    assert "--tenant-bytes-in-flight" in refused(admission_with(one, size_of_one=50), one, 1)
    pipeline.release(one, 5000)
    assert (one.size, one.requests) == (0, 0)


def admission_with(share: InFlight, size_of_one: int) -> Admission:
    """A pipeline that knows of what a share has already."""
    pipeline = admission(size=10**6, size_of_one=size_of_one)
    share.size, share.requests = 5000, 1
    return pipeline


def test_refused_request_is_not_counted() -> None:
    pipeline, one = admission(1), InFlight()
    fill(pipeline, one, 1)
    for _ in range(5):
        refused(pipeline, one, 10)
    pipeline.release(one, 0)
    assert (pipeline.in_flight, one.requests, one.size) == (0, 0, 0)
