"""Implements for threads what differs between the two clients; `async_transport` has the same names."""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeAlias, TypeVar

import grpc

from gradrule._messages.error_status import (
    AnswerLostError,
    closed_error,
    error_of,
    lost_or_error,
    message_parts,
    parsed,
    reached_server,
)
from gradrule._messages.session_calls import METHOD
from gradrule._rpc.interrupts import GuardedChannel
from gradrule._rpc.stream_messages import StreamLostError
from gradrule.errors import BlobNotFoundError, CancelledError, GradruleError, MessageTooLargeError, UnavailableError

if TYPE_CHECKING:
    from gradrule._messages.call_arguments import Feeds
    from gradrule._messages.rpc_calls import Call
    from gradrule._rpc.sync_client.base import ClientBase
    from gradrule._rpc.sync_client.sending import CallSender

R = TypeVar("R")

CHANNEL_CLOSED = ValueError
"""Exception of gRPC for the use of a closed channel."""

# Interval of the checks whether the answer of a session is due.
_CHECK_S = 0.5

sleep = time.sleep
Lock = threading.RLock
Channel: TypeAlias = GuardedChannel
ManyFeeds: TypeAlias = "Iterable[Feeds]"
Starting: TypeAlias = Annotated[R, "a client that is started at once"]
iterate = iter


def guarded(channel: grpc.Channel) -> Channel:
    """Returns a channel that signal handlers may interrupt."""
    return GuardedChannel(channel)


def starting(start: Callable[[], R]) -> R:
    """Starts a client and returns it."""
    return start()


def run_in_thread(function: Callable[..., R], *arguments: Any) -> R:
    """Runs a function that blocks, in the caller's own thread."""
    return function(*arguments)


class SessionStream:
    """Exchanges messages over the stream of a session; each message has one answer. Raises `CHANNEL_CLOSED`."""

    def __init__(self, channel: GuardedChannel, metadata: Any, target: str) -> None:
        channel.guard.require_not_running()
        self._guard = channel.guard
        self._target = target
        self._due = math.inf
        self._has_ended = threading.Event()
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call = channel.stream_stream(METHOD)(iter(self._messages.get, None), metadata=metadata)
        # The thread must not keep a stream that nothing else refers to.
        monitor = threading.Thread(target=_end_late_stream, args=(weakref.ref(self), self._has_ended), daemon=True)
        try:
            monitor.start()
        except BaseException:
            self.close()
            raise

    def exchange(self, message: bytes, seconds: float) -> bytes:
        """Sends a message and returns the answer.

        Raises:
            StreamLostError: The stream has ended.
            TimeoutError: There was no answer within `seconds`, and up to half a second more; the stream has ended.
            UnsupportedError: This thread runs another call of the client, which this one has interrupted.
        """
        self._guard.require_not_running()
        self._due = due = time.monotonic() + seconds
        self._messages.put(message)
        try:
            return bytes(next(self._call))
        except grpc.RpcError as failure:
            if self._has_ended.is_set() and time.monotonic() > due:
                raise TimeoutError from None
            raise StreamLostError(error_of(failure, self._target)) from None
        except StopIteration:
            raise StreamLostError(UnavailableError("the server has ended the session")) from None
        finally:
            self._due = math.inf

    def end_if_late(self) -> None:
        """Ends the stream if an answer is due."""
        if time.monotonic() > self._due:
            self.close()

    def close(self) -> None:
        """Ends the stream."""
        self._has_ended.set()
        self._messages.put(None)
        self._call.cancel()


def _end_late_stream(reference: weakref.ref[SessionStream], has_ended: threading.Event) -> None:
    """Ends a stream of a session if an answer is due: the thread that reads the answer is blocked in gRPC."""
    while not has_ended.wait(_CHECK_S):
        stream = reference()
        if stream is None:
            return
        stream.end_if_late()
        del stream


class _Started(NamedTuple, Generic[R]):
    """Holds a call that was sent, and functions that wait for its result and cancel it.

    Attributes:
        call: The call.
        result: Waits for the result.
        cancel: Cancels the call.
        over_stream: Whether it was sent over the stream.
        due: When its timeout ends, on the clock of `time.monotonic`.
        ended_at: Returns when it ended; None if that is not known.
    """

    call: Call[R]
    result: Callable[[], R]
    cancel: Callable[[], object]
    over_stream: bool
    due: float
    ended_at: Callable[[], float | None]


class Pipeline(Generic[R]):
    """Runs several calls at the same time and returns their results in order; `len()` counts unread results.

    Args:
        client: Client that sends the calls.
        timeout: Timeout in seconds for each call; None: the client's.
    """

    def __init__(self, client: ClientBase, timeout: float | None) -> None:
        self._client = client
        self._timeout = timeout
        self._started: deque[_Started[R]] = deque()

    def __len__(self) -> int:
        return len(self._started)

    def start(self, call: Call[R]) -> None:
        """Sends a call without waiting for its answer."""
        self._started.append(_start(self._client._sender, call, self._client._limit(call, self._timeout)))

    def next_result(self) -> R:
        """Waits for the first call and returns its result. Raises the error of a failed call."""
        started = self._started.popleft()
        try:
            return started.result()
        except StreamLostError:
            self._client._sender._routes.record_lost_stream()
        except AnswerLostError:
            # Sent again below: gRPC does not retry a call if a part of its answer has arrived.
            pass
        except BlobNotFoundError:
            if not started.call.blobs:
                raise
        except GradruleError as refusal:
            # A call that was sent alone may be sent in chunks. A call over the stream may be sent again, as gRPC
            # retries calls that are sent alone; so may each call that reached no server.
            if not (
                refusal.code is grpc.StatusCode.UNAVAILABLE
                if started.over_stream
                else isinstance(refusal, MessageTooLargeError) or not reached_server(refusal)
            ):
                raise
        # The caller may ask for the result long after the call failed; that time does not count.
        now = time.monotonic()
        ended_at = started.ended_at() or now
        return self._client._run(started.call, self._timeout, ends_at=now + started.due - ended_at)

    def cancel(self) -> None:
        """Cancels the calls without a result."""
        for started in self._started:
            started.cancel()


def _start(sender: CallSender, call: Call[R], seconds: float) -> _Started[R]:
    parts, size = message_parts(call.request)
    due = time.monotonic() + seconds
    if sender._routes.must_chunk(size) or sender._may_stream(size):
        try:
            over_stream = sender._stream.start(call, parts, size, seconds)
        except StreamLostError:
            sender._routes.record_lost_stream()
        else:
            return _Started(call, over_stream.result, over_stream.cancel, True, due, over_stream.ended_at)
    try:
        future = sender._method(call.method).future(b"".join(parts), timeout=seconds, metadata=sender._metadata)
    except CHANNEL_CLOSED as cause:
        raise closed_error(sender.target) from cause
    ended: list[float] = []
    future.add_done_callback(lambda _: ended.append(time.monotonic()))

    def result() -> R:
        try:
            answer = future.result()
            sender._routes.record_answer()
            return parsed(call.answer, call.decode, answer)
        except grpc.RpcError as failure:
            raise lost_or_error(failure, sender.target) from None
        except grpc.FutureCancelledError as failure:
            raise CancelledError("the call was cancelled; its client was closed meanwhile") from failure

    return _Started(call, result, future.cancel, False, due, lambda: ended[0] if ended else None)
