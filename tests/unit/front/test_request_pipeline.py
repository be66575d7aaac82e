"""The steps of every call, with a context that records how the call ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from gradrule.v1 import rule_pb2
from gradrule_server.front.calls import Call
from gradrule_server.front.open_streams import Stream
from gradrule_server.front.services import SessionServicer
from gradrule_server.identity import Authenticator, Principal
from tests.unit.front.pipelines import Aborted, Context, call, create_pipeline, stream


class Withdrawn(Authenticator):
    """Authenticator that let everybody in, and hold no longer."""

    def is_still_valid(self, _: Principal) -> bool:
        return False


async def test_call_past_its_deadline_is_cancelled_with_a_reason() -> None:
    ends: list[str] = []

    async def slow(_: Call[Any]) -> bytes:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return b""

    pipeline = create_pipeline(default_deadline_s=0.2, max_deadline_s=0.3)
    for remaining in (None, 0.1, 600.0):
        context = Context(remaining)
        with pytest.raises(Aborted):
            await call(pipeline, slow, context)
        assert (context.reason, context.code) == ("DEADLINE_EXCEEDED", grpc.StatusCode.DEADLINE_EXCEEDED)
    assert ends == ["cancelled"] * 3


@pytest.mark.parametrize("fault", [TypeError, TimeoutError])
async def test_timeout_error_of_a_method_is_not_reported_as_deadline(fault: type[Exception]) -> None:
    async def broken(_: Call[Any]) -> bytes:
        raise fault

    context = Context()
    with pytest.raises(Aborted):
        await call(create_pipeline(), broken, context)
    assert context.reason == "INTERNAL"


async def test_requests_at_a_time_are_limited() -> None:
    gate = asyncio.Event()

    async def waits(_: Call[Any]) -> bytes:
        await gate.wait()
        return b"done"

    pipeline = create_pipeline(1)
    first = asyncio.create_task(call(pipeline, waits, Context()))
    await asyncio.sleep(0)
    refused = Context()
    with pytest.raises(Aborted):
        await call(pipeline, waits, refused)
    assert refused.reason == "OVERLOADED"
    assert refused.trailers["grpc-retry-pushback-ms"] == "200"
    gate.set()
    assert await first == b"done"
    assert await call(pipeline, waits, Context()) == b"done"


async def test_answers_are_never_refused_for_lack_of_room() -> None:
    gate = asyncio.Event()

    async def large(_: Call[Any]) -> bytes:
        await gate.wait()
        return bytes(600_000)

    pipeline = create_pipeline()
    calls = [asyncio.create_task(call(pipeline, large, Context())) for _ in range(4)]
    await asyncio.sleep(0.01)
    gate.set()
    assert [len(answer) for answer in await asyncio.gather(*calls)] == [600_000] * 4


async def test_session_message_is_parsed_after_admission() -> None:
    gate = asyncio.Event()

    async def waits(_: Call[Any]) -> bytes:
        await gate.wait()
        return b""

    # Bytes that cannot be parsed as a start: parsing them fails.
    async def start() -> AsyncIterator[bytes]:
        yield b"\x0a\x02\xff\xff"

    pipeline = create_pipeline(1)
    session = SessionServicer(pipeline).streams()["RunSession"]
    first = asyncio.create_task(call(pipeline, waits, Context()))
    await asyncio.sleep(0)
    for reason in ("OVERLOADED", "MALFORMED_REQUEST"):
        context = Context()
        with pytest.raises(Aborted):
            await stream(pipeline, session, context, start())
        assert context.reason == reason
        context.done()
        gate.set()
        await first


async def test_malformed_request_is_refused() -> None:
    async def never(_: Call[Any]) -> bytes:
        raise AssertionError

    context = Context()
    with pytest.raises(Aborted):
        await call(create_pipeline(), never, context, b"\xff\xff")
    assert context.reason == "MALFORMED_REQUEST"


async def test_stream_ends_at_the_next_request_after_its_credential_was_withdrawn() -> None:
    async def some() -> AsyncIterator[bytes]:
        yield b"request"

    async def reads(stream: Stream) -> None:
        await stream.read()
        raise AssertionError

    context = Context()
    with pytest.raises(Aborted):
        await stream(create_pipeline(credentials=Withdrawn()), reads, context, some())
    assert context.reason == "UNAUTHENTICATED"


async def test_idle_stream_ends_after_its_credential_was_withdrawn() -> None:
    async def quiet(_: Stream) -> None:
        await asyncio.Event().wait()

    for _ in range(2):
        context = Context()
        with pytest.raises(Aborted):
            await asyncio.wait_for(stream(create_pipeline(recheck_s=0.05, credentials=Withdrawn()), quiet, context), 60)
        assert context.reason == "UNAUTHENTICATED"
    still = asyncio.ensure_future(stream(create_pipeline(recheck_s=0.01), quiet, Context()))
    await asyncio.sleep(0.1)
    assert not still.done()
    still.cancel()


async def test_stream_ends_if_its_client_does_not_read() -> None:
    ends: list[str] = []

    async def writes(stream: Stream) -> None:
        try:
            await stream.write(b"answer")
        finally:
            ends.append("ended")

    context = Context()
    with pytest.raises(Aborted):
        await asyncio.wait_for(stream(create_pipeline(stall_s=0.05), writes, context), 60)
    assert (context.reason, ends) == ("DEADLINE_EXCEEDED", ["ended"])


@pytest.mark.parametrize(("size", "reason"), [(10 << 20, ""), (1000, "DEADLINE_EXCEEDED")])
async def test_client_has_more_time_to_read_a_large_message(size: int, reason: str) -> None:
    class Slow(Context):
        async def write(self, _: bytes) -> None:
            await asyncio.sleep(0.5)

    async def writes(stream: Stream) -> None:
        await stream.write(bytes(size))

    context = Slow()
    with suppress(Aborted):
        await stream(create_pipeline(stall_s=0.1), writes, context)
    assert context.reason == reason


@pytest.mark.parametrize("is_open", [False, True])
async def test_streams_are_not_read_once_the_server_drains(is_open: bool) -> None:
    reading = asyncio.Event()

    async def reads(stream: Stream) -> None:
        # The age of the stream is later.
        stream.stop_reading(3600)
        reading.set()
        await stream.read()

    async def silent() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    pipeline, context = create_pipeline(), Context()
    if not is_open:
        pipeline.drain()
    served = asyncio.ensure_future(stream(pipeline, reads, context, silent()))
    await reading.wait()
    if is_open:
        await asyncio.sleep(0.01)
        pipeline.drain()
    with pytest.raises(Aborted):
        await asyncio.wait_for(served, 60)
    assert context.reason == "UNAVAILABLE"


async def test_idle_stream_stays_open() -> None:
    async def quiet(_: Stream) -> None:
        await asyncio.sleep(0.2)

    await stream(create_pipeline(stall_s=0.02), quiet, Context())


async def test_streams_of_a_tenant_are_limited() -> None:
    is_open, gate = asyncio.Event(), asyncio.Event()

    async def waits(_: Stream) -> None:
        is_open.set()
        await gate.wait()

    pipeline, read = create_pipeline(), Context()
    first = asyncio.create_task(stream(pipeline, waits, read))
    await is_open.wait()
    refused = Context()
    with pytest.raises(Aborted):
        await stream(pipeline, waits, refused)
    assert refused.reason == "QUOTA_EXCEEDED"
    gate.set()
    await first
    # Until its client has read all, it counts.
    with pytest.raises(Aborted):
        await stream(pipeline, waits, Context())
    read.done()
    await stream(pipeline, waits, Context())


def request_of(size: int) -> bytes:
    """Returns a request of about this size."""
    return rule_pb2.GetRuleRequest(name="x" * size).SerializeToString()


async def test_answers_count_until_they_are_read() -> None:
    async def large(_: Call[Any]) -> bytes:
        return bytes(600_000)

    pipeline, first = create_pipeline(), Context()
    await call(pipeline, large, first)
    # Unread answers leave less room for requests.
    refused = Context(0.1)
    with pytest.raises(Aborted):
        await call(pipeline, large, refused, request_of(500_000))
    assert refused.reason == "OVERLOADED"
    waits = asyncio.create_task(call(pipeline, large, Context(), request_of(500_000)))
    await asyncio.sleep(0)
    first.done()
    await waits


async def test_request_that_waits_until_its_deadline_is_told_why_although_the_loop_is_late() -> None:
    async def large(_: Call[Any]) -> bytes:
        return bytes(10**6)

    pipeline, refused = create_pipeline(), Context(0.1)
    await call(pipeline, large, Context())
    waits = asyncio.create_task(call(pipeline, large, refused, request_of(500_000)))
    await asyncio.sleep(0.01)
    # Both timers are due when the loop goes on.
    time.sleep(0.2)
    with pytest.raises(Aborted):
        await waits
    assert refused.reason == "OVERLOADED"


async def test_only_answer_of_a_tenant_may_have_any_size() -> None:
    async def huge(_: Call[Any]) -> bytes:
        return bytes(10**7)

    assert len(await call(create_pipeline(), huge, Context())) == 10**7


async def test_unread_answer_counts_after_its_stream_has_ended() -> None:
    async def writes(stream: Stream) -> None:
        await stream.write(bytes(10**6 + 1))

    async def small(_: Call[Any]) -> bytes:
        return b""

    pipeline, stalled = create_pipeline(stall_s=1.5), Context()
    with pytest.raises(Aborted):
        await stream(pipeline, writes, stalled)
    refused = Context(0.1)
    with pytest.raises(Aborted):
        await call(pipeline, small, refused, request_of(100_000))
    assert refused.reason == "OVERLOADED"
    # gRPC takes the call for done, and has the answer still.
    stalled.done()
    waits = asyncio.create_task(call(pipeline, small, Context(), request_of(100_000)))
    await asyncio.sleep(0)
    assert not waits.done()
    # The connection is closed after twice `stall_s`.
    await waits
