"""Bidirectional streams: reading until the client or the server ends them, requests that run side by side."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

from gradrule.common import wire_format
from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Caller, MethodTable, Write
from gradrule_server.front.handlers import Door
from gradrule_server.front.outcomes import incident
from gradrule_server.front.request_chunks import RequestChunks
from gradrule_server.front.status import status_of
from gradrule_server.link.v1 import link_pb2

_log = logging.getLogger(__name__)

T = TypeVar("T")
Answer = Callable[[], Awaitable[bytes]]

# Requests of one stream that run or whose answers wait to be written, and bytes of the latter; past these it is not
# read.
_MAX_UNDER_WAY = 32
_MAX_UNWRITTEN_BYTES = 64 << 20
# Smaller chunks of an answer would cost more than they spare.
_MIN_CHUNK_BYTES = 64 << 10

_ANSWER_FIELDS = {
    field.name: field.number for field in link_pb2.RawStreamResponse.DESCRIPTOR.oneofs_by_name["response"].fields
}
_ID_TAG = bytes((link_pb2.RawStreamResponse.REQUEST_ID_FIELD_NUMBER << 3 | wire_format.VARINT,))
_CHUNK_FIELD = link_pb2.RawStreamResponse.CHUNK_FIELD_NUMBER


async def incoming(
    requests: AsyncIterator[bytes],
    draining: asyncio.Event,
    event: asyncio.Future[T] | None = None,
    on_event: Callable[[T], Awaitable[None]] | None = None,
) -> AsyncIterator[bytes]:
    """The messages of a stream until the client has sent its last. UNAVAILABLE once the server is going away.

    Calls `on_event` with the result of `event` once it is set, between two messages.
    """
    drained = asyncio.ensure_future(draining.wait())
    try:
        while True:
            coming = asyncio.ensure_future(anext(requests, None))
            try:
                if event is not None and on_event is not None:
                    waited: set[asyncio.Future[Any]] = {coming, drained, event}
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    if event.done():
                        await on_event(event.result())
                        event = None
                await asyncio.wait({coming, drained}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not coming.done():
                    coming.cancel()
            if not coming.done():
                raise error(errors_pb2.ERROR_REASON_UNAVAILABLE, "the server is going away", retry_after_s=0.0)
            raw = coming.result()
            if raw is None:
                return
            yield raw
    finally:
        drained.cancel()


class Multiplexed:
    """`StreamEvaluate`: requests under ids, answered as they are ready.

    `methods`: what each kind of request does, with the type of its message.
    """

    def __init__(
        self,
        door: Door,
        caller: Caller,
        methods: MethodTable,
        write: Write,
    ) -> None:
        self._door = door
        self._caller = caller
        self._methods = methods
        self._write = write
        self._writing = asyncio.Lock()
        self._slots = asyncio.Semaphore(_MAX_UNDER_WAY)
        self._unwritten = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._under_way: dict[int, _UnderWay] = {}
        self._chunks = RequestChunks(door, caller, _MAX_UNDER_WAY, self._refuse_late)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Answers requests until the stream ends; what is under way by then is finished, unless the client left."""
        reading = asyncio.ensure_future(self._read(requests))
        drained = asyncio.ensure_future(self._door.draining.wait())
        try:
            try:
                await asyncio.wait({reading, drained}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    raise error(errors_pb2.ERROR_REASON_UNAVAILABLE, "the server is going away", retry_after_s=0.0)
                reading.result()
            finally:
                reading.cancel()
                drained.cancel()
        except GradruleError:
            await self._finish()
            raise
        else:
            await self._finish()
        finally:
            self._is_over = True
            self._chunks.drop_all()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(reading, *self._tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        async for raw in requests:
            if not self._has_room.is_set():
                await self._has_room.wait()
            await self._take(raw)

    def _refuse_late(self, number: int, cause: GradruleError) -> None:
        """Answers a request whose chunks did not all come in time."""
        self._keep(asyncio.ensure_future(self._start(number, _fail(cause))))

    async def _finish(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _take(self, raw: bytes) -> None:
        """Starts what a message asks for."""
        try:
            request = link_pb2.RawStreamRequest.FromString(raw)
            number, kind = request.request_id, request.WhichOneof("request")
            if kind == "cancel":
                number = evaluate_pb2.CancelRequest.FromString(request.cancel).request_id
        except DecodeError:
            name = evaluate_pb2.StreamEvaluateRequest.DESCRIPTOR.full_name
            await self._start(0, _refuse(f"the bytes are no {name}"))
            return
        if kind == "cancel":
            await self._cancel(number)
        elif kind is None:
            await self._start(number, _refuse("the message holds no request"))
        elif number in self._under_way:
            await self._start(number, _refuse(f"a request {number} is under way on this stream; take another id"))
        elif kind == "chunk":
            failure = self._chunks.add(number, request.chunk, _seconds(request))
            if failure is not None:
                await self._start(number, _fail(failure))
        elif not request.total_bytes and not self._chunks.has_any:
            await self._answer(request, kind)
        elif self._chunks.forget_refused(number) and request.total_bytes:
            # It was answered when it was refused. Without chunks it is another request, which took the id again.
            return
        elif self._chunks.size(number) != request.total_bytes:
            came = self._chunks.size(number)
            self._chunks.drop(number)
            message = f"the request's chunks have {request.total_bytes} bytes (total_bytes), of which {came} have come"
            await self._start(number, _refuse(message))
        else:
            if request.total_bytes:
                self._chunks.complete(number)
            else:
                self._chunks.drop(number)
            await self._answer(request, kind)

    async def _answer(self, request: link_pb2.RawStreamRequest, kind: str) -> None:
        """Starts a request that is there as a whole."""
        number = request.request_id
        request_type, method = self._methods[kind]
        observed = self._door.observer.part(kind)
        raw: bytes = getattr(request, kind)
        answer_whole = functools.partial(self._door.answer, self._caller, observed, request_type, method)

        async def answer_joined() -> bytes:
            return await answer_whole(*await self._chunks.joined(number, raw))

        answer = answer_joined if request.total_bytes else functools.partial(answer_whole, raw, _seconds(request))
        await self._start(number, answer, kind, request.answer_chunk_bytes, observed.request.id)

    async def _cancel(self, number: int) -> None:
        under_way = self._under_way.get(number)
        if under_way is not None:
            under_way.is_given_up = True
            # A task that is cancelled before its first step would never answer.
            asyncio.get_running_loop().call_soon(under_way.cancel)
        elif self._chunks.drop(number):
            await self._start(number, _fail(_given_up()))

    async def _start(
        self, number: int, answer: Answer, kind: str = "", chunk_bytes: int = 0, request_id: str = ""
    ) -> None:
        await self._slots.acquire()
        under_way = _UnderWay()
        if kind:
            self._under_way[number] = under_way
        serving = self._serve(number, under_way, answer, kind, chunk_bytes, request_id)
        under_way.task = asyncio.get_running_loop().create_task(serving)
        self._tasks.add(under_way.task)
        under_way.task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._slots.release()
        self._ended(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a request of a stream was not answered", exc_info=task.exception())

    async def _serve(
        self, number: int, under_way: _UnderWay, answer: Answer, kind: str, chunk_bytes: int, request_id: str
    ) -> None:
        """Answers a request, however it ends: for nothing at all its client would wait for ever."""
        data: bytes | None = None
        failure: GradruleError | None = None
        try:
            data = await answer()
        except GradruleError as cause:
            failure = cause
        except asyncio.CancelledError:
            if not under_way.is_given_up or self._is_over:
                raise
            failure = _given_up()
        except Exception:
            failure = incident()
        finally:
            under_way.is_answered = True
            if self._under_way.get(number) is under_way:
                del self._under_way[number]
            # It holds the request's bytes, which are not counted any more.
            del answer
        if data is None:
            assert failure is not None
            await self._send(0, _failed(number, failure, request_id))
        elif self._is_over:
            # It answered all the same.
            self._door.let_go(self._caller, len(data))
        else:
            size, messages = len(data), _messages(number, _ANSWER_FIELDS[kind], data, chunk_bytes)
            # The messages hold what they need of it.
            del data
            await self._send(size, messages)

    async def _send(self, size: int, messages: bytes | Iterator[bytes]) -> None:
        """Writes an answer of so many bytes, whose messages, if there are several, are made when their turn comes."""
        self._count(size)
        held = size
        try:
            if isinstance(messages, bytes):
                async with self._writing:
                    # The stream counts what it writes.
                    self._door.let_go(self._caller, held)
                    held = 0
                    await self._try_to_write(messages)
                return
            # Chunks are copies: the answer stays until the last is written.
            for data in messages:
                async with self._writing:
                    if not await self._try_to_write(data):
                        return
        finally:
            if held:
                self._door.let_go(self._caller, held)
            self._count(-size)

    async def _try_to_write(self, data: bytes) -> bool:
        """Writes a message; returns whether that could be done."""
        try:
            await self._write(data)
        except Exception:
            # The client has stopped reading; the reading side of the stream reports that it has ended.
            _log.debug("an answer could not be written", exc_info=True)
            return False
        return True

    def _count(self, size: int) -> None:
        """Counts answers that wait, in and out."""
        self._unwritten += size
        if self._unwritten > _MAX_UNWRITTEN_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()


class _UnderWay:
    """A request whose answer is being made."""

    __slots__ = ("is_answered", "is_given_up", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.is_given_up = False
        self.is_answered = False

    def cancel(self) -> None:
        """Ends the making of the answer, unless it is made; its writing goes on."""
        if self.task is not None and not self.is_answered:
            self.task.cancel()


def _refuse(message: str) -> Answer:
    return _fail(error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message))


def _fail(cause: GradruleError) -> Answer:
    async def answer() -> bytes:
        raise cause

    return answer


def _given_up() -> GradruleError:
    return error(errors_pb2.ERROR_REASON_CANCELLED, "the client gave the request up")


def _seconds(request: link_pb2.RawStreamRequest) -> float | None:
    """Seconds that the client gives a request; None: the default."""
    return request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None


def _messages(number: int, field: int, answer: bytes, chunk_bytes: int) -> bytes | Iterator[bytes]:
    """The messages of an answer, with `chunk_bytes` of it in each; 0: with all of it in one, which is returned itself.

    One message is made at once, so that the answer need not be kept beside it.
    """
    head = _ID_TAG + wire_format.varint(number)
    size = max(chunk_bytes, _MIN_CHUNK_BYTES)
    if not chunk_bytes or len(answer) <= size:
        return b"".join((head, wire_format.prefix(field, len(answer)), answer))
    return _chunks(head, head + wire_format.prefix(field, 0), memoryview(answer), size)


def _chunks(head: bytes, last: bytes, answer: memoryview, size: int) -> Iterator[bytes]:
    for start in range(0, len(answer), size):
        yield b"".join((head, *wire_format.wrapped(_CHUNK_FIELD, (answer[start : start + size],))))
    yield last


def _failed(number: int, cause: GradruleError, request_id: str) -> bytes:
    try:
        status = status_of(cause)
        if request_id:
            # A call of its own would have it in its trailers.
            status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
        return link_pb2.RawStreamResponse(request_id=number, status=status.SerializeToString()).SerializeToString()
    except Exception:
        # What cannot be told is told by its incident.
        return _failed(number, incident(), "")
