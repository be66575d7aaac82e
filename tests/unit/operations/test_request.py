"""What is known of a request, and who learns of its end."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gradrule_server.operations.observer import Observer
from gradrule_server.operations.request import (
    Request,
    compiling,
    current,
    enter,
    leave,
    note_lookup,
    note_tenant,
    of_metadata,
)
from tests.unit.operations.requests import make, peer, refusal

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("given", ["a", "7f3-9:x/y+z=@.", "x" * 128])
def test_an_id_that_is_one_is_kept(given: str) -> None:
    assert of_metadata("S/M", [("x-request-id", given)], peer, 0).id == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\nb", "\x1b[31m", "ä", "a\n", b"bytes", '"', "{}"])
def test_an_id_that_is_none_is_made(given: str | bytes) -> None:
    first = of_metadata("S/M", [("x-request-id", given)], peer, 0).id
    second = of_metadata("S/M", [("x-request-id", given)], peer, 0).id
    assert given != first != second
    assert first.isprintable()
    assert len(first) < 30


def test_without_metadata_too() -> None:
    assert of_metadata("S/M", None, peer, 0).id


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (TRACE, "0af7651916cd43dd8448eb211c80319c"),
        (TRACE[:-1], ""),
        (TRACE.upper(), ""),
        (TRACE + "\n", ""),
        (TRACE + "-" + "x" * 600, ""),
        ("00-zz", ""),
        (b"00", ""),
    ],
)
def test_traces(given: str | bytes, found: str) -> None:
    request = of_metadata("S/M", [("traceparent", given), ("tracestate", "a=b")], peer, 0)
    assert request.trace_id == found
    assert bool(request.trace_parent) == bool(found)
    assert request.trace_state == "a=b"


def test_nothing_is_noted_outside_of_requests() -> None:
    assert current() is None
    note_tenant("a")
    note_lookup("programs", is_hit=True)
    with compiling():
        pass


async def test_tasks_and_threads_that_work_for_a_request_know_it() -> None:
    ended: list[Request] = []
    with Observer([ended.append]).rpc("S/M", (), peer) as observed:
        await asyncio.create_task(asyncio.to_thread(note_lookup, "programs", is_hit=True))
        await asyncio.to_thread(note_lookup, "programs", is_hit=False)
        note_lookup("programs", is_hit=False)
    assert current() is None
    assert ended == [observed.request]
    assert (observed.request.hits, observed.request.misses) == ({"programs": 1}, {"programs": 2})


async def test_requests_side_by_side_are_told_apart() -> None:
    async def one(name: str) -> Request:
        with Observer().rpc(name, (), peer) as observed:
            await asyncio.sleep(0.001)
            assert current() is observed.request
            note_tenant(name)
            await asyncio.sleep(0.001)
            return observed.request

    names = [f"t{number}" for number in range(20)]
    assert [request.tenant for request in await asyncio.gather(*map(one, names))] == names


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        (None, "OK"),
        (refusal("UNKNOWN_RULE"), "UNKNOWN_RULE"),
        (asyncio.CancelledError(), "CANCELLED"),
        (KeyError("secret"), "INTERNAL"),
    ],
)
def test_how_a_request_ended(fails: BaseException | None, reason: str) -> None:
    ended: list[Request] = []
    request = make(ended.append, fails=fails)
    assert ended == [request]
    assert request.reason == reason
    assert "secret" not in request.message
    assert request.ended_ns >= request.received_ns > 0
    assert current() is None


def test_a_stream_that_its_caller_leaves_has_not_failed() -> None:
    def stream(request: Request) -> None:
        request.is_stream = True

    assert make(fails=asyncio.CancelledError(), within=stream).reason == "OK"
    assert make(fails=refusal("UNAVAILABLE"), within=stream).reason == "UNAVAILABLE"


def test_requests_of_a_stream_are_its_parts() -> None:
    ended: list[Request] = []
    observer = Observer([ended.append])
    with observer.rpc("G/Stream", [("x-request-id", "s"), ("traceparent", TRACE)], peer):
        note_tenant("ada", "cert")
        with observer.part("evaluate"):
            pass
        with observer.part("forward"):
            pass
    assert [(request.id, request.rpc) for request in ended] == [
        ("s/1", "G/Stream/evaluate"),
        ("s/2", "G/Stream/forward"),
        ("s", "G/Stream"),
    ]
    assert {(request.tenant, request.principal, request.trace_parent) for request in ended} == {("ada", "cert", TRACE)}


def test_whoever_counts_wrong_costs_nobody_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Request) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR):
        assert make(broken).reason == "OK"
    assert "could not be noted" in caplog.text
    assert current() is None


def test_compiling_is_measured() -> None:
    request = Request("i", "S/M", 0, peer)
    token = enter(request)
    try:
        with compiling():
            pass
        first = request.compile_started_ns
        with pytest.raises(ValueError, match="x"), compiling():
            raise ValueError("x")
    finally:
        leave(token)
    assert request.compile_ns > 0
    assert request.compile_started_ns == first > 0
