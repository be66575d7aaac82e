"""The standard health service, which anybody may ask: no caller of it can hold up another, nor the server.

What is said changes at once; those who watch learn of it each in a task of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Final, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2

from gradrule_server.front.calls import Context
from gradrule_server.front.cutting import cut
from gradrule_server.front.reading import read_one

_Status: TypeAlias = int
SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING

# Requests that are being read, and seconds that each may take.
_MAX_READING = 256
_REQUEST_S = 5.0
_MAX_WATCHERS = 1024
# Seconds for which what a watcher is told may wait to be read.
_STALL_S = 20.0


class Health:
    """What is said of each service, and those who watch it. `stall_s`: for so long a watcher need not read."""

    def __init__(self, *, max_watchers: int = _MAX_WATCHERS, stall_s: float = _STALL_S) -> None:
        self._statuses: dict[str, _Status] = {"": SERVING}
        self._max_watchers = max_watchers
        self._stall_s = stall_s
        self._watchers: set[asyncio.Event] = set()
        self._reading = 0
        self._is_ending = False

    def set(self, service: str, status: _Status) -> None:
        """What is said of a service from now on."""
        if not self._is_ending and self._statuses.get(service) != status:
            self._statuses[service] = status
            self._tell()

    def end(self) -> None:
        """Says NOT_SERVING of all services from now on; whoever watches is told so, and watches no longer."""
        self._is_ending = True
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        self._tell()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service. Its requests come as streams: gRPC reads those when it is asked to, and not before."""
        return _Service(
            {
                f"/{health.SERVICE_NAME}/Check": grpc.stream_unary_rpc_method_handler(self._check),
                f"/{health.SERVICE_NAME}/Watch": grpc.stream_stream_rpc_method_handler(self._watch),
            }
        )

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def _check(self, _: AsyncIterator[bytes], context: Context) -> bytes:
        status = self._statuses.get(await self._service_asked_for(context))
        if status is None:
            await _abort(context, grpc.StatusCode.NOT_FOUND, "the server has no such service")
        return health_pb2.HealthCheckResponse(status=status).SerializeToString()

    async def _watch(self, _: AsyncIterator[bytes], context: Context) -> None:
        if len(self._watchers) >= self._max_watchers:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "as many watch as may; ask with Check")
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            service = await self._service_asked_for(context)
            told: _Status | None = None
            while True:
                changed.clear()
                status = self._statuses.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != told:
                    await self._write(health_pb2.HealthCheckResponse(status=status), context)
                    told = status
                elif self._is_ending:
                    return
                else:
                    await changed.wait()
        finally:
            self._watchers.discard(changed)

    async def _write(self, message: Message, context: Context) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await context.write(message.SerializeToString())
        except TimeoutError:
            cut(context.peer())
            # gRPC cancels this once it has noticed.
            await asyncio.sleep(self._stall_s)
            raise

    async def _service_asked_for(self, context: Context) -> str:
        if self._reading >= _MAX_READING:
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many ask at once")
        self._reading += 1
        try:
            raw = await read_one(context, _REQUEST_S)
        except TimeoutError:
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come")
        finally:
            self._reading -= 1
        try:
            return health_pb2.HealthCheckRequest.FromString(raw or b"").service
        except DecodeError:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "the bytes are no request")


class _Service(grpc.GenericRpcHandler):
    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return self._handlers.get(handler_call_details.method)


async def _abort(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort always raises")
