"""`StreamEvaluate`: runs the requests of one stream side by side, and answers each as soon as it is ready."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2

from gradrule.common import wire_format
from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import MethodTable, log_incident, to_status
from gradrule_server.front.open_streams import Stream
from gradrule_server.front.request_chunks import RequestChunks
from gradrule_server.front.request_pipeline import RequestPipeline
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import ObservedRequest

_log = logging.getLogger(__name__)

# A stream is not read while more requests of it run or wait to be written.
_MAX_REQUESTS = 32
# Smaller chunks of an answer would cost more than they save.
_MIN_CHUNK_BYTES = 64 << 10

_ANSWER_FIELDS = {
    field.name: field.number for field in link_pb2.RawStreamResponse.DESCRIPTOR.oneofs_by_name["response"].fields
}
_REQUEST = evaluate_pb2.StreamEvaluateRequest.DESCRIPTOR.full_name
_ID_TAG = bytes((link_pb2.RawStreamResponse.REQUEST_ID_FIELD_NUMBER << 3 | wire_format.VARINT,))
_CHUNK_FIELD = link_pb2.RawStreamResponse.CHUNK_FIELD_NUMBER


class EvaluateStream:
    """One `StreamEvaluate` stream. Requests have ids; their answers may come in another order.

    Args:
        pipeline: admits and parses each request.
        stream: of the client.
        methods: method and message type for each kind of request.
    """

    def __init__(self, pipeline: RequestPipeline, stream: Stream, methods: MethodTable) -> None:
        self._pipeline = pipeline
        self._stream = stream
        self._caller = stream.caller
        self._methods = {kind: pipeline.parsing(*method) for kind, method in methods.items()}
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(_MAX_REQUESTS)
        self._chunks = RequestChunks(
            pipeline.admission, self._caller.tenant.in_flight, pipeline.times.max_deadline_s, self._refuse_late
        )
        # The requests that are computed, and all tasks of requests: those that are written too.
        self._computing: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def run(self) -> None:
        """Answers requests until the stream ends, then waits for running requests, unless the client has left."""
        failure: GradruleError | None = None
        try:
            try:
                await self._read()
            except GradruleError as cause:
                failure = cause
            while self._tasks:
                await asyncio.wait(set(self._tasks))
            if failure is not None:
                raise failure
        finally:
            self._is_over = True
            self._chunks.drop_all()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        if self._pipeline.times.stream_age_s is not None:
            self._stream.stop_reading(self._pipeline.times.stream_age_s)
        admission, in_flight = self._pipeline.admission, self._caller.tenant.in_flight
        while (raw := await self._stream.read()) is not None:
            await self._handle(raw)
            # A request must not stay in memory because no other one follows.
            del raw
            # While requests arrive in chunks, the chunks that would complete them must still be read.
            if not self._chunks.arriving and (counted := await admission.wait_to_read(in_flight)):
                admission.forget_arriving(in_flight, counted)

    async def _handle(self, raw: bytes) -> None:
        """Starts, continues or cancels a request, as a message of the client says."""
        number = 0
        try:
            request = link_pb2.RawStreamRequest.FromString(raw)
            number, kind = request.request_id, request.WhichOneof("request")
            if kind == "cancel":
                await self._cancel(evaluate_pb2.CancelRequest.FromString(request.cancel).request_id)
            elif kind is None:
                raise _malformed("the message holds no request")
            elif number in self._computing:
                raise _malformed(f"a request {number} is under way on this stream; take another id")
            elif kind == "chunk":
                self._chunks.add(number, request.chunk, _seconds(request))
            elif self._chunks.complete(number, request.total_bytes):
                observed = self._pipeline.observer.part(kind)
                await self._slots.acquire()
                self._computing[number] = self._start(self._answer(request, kind, observed))
        except DecodeError:
            await self._write_failure(0, _malformed(f"the bytes are no {_REQUEST}"))
        except GradruleError as cause:
            await self._write_failure(number, cause)

    async def _cancel(self, number: int) -> None:
        task = self._computing.get(number)
        if task is not None:
            # A task that is cancelled before its first step would never answer.
            self._loop.call_soon(self._cancel_computing, number, task)
        elif self._chunks.drop(number):
            await self._write_failure(number, _cancelled())

    def _cancel_computing(self, number: int, task: asyncio.Task[None]) -> None:
        """Cancels the computation, unless the answer is ready; its writing continues."""
        if self._computing.get(number) is task:
            task.cancel()

    def _refuse_late(self, number: int, cause: GradruleError) -> None:
        """Answers a request whose chunks did not all arrive in time."""
        self._start(self._write_failure(number, cause))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a request of a stream was not answered", exc_info=task.exception())

    async def _answer(self, request: link_pb2.RawStreamRequest, kind: str, observed: ObservedRequest) -> None:
        """Answers a request in all cases, since its client would otherwise wait forever."""
        number, raw, remaining = request.request_id, getattr(request, kind), _seconds(request)
        is_chunked, chunk_bytes = number in self._chunks.arriving, request.answer_chunk_bytes
        del request
        data: bytes | None = None
        failure: GradruleError | None = None
        try:
            try:
                with observed:
                    if is_chunked:
                        raw, remaining = await self._chunks.join(number, raw)
                    data = await self._pipeline.run(self._caller, observed.request, remaining, raw, self._methods[kind])
            except GradruleError as cause:
                failure = cause
            except asyncio.CancelledError:
                if self._is_over:
                    raise
                failure = _cancelled()
            except Exception:
                failure = log_incident()
            finally:
                # The bytes of the request are not counted any more.
                del self._computing[number], raw
            if data is None:
                assert failure is not None
                await self._write_failure(number, failure, observed.request.id)
            elif self._is_over:
                # The answer came after the stream had ended.
                self._pipeline.release_answer(self._caller, len(data))
            else:
                size, messages = len(data), _messages(number, _ANSWER_FIELDS[kind], data, chunk_bytes)
                # Frees the answer early: the messages hold what they need of it.
                del data
                if isinstance(messages, bytes):
                    await self._write(messages, size)
                else:
                    await self._write_chunks(messages, size)
        finally:
            self._slots.release()

    async def _write_chunks(self, messages: Iterator[bytes], size: int) -> None:
        """Writes an answer of `size` bytes in chunks, which are copies: the answer counts until the last is written."""
        try:
            for message in messages:
                if not await self._write(message):
                    return
        finally:
            self._pipeline.release_answer(self._caller, size)

    async def _write_failure(self, number: int, cause: GradruleError, request_id: str = "") -> None:
        """Writes the error of a request. `request_id`: as in the log; empty: it has none."""
        await self._write(_failure_message(number, cause, request_id))

    async def _write(self, data: bytes, counted: int = 0) -> bool:
        """Writes a message, see `Stream.write`; returns whether that worked."""
        try:
            await self._stream.write(data, counted)
        except Exception:
            # The client has stopped reading; the reading side of the stream reports that it has ended.
            _log.debug("an answer could not be written", exc_info=True)
            return False
        return True


def _malformed(message: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message)


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
