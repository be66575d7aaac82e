"""Tests the record of a request, the sinks that receive it, and the timings that are read from encoded responses."""

from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradrule.v1 import evaluate_pb2, tensor_pb2
from gradrule_server.operations.request_record import (
    EngineRun,
    ObservedRequest,
    Observer,
    RequestRecord,
    current,
    from_metadata,
    read_fields,
    record_cache_lookup,
    record_pull_back,
    record_run,
    timing_compilation,
)
from tests.unit.operations.records import make, peer, refusal

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("given", ["a", "7f3-9:x/y+z=@.", "x" * 128])
def test_valid_request_id_is_kept(given: str) -> None:
    assert from_metadata("S/M", [("x-request-id", given)], peer, 0).id == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\nb", "\x1b[31m", "ä", "a\n", b"bytes", '"', "{}"])
def test_invalid_request_id_is_replaced(given: str | bytes) -> None:
    first = from_metadata("S/M", [("x-request-id", given)], peer, 0).id
    second = from_metadata("S/M", [("x-request-id", given)], peer, 0).id
    assert given != first != second
    assert first.isprintable()
    assert len(first) < 30


def test_request_without_metadata_gets_an_id() -> None:
    assert from_metadata("S/M", None, peer, 0).id


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
def test_trace_id_is_read_from_traceparent(given: str | bytes, found: str) -> None:
    request = from_metadata("S/M", [("traceparent", given), ("tracestate", "a=b")], peer, 0)
    assert request.trace_id == found
    assert bool(request.trace_parent) == bool(found)
    assert request.trace_state == "a=b"


def test_nothing_is_recorded_outside_of_requests() -> None:
    assert current() is None
    record_cache_lookup("programs", is_hit=True)
    with timing_compilation():
        pass


async def test_tasks_and_threads_inherit_the_current_request() -> None:
    ended: list[RequestRecord] = []
    with Observer([ended.append]).rpc("S/M", (), peer) as observed:
        await asyncio.create_task(asyncio.to_thread(record_cache_lookup, "programs", is_hit=True))
        await asyncio.to_thread(record_cache_lookup, "programs", is_hit=False)
        record_cache_lookup("programs", is_hit=False)
    assert current() is None
    assert ended == [observed.request]
    assert (observed.request.hits, observed.request.misses) == ({"programs": 1}, {"programs": 2})


async def test_concurrent_requests_have_separate_records() -> None:
    async def one(name: str) -> RequestRecord:
        with Observer().rpc(name, (), peer) as observed:
            await asyncio.sleep(0.001)
            assert current() is observed.request
            observed.request.tenant = name
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
def test_reason_is_recorded(fails: BaseException | None, reason: str) -> None:
    ended: list[RequestRecord] = []
    request = make(ended.append, fails=fails)
    assert ended == [request]
    assert request.reason == reason
    assert "secret" not in request.message
    assert request.ended_ns >= request.received_ns > 0
    assert current() is None


def test_cancelled_stream_has_not_failed() -> None:
    def stream(request: RequestRecord) -> None:
        request.is_stream = True

    assert make(fails=asyncio.CancelledError(), within=stream).reason == "OK"
    assert make(fails=refusal("UNAVAILABLE"), within=stream).reason == "UNAVAILABLE"


def test_requests_of_a_stream_are_numbered() -> None:
    ended: list[RequestRecord] = []
    observer = Observer([ended.append])
    with observer.rpc("G/Stream", [("x-request-id", "s"), ("traceparent", TRACE)], peer) as stream:
        stream.request.tenant, stream.request.principal = "ada", "cert"
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


def test_failing_sink_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: RequestRecord) -> None:
        raise ZeroDivisionError

    with caplog.at_level(logging.ERROR):
        assert make(broken).reason == "OK"
    assert "could not be recorded" in caplog.text
    assert current() is None


def test_compile_time_is_measured() -> None:
    request = RequestRecord("i", "S/M", 0, peer)
    with ObservedRequest(request, ()):
        with timing_compilation():
            pass
        first = request.compile_started_ns
        with pytest.raises(ValueError, match="x"), timing_compilation():
            raise ValueError("x")
    assert request.compile_ns > 0
    assert request.compile_started_ns == first > 0


def recorded(record: object, *arguments: object) -> tuple[int, EngineRun]:
    """When a request was sent to an engine, and its times there."""
    request = RequestRecord("i", "S/M", 0, peer)
    with ObservedRequest(request, ()):
        record(*arguments)  # type: ignore[operator]
        return request.sent_to_engine_ns, request.engine_run


@given(
    st.integers(0, 10**12),
    st.integers(0, 10**12),
    st.text(max_size=20),
    st.lists(st.binary(max_size=300), max_size=5),
    st.integers(0, 3),
)
def test_timings_of_evaluate_are_read(
    queue_ns: int, run_ns: int, device: str, contents: list[bytes], blocks: int
) -> None:
    answer = evaluate_pb2.EvaluateResponse(device=device)
    for content in contents:
        answer.outputs.add(name="y").value.inline_tensor.CopyFrom(tensor_pb2.Tensor(tensor_content=content))
        answer.gradients.add(x="x").dense.tensor_content = content
    for _ in range(blocks):
        answer.jacobians.add(y="y", x="x").dense.tensor_content = b"\x2a\x02ab" * 50
    answer.timings.queue.FromNanoseconds(queue_ns)
    answer.timings.run.FromNanoseconds(run_ns)
    assert recorded(record_run, answer.SerializeToString(), 7) == (7, (queue_ns, run_ns, device))


def test_timings_of_pull_back_are_read() -> None:
    answer = evaluate_pb2.PullBackResponse()
    answer.gradients.add(x="x").dense.tensor_content = b"1234"
    answer.timings.run.FromNanoseconds(9)
    sent_ns, run = recorded(record_pull_back, answer.SerializeToString(), 3)
    assert (sent_ns, run.run_ns) == (3, 9)


def test_last_of_several_fields_counts() -> None:
    assert read_fields(b"\x2a\x01a\x2a\x02bc\x30\x80\x01\x39" + bytes(8) + b"\x45" + bytes(4), (5,)) == {5: b"bc"}


@pytest.mark.parametrize("wrong", [b"\x2a", b"\x2a\x05ab", b"\xff", b"\x2b", b"\x31abc", b"\x08"])
def test_malformed_bytes_are_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_fields(wrong, (5,))
