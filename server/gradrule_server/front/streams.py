"""Bidirectional streams: reading until the client or the server ends them, requests that run side by side."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Caller, MethodTable, Write
from gradrule_server.front.handlers import Door
from gradrule_server.front.outcomes import incident
from gradrule_server.front.status import status_of
from gradrule_server.link.v1 import link_pb2

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Requests of one stream that run or whose answers wait to be written, and bytes of the latter; past these it is not
# read.
_MAX_UNDER_WAY = 32
_MAX_UNWRITTEN_BYTES = 64 << 20


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
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

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
            answering = self._under_way.get(cancelled)
            if answering is not None:
                answering.cancel()
        elif kind is None:
            await self._start(number, _refuse("the message holds no request"))
        elif number in self._under_way:
            await self._start(number, _refuse(f"a request {number} is under way on this stream; take another id"))
        else:
            request_type, method = self._methods[kind]
            remaining = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
            observed = self._door.observer.part(kind)
            answer = self._door.answer(self._caller, observed, request_type, method, getattr(request, kind), remaining)
            await self._start(number, answer, kind)

    async def _start(self, number: int, answer: Coroutine[Any, Any, bytes], kind: str = "") -> None:
        try:
            await self._slots.acquire()
        except BaseException:
            answer.close()
            raise
        answering = asyncio.ensure_future(answer)
        if kind:
            self._under_way[number] = answering
        task = asyncio.ensure_future(self._serve(number, answering, kind))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and task.exception() is not None:
            _log.error("a request of a stream was not answered", exc_info=task.exception())

    async def _serve(self, number: int, answering: asyncio.Task[bytes], kind: str) -> None:
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
        size, data = _size_of(answering), _response(number, kind, answering)
        # The answer is in there now: it need not wait a second time.
        del answering
        self._count(len(data))
        try:
            try:
                await self._writing.acquire()
            finally:
                # What is being written is counted by whoever writes it.
                self._door.let_go(self._caller, size)
            try:
                await self._write(data)
            except Exception:
                # Nobody reads any more; that the stream ends is told by other means.
                _log.debug("an answer could not be written", exc_info=True)
            finally:
                self._writing.release()
        finally:
            self._count(-len(data))

    def _count(self, size: int) -> None:
        """Counts answers that wait, in and out."""
        self._unwritten += size
        if self._unwritten > _MAX_UNWRITTEN_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()


async def _refuse(message: str) -> bytes:
    raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message)


def _response(number: int, kind: str, answering: asyncio.Task[bytes]) -> bytes:
    """What the client gets for a request that has ended, however it did: for nothing at all it would wait for ever."""
    try:
        try:
            response = link_pb2.RawStreamResponse(request_id=number)
            setattr(response, kind, answering.result())
            return response.SerializeToString()
        except GradruleError as cause:
            return _failed(number, cause)
        except asyncio.CancelledError:
            return _failed(number, error(errors_pb2.ERROR_REASON_CANCELLED, "the client gave the request up"))
    except Exception:
        return _failed(number, incident())


def _failed(number: int, cause: GradruleError) -> bytes:
    status = status_of(cause).SerializeToString()
    return link_pb2.RawStreamResponse(request_id=number, status=status).SerializeToString()


def _size_of(answering: asyncio.Task[bytes]) -> int:
    """Bytes of the answer, if there is one."""
    return 0 if answering.cancelled() or answering.exception() is not None else len(answering.result())
