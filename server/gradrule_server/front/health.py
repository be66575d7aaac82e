"""The standard health service, which anybody may ask: no caller of it can hold up another, nor the server.

What is said changes at once; those who watch learn of it each in a task of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from gradrule_server.front.calls import Context
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.public_calls import Evicted, OpenCalls, SmallReads, refuse, write

_Status: TypeAlias = int
SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING

_REQUEST_S = 5.0
# Clients that watch health do so before their first call, and many may share an address.
_MAX_WATCHERS, _MAX_WATCHERS_OF_ADDRESS, _MAX_WATCHERS_OF_CONNECTION = 1024, 256, 16
# Seconds for which what a watcher is told may wait to be read.
_STALL_S = 20.0


class Health:
    """What is said of each service, and those who watch it. `stall_s`: for so long a watcher need not read."""

    def __init__(
        self,
        connections: ConnectionWatch | None = None,
        *,
        max_watchers: int = _MAX_WATCHERS,
        stall_s: float = _STALL_S,
    ) -> None:
        self._statuses: dict[str, _Status] = {"": SERVING}
        self._stall_s = stall_s
        self._connections = connections or ConnectionWatch()
        self._reads = SmallReads(self._connections)
        self._open = OpenCalls(max_watchers, _MAX_WATCHERS_OF_ADDRESS, _MAX_WATCHERS_OF_CONNECTION)
        self._watchers: set[asyncio.Event] = set()
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
        with self._connections.of(context.peer()).call():
            status = self._statuses.get(await self._service_asked_for(context))
            if status is None:
                await refuse(context, grpc.StatusCode.NOT_FOUND, "the server has no such service")
            return health_pb2.HealthCheckResponse(status=status).SerializeToString()

    async def _watch(self, _: AsyncIterator[bytes], context: Context) -> None:
        connection = self._connections.of(context.peer())
        with self._open.taken(connection) as has_room, connection.call():
            if not has_room:
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "as many watch as may; ask with Check")
            changed = asyncio.Event()
            self._watchers.add(changed)
            try:
                await self._tell_changes(await self._service_asked_for(context), changed, context)
            finally:
                self._watchers.discard(changed)

    async def _tell_changes(self, service: str, changed: asyncio.Event, context: Context) -> None:
        told: _Status | None = None
        while True:
            changed.clear()
            status = self._statuses.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                await write(context, health_pb2.HealthCheckResponse(status=status).SerializeToString(), self._stall_s)
                told = status
            elif self._is_ending:
                return
            else:
                await changed.wait()

    async def _service_asked_for(self, context: Context) -> str:
        try:
            raw = await self._reads.read(context, _REQUEST_S)
        except Evicted:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many ask at once, and do not send what")
        except TimeoutError:
            await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come")
        try:
            return health_pb2.HealthCheckRequest.FromString(raw or b"").service
        except DecodeError:
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the bytes are no request")


class _Service(grpc.GenericRpcHandler):
    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return self._handlers.get(handler_call_details.method)
