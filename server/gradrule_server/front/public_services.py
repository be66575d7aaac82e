"""The health and reflection services, which need no credential. No caller can delay another one, or the server.

Health statuses change at once. Each watcher gets them in a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from gradrule_server.front.calls import Context
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.public_calls import Evicted, OpenCalls, SmallReads, refuse, write

_Status: TypeAlias = int
SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING

# Seconds that a client has to send its first request.
_REQUEST_S = 5.0
# Seconds that a client has to read a message.
_STALL_S = 20.0
# Of all clients, of one address, of one connection. Clients watch health before their first call, and many may share
# an address.
_MAX_WATCHERS = 1024, 256, 16
_MAX_REFLECTION_STREAMS = 256, 64, 16
# Seconds between two requests of a reflection stream: tools keep it open while they call other methods.
_NEXT_REFLECTION_REQUEST_S = 60.0


class Health:
    """The health service: the status of each service, and the clients that watch it.

    Args:
        connections: counts bytes of unfinished messages.
        max_watchers: number of watching clients.
        stall_s: seconds that a watcher has to read a status.
        request_s: seconds that a client has to send its request.
    """

    def __init__(
        self,
        connections: ConnectionWatch | None = None,
        *,
        max_watchers: int = _MAX_WATCHERS[0],
        stall_s: float = _STALL_S,
        request_s: float = _REQUEST_S,
    ) -> None:
        self._statuses: dict[str, _Status] = {"": SERVING}
        self._stall_s = stall_s
        self._request_s = request_s
        self._connections = connections or ConnectionWatch()
        self._reads = SmallReads(self._connections)
        self._open = OpenCalls(max_watchers, *_MAX_WATCHERS[1:])
        self._watchers: set[asyncio.Event] = set()
        self._is_ending = False

    def set(self, service: str, status: _Status) -> None:
        """Changes the status of a service."""
        if not self._is_ending and self._statuses.get(service) != status:
            self._statuses[service] = status
            self._notify()

    def end(self) -> None:
        """Changes all statuses to NOT_SERVING for good, reports that to all watchers and ends their calls."""
        self._is_ending = True
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        self._notify()

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the gRPC service. Its methods are declared as streams, whose requests gRPC reads only when asked."""
        return _HealthService(
            {
                f"/{health.SERVICE_NAME}/Check": grpc.stream_unary_rpc_method_handler(self._check),
                f"/{health.SERVICE_NAME}/Watch": grpc.stream_stream_rpc_method_handler(self._watch),
            }
        )

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher.set()

    async def _check(self, _: AsyncIterator[bytes], context: Context) -> bytes:
        with self._connections.get(context.peer()).call():
            status = self._statuses.get(await self._read_service_name(context))
            if status is None:
                await refuse(context, grpc.StatusCode.NOT_FOUND, "the server has no such service")
            return health_pb2.HealthCheckResponse(status=status).SerializeToString()

    async def _watch(self, _: AsyncIterator[bytes], context: Context) -> None:
        connection = self._connections.get(context.peer())
        with self._open.open(connection) as has_room, connection.call():
            if not has_room:
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "as many watch as may; ask with Check")
            changed = asyncio.Event()
            self._watchers.add(changed)
            try:
                await self._send_changes(await self._read_service_name(context), changed, context)
            finally:
                self._watchers.discard(changed)

    async def _send_changes(self, service: str, changed: asyncio.Event, context: Context) -> None:
        sent: _Status | None = None
        while True:
            changed.clear()
            status = self._statuses.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != sent:
                await write(context, health_pb2.HealthCheckResponse(status=status).SerializeToString(), self._stall_s)
                sent = status
            elif self._is_ending:
                return
            else:
                await changed.wait()

    async def _read_service_name(self, context: Context) -> str:
        try:
            raw = await self._reads.read(context, self._request_s)
        except Evicted:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many ask at once, and do not send what")
        except TimeoutError:
            await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the request did not come")
        try:
            return health_pb2.HealthCheckRequest.FromString(raw or b"").service
        except DecodeError:
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the bytes are no request")


class _HealthService(grpc.GenericRpcHandler):
    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler[bytes, bytes]]) -> None:
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return self._handlers.get(handler_call_details.method)


_REFLECTION_METHOD = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"


class Reflection(grpc.GenericRpcHandler):
    """The reflection service.

    Args:
        names: of the services that it describes.
        connections: counts bytes of unfinished messages.
        request_s: seconds that a client has to send its first request.
    """

    def __init__(self, names: Iterable[str], connections: ConnectionWatch, *, request_s: float = _REQUEST_S) -> None:
        self._servicer: Any = ReflectionServicer(names)
        self._connections = connections
        self._reads = SmallReads(connections)
        self._open = OpenCalls(*_MAX_REFLECTION_STREAMS)
        self._request_s = request_s
        self._handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return self._handler if handler_call_details.method == _REFLECTION_METHOD else None

    async def _serve(self, _: AsyncIterator[bytes], context: Context) -> None:
        connection = self._connections.get(context.peer())
        with self._open.open(connection) as has_room, connection.call():
            if not has_room:
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many reflection streams are open")
            seconds = self._request_s
            while (raw := await self._next(context, seconds)) is not None:
                async for answer in self._servicer.ServerReflectionInfo(_only(await _parse(raw, context)), context):
                    await write(context, answer.SerializeToString(), _STALL_S)
                seconds = _NEXT_REFLECTION_REQUEST_S

    async def _next(self, context: Context, seconds: float) -> bytes | None:
        try:
            return await self._reads.read(context, seconds)
        except Evicted:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests are being read; try again")
        except TimeoutError:
            await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"no request came within {seconds:g} s")


async def _parse(raw: bytes, context: Context) -> ServerReflectionRequest:
    try:
        return ServerReflectionRequest.FromString(raw)
    except DecodeError:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the bytes are no ServerReflectionRequest")


async def _only(request: ServerReflectionRequest) -> AsyncIterator[ServerReflectionRequest]:
    yield request
