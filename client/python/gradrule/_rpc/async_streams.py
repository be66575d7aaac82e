"""Sends many calls over one `StreamEvaluate`, for asyncio: one task reads the stream, one writes it.

The tasks of callers do not read or write: gRPC ends the whole stream if a task is cancelled while it does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio

from gradrule._messages.error_status import closed_error, error_of, error_of_code
from gradrule._messages.rpc_calls import Call
from gradrule._rpc import call_routes, stream_messages
from gradrule._rpc.stream_messages import StreamLostError, decoded
from gradrule.common import wire_format
from gradrule.errors import CancelledError, DeadlineExceededError, GradruleError, InternalError, UnavailableError

R = TypeVar("R")

_Answer = tuple[str, bytes]


class AsyncStream:
    """Sends requests over a stream, which is opened at the first request and again after it ended.

    Args:
        channel: The client's channel.
        metadata: Metadata of the stream.
        target: The target of the client, for errors.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: Any, target: str) -> None:
        self._open: Callable[..., Any] = channel.stream_stream(stream_messages.METHOD)
        self._metadata = metadata
        self._target = target
        self._connection: AsyncConnection | None = None

    @property
    def pending_count(self) -> int:
        """Number of requests without an answer."""
        return 0 if self._connection is None else len(self._connection.waiting)

    @property
    def is_usable(self) -> bool:
        """Whether this task may use the stream: always."""
        return True

    @property
    def is_open(self) -> bool:
        """Whether the stream is open."""
        return self._connection is not None and not self._connection.ended

    async def run(self, call: Call[R], parts: wire_format.Parts, size: int, timeout: float) -> R:
        """Sends a call, whose request has these bytes, and returns its decoded answer.

        Args:
            call: The call.
            parts: Bytes of its request, `size` in all.
            size: Number of bytes.
            timeout: Timeout in seconds.

        Raises:
            StreamLostError: The stream ended before the answer came.
            GradruleError: The call failed.
        """
        if self._connection is None or self._connection.ended:
            try:
                self._connection = AsyncConnection(self._open, self._metadata, self._target)
            except grpc.aio.UsageError as cause:
                raise closed_error(self._target) from cause
        connection = self._connection
        number, future = connection.send(stream_messages.kind_of(call), parts, size, timeout)
        late_s = timeout + stream_messages.GRACE_S
        late = asyncio.get_running_loop().call_later(late_s, connection.time_out, future, timeout)
        try:
            kind, data = await future
        finally:
            late.cancel()
            connection.cancel(number)
        return decoded(call, kind, data)

    async def close(self) -> None:
        """Ends the stream and cancels its requests."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class AsyncConnection:
    """Manages a stream from its opening to its end."""

    def __init__(self, open_stream: Callable[..., Any], metadata: Any, target: str) -> None:
        self._target = target
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self.waiting: dict[int, asyncio.Future[_Answer]] = {}
        """Requests that have no answer yet, by number."""
        self._pieces: dict[int, list[bytes]] = {}
        self._outgoing: deque[tuple[int, bytes]] = deque()
        self._long: deque[tuple[int, Iterator[bytes]]] = deque()
        self._has_outgoing: asyncio.Future[None] | None = None
        self._used_at = self._loop.time()
        self._keeps_handles = False
        self._is_closed = False
        self._is_late = False
        self.ended = False
        self._call = open_stream(metadata=metadata)
        self._reader = asyncio.ensure_future(self._read())
        self._writer = asyncio.ensure_future(self._write())
        self._idle = self._loop.call_later(call_routes.REPEATED_WITHIN_S, self._check_idle)

    def send(
        self, kind: str, parts: wire_format.Parts, size: int, timeout: float
    ) -> tuple[int, asyncio.Future[_Answer]]:
        """Sends a request."""
        number = next(self._numbers)
        message = stream_messages.messages(number, kind, parts, size, timeout)
        future: asyncio.Future[_Answer] = self._loop.create_future()
        # asyncio logs exceptions that are never retrieved; a cancelled caller does not retrieve its own.
        future.add_done_callback(_retrieve)
        self.waiting[number] = future
        self._used_at = self._loop.time()
        self._keeps_handles |= kind == "forward"
        if isinstance(message, bytes):
            self._outgoing.append((number, message))
        else:
            self._long.append((number, message))
        self._wake_writer()
        return number, future

    def cancel(self, number: int) -> None:
        """Cancels a request, unless it is answered."""
        self._pieces.pop(number, None)
        if self.waiting.pop(number, None) is not None and not self.ended:
            self._outgoing.append((0, stream_messages.cancellation(number)))
            self._wake_writer()

    def time_out(self, future: asyncio.Future[_Answer], timeout: float) -> None:
        """Fails a request that is not answered, and ends the stream: servers answer late requests themselves."""
        if future.done():
            return
        future.set_exception(DeadlineExceededError(f"no answer within {timeout:.3g} s"))
        self.ended = self._is_late = True
        self._call.cancel()

    async def close(self) -> None:
        """Ends the stream and cancels its requests."""
        self._is_closed = True
        self._call.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    def _check_idle(self) -> None:
        idle_s = self._loop.time() - self._used_at
        if not self.waiting and not self._keeps_handles and idle_s >= call_routes.REPEATED_WITHIN_S:
            self.ended = True
            self._wake_writer()
        elif not self.ended:
            left_s = max(call_routes.REPEATED_WITHIN_S - idle_s, 1.0)
            self._idle = self._loop.call_later(left_s, self._check_idle)

    def _wake_writer(self) -> None:
        if self._has_outgoing is not None and not self._has_outgoing.done():
            self._has_outgoing.set_result(None)

    async def _write(self) -> None:
        """Writes messages; small ones go between the chunks of long ones."""
        try:
            while not self.ended:
                data = self._next_message()
                if data is not None:
                    await self._call.write(data)
                elif not (self._outgoing or self._long):
                    self._has_outgoing = self._loop.create_future()
                    await self._has_outgoing
            await self._call.done_writing()
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError, asyncio.CancelledError):
            # The reader passes the reason to all callers.
            return

    def _next_message(self) -> bytes | None:
        """Removes and returns the next message; None if its request was cancelled."""
        if self._outgoing:
            number, data = self._outgoing.popleft()
            # Number 0 is a cancellation.
            return data if number == 0 or number in self.waiting else None
        if self._long:
            number, chunks = self._long[0]
            chunk = next(chunks, None) if number in self.waiting else None
            if chunk is None:
                self._long.popleft()
            else:
                self._long.rotate(-1)
            return chunk
        return None

    async def _read(self) -> None:
        failure: GradruleError = UnavailableError("the server ended the stream")
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                self._deliver(stream_messages.received(data))
            if await self._call.code() is not grpc.StatusCode.OK:
                said = await self._call.details() or "the stream broke"
                failure = error_of_code(grpc.StatusCode.UNAVAILABLE, said, self._target)
        except grpc.RpcError as cause:
            failure = error_of(cause, self._target)
        except asyncio.CancelledError:
            failure = (
                UnavailableError("the stream was closed: the server had not answered a request in time")
                if self._is_late
                else CancelledError("the call was cancelled; its client was closed meanwhile")
            )
        except InternalError as cause:
            failure = cause
            self._call.cancel()
        self.ended = True
        self._idle.cancel()
        error = failure if self._is_closed else StreamLostError(failure)
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(error)
        self.waiting.clear()
        self._pieces.clear()
        self._wake_writer()

    def _deliver(self, message: stream_messages.Received) -> None:
        number, kind, data = message
        future = self.waiting.get(number)
        if future is None:
            return
        if kind == "chunk":
            self._pieces.setdefault(number, []).append(data)
            return
        pieces = self._pieces.pop(number, None)
        if pieces and kind != "status":
            data = b"".join((*pieces, data))
        del self.waiting[number]
        if not future.done():
            future.set_result((kind, data))


def _retrieve(future: asyncio.Future[_Answer]) -> None:
    if not future.cancelled():
        future.exception()
