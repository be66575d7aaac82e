"""Concurrent requests of one stream: which bytes are counted, chunks, and errors."""

from __future__ import annotations

import asyncio
import tracemalloc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from google.rpc import error_details_pb2, status_pb2

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import error
from gradrule_server.front.admission import InFlight
from gradrule_server.front.calls import Call
from gradrule_server.front.evaluate_stream import EvaluateStream
from gradrule_server.front.open_streams import Stream
from gradrule_server.front.request_chunks import RequestChunks
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import NOT_RUN, EngineRun, current
from tests.unit.front.pipelines import Aborted, Context, create_admission, create_pipeline, stream
from tests.waiting import wait_for_condition

# Three such answers fit into the limits of `create_pipeline`.
SIZE = 300_000


class Reads(Context):
    """A client that reads while `reading` is set, or, `broken`, to which nothing can be written."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.reading = asyncio.Event()
        self.answers: dict[int, str] = {}
        """By id: the kind of the answer, or the reason why there is none."""
        self._broken = broken

    async def write(self, data: bytes) -> None:
        if self._broken:
            raise RuntimeError("the client has left")
        await self.reading.wait()
        response = link_pb2.RawStreamResponse.FromString(data)
        kind = response.WhichOneof("response") or ""
        self.answers[response.request_id] = reason(response.status) if kind == "status" else kind


class Opened:
    """One stream, whose requests to evaluate are answered by `evaluate`."""

    def __init__(
        self,
        context: Context,
        evaluate: Callable[[Call[Any]], Awaitable[bytes]],
        *,
        stall_s: float = 10.0,
        max_deadline_s: float = 10.0,
        max_requests: int = 9,
    ) -> None:
        self.in_flight = InFlight()
        self._requests: asyncio.Queue[link_pb2.RawStreamRequest | None] = asyncio.Queue()
        pipeline = create_pipeline(max_requests, stall_s=stall_s, max_deadline_s=max_deadline_s)

        async def method(stream: Stream) -> None:
            self.in_flight = stream.caller.tenant.in_flight
            await EvaluateStream(pipeline, stream, {"evaluate": (evaluate_pb2.EvaluateRequest, evaluate)}).run()

        self.task = asyncio.ensure_future(stream(pipeline, method, context, self._messages()))

    async def _messages(self) -> AsyncIterator[bytes]:
        while (request := await self._requests.get()) is not None:
            yield request.SerializeToString()

    def send(self, *numbers: int) -> None:
        """Sends requests."""
        for number in numbers:
            self._requests.put_nowait(link_pb2.RawStreamRequest(request_id=number, evaluate=b""))

    async def ask(self, *numbers: int) -> None:
        """Sends requests, and waits until they have been answered, as far as they are at once."""
        self.send(*numbers)
        await settled()

    async def ask_for(self, *requests: link_pb2.RawStreamRequest) -> None:
        """The same with other messages."""
        for request in requests:
            self._requests.put_nowait(request)
        await settled()

    async def end(self) -> None:
        """The client has sent its last."""
        self._requests.put_nowait(None)
        await self.task

    async def cancel(self) -> None:
        """The client gives the stream up."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await settled()


async def settled() -> None:
    """What can go on has gone on."""
    await asyncio.sleep(0.05)
    # After a stall the time is over before anything has gone on.
    for _ in range(400):
        await asyncio.sleep(0)


def reason(status: bytes) -> str:
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(status).details[0].Unpack(info)
    return info.reason


async def large(_: Call[Any]) -> bytes:
    return bytes(SIZE)


def counted(share: InFlight) -> int:
    """How many answers are counted; what a message has around its answer is next to nothing."""
    answers, around = divmod(share.size, SIZE)
    assert around < 100
    return answers


async def test_waiting_answers_are_counted_once() -> None:
    context = Reads()
    opened = Opened(context, large)
    await opened.ask(1, 2, 3)
    # One is being written, two wait.
    assert counted(opened.in_flight) == 3
    context.reading.set()
    await settled()
    assert context.answers == dict.fromkeys([1, 2, 3], "evaluate")
    assert opened.in_flight.size == 0
    await opened.end()


async def test_answers_are_never_refused_for_lack_of_room() -> None:
    context = Reads()
    opened = Opened(context, large)
    await opened.ask(1, 2, 3, 4, 5)
    # The fourth is beyond the limit, so the fifth request waits until an answer has been read.
    assert counted(opened.in_flight) == 4
    context.reading.set()
    await settled()
    assert context.answers == dict.fromkeys([1, 2, 3, 4, 5], "evaluate")
    await opened.end()
    assert (opened.in_flight.requests, opened.in_flight.size) == (0, 0)


async def test_answers_of_a_cancelled_stream_are_not_counted() -> None:
    context = Reads()
    opened = Opened(context, large)
    await opened.ask(1, 2, 3)
    await opened.cancel()
    # That which was being written is gRPC's until it is done with the call.
    assert counted(opened.in_flight) == 1
    context.done()
    assert (opened.in_flight.requests, opened.in_flight.size) == (0, 0)


async def test_waiting_answer_keeps_nothing_else_of_its_request() -> None:
    class EngineAnswer:
        """What the engine answered."""

    held: list[weakref.ref[EngineAnswer]] = []

    async def noted(_: Call[Any]) -> bytes:
        found, request = EngineAnswer(), current()
        assert request is not None
        request.sent_to_engine_ns, request.read_engine_run = 1, partial(_no_run, found)
        held.append(weakref.ref(found))
        return bytes(SIZE)

    context = Reads()
    opened = Opened(context, noted)
    await opened.ask(1, 2)
    assert [ref() for ref in held] == [None, None]
    context.reading.set()
    await opened.end()


def _no_run(_: object) -> EngineRun:
    return NOT_RUN


async def test_answers_that_cannot_be_written_are_not_counted() -> None:
    context = Reads(broken=True)
    opened = Opened(context, large)
    await opened.ask(1, 2, 3)
    await opened.end()
    context.done()
    assert (opened.in_flight.requests, opened.in_flight.size) == (0, 0)


async def test_answers_of_an_unread_stream_are_released_at_its_end() -> None:
    context = Context()
    opened = Opened(context, large, stall_s=0.2)
    await opened.ask(1, 2, 3)
    assert counted(opened.in_flight) == 3
    with pytest.raises(Aborted):
        await opened.task
    assert context.reason == "DEADLINE_EXCEEDED"
    await asyncio.sleep(0.6)
    assert (opened.in_flight.requests, opened.in_flight.size) == (0, 0)


async def test_answer_of_a_cancelled_request_is_not_counted() -> None:
    async def stubborn(_: Call[Any]) -> bytes:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return bytes(SIZE)

    opened = Opened(Reads(), stubborn)
    await opened.ask(1)
    assert opened.in_flight.requests == 1
    await opened.cancel()
    assert (opened.in_flight.requests, opened.in_flight.size) == (0, 0)


async def test_answer_ready_at_the_end_of_its_stream_is_not_counted() -> None:
    for steps in range(40):
        context = Reads()
        opened = Opened(context, large)
        opened.send(1)
        for _ in range(steps):
            await asyncio.sleep(0)
        await opened.cancel()
        context.done()
        assert (opened.in_flight.requests, opened.in_flight.size) == (0, 0), steps


async def test_error_that_cannot_be_reported_becomes_an_incident() -> None:
    async def fails(_: Call[Any]) -> bytes:
        # No UTF-8: no status can hold it.
        raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "\ud800")

    context = Reads()
    context.reading.set()
    opened = Opened(context, fails)
    for number in (1, 2):
        await opened.ask(number)
        assert context.answers[number] == "INTERNAL"
    await opened.end()


class Pieces(Reads):
    """A client that reads, and keeps what the answers in chunks have."""

    def __init__(self) -> None:
        super().__init__()
        self.reading.set()
        self.data: dict[int, list[bytes]] = {}
        self.count: Counter[int] = Counter()
        """How many answers each request got."""

    async def write(self, data: bytes) -> None:
        response = link_pb2.RawStreamResponse.FromString(data)
        if response.WhichOneof("response") == "chunk":
            self.data.setdefault(response.request_id, []).append(response.chunk)
        else:
            self.count[response.request_id] += 1
            await super().write(data)


REQUEST = evaluate_pb2.EvaluateRequest(program="programs/p").SerializeToString()


async def size_of(call: Call[Any]) -> bytes:
    """Answers with the bytes of the request."""
    return call.raw


def chunk(number: int, data: bytes, timeout_s: float | None = None) -> link_pb2.RawStreamRequest:
    message = link_pb2.RawStreamRequest(request_id=number, chunk=data)
    if timeout_s is not None:
        message.timeout.FromNanoseconds(int(timeout_s * 1e9))
    return message


def last(number: int, chunk_bytes: int, answer_chunk_bytes: int = 0) -> link_pb2.RawStreamRequest:
    return link_pb2.RawStreamRequest(
        request_id=number, evaluate=b"", total_bytes=chunk_bytes, answer_chunk_bytes=answer_chunk_bytes
    )


async def test_chunked_request_gets_a_chunked_answer() -> None:
    request = evaluate_pb2.EvaluateRequest(program="programs/" + "p" * 200_000).SerializeToString()
    context = Pieces()
    opened = Opened(context, size_of)
    pieces = [request[:70_000], request[70_000:140_000], request[140_000:]]
    await opened.ask_for(*(chunk(7, piece) for piece in pieces))
    assert opened.in_flight.size == len(request)
    await opened.ask_for(last(7, len(request), answer_chunk_bytes=80_000))
    await wait_for_condition(lambda: context.answers)
    assert b"".join(context.data[7]) == request
    assert [len(piece) for piece in context.data[7][:-1]] == [80_000, 80_000]
    assert context.answers == {7: "evaluate"}
    await opened.end()
    context.done()
    assert (opened.in_flight.requests, opened.in_flight.size) == (0, 0)


async def test_chunked_answer_counts_until_its_last_chunk_is_written() -> None:
    class ReadsTwo(Context):
        """A client that reads two messages and no more."""

        messages = 0

        async def write(self, _: bytes) -> None:
            self.messages += 1
            if self.messages > 2:
                await asyncio.Event().wait()

    context = ReadsTwo()
    opened = Opened(context, large)
    await opened.ask_for(chunk(1, REQUEST), last(1, len(REQUEST), answer_chunk_bytes=70_000))
    await wait_for_condition(lambda: context.messages == 3)
    assert (context.messages, opened.in_flight.size >= SIZE) == (3, True)
    await opened.cancel()
    context.done()
    assert (opened.in_flight.requests, opened.in_flight.size) == (0, 0)


async def test_chunks_without_room_are_refused_once() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(*(chunk(1, bytes(SIZE)) for _ in range(13)))
    assert context.answers == {1: "OVERLOADED"}
    assert opened.in_flight.size == 0
    context.answers.clear()
    await opened.ask_for(last(1, 13 * SIZE))
    assert context.answers == {}
    await opened.ask(1)
    assert context.answers == {1: "evaluate"}
    await opened.end()


async def test_missing_chunks_are_reported() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(chunk(1, b"a"), last(1, 2), last(2, 3), chunk(3, b"a", timeout_s=0.01), last(4, 0))
    await wait_for_condition(lambda: len(context.answers) == 4)
    assert context.answers == {
        1: "MALFORMED_REQUEST",
        2: "MALFORMED_REQUEST",
        3: "DEADLINE_EXCEEDED",
        4: "evaluate",
    }
    assert opened.in_flight.size == 0
    await opened.end()


async def test_chunked_request_can_be_cancelled() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    cancel = evaluate_pb2.CancelRequest(request_id=1).SerializeToString()
    await opened.ask_for(chunk(1, bytes(SIZE)), link_pb2.RawStreamRequest(cancel=cancel))
    assert context.answers == {1: "CANCELLED"}
    assert opened.in_flight.size == 0
    await opened.ask_for(chunk(1, bytes(SIZE)))
    assert opened.in_flight.size == SIZE
    await opened.cancel()
    assert opened.in_flight.size == 0


async def test_chunked_requests_at_a_time_are_limited() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(*(chunk(number, b"") for number in range(40)))
    assert context.answers == dict.fromkeys(range(32, 40), "OVERLOADED")
    await opened.end()


async def test_refused_requests_do_not_keep_others_from_arriving() -> None:
    """Clients send no more of a request that was refused."""
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(chunk(0, bytes(2_900_000)), *(chunk(number, bytes(SIZE)) for number in range(1, 40)))
    await wait_for_condition(lambda: len(context.answers) >= 39)
    assert context.answers == dict.fromkeys(range(1, 40), "OVERLOADED")
    await opened.ask_for(chunk(50, REQUEST), last(50, len(REQUEST)))
    await wait_for_condition(lambda: 50 in context.answers)
    assert context.answers[50] == "evaluate"
    await opened.end()


async def test_request_beyond_the_limit_is_answered_once() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(*(chunk(number, b"a") for number in range(33)), chunk(32, b"b"), last(32, 2))
    assert (context.answers, context.count) == ({32: "OVERLOADED"}, {32: 1})
    await opened.end()


async def test_id_of_a_refused_request_can_be_used_again() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(chunk(1, b"a"), *(chunk(2, bytes(SIZE)) for _ in range(13)))
    assert context.answers == {2: "OVERLOADED"}
    await opened.ask(2)
    assert context.answers == {2: "evaluate"}
    await opened.end()


async def test_complete_request_that_waits_is_answered_once() -> None:
    release = asyncio.Event()

    async def slow(call: Call[Any]) -> bytes:
        await release.wait()
        await asyncio.sleep(0.01)
        return call.raw

    context = Pieces()
    opened = Opened(context, slow, max_requests=40)
    # As many as run at a time.
    await opened.ask(*range(32))
    waiting = 32
    await opened.ask_for(chunk(waiting, REQUEST, timeout_s=0.02), last(waiting, len(REQUEST)))
    await asyncio.sleep(0.1)
    release.set()
    await wait_for_condition(lambda: waiting in context.answers)
    await settled()
    assert context.count[waiting] == 1
    assert context.answers[waiting] == "DEADLINE_EXCEEDED"
    await opened.end()
    assert (opened.in_flight.requests, opened.in_flight.size) == (0, 0)


async def test_request_with_one_empty_chunk_is_answered_once() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(chunk(1, b"", timeout_s=0.1), last(1, 0))
    await asyncio.sleep(0.1)
    assert (context.answers, context.count) == ({1: "evaluate"}, {1: 1})
    await opened.end()


async def test_request_must_arrive_within_the_longest_deadline() -> None:
    context = Pieces()
    opened = Opened(context, size_of, max_deadline_s=0.02)
    await opened.ask_for(chunk(1, b"a", timeout_s=1e6))
    await wait_for_condition(lambda: context.answers)
    assert context.answers == {1: "DEADLINE_EXCEEDED"}
    assert opened.in_flight.size == 0
    await opened.end()


async def test_small_chunks_take_little_more_memory_than_is_counted() -> None:
    in_flight = InFlight()
    chunks = RequestChunks(create_admission(1), in_flight, 10.0, lambda number, cause: None)
    tracemalloc.start()
    try:
        for number in range(30_000):
            chunks.add(1, number.to_bytes(2, "big"), None)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2 * in_flight.arriving.size
    assert (await chunks.join(1, b""))[0] == b"".join(number.to_bytes(2, "big") for number in range(30_000))


async def test_error_names_the_request_id_of_the_log() -> None:
    async def fails(_: Call[Any]) -> bytes:
        raise error(errors_pb2.ERROR_REASON_UNKNOWN_FEED, "no")

    statuses: list[bytes] = []

    class Keeps(Context):
        async def write(self, data: bytes) -> None:
            statuses.append(link_pb2.RawStreamResponse.FromString(data).status)

    opened = Opened(Keeps(), fails)
    await opened.ask(1)
    info = error_details_pb2.RequestInfo()
    assert any(detail.Unpack(info) for detail in status_pb2.Status.FromString(statuses[0]).details)
    assert info.request_id.endswith("/1")
    await opened.end()
