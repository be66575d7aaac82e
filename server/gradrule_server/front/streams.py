"""Bidirectional streams: reading until the client or the server ends them, requests that run side by side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

from gradrule import _wire
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

# Requests of one stream that run or whose answers wait to be written, and bytes of the latter; past these it is not
# read.
_MAX_UNDER_WAY = 32
_MAX_UNWRITTEN_BYTES = 64 << 20
# Smaller chunks of an answer would cost more than they spare.
_MIN_CHUNK_BYTES = 64 << 10

_ANSWER_FIELDS = {
    field.name: field.number for field in link_pb2.RawStreamResponse.DESCRIPTOR.oneofs_by_name["response"].fields
}
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
        self._under_way: dict[int, asyncio.Task[bytes]] = {}
        self._chunks = RequestChunks(door, caller, _MAX_UNDER_WAY, self._refuse_late)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Answers requests until the stream ends; what is under way by then is finished, unless the client left."""
        try:
            try:
                async for raw in incoming(requests, self._door.draining):
                    await self._has_room.wait()
                    await self._take(raw)
            except GradruleError:
                await self._finish()
                raise
            await self._finish()
        finally:
            self._chunks.drop_all()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _refuse_late(self, number: int, cause: GradruleError) -> None:
        """Answers a request whose chunks did not all come in time."""
        task = asyncio.ensure_future(self._start(number, _fail(cause)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _take(self, raw: bytes) -> None:
        """Starts what a message asks for."""
        try:
            request = link_pb2.RawStreamRequest.FromString(raw)
            cancelled = evaluate_pb2.CancelRequest.FromString(request.cancel).request_id
        except DecodeError:
            name = evaluate_pb2.StreamEvaluateRequest.DESCRIPTOR.full_name
            await self._start(0, _refuse(f"the bytes are no {name}"))
            return
        number, kind = request.request_id, request.WhichOneof("request")
        if kind == "cancel":
            await self._cancel(cancelled)
        elif kind is None:
            await self._start(number, _refuse("the message holds no request"))
        elif number in self._under_way:
            await self._start(number, _refuse(f"a request {number} is under way on this stream; take another id"))
        elif kind == "chunk":
            remaining = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
            failure = self._chunks.add(number, request.chunk, remaining)
            if failure is not None:
                await self._start(number, _fail(failure))
        elif self._chunks.is_refused(number):
            # It was answered when it was refused.
            self._chunks.drop(number)
        elif self._chunks.size(number) != request.chunk_bytes:
            came = self._chunks.size(number)
            self._chunks.drop(number)
            message = f"the request's chunks have {request.chunk_bytes} bytes (chunk_bytes), of which {came} have come"
            await self._start(number, _refuse(message))
        else:
            await self._answer(request, kind)

    async def _answer(self, request: link_pb2.RawStreamRequest, kind: str) -> None:
        """Starts a request that is there as a whole."""
        number = request.request_id
        request_type, method = self._methods[kind]
        remaining = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
        observed = self._door.observer.part(kind)
        rest: bytes = getattr(request, kind)

        async def answer() -> bytes:
            raw, seconds = rest, remaining
            if request.chunk_bytes:
                raw, seconds = await self._chunks.joined(number, rest)
            return await self._door.answer(self._caller, observed, request_type, method, raw, seconds)

        await self._start(number, answer(), kind, request.answer_chunk_bytes, observed.request.id)

    async def _cancel(self, number: int) -> None:
        answering = self._under_way.get(number)
        if answering is not None:
            answering.cancel()
        elif self._chunks.drop(number):
            await self._start(number, _fail(_given_up()))

    async def _start(
        self,
        number: int,
        answer: Coroutine[Any, Any, bytes],
        kind: str = "",
        chunk_bytes: int = 0,
        request_id: str = "",
    ) -> None:
        try:
            await self._slots.acquire()
        except BaseException:
            answer.close()
            raise
        answering = asyncio.ensure_future(answer)
        if kind:
            self._under_way[number] = answering
        task = asyncio.ensure_future(self._serve(number, answering, kind, chunk_bytes, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and task.exception() is not None:
            _log.error("a request of a stream was not answered", exc_info=task.exception())

    async def _serve(
        self, number: int, answering: asyncio.Task[bytes], kind: str, chunk_bytes: int, request_id: str
    ) -> None:
        try:
            await asyncio.wait({answering})
        except asyncio.CancelledError:
            # It may answer all the same, or have answered already.
            answering.add_done_callback(lambda task: self._door.let_go(self._caller, _size_of(task)))
            raise
        finally:
            answering.cancel()
            if self._under_way.get(number) is answering:
                del self._under_way[number]
        held, messages = _messages(number, kind, answering, chunk_bytes, request_id)
        # Nothing but the messages needs the answer from now on.
        del answering
        size = held
        self._count(size)
        try:
            for data in messages:
                try:
                    await self._writing.acquire()
                finally:
                    # What is being written is counted by whoever writes it.
                    written = min(held, len(data))
                    held -= written
                    self._door.let_go(self._caller, written)
                try:
                    await self._write(data)
                except Exception:
                    # Nobody reads any more; that the stream ends is told by other means.
                    _log.debug("an answer could not be written", exc_info=True)
                    return
                finally:
                    self._writing.release()
        finally:
            self._door.let_go(self._caller, held)
            self._count(-size)

    def _count(self, size: int) -> None:
        """Counts answers that wait, in and out."""
        self._unwritten += size
        if self._unwritten > _MAX_UNWRITTEN_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()


async def _refuse(message: str) -> bytes:
    raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message)


async def _fail(cause: GradruleError) -> bytes:
    raise cause


def _given_up() -> GradruleError:
    return error(errors_pb2.ERROR_REASON_CANCELLED, "the client gave the request up")


def _messages(
    number: int, kind: str, answering: asyncio.Task[bytes], chunk_bytes: int, request_id: str
) -> tuple[int, Iterator[bytes]]:
    """What the client gets for a request that has ended, however it did: for nothing at all it would wait for ever.

    Returns the number of bytes of its answer, and the messages, each of which is made when its turn comes.
    """
    try:
        try:
            answer = answering.result()
            field = _ANSWER_FIELDS[kind]
        except GradruleError as cause:
            return 0, iter((_failed(number, cause, request_id),))
        except asyncio.CancelledError:
            return 0, iter((_failed(number, _given_up(), request_id),))
    except Exception:
        return 0, iter((_failed(number, incident(), request_id),))
    return len(answer), _pieces(number, field, answer, max(chunk_bytes, _MIN_CHUNK_BYTES) if chunk_bytes else 0)


def _pieces(number: int, field: int, answer: bytes, size: int) -> Iterator[bytes]:
    """The messages of an answer, with `size` bytes of it in each; 0: with all of it in one."""
    head = link_pb2.RawStreamResponse(request_id=number).SerializeToString()
    view = memoryview(answer)
    if not size or len(view) <= size:
        yield b"".join((head, _wire.prefix(field, len(view)), view))
        return
    for start in range(0, len(view), size):
        yield b"".join((head, *_wire.wrapped(_CHUNK_FIELD, (view[start : start + size],))))
    yield head + _wire.prefix(field, 0)


def _failed(number: int, cause: GradruleError, request_id: str) -> bytes:
    status = status_of(cause)
    if request_id:
        # A call of its own would have it in its trailers.
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    return link_pb2.RawStreamResponse(request_id=number, status=status.SerializeToString()).SerializeToString()


def _size_of(answering: asyncio.Task[bytes]) -> int:
    """Bytes of the answer, if there is one."""
    return 0 if answering.cancelled() or answering.exception() is not None else len(answering.result())
