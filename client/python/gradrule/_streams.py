"""`StreamEvaluate` from the client's side: many requests over one stream, each with an answer of its own."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from gradrule._calls import Call
from gradrule._status import error_of, error_of_status, serialized
from gradrule.errors import CancelledError, DeadlineExceededError, GradruleError, InternalError, UnavailableError
from gradrule.v1 import evaluate_pb2

R = TypeVar("R")

METHOD = "/gradrule.v1.GradientService/StreamEvaluate"

# The server keeps the deadline; this is for one that no longer answers.
_GRACE_S = 2.0

Answer = evaluate_pb2.StreamEvaluateResponse


class Stream:
    """One stream, opened at the first request and again after it broke. Safe to share between threads.

    closed: what is raised once the channel is closed.
    """

    def __init__(self, channel: grpc.Channel, metadata: Any, closed: Callable[[], GradruleError]) -> None:
        self._open: Callable[..., Any] = channel.stream_stream(METHOD)
        self._metadata = metadata
        self._closed = closed
        self._lock = threading.Lock()
        self._connection: _Connection | None = None

    def run(self, call: Call[R], timeout: float) -> R:
        """Sends a call, waits for its answer and decodes it. `timeout`: seconds."""
        connection = self._connected()
        number, future = connection.send(call, timeout)
        try:
            answer = future.result(timeout + _GRACE_S)
        except futures.TimeoutError:
            connection.cancel(number)
            raise DeadlineExceededError(f"no answer within {timeout:.3g} s") from None
        return _decoded(call, answer)

    def close(self) -> None:
        """Ends the stream; what is under way is given up."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> _Connection:
        with self._lock:
            if self._connection is None or self._connection.ended:
                try:
                    self._connection = _Connection(self._open, self._metadata)
                except ValueError as cause:
                    raise self._closed() from cause
            return self._connection


class _Connection:
    """A stream that is open, until it has ended."""

    def __init__(self, open_stream: Callable[..., Any], metadata: Any) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, futures.Future[Answer]] = {}
        self.ended = False
        self._call = open_stream(iter(self._outgoing.get, None), metadata=metadata, wait_for_ready=False)
        threading.Thread(target=self._read, name="gradrule-stream", daemon=True).start()

    def send(self, call: Call[Any], timeout: float) -> tuple[int, futures.Future[Answer]]:
        number = next(self._numbers)
        data = message(number, call, timeout)
        future: futures.Future[Answer] = futures.Future()
        with self._lock:
            if self.ended:
                raise UnavailableError("the stream has just ended")
            self._waiting[number] = future
        self._outgoing.put(data)
        return number, future

    def cancel(self, number: int) -> None:
        with self._lock:
            self._waiting.pop(number, None)
        self._outgoing.put(cancellation(number))

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()

    def _read(self) -> None:
        failure: GradruleError = UnavailableError("the server ended the stream")
        try:
            for data in self._call:
                answer = Answer.FromString(data)
                with self._lock:
                    future = self._waiting.pop(answer.request_id, None)
                if future is not None:
                    future.set_result(answer)
        except grpc.RpcError as cause:
            failure = error_of(cause)
        except DecodeError as cause:
            failure = InternalError(f"the server's answer cannot be read: {cause}")
            self._call.cancel()
        with self._lock:
            self.ended = True
            lost = list(self._waiting.values())
            self._waiting.clear()
        self._outgoing.put(None)
        for future in lost:
            future.set_exception(failure)


class AsyncStream:
    """`Stream` for asyncio."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Any, closed: Callable[[], GradruleError]) -> None:
        self._open: Callable[..., Any] = channel.stream_stream(METHOD)
        self._metadata = metadata
        self._closed = closed
        self._connection: _AsyncConnection | None = None

    async def run(self, call: Call[R], timeout: float) -> R:
        """As `Stream.run`."""
        if self._connection is None or self._connection.ended:
            try:
                self._connection = _AsyncConnection(self._open, self._metadata)
            except grpc.aio.UsageError as cause:
                raise self._closed() from cause
        connection = self._connection
        number, future = connection.send(call, timeout)
        try:
            answer = await asyncio.wait_for(future, timeout + _GRACE_S)
        except TimeoutError:
            connection.cancel(number)
            raise DeadlineExceededError(f"no answer within {timeout:.3g} s") from None
        except asyncio.CancelledError:
            connection.cancel(number)
            raise
        return _decoded(call, answer)

    async def close(self) -> None:
        """As `Stream.close`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _AsyncConnection:
    def __init__(self, open_stream: Callable[..., Any], metadata: Any) -> None:
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()
        self.ended = False
        self._call = open_stream(metadata=metadata)
        self._reader = asyncio.ensure_future(self._read())

    def send(self, call: Call[Any], timeout: float) -> tuple[int, asyncio.Future[Answer]]:
        number = next(self._numbers)
        data = message(number, call, timeout)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        # A failure that comes when its caller has just given up is nobody's, and would be reported as lost.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting[number] = future
        self._start(self._send(number, data))
        return number, future

    def cancel(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._start(self._write(cancellation(number)))

    async def close(self) -> None:
        self._call.cancel()
        await self._reader
        await asyncio.gather(*self._writes, return_exceptions=True)

    def _start(self, write: Coroutine[Any, Any, None]) -> None:
        # A task that is cancelled while it writes takes the whole stream along, and so all other callers' requests;
        # hence no caller's task writes. The lock gives way in the order in which the tasks start.
        task = asyncio.ensure_future(write)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _send(self, number: int, data: bytes) -> None:
        async with self._writing:
            # It may have been given up while it waited for its turn.
            if number in self._waiting:
                await self._put(data)

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            await self._put(data)

    async def _put(self, data: bytes) -> None:
        try:
            await self._call.write(data)
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            # The reader tells why the stream ended, to all who wait.
            return

    async def _read(self) -> None:
        failure: GradruleError = UnavailableError("the server ended the stream")
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                answer = Answer.FromString(data)
                future = self._waiting.pop(answer.request_id, None)
                if future is not None and not future.done():
                    future.set_result(answer)
            if await self._call.code() is not grpc.StatusCode.OK:
                failure = UnavailableError(await self._call.details() or "the stream broke")
        except grpc.RpcError as cause:
            failure = error_of(cause)
        except asyncio.CancelledError:
            failure = CancelledError("the stream was closed")
        except DecodeError as cause:
            failure = InternalError(f"the server's answer cannot be read: {cause}")
            self._call.cancel()
        self.ended = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(failure)
        self._waiting.clear()


def message(number: int, call: Call[Any], timeout: float) -> bytes:
    """A call as one message of a stream; `call.method` is the field of the request."""
    kind: dict[str, Any] = {call.method: call.request}
    request = evaluate_pb2.StreamEvaluateRequest(request_id=number, **kind)
    request.timeout.FromNanoseconds(int(timeout * 1e9))
    return serialized(request)


def cancellation(number: int) -> bytes:
    """The message that gives a request up."""
    cancel = evaluate_pb2.CancelRequest(request_id=number)
    return evaluate_pb2.StreamEvaluateRequest(cancel=cancel).SerializeToString()


def _decoded(call: Call[R], answer: Answer) -> R:
    kind = answer.WhichOneof("response")
    if kind == "status":
        raise error_of_status(answer.status)
    if kind != call.method:
        raise InternalError(f"the server answered a {call.method} with {kind}")
    return call.decode(getattr(answer, kind))
