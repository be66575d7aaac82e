"""Runs several calls at the same time; `async_pipeline` has the same names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import grpc

from gradrule._messages.error_status import error_of, message_parts, parsed
from gradrule._messages.request_messages import Feeds
from gradrule._messages.rpc_calls import Call
from gradrule._rpc.stream_messages import StreamLostError
from gradrule._rpc.sync_client.base import ClientBase
from gradrule._rpc.sync_client.sending import CallSender
from gradrule._rpc.sync_transport import CHANNEL_CLOSED
from gradrule.errors import BlobNotFoundError, CancelledError, GradruleError, MessageTooLargeError

R = TypeVar("R")

ManyFeeds: TypeAlias = "Iterable[Feeds]"

iterate = iter


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
