"""The health and reflection services, which need no credential. No caller can delay another one, or the server.

Health statuses change at once, and each watcher gets them in a task of its own. How many calls may be open, and how
many messages may be read at a time, is limited.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from gradrule_server.front.calls import Context
from gradrule_server.front.connections import Connection, ConnectionWatch, retrieve
from gradrule_server.front.sockets import close_connection

# Messages that may be read at a time.
_MAX_READING = 256
_MAX_READING_PER_CONNECTION = 16

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


class _Waiting:
    """A message that is being read; `ended` is set to make room for another one."""

    __slots__ = ("connection", "ended")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class SmallReads:
    """Reads messages of unauthenticated callers.

    Every call is accepted. Where too many wait for their message, the longest-waiting call ends: on the same
    connection, or on the connection with the most waiting calls of the address with the most waiting calls.
    """

    def __init__(self, connections: ConnectionWatch, most: int = _MAX_READING) -> None:
        self._connections = connections
        self._most = most
        self._waiting: dict[_Waiting, None] = {}

    async def read(self, context: Context, seconds: float = _REQUEST_S) -> bytes | None:
        """Returns the next message, or None at the end of the call.

        Ends the call with RESOURCE_EXHAUSTED if another call needs its room, and with DEADLINE_EXCEEDED if no message
        comes in time. An abandoned read continues until the call ends, since gRPC would lose the message of a
        cancelled read.
        """
        connection = self._connections.get(context.peer())
        self._make_room(connection)
        mine = _Waiting(connection)
        self._waiting[mine] = None
        reading = asyncio.ensure_future(connection.read(context))
        reading.add_done_callback(retrieve)
        try:
            await asyncio.wait((reading, mine.ended), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._waiting[mine]
        if not reading.done():
            if mine.ended.done():
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests are being read; try again")
            await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"no request came within {seconds:g} s")
        return reading.result()

    def _make_room(self, connection: Connection) -> None:
        waiting = [each for each in self._waiting if not each.ended.done()]
        own = [each for each in waiting if each.connection is connection]
        if len(own) >= _MAX_READING_PER_CONNECTION:
            own[0].ended.set_result(None)
        elif len(waiting) >= self._most:
            ((address, _),) = Counter(each.connection.address for each in waiting).most_common(1)
            of_address = [each for each in waiting if each.connection.address == address]
            ((most, _),) = Counter(each.connection for each in of_address).most_common(1)
            next(each for each in of_address if each.connection is most).ended.set_result(None)


class OpenCalls:
    """Limits the number of calls that are open at a time, of all clients, of one address and of one connection."""

    def __init__(self, most: int, of_address: int, of_connection: int) -> None:
        self._limits = most, of_address, of_connection
        self._open: Counter[object] = Counter()

    @contextmanager
    def open(self, connection: Connection) -> Iterator[bool]:
        """Context in which a call is open; yields False, and counts nothing, where there are too many."""
        keys = (None, ("address", connection.address), connection)
        has_room = all(self._open[key] < limit for key, limit in zip(keys, self._limits, strict=True))
        if has_room:
            self._open.update(keys)
        try:
            yield has_room
        finally:
            if has_room:
                self._open.subtract(keys)
                for key in keys:
                    if not self._open[key]:
                        del self._open[key]


async def write(context: Context, data: bytes, stall_s: float) -> None:
    """Sends a message; closes the connection of a client that does not read it in time."""
    try:
        async with asyncio.timeout(stall_s):
            await context.write(data)
    except TimeoutError:
        close_connection(context.peer())
        # gRPC cancels this task once it has noticed that the connection is closed.
        await asyncio.sleep(stall_s)
        raise


async def refuse(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    """Ends a call with a status."""
    await context.abort(code, message)
    raise AssertionError("abort always raises")


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

    def is_serving(self, service: str) -> bool:
        """Returns whether the status of a service is SERVING."""
        return self._statuses.get(service) == SERVING

    def end(self) -> None:
        """Changes all statuses to NOT_SERVING permanently, reports that to all watchers and ends their calls."""
        self._is_ending = True
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        self._notify()

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the gRPC service. Its methods are declared as streams, whose requests gRPC reads only when asked."""
        return grpc.method_handlers_generic_handler(
            health.SERVICE_NAME,
            {
                "Check": grpc.stream_unary_rpc_method_handler(self._check),
                "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
            },
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
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many Watch calls are open; use Check")
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
        raw = await self._reads.read(context, self._request_s)
        try:
            return health_pb2.HealthCheckRequest.FromString(raw or b"").service
        except DecodeError:
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the bytes are no request")


class Reflection:
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

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the gRPC service."""
        return grpc.method_handlers_generic_handler(
            reflection.SERVICE_NAME, {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self._serve)}
        )

    async def _serve(self, _: AsyncIterator[bytes], context: Context) -> None:
        connection = self._connections.get(context.peer())
        with self._open.open(connection) as has_room, connection.call():
            if not has_room:
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many reflection streams are open")
            seconds = self._request_s
            while (raw := await self._reads.read(context, seconds)) is not None:
                async for answer in self._servicer.ServerReflectionInfo(_only(await _parse(raw, context)), context):
                    await write(context, answer.SerializeToString(), _STALL_S)
                seconds = _NEXT_REFLECTION_REQUEST_S


async def _parse(raw: bytes, context: Context) -> ServerReflectionRequest:
    try:
        return ServerReflectionRequest.FromString(raw)
    except DecodeError:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the bytes are no ServerReflectionRequest")


async def _only(request: ServerReflectionRequest) -> AsyncIterator[ServerReflectionRequest]:
    yield request
