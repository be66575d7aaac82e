"""Implements for threads what differs between the two clients; `async_transport` has the same names."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import grpc

from gradrule._messages.error_status import error_of, message_parts, parsed
from gradrule._messages.session_calls import METHOD
from gradrule._rpc.stream_messages import StreamLostError
from gradrule.errors import BlobNotFoundError, CancelledError, GradruleError, MessageTooLargeError, UnavailableError

if TYPE_CHECKING:
    from gradrule._messages.request_messages import Feeds
    from gradrule._messages.rpc_calls import Call
    from gradrule._rpc.sync_client.base import ClientBase
    from gradrule._rpc.sync_client.sending import CallSender

R = TypeVar("R")

CHANNEL_CLOSED = ValueError
"""What gRPC raises when a closed channel is used."""

sleep = time.sleep
ManyFeeds: TypeAlias = "Iterable[Feeds]"
iterate = iter


def run_in_thread(function: Callable[..., R], *arguments: Any) -> R:
    """Runs a function that blocks, in the caller's own thread."""
    return function(*arguments)


class SessionStream:
    """The stream of a session, on which each message has one answer. Raises `CHANNEL_CLOSED`."""

    def __init__(self, channel: grpc.Channel, metadata: Any) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        opened: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        self._call: Any = opened(iter(self._messages.get, None), metadata=metadata)

    def exchange(self, message: bytes) -> bytes:
        """Sends a message and returns the answer.

        Raises:
            UnavailableError: The server ended the session.
            GradruleError: The stream failed.
        """
        self._messages.put(message)
        try:
            return bytes(next(self._call))
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except StopIteration:
            raise UnavailableError("the server has ended the session") from None

    def close(self) -> None:
        """Ends the stream."""
        self._messages.put(None)
        self._call.cancel()


class _Started(NamedTuple, Generic[R]):
    """A call that was sent: how to wait for its answer and how to cancel it."""

    call: Call[R]
    result: Callable[[], R]
    cancel: Callable[[], object]
    over_stream: bool


class Pipeline(Generic[R]):
    """Calls of `Evaluate` that were started, in order; `len()` counts those whose result was not read.

    Args:
        client: Sends them.
        timeout: Seconds for each call; None: the client's.
    """

    def __init__(self, client: ClientBase, timeout: float | None) -> None:
        self._client = client
        self._timeout = timeout
        self._started: deque[_Started[R]] = deque()

    def __len__(self) -> int:
        return len(self._started)

    def start(self, call: Call[R]) -> None:
        """Sends a call without waiting for its answer."""
        self._started.append(_start(self._client._sender, call, self._client._deadline(self._timeout)))

    def next_result(self) -> R:
        """Waits for the first call and returns its result. Raises what it failed with."""
        started = self._started.popleft()
        try:
            return started.result()
        except StreamLostError:
            self._client._sender._routes.note_lost()
        except BlobNotFoundError:
            if not started.call.blobs:
                raise
        except GradruleError as refusal:
            # What was sent alone may go in chunks. What was sent over the stream may be sent again, as gRPC does with
            # what is sent alone.
            if not (
                refusal.code is grpc.StatusCode.UNAVAILABLE
                if started.over_stream
                else isinstance(refusal, MessageTooLargeError)
            ):
                raise
        return self._client._run(started.call, self._timeout)

    def cancel(self) -> None:
        """Cancels all calls that are left."""
        for started in self._started:
            started.cancel()


def _start(sender: CallSender, call: Call[R], seconds: float) -> _Started[R]:
    parts, size = message_parts(call.request, call.large)
    if sender._routes.must_chunk(size) or sender._may_stream(size):
        try:
            over_stream = sender._stream.start(call, parts, size, seconds)
        except StreamLostError:
            sender._routes.note_lost()
        else:
            return _Started(call, over_stream.result, over_stream.cancel, True)
    try:
        future = sender._method(call.method).future(b"".join(parts), timeout=seconds, metadata=sender._metadata)
    except CHANNEL_CLOSED as cause:
        raise sender._closed() from cause

    def result() -> R:
        try:
            return parsed(call.answer, call.decode, future.result())
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except grpc.FutureCancelledError as failure:
            raise CancelledError("the call was cancelled; its client was closed meanwhile") from failure

    return _Started(call, result, future.cancel, False)
