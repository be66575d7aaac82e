"""`StreamEvaluate`: runs the requests of one stream side by side, and answers each as soon as it is ready."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

from gradrule.common import wire_format
from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.admission import RequestChunks
from gradrule_server.front.calls import Caller, MethodTable, Write, log_incident, to_status
from gradrule_server.front.request_pipeline import RequestPipeline
from gradrule_server.link.v1 import link_pb2

_log = logging.getLogger(__name__)

Answer = Callable[[], Awaitable[bytes]]

# A stream is not read while more requests of it run or wait to be written, or more bytes of answers wait.
_MAX_REQUESTS = 32
_MAX_UNWRITTEN_BYTES = 64 << 20
# Smaller chunks of an answer would cost more than they save.
_MIN_CHUNK_BYTES = 64 << 10

_ANSWER_FIELDS = {
    field.name: field.number for field in link_pb2.RawStreamResponse.DESCRIPTOR.oneofs_by_name["response"].fields
}
_ID_TAG = bytes((link_pb2.RawStreamResponse.REQUEST_ID_FIELD_NUMBER << 3 | wire_format.VARINT,))
_CHUNK_FIELD = link_pb2.RawStreamResponse.CHUNK_FIELD_NUMBER


class EvaluateStream:
    """One `StreamEvaluate` stream. Requests have ids; their answers may come in another order.

    Args:
        pipeline: admits and parses each request.
        caller: of the stream.
        methods: method and message type for each kind of request.
        write: writes a message to the client.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        caller: Caller,
        methods: MethodTable,
        write: Write,
    ) -> None:
        self._pipeline = pipeline
        self._caller = caller
        self._methods = methods
        self._write = write
        self._writing = asyncio.Lock()
        self._slots = asyncio.Semaphore(_MAX_REQUESTS)
        self._unwritten = 0
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._running: dict[int, _RunningRequest] = {}
        self._chunks = RequestChunks(
            pipeline,
            caller,
            max_requests=_MAX_REQUESTS,
            max_deadline_s=pipeline.max_deadline_s,
            on_late=self._refuse_late,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def run(self, requests: AsyncIterator[bytes]) -> None:
        """Answers requests until the stream ends, then waits for running requests, unless the client has left."""
        reading = asyncio.ensure_future(self._read(requests))
        drained = asyncio.ensure_future(self._pipeline.draining.wait())
        try:
            try:
                age_s = self._pipeline.stream_age_s
                await asyncio.wait({reading, drained}, timeout=age_s, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    cause = "the server is going away" if drained.done() else "the stream has reached its maximum age"
                    raise error(errors_pb2.ERROR_REASON_UNAVAILABLE, cause, retry_after_s=0.0)
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
            await self._handle(raw)
            if not self._chunks.are_arriving:
                # The chunks that would complete a request must still be read.
                await self._pipeline.wait_for_room(self._caller)

    def _refuse_late(self, number: int, cause: GradruleError) -> None:
        """Answers a request whose chunks did not all arrive in time."""
        self._keep(asyncio.ensure_future(self._start(number, _fail(cause))))

    async def _finish(self) -> None:
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _handle(self, raw: bytes) -> None:
        """Starts, continues or cancels a request, as a message of the client says."""
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
        elif number in self._running:
            await self._start(number, _refuse(f"a request {number} is under way on this stream; take another id"))
        elif kind == "chunk":
            failure = self._chunks.add(number, request.chunk, _seconds(request))
            if failure is not None:
                await self._start(number, _fail(failure))
        elif not request.total_bytes and not self._chunks.has_any:
            await self._answer(request, kind)
        elif self._chunks.forget_refused(number) and request.total_bytes:
            # It was answered when it was refused. A request without chunks is a new one that uses the id again.
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
        """Starts a request that has arrived completely."""
        number = request.request_id
        request_type, method = self._methods[kind]
        observed = self._pipeline.observer.part(kind)
        raw: bytes = getattr(request, kind)
        answer_whole = functools.partial(self._pipeline.answer, self._caller, observed, request_type, method)

        async def answer_joined() -> bytes:
            return await answer_whole(*await self._chunks.join(number, raw))

        answer = answer_joined if request.total_bytes else functools.partial(answer_whole, raw, _seconds(request))
        await self._start(number, answer, kind, request.answer_chunk_bytes, observed.request.id)

    async def _cancel(self, number: int) -> None:
        running = self._running.get(number)
        if running is not None:
            running.is_cancelled = True
            # A task that is cancelled before its first step would never answer.
            asyncio.get_running_loop().call_soon(running.cancel)
        elif self._chunks.drop(number):
            await self._start(number, _fail(_cancelled()))

    async def _start(
        self, number: int, answer: Answer, kind: str = "", chunk_bytes: int = 0, request_id: str = ""
    ) -> None:
        await self._slots.acquire()
        running = _RunningRequest()
        if kind:
            self._running[number] = running
        serving = self._run_request(number, running, answer, kind, chunk_bytes, request_id)
        running.task = asyncio.get_running_loop().create_task(serving)
        self._tasks.add(running.task)
        running.task.add_done_callback(self._served)

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

    async def _run_request(
        self, number: int, running: _RunningRequest, answer: Answer, kind: str, chunk_bytes: int, request_id: str
    ) -> None:
        """Answers a request in all cases, since its client would otherwise wait forever."""
        data: bytes | None = None
        failure: GradruleError | None = None
        try:
            data = await answer()
        except GradruleError as cause:
            failure = cause
        except asyncio.CancelledError:
            if not running.is_cancelled or self._is_over:
                raise
            failure = _cancelled()
        except Exception:
            failure = log_incident()
        finally:
            running.is_answered = True
            if self._running.get(number) is running:
                del self._running[number]
            # Frees the bytes of the request, which are not counted any more.
            del answer
        if data is None:
            assert failure is not None
            await self._send(0, _failure_message(number, failure, request_id))
        elif self._is_over:
            # The answer came after the stream had ended.
            self._pipeline.release_answer(self._caller, len(data))
        else:
            size, messages = len(data), _messages(number, _ANSWER_FIELDS[kind], data, chunk_bytes)
            # Frees the answer early: the messages hold what they need of it.
            del data
            await self._send(size, messages)

    async def _send(self, size: int, messages: bytes | Iterator[bytes]) -> None:
        """Writes an answer of `size` bytes; the messages of a chunked answer are made one by one."""
        self._count(size)
        held = size
        try:
            if isinstance(messages, bytes):
                async with self._writing:
                    # From here on `OpenStreams` counts the message.
                    self._pipeline.release_answer(self._caller, held)
                    held = 0
                    await self._try_to_write(messages)
                return
            # Chunks are copies, so the answer stays in memory until the last chunk is written.
            for data in messages:
                async with self._writing:
                    if not await self._try_to_write(data):
                        return
        finally:
            if held:
                self._pipeline.release_answer(self._caller, held)
            self._count(-size)

    async def _try_to_write(self, data: bytes) -> bool:
        """Writes a message; returns whether that worked."""
        try:
            await self._write(data)
        except Exception:
            # The client has stopped reading; the reading side of the stream reports that it has ended.
            _log.debug("an answer could not be written", exc_info=True)
            return False
        return True

    def _count(self, size: int) -> None:
        """Counts bytes of answers that wait to be written; stops counting them where `size` is negative."""
        self._unwritten += size
        if self._unwritten > _MAX_UNWRITTEN_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()


class _RunningRequest:
    """A request whose answer is being computed or written."""

    __slots__ = ("is_answered", "is_cancelled", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.is_cancelled = False
        self.is_answered = False

    def cancel(self) -> None:
        """Cancels the computation, unless the answer is ready; its writing continues."""
        if self.task is not None and not self.is_answered:
            self.task.cancel()


def _refuse(message: str) -> Answer:
    return _fail(error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message))


def _fail(cause: GradruleError) -> Answer:
    async def answer() -> bytes:
        raise cause

    return answer


def _cancelled() -> GradruleError:
    return error(errors_pb2.ERROR_REASON_CANCELLED, "the client gave the request up")


def _seconds(request: link_pb2.RawStreamRequest) -> float | None:
    """Returns the seconds that the client gives a request; None: the default deadline."""
    return request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None


def _messages(number: int, field: int, answer: bytes, chunk_bytes: int) -> bytes | Iterator[bytes]:
    """Returns the messages of an answer, each with `chunk_bytes` of it; 0: the one message with all of it.

    A single message is made now, so that the answer can be freed.
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


def _failure_message(number: int, cause: GradruleError, request_id: str) -> bytes:
    try:
        status = to_status(cause)
        if request_id:
            # Unary calls have the id in their trailers.
            status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
        return link_pb2.RawStreamResponse(request_id=number, status=status.SerializeToString()).SerializeToString()
    except Exception:
        # The status could not be made: report an incident instead.
        return _failure_message(number, log_incident(), "")
