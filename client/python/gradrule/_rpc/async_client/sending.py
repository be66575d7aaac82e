"""Sends calls: alone, over the client's stream, in chunks, or through shared memory."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import grpc
import grpc.aio

from gradrule._messages import rpc_calls
from gradrule._messages.error_status import (
    AnswerLostError,
    closed_error,
    error_of,
    lost_or_error,
    message_parts,
    parsed,
    reached_server,
)
from gradrule._rpc import call_routes, shared_memory
from gradrule._rpc.async_streams import AsyncStream
from gradrule._rpc.async_transport import CHANNEL_CLOSED, Channel, run_in_thread, sleep
from gradrule._rpc.shared_memory import SharedMemory, may_resend
from gradrule._rpc.stream_messages import CHUNK_BYTES, StreamLostError
from gradrule.common import wire_format
from gradrule.errors import GradruleError, MessageTooLargeError, UnavailableError

R = TypeVar("R")


class AsyncCallSender:
    """Sends the calls of a client. Safe to share between tasks.

    Args:
        channel: The client's channel.
        metadata: Metadata of each call.
        routes: Chooses whether a call is sent alone, over the stream or in chunks.
        memory: The memory shared with the server.
        target: The target of the client, for errors.
    """

    def __init__(
        self,
        channel: Channel,
        metadata: Any,
        routes: call_routes.Routes,
        memory: SharedMemory,
        target: str,
    ) -> None:
        self._channel = channel
        self._metadata = metadata
        self._routes = routes
        self.target = target
        self._methods: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {}
        self._stream = AsyncStream(channel, metadata, target)
        self._memory = memory
        self._is_closed = False

    async def close(self) -> None:
        """Ends the stream, cancels its calls, and closes the shared memory."""
        self._is_closed = True
        self._memory.close()
        await self._stream.close()

    async def send(self, call: rpc_calls.Call[R], seconds: float) -> R:
        """Sends a call and returns its answer, decoded. Raises what the call failed with."""
        parts, size = message_parts(call.request)
        if call.on_stream:
            # A handle is lost with its stream, so only calls that need none are sent again.
            is_resent = call_routes.may_resend(call)
            return await self._send_over_stream(call, parts, size, seconds, is_resent=is_resent)
        if call.method != rpc_calls.EVALUATE:
            return await self._send_unary(call, parts, seconds)
        if self._memory.is_worth(call, size):
            return await self._send_through_memory(call, parts, size, seconds)
        return await self._send_evaluate(call, parts, size, seconds)

    async def _send_through_memory(
        self, call: rpc_calls.Call[R], parts: wire_format.Parts, size: int, seconds: float
    ) -> R:
        """Sends a call with its large tensors in shared memory, or inline if that is not possible."""
        ends_at = time.monotonic() + seconds
        memory = self._memory
        if memory.must_open():
            try:
                offer = await self._method(shared_memory.METHOD)(
                    b"", timeout=min(seconds, shared_memory.OFFER_TIMEOUT_S), metadata=self._metadata
                )
            except grpc.RpcError as failure:
                memory.refuse(error_of(failure, self.target))
            except CHANNEL_CLOSED as cause:
                raise closed_error(self.target) from cause
            else:
                # The server may answer slowly; other calls continue meanwhile.
                await run_in_thread(memory.open, call, size, offer, call_routes.remaining_s(ends_at))
        shared = memory.place(call)
        if shared is not None:
            try:
                answer = await self._send_once(shared.call, shared.parts, call_routes.remaining_s(ends_at))
                memory.end(shared)
                return answer
            except BaseException as failure:
                memory.end(shared, failure)
                if not may_resend(failure):
                    raise
        return await self._send_evaluate(call, parts, size, call_routes.remaining_s(ends_at))

    async def _send_evaluate(self, call: rpc_calls.Call[R], parts: wire_format.Parts, size: int, seconds: float) -> R:
        """Sends a call of `Evaluate`. It changes nothing, so it is sent again if its answer is lost."""
        if self._routes.must_chunk(size):
            return await self._send_over_stream(call, parts, size, seconds)
        ends_at = time.monotonic() + seconds
        if self._may_stream(size):
            try:
                answer = await self._stream.run(call, parts, size, seconds)
            except StreamLostError:
                self._routes.record_lost_stream()
            except GradruleError as refusal:
                if refusal.code is not grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                self._routes.record_answer(on_stream=True)
                return answer
        try:
            return await self._send_unary(call, parts, call_routes.remaining_s(ends_at))
        except MessageTooLargeError:
            if size <= CHUNK_BYTES:
                raise
        seconds = call_routes.remaining_s(ends_at)
        answer = await self._send_over_stream(call, parts, size, seconds)
        self._routes.record_too_long(size)
        return answer

    async def _send_over_stream(
        self, call: rpc_calls.Call[R], parts: wire_format.Parts, size: int, seconds: float, *, is_resent: bool = True
    ) -> R:
        """Sends a call over the stream, in chunks if it is long; `is_resent`: again if streams are lost."""
        ends_at = time.monotonic() + seconds
        resends = call_routes.Resends(self._routes, ends_at, call_routes.TRIES)
        while True:
            try:
                return await self._stream.run(call, parts, size, call_routes.remaining_s(ends_at))
            except (StreamLostError, UnavailableError) as failure:
                error, is_lost = (failure.cause, True) if isinstance(failure, StreamLostError) else (failure, False)
                if self._is_closed or not is_resent or error.code is not grpc.StatusCode.UNAVAILABLE:
                    raise error from None
                pause = resends.pause_after(error, is_lost=is_lost and reached_server(error))
            await sleep(pause)

    def _may_stream(self, size: int) -> bool:
        stream = self._stream
        return stream.is_usable and self._routes.may_stream(size, stream.pending_count, is_open=stream.is_open)

    async def _send_unary(self, call: rpc_calls.Call[R], parts: wire_format.Parts, seconds: float) -> R:
        """Sends a call as a unary call, and again if its server is lost; gRPC retries other calls."""
        ends_at = time.monotonic() + seconds
        resends = call_routes.Resends(self._routes, ends_at)
        while True:
            try:
                return await self._send_once(call, parts, call_routes.remaining_s(ends_at))
            except AnswerLostError as lost:
                pause = resends.pause_after(lost.cause, is_lost=True)
            except GradruleError as error:
                if self._is_closed:
                    raise
                # The server that takes the place of the lost one may not listen yet.
                pause = resends.pause_after(error, is_lost=False)
            await sleep(pause)

    async def _send_once(self, call: rpc_calls.Call[R], parts: wire_format.Parts, seconds: float) -> R:
        """Sends a call as a unary call. Raises `AnswerLostError` if the connection broke before its end."""
        try:
            answer = await self._method(call.method)(b"".join(parts), timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise lost_or_error(failure, self.target) from None
        except CHANNEL_CLOSED as cause:
            raise closed_error(self.target) from cause
        self._routes.record_answer()
        return parsed(call.answer, call.decode, answer)

    def _method(self, path: str) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self._channel.unary_unary(path)
        return method
