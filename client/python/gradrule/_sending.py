"""Sends calls: alone, over the client's stream, or in chunks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import grpc

from gradrule import _calls, _deadlines, _routes, _shared_memory
from gradrule._shared_memory import SharedMemory, may_resend
from gradrule._status import error_of, message_parts, parsed
from gradrule._stream_messages import CHUNK_BYTES
from gradrule._streams import Stream, StreamLostError
from gradrule.common import wire_format
from gradrule.errors import CancelledError, GradruleError, MessageTooLargeError, UnavailableError

R = TypeVar("R")


class Started(NamedTuple, Generic[R]):
    """A call that was sent: what waits for its answer, and what gives it up."""

    result: Callable[[], R]
    cancel: Callable[[], object]
    over_stream: bool = False


class CallSender:
    """Sends the calls of a client. Safe to share between threads.

    closed: returns what is raised once the channel is closed.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        metadata: Any,
        routes: _routes.Routes,
        memory: SharedMemory,
        closed: Callable[[], GradruleError],
    ) -> None:
        self._channel = channel
        self._metadata = metadata
        self._routes = routes
        self._closed = closed
        self._methods: dict[str, grpc.UnaryUnaryMultiCallable[bytes, bytes]] = {}
        self._stream = Stream(channel, metadata, closed)
        self._memory = memory

    def send(self, call: _calls.Call[R], seconds: float) -> R:
        """Sends a call and returns its answer, decoded. Raises what the call failed with."""
        parts, size = message_parts(call.request, call.large)
        if call.on_stream:
            try:
                return self._over_stream(call, parts, size, seconds)
            except StreamLostError as lost:
                raise lost.cause from None
        if call.method != _calls.EVALUATE:
            return self._alone(call, parts, seconds)
        if self._memory.is_worth(call, size):
            return self._through_memory(call, parts, size, seconds)
        return self._evaluate(call, parts, size, seconds)

    def start(self, call: _calls.Call[R], seconds: float) -> Started[R]:
        """Sends a call of `Evaluate` without waiting for its answer."""
        parts, size = message_parts(call.request, call.large)
        if self._routes.must_chunk(size) or self._may_stream(size):
            try:
                started = self._stream.start(call, parts, size, seconds)
            except StreamLostError:
                self._routes.note_lost()
            else:
                return Started(started.result, started.cancel, over_stream=True)
        try:
            future = self._method(call.method).future(b"".join(parts), timeout=seconds, metadata=self._metadata)
        except ValueError as cause:
            raise self._closed() from cause

        def result() -> R:
            try:
                return parsed(call.answer, call.decode, future.result())
            except grpc.RpcError as failure:
                raise error_of(failure) from None
            except grpc.FutureCancelledError as failure:
                raise CancelledError("the call was cancelled; its client was closed meanwhile") from failure

        return Started(result, future.cancel)

    def note_lost(self) -> None:
        """Notes that a call that was started lost its stream."""
        self._routes.note_lost()

    def close(self) -> None:
        """Ends the stream; calls on it are given up. Shares memory no more."""
        self._stream.close()
        self._memory.close()

    def _through_memory(self, call: _calls.Call[R], parts: wire_format.Parts, size: int, seconds: float) -> R:
        """Sends a call whose large tensors lie in shared memory; inline where that cannot be."""
        ends_at = time.monotonic() + seconds
        memory = self._memory
        if memory.must_open():
            try:
                offer = self._method(_shared_memory.METHOD)(
                    b"", timeout=min(seconds, _shared_memory.OFFER_S), metadata=self._metadata
                )
            except grpc.RpcError as failure:
                memory.refuse(error_of(failure))
            except ValueError as cause:
                raise self._closed() from cause
            else:
                memory.open(call, size, offer, _deadlines.left(ends_at))
        shared = memory.place(call, parts)
        if shared is not None:
            try:
                answer = self._alone(shared.call, shared.parts, _deadlines.left(ends_at))
                memory.end(shared)
                return answer
            except BaseException as failure:
                memory.end(shared, failure)
                if not may_resend(failure):
                    raise
        return self._evaluate(call, parts, size, _deadlines.left(ends_at))

    def _evaluate(self, call: _calls.Call[R], parts: wire_format.Parts, size: int, seconds: float) -> R:
        """Sends a call of `Evaluate`; as it changes nothing, it may be sent again where its answer is lost."""
        if self._routes.must_chunk(size):
            return self._in_chunks(call, parts, size, seconds)
        ends_at = time.monotonic() + seconds
        if self._may_stream(size):
            try:
                answer = self._over_stream(call, parts, size, seconds)
            except StreamLostError:
                self._routes.note_lost()
            except GradruleError as refusal:
                if refusal.code is not grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                self._routes.note_answered()
                return answer
        try:
            return self._alone(call, parts, _deadlines.left(ends_at))
        except MessageTooLargeError:
            if size <= CHUNK_BYTES:
                raise
        answer = self._in_chunks(call, parts, size, _deadlines.left(ends_at))
        self._routes.note_too_long(size)
        return answer

    def _in_chunks(self, call: _calls.Call[R], parts: wire_format.Parts, size: int, seconds: float) -> R:
        """Sends a call that may be too long for one message."""
        ends_at = time.monotonic() + seconds
        for attempt in itertools.count(1):
            try:
                return self._over_stream(call, parts, size, _deadlines.left(ends_at))
            except (StreamLostError, UnavailableError) as failure:
                cause = failure.cause if isinstance(failure, StreamLostError) else failure
                if cause.code is not grpc.StatusCode.UNAVAILABLE or attempt == _routes.TRIES:
                    raise cause from None
            time.sleep(_routes.pause_before(attempt))
        raise AssertionError("the loop ends by itself")

    def _may_stream(self, size: int) -> bool:
        stream = self._stream
        return self._routes.may_stream(size, stream.under_way, is_open=stream.is_open)

    def _over_stream(self, call: _calls.Call[R], parts: wire_format.Parts, size: int, seconds: float) -> R:
        found: R = self._stream.start(call, parts, size, seconds).result()
        return found

    def _alone(self, call: _calls.Call[R], parts: wire_format.Parts, seconds: float) -> R:
        try:
            answer = self._method(call.method)(b"".join(parts), timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_of(failure) from None
        except ValueError as cause:
            raise self._closed() from cause
        return parsed(call.answer, call.decode, answer)

    def _method(self, path: str) -> grpc.UnaryUnaryMultiCallable[bytes, bytes]:
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self._channel.unary_unary(path)
        return method
