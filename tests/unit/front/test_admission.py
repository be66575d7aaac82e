"""Who is let in when it is full."""

from __future__ import annotations

import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.front.admission import Admission, Bound, Share


def admission(requests: int = 8, size: int = 800, *, of_one: int = 100, size_of_one: int = 10_000) -> Admission:
    return Admission(Bound(requests, size), Bound(of_one, size_of_one))


def refused(door: Admission, share: Share, size: int = 0) -> str:
    with pytest.raises(GradruleError) as refusal:
        door.enter(share, size)
    assert reason_name(refusal.value.reason) == "OVERLOADED"
    assert refusal.value.retry_after_s == 0.2
    return refusal.value.message


def fill(door: Admission, share: Share, count: int, size: int = 0) -> None:
    for _ in range(count):
        door.enter(share, size)


def test_one_alone_gets_all() -> None:
    door, one = admission(), Share()
    fill(door, one, 8)
    assert "--max-concurrent-requests" in refused(door, one)
    door.leave(one, 0)
    fill(door, one, 1)
    assert door.in_flight == one.requests == 8


def test_a_tenant_gets_no_more_than_its_quota() -> None:
    door, one = admission(of_one=3), Share()
    fill(door, one, 3)
    assert "--tenant-requests" in refused(door, one)
    fill(door, Share(), 3)


def test_whoever_came_first_does_not_keep_others_out() -> None:
    door, greedy, modest = admission(), Share(), Share()
    fill(door, greedy, 8)
    # Two are here now: each may have half.
    fill(door, modest, 4)
    refused(door, modest)
    refused(door, greedy)
    for _ in range(5):
        door.leave(greedy, 0)
    fill(door, greedy, 1)


def test_fair_shares_have_an_end() -> None:
    door = admission()
    for _ in range(8):
        fill(door, Share(), 1)
    # Nine share eight: no whole request is left for the ninth.
    refused(door, Share())


def test_never_more_than_twice_the_whole() -> None:
    door, first = admission(), Share()
    fill(door, first, 8)
    for others in range(1, 40):
        share = Share()
        for _ in range(8 // (others + 1)):
            if door.refusal(share) is None:
                door.enter(share, 0)
    assert door.in_flight <= 16


def test_bytes_are_shared_as_requests_are() -> None:
    door, greedy, modest = admission(100), Share(), Share()
    fill(door, greedy, 8, 100)
    assert "--max-bytes-in-flight" in refused(door, greedy, 1)
    fill(door, modest, 4, 100)
    refused(door, modest, 100)
    for _ in range(8):
        door.leave(greedy, 100)
    assert (greedy.requests, greedy.size) == (0, 0)
    door.enter(greedy, 400)


def test_one_tenant_s_answers_refuse_nobody_else() -> None:
    door, greedy, modest = admission(100), Share(), Share()
    # An answer that is alone may be of any size, and its client need not read it.
    door.grow(greedy, 100_000)
    with pytest.raises(GradruleError):
        door.grow(greedy, 1)
    door.enter(modest, 400)
    door.leave(modest, 400)
    door.adjust(greedy, -100_000)
    fill(door, modest, 8, 100)
    assert "--max-bytes-in-flight" in refused(door, modest, 1)


def test_what_is_alone_may_be_of_any_size() -> None:
    door, one = admission(size_of_one=50), Share()
    door.enter(one, 5000)
    assert "--tenant-bytes-in-flight" in refused(admission_with(one, size_of_one=50), one, 1)
    door.leave(one, 5000)
    assert (one.size, one.requests) == (0, 0)


def admission_with(share: Share, size_of_one: int) -> Admission:
    """A door that knows of what a share has already."""
    door = admission(size=10**6, size_of_one=size_of_one)
    share.size, share.requests = 5000, 1
    return door


def test_a_refusal_counts_nothing() -> None:
    door, one = admission(1), Share()
    fill(door, one, 1)
    for _ in range(5):
        refused(door, one, 10)
    door.leave(one, 0)
    assert (door.in_flight, one.requests, one.size) == (0, 0, 0)
