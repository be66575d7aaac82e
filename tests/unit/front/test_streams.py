"""Requests side by side on one stream: what their answers take while they wait, and what becomes of failures."""

from __future__ import annotations

import asyncio
import tracemalloc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from google.rpc import error_details_pb2, status_pb2

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import error
from gradrule_server.front.admission import Share
from gradrule_server.front.calls import Call, Caller, Write
from gradrule_server.front.request_chunks import RequestChunks
from gradrule_server.front.streams import Multiplexed
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import NOT_RUN, EngineRun, current
from tests.unit.front.doors import Aborted, Context, door_of, stream

# Three fit into what doors have room for.
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
        self.share = Share()
        self._requests: asyncio.Queue[link_pb2.RawStreamRequest | None] = asyncio.Queue()
        door = door_of(max_requests, stall_s=stall_s, max_deadline_s=max_deadline_s)

        async def method(caller: Caller, requests: AsyncIterator[bytes], write: Write) -> None:
            self.share = caller.tenant.share
            await Multiplexed(door, caller, {"evaluate": (evaluate_pb2.EvaluateRequest, evaluate)}, write).run(requests)

        self.task = asyncio.ensure_future(stream(door, method, context, self._messages()))

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


def reason(status: bytes) -> str:
    info = error_details_pb2.ErrorInfo()
    assert status_pb2.Status.FromString(status).details[0].Unpack(info)
    return info.reason


async def large(_: Call[Any]) -> bytes:
    return bytes(SIZE)


def counted(share: Share) -> int:
    """How many answers are counted; what a message has around its answer is next to nothing."""
    answers, around = divmod(share.size, SIZE)
    assert around < 100
    return answers


async def test_answers_that_wait_are_counted_once_each() -> None:
    context = Reads()
    opened = Opened(context, large)
    await opened.ask(1, 2, 3)
    # One is being written, two wait.
    assert counted(opened.share) == 3
    context.reading.set()
    await settled()
    assert context.answers == dict.fromkeys([1, 2, 3], "evaluate")
    assert opened.share.size == 0
    await opened.end()


async def test_an_answer_for_which_there_is_no_room_is_refused_and_ends_nothing() -> None:
    context = Reads()
    opened = Opened(context, large)
    await opened.ask(1, 2, 3, 4, 5)
    assert counted(opened.share) == 3
    context.reading.set()
    await settled()
    assert context.answers == dict.fromkeys([1, 2, 3], "evaluate") | dict.fromkeys([4, 5], "OVERLOADED")
    await opened.ask(4)
    assert context.answers[4] == "evaluate"
    await opened.end()
    assert (opened.share.requests, opened.share.size) == (0, 0)


async def test_answers_of_a_stream_that_is_given_up_count_no_longer() -> None:
    context = Reads()
    opened = Opened(context, large)
    await opened.ask(1, 2, 3)
    await opened.cancel()
    # That which was being written is gRPC's until it is done with the call.
    assert counted(opened.share) == 1
    context.done()
    assert (opened.share.requests, opened.share.size) == (0, 0)


async def test_an_answer_that_waits_holds_nothing_else_of_its_request() -> None:
    class EngineAnswer:
        """What the engine answered."""

    held: list[weakref.ref[EngineAnswer]] = []

    async def noted(_: Call[Any]) -> bytes:
        found, request = EngineAnswer(), current()
        assert request is not None
        request.record_engine_run(1, partial(_no_run, found))
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


async def test_answers_that_cannot_be_written_count_no_longer() -> None:
    context = Reads(broken=True)
    opened = Opened(context, large)
    await opened.ask(1, 2, 3)
    await opened.end()
    context.done()
    assert (opened.share.requests, opened.share.size) == (0, 0)


async def test_answers_of_a_stream_that_nobody_reads_count_no_longer() -> None:
    context = Context()
    opened = Opened(context, large, stall_s=0.2)
    await opened.ask(1, 2, 3)
    assert counted(opened.share) == 3
    with pytest.raises(Aborted):
        await opened.task
    assert context.reason == "DEADLINE_EXCEEDED"
    await asyncio.sleep(0.6)
    assert (opened.share.requests, opened.share.size) == (0, 0)


async def test_an_answer_that_comes_though_it_was_given_up_counts_no_longer() -> None:
    async def stubborn(_: Call[Any]) -> bytes:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return bytes(SIZE)

    opened = Opened(Reads(), stubborn)
    await opened.ask(1)
    assert opened.share.requests == 1
    await opened.cancel()
    assert (opened.share.requests, opened.share.size) == (0, 0)


async def test_an_answer_that_is_there_as_its_stream_ends_counts_no_longer() -> None:
    for steps in range(40):
        context = Reads()
        opened = Opened(context, large)
        opened.send(1)
        for _ in range(steps):
            await asyncio.sleep(0)
        await opened.cancel()
        context.done()
        assert (opened.share.requests, opened.share.size) == (0, 0), steps


async def test_a_failure_that_cannot_be_told_is_an_incident_and_ends_nothing() -> None:
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


async def test_a_request_in_chunks_is_one_request_and_its_answer_comes_in_chunks() -> None:
    request = evaluate_pb2.EvaluateRequest(program="programs/" + "p" * 200_000).SerializeToString()
    context = Pieces()
    opened = Opened(context, size_of)
    pieces = [request[:70_000], request[70_000:140_000], request[140_000:]]
    await opened.ask_for(*(chunk(7, piece) for piece in pieces))
    assert opened.share.size == len(request)
    await opened.ask_for(last(7, len(request), answer_chunk_bytes=80_000))
    assert b"".join(context.data[7]) == request
    assert [len(piece) for piece in context.data[7][:-1]] == [80_000, 80_000]
    assert context.answers == {7: "evaluate"}
    await opened.end()
    context.done()
    assert (opened.share.requests, opened.share.size) == (0, 0)


async def test_an_answer_in_chunks_counts_until_the_last_is_written() -> None:
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
    assert (context.messages, opened.share.size >= SIZE) == (3, True)
    await opened.cancel()
    context.done()
    assert (opened.share.requests, opened.share.size) == (0, 0)


async def test_chunks_for_which_there_is_no_room_are_refused_once() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(*(chunk(1, bytes(SIZE)) for _ in range(5)))
    assert context.answers == {1: "OVERLOADED"}
    assert opened.share.size == 0
    context.answers.clear()
    await opened.ask_for(last(1, 5 * SIZE))
    assert context.answers == {}
    await opened.ask(1)
    assert context.answers == {1: "evaluate"}
    await opened.end()


async def test_chunks_that_do_not_all_come_are_told() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(chunk(1, b"a"), last(1, 2), last(2, 3), chunk(3, b"a", timeout_s=0.01), last(4, 0))
    assert context.answers == {
        1: "MALFORMED_REQUEST",
        2: "MALFORMED_REQUEST",
        3: "DEADLINE_EXCEEDED",
        4: "evaluate",
    }
    assert opened.share.size == 0
    await opened.end()


async def test_a_request_in_chunks_can_be_given_up() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    cancel = evaluate_pb2.CancelRequest(request_id=1).SerializeToString()
    await opened.ask_for(chunk(1, bytes(SIZE)), link_pb2.RawStreamRequest(cancel=cancel))
    assert context.answers == {1: "CANCELLED"}
    assert opened.share.size == 0
    await opened.ask_for(chunk(1, bytes(SIZE)))
    assert opened.share.size == SIZE
    await opened.cancel()
    assert opened.share.size == 0


async def test_no_more_than_so_many_requests_arrive_at_a_time() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(*(chunk(number, b"") for number in range(40)))
    assert context.answers == dict.fromkeys(range(32, 40), "OVERLOADED")
    await opened.end()


async def test_requests_that_were_refused_keep_no_others_from_arriving() -> None:
    """Clients send no more of a request that was refused."""
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(chunk(0, bytes(900_000)), *(chunk(number, bytes(SIZE)) for number in range(1, 40)))
    async with asyncio.timeout(10):
        while len(context.answers) < 39:
            await settled()
    assert context.answers == dict.fromkeys(range(1, 40), "OVERLOADED")
    await opened.ask_for(chunk(50, REQUEST), last(50, len(REQUEST)))
    assert context.answers[50] == "evaluate"
    await opened.end()


async def test_a_request_beyond_those_that_may_arrive_is_answered_once() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(*(chunk(number, b"a") for number in range(33)), chunk(32, b"b"), last(32, 2))
    assert (context.answers, context.count) == ({32: "OVERLOADED"}, {32: 1})
    await opened.end()


async def test_the_id_of_a_refused_request_can_be_taken_again() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(chunk(1, b"a"), *(chunk(2, bytes(SIZE)) for _ in range(5)))
    assert context.answers == {2: "OVERLOADED"}
    await opened.ask(2)
    assert context.answers == {2: "evaluate"}
    await opened.end()


async def test_a_request_that_has_arrived_and_waits_for_others_is_answered_once() -> None:
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
    await settled()
    assert context.count[waiting] == 1
    assert context.answers[waiting] == "DEADLINE_EXCEEDED"
    await opened.end()
    assert (opened.share.requests, opened.share.size) == (0, 0)


async def test_a_request_whose_only_chunk_was_empty_is_answered_once() -> None:
    context = Pieces()
    opened = Opened(context, size_of)
    await opened.ask_for(chunk(1, b"", timeout_s=0.02), last(1, 0))
    await asyncio.sleep(0.1)
    assert (context.answers, context.count) == ({1: "evaluate"}, {1: 1})
    await opened.end()


async def test_no_request_may_arrive_for_longer_than_a_request_may_take() -> None:
    context = Pieces()
    opened = Opened(context, size_of, max_deadline_s=0.02)
    await opened.ask_for(chunk(1, b"a", timeout_s=1e6))
    await asyncio.sleep(0.05)
    assert context.answers == {1: "DEADLINE_EXCEEDED"}
    assert opened.share.size == 0
    await opened.end()


async def test_small_chunks_take_little_more_than_is_counted() -> None:
    counted = 0

    def take_in(_: Any, size: int) -> None:
        nonlocal counted
        counted += size

    door: Any = SimpleNamespace(take_in=take_in, let_go=lambda caller, size: None, max_deadline_s=10.0)
    caller: Any = SimpleNamespace()
    chunks = RequestChunks(door, caller, 1, lambda number, cause: None)
    tracemalloc.start()
    try:
        for number in range(30_000):
            assert chunks.add(1, number.to_bytes(2, "big"), None) is None
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2 * counted
    assert (await chunks.joined(1, b""))[0] == b"".join(number.to_bytes(2, "big") for number in range(30_000))


async def test_a_failure_names_the_request_by_which_the_log_has_it() -> None:
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
