"""Sends many calls over one `StreamEvaluate`, for threads.

While callers wait, one of them reads the stream for all: passing an answer from thread to thread costs more than
reading it.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from gradrule._messages.error_status import closed_error, error_of
from gradrule._messages.rpc_calls import Call
from gradrule._rpc import call_routes, stream_messages
from gradrule._rpc.interrupts import CallGuard, GuardedChannel
from gradrule._rpc.stream_messages import StreamLostError, decoded
from gradrule.common import wire_format
from gradrule.errors import CancelledError, DeadlineExceededError, GradruleError, InternalError, UnavailableError

R = TypeVar("R")

_log = logging.getLogger(__name__)

# Interval of the checks whether an open stream must be read or closed.
_CHECK_S = 1.0


class Pending:
    """Holds a request of a stream that has no answer yet."""

    __slots__ = ("answer", "due", "ended_at", "failure", "is_done", "is_woken", "number", "pieces", "wake")

    def __init__(self, number: int, due: float) -> None:
        self.number = number
        self.due = due
        """Time when its caller stops waiting, on the clock of `time.monotonic`."""
        self.answer: tuple[str, bytes] | None = None
        """Kind and bytes of the answer."""
        self.failure: Exception | None = None
        self.ended_at: float | None = None
        """Time of the answer or the failure, on the same clock."""
        self.pieces: list[bytes] = []
        self.is_done = False
        self.wake: threading.Lock | None = None
        """Lock that the caller waits for; its release wakes the caller."""
        self.is_woken = False


class Stream:
    """Sends requests over a stream, which is opened at the first request and again after it ended. Thread-safe.

    The locks are reentrant, so that a signal handler that has interrupted a call may close the client.

    Args:
        channel: The client's channel.
        metadata: Metadata of the stream.
        target: The target of the client, for errors.
    """

    def __init__(self, channel: GuardedChannel, metadata: Any, target: str) -> None:
        self._guard = channel.guard
        self._open: Callable[..., Any] = channel.stream_stream(stream_messages.METHOD)
        self._metadata = metadata
        self._target = target
        self._lock = threading.RLock()
        self._connection: Connection | None = None

    @property
    def pending_count(self) -> int:
        """Number of requests without an answer."""
        connection = self._own_connection
        return 0 if connection is None else connection.pending_count

    @property
    def is_usable(self) -> bool:
        """Whether this thread may use the stream: not if it has interrupted another call of its own."""
        return not self._guard.is_running

    @property
    def is_open(self) -> bool:
        """Whether the stream is open."""
        connection = self._own_connection
        return connection is not None and not connection.ended

    @property
    def _own_connection(self) -> Connection | None:
        """The connection, unless the process that opened it has forked this one: gRPC closes it in forks."""
        connection = self._connection
        return None if connection is None or connection.process != os.getpid() else connection

    def run(self, call: Call[R], parts: wire_format.Parts, size: int, timeout: float) -> R:
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
        answer: R = self.start(call, parts, size, timeout).result()
        return answer

    def start(self, call: Call[Any], parts: wire_format.Parts, size: int, timeout: float) -> Started:
        """Sends a call without waiting for its answer. Arguments and errors are those of `run`."""
        self._guard.require_not_running()
        return self._guard.run(self._start, call, parts, size, timeout)

    def close(self) -> None:
        """Ends the stream and cancels its requests."""
        with self._lock:
            connection, self._connection = self._own_connection, None
        if connection is not None:
            connection.close()

    def _start(self, call: Call[Any], parts: wire_format.Parts, size: int, timeout: float) -> Started:
        kind = stream_messages.kind_of(call)
        connection = self._connected()
        return Started(self._guard, connection, connection.send(kind, parts, size, timeout), call, timeout)

    def _connected(self) -> Connection:
        connection = self._own_connection
        if connection is not None and not connection.ended:
            return connection
        with self._lock:
            connection = self._own_connection
            if connection is None or connection.ended:
                try:
                    connection = self._connection = Connection(self._open, self._metadata, self._target)
                except ValueError as cause:
                    raise closed_error(self._target) from cause
            return connection


class Started:
    """Holds a call that was sent over a stream."""

    __slots__ = ("_call", "_connection", "_guard", "_pending", "_timeout")

    def __init__(
        self, guard: CallGuard, connection: Connection, pending: Pending, call: Call[Any], timeout: float
    ) -> None:
        self._guard = guard
        self._connection = connection
        self._pending = pending
        self._call = call
        self._timeout = timeout

    def result(self) -> Any:
        """Waits for the answer and decodes it. Raises `StreamLostError` and the error of a failed call."""
        try:
            kind, data = self._guard.run(self._connection.wait, self._pending)
        except TimeoutError:
            self.cancel()
            raise DeadlineExceededError(f"no answer within {self._timeout:.3g} s") from None
        except BaseException:
            self.cancel()
            raise
        return decoded(self._call, kind, data)

    def ended_at(self) -> float | None:
        """Returns the time of the answer or the failure, on the clock of `time.monotonic`; None before it."""
        return self._pending.ended_at

    def cancel(self) -> None:
        """Cancels the call, unless it is answered."""
        self._connection.cancel(self._pending)


class Connection:
    """Manages a stream from its opening to its end.

    Attributes:
        process: Id of the process that opened it.
    """

    def __init__(self, open_stream: Callable[..., Any], metadata: Any, target: str) -> None:
        self._target = target
        self.process = os.getpid()
        self._outgoing: queue.SimpleQueue[bytes | Iterator[bytes] | None] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._waiting: dict[int, Pending] = {}
        self._reader: Pending | None = None
        self._used_at = time.monotonic()
        self._keeps_handles = False
        self._has_ended = threading.Event()
        self._is_closed = False
        self.ended = False
        self._call = open_stream(self._messages(), metadata=metadata, wait_for_ready=False)
        threading.Thread(target=self._monitor, name="gradrule-stream", daemon=True).start()

    @property
    def pending_count(self) -> int:
        """Number of requests without an answer."""
        return len(self._waiting)

    def send(self, kind: str, parts: wire_format.Parts, size: int, timeout: float) -> Pending:
        """Sends a request. Raises `StreamLostError` if the stream has ended."""
        number = next(self._numbers)
        message = stream_messages.messages(number, kind, parts, size, timeout)
        now = time.monotonic()
        pending = Pending(number, now + timeout + stream_messages.GRACE_S)
        with self._lock:
            if self.ended:
                raise StreamLostError(UnavailableError("the stream has just ended"))
            self._waiting[number] = pending
            self._used_at = now
            self._keeps_handles |= kind == "forward"
        self._outgoing.put(message if isinstance(message, bytes) else self._while_pending(number, message))
        return pending

    def wait(self, pending: Pending) -> tuple[str, bytes]:
        """Returns kind and bytes of the answer. Raises the error of the request and `TimeoutError`."""
        while not pending.is_done:
            reads = False
            try:
                with self._lock:
                    pending.is_woken = False
                    if reads := self._reader is None:
                        self._reader = pending
                    elif pending.wake is None:
                        pending.wake = threading.Lock()
                        pending.wake.acquire()
                if reads:
                    self._read(pending)
                elif not pending.is_done:
                    self._sleep(pending)
            except BaseException:
                if reads:
                    # An interrupt may occur just before reading starts or while it ends.
                    self._end_reading(pending)
                raise
        if pending.failure is not None:
            raise pending.failure
        assert pending.answer is not None
        return pending.answer

    def cancel(self, pending: Pending) -> None:
        """Cancels a request, unless it is answered."""
        with self._lock:
            if self._waiting.pop(pending.number, None) is None:
                return
            self._complete(pending, None, CancelledError("the call was cancelled"))
        self._outgoing.put(stream_messages.cancellation(pending.number))
        # If its caller was just woken to read, wake another caller.
        self._wake_reader(excluded=pending)

    def close(self) -> None:
        """Ends the stream and cancels its requests."""
        self._is_closed = True
        self._finish()
        self._call.cancel()
        self._end(CancelledError("the call was cancelled; its client was closed meanwhile"))

    def _sleep(self, pending: Pending) -> None:
        """Sleeps until the request is answered or its caller must read."""
        assert pending.wake is not None
        try:
            if not pending.wake.acquire(timeout=max(0.0, pending.due - time.monotonic())):
                raise TimeoutError
        except BaseException:
            # If this caller was just woken to read, wake another one.
            self._wake_reader(excluded=pending)
            raise

    def _read(self, pending: Pending) -> None:
        """Reads the stream for all callers until this request is answered."""
        try:
            while not pending.is_done:
                self._read_message()
        except BaseException:
            # gRPC would refuse the next read as a second one at the same time.
            self._call.cancel()
            self._end(UnavailableError("reading the stream was interrupted"))
            raise
        finally:
            self._end_reading(pending)

    def _end_reading(self, pending: Pending) -> None:
        """Lets another caller read, if this one was reading."""
        with self._lock:
            if self._reader is not pending:
                return
            self._reader = None
        if self._waiting:
            self._wake_reader(excluded=pending)

    def _read_message(self) -> None:
        try:
            self._deliver(stream_messages.received(next(self._call)))
        except StopIteration:
            self._end(UnavailableError("the server ended the stream"))
        except grpc.RpcError as cause:
            self._end(error_of(cause, self._target))
        except InternalError as failure:
            self._call.cancel()
            self._end(failure)

    def _deliver(self, message: stream_messages.Received) -> None:
        pending = self._waiting.get(message.number)
        if pending is None:
            return
        if message.kind == "chunk":
            pending.pieces.append(message.data)
            return
        data = message.data
        if pending.pieces and message.kind != "status":
            data = b"".join((*pending.pieces, data))
        with self._lock:
            if self._waiting.pop(message.number, None) is None:
                return
            self._complete(pending, (message.kind, data), None)

    def _complete(self, pending: Pending, answer: tuple[str, bytes] | None, failure: Exception | None) -> None:
        """Sets the outcome of a request. The caller holds the lock."""
        pending.ended_at = time.monotonic()
        pending.answer, pending.failure, pending.is_done = answer, failure, True
        _wake(pending)

    def _end(self, failure: GradruleError) -> None:
        """Fails all requests. If the server or the network ended the stream, they may be sent over another."""
        error = failure if self._is_closed else StreamLostError(failure)
        with self._lock:
            self.ended = True
            lost = list(self._waiting.values())
            self._waiting.clear()
            for pending in lost:
                self._complete(pending, None, error)
        self._finish()

    def _finish(self) -> None:
        self.ended = True
        self._has_ended.set()
        self._outgoing.put(None)

    def _wake_reader(self, *, excluded: Pending) -> None:
        """Wakes a sleeping caller to read the stream if no caller reads it."""
        with self._lock:
            if self._reader is not None:
                return
            for pending in self._waiting.values():
                if pending.wake is not None and pending is not excluded:
                    _wake(pending)
                    return

    def _monitor(self) -> None:
        """Reads answers that no caller waits for; ends a stream that is idle or whose server does not answer."""
        unread_since = 0.0
        while not self._has_ended.wait(_CHECK_S):
            now = time.monotonic()
            with self._lock:
                reader = self._reader
                unread = next(iter(self._waiting.values()), None) if reader is None else None
                is_idle = (
                    not self._waiting
                    and not self._keeps_handles
                    and now - self._used_at > call_routes.REPEATED_WITHIN_S
                )
                if is_idle:
                    self.ended = True
                unread_since = 0.0 if unread is None else unread_since or now
                reads = unread is not None and now > unread_since
                if reads:
                    self._reader = unread
            if is_idle:
                self._finish()
            elif reader is not None and now > reader.due:
                _log.info("the stream is closed: the server has not answered a request in time")
                self._time_out(reader)
            elif reads and unread is not None:
                # The server ends streams that are not read.
                self._read(unread)

    def _time_out(self, pending: Pending) -> None:
        """Fails a request whose caller is blocked in reading, and ends the stream."""
        with self._lock:
            if self._waiting.pop(pending.number, None) is not None:
                self._complete(pending, None, TimeoutError())
        self._call.cancel()
        self._end(UnavailableError("the stream was closed: the server had not answered a request in time"))

    def _while_pending(self, number: int, messages: Iterator[bytes]) -> Iterator[bytes]:
        for message in messages:
            if number not in self._waiting:
                return
            yield message

    def _messages(self) -> Iterator[bytes]:
        """Yields messages to send; small ones go between the chunks of long ones."""
        long: deque[Iterator[bytes]] = deque()
        while True:
            try:
                item = self._outgoing.get(block=not long)
            except queue.Empty:
                chunk = next(long[0], None)
                if chunk is None:
                    long.popleft()
                else:
                    long.rotate(-1)
                    yield chunk
                continue
            if item is None:
                return
            if isinstance(item, bytes):
                yield item
            else:
                long.append(item)


def _wake(pending: Pending) -> None:
    """Wakes a request's caller, if it sleeps. The caller of this function holds the lock."""
    if pending.wake is not None and not pending.is_woken:
        pending.is_woken = True
        pending.wake.release()
