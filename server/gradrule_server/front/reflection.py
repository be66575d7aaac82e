"""gRPC's reflection service, which anybody may ask: bounded in what it reads, and in how many ask at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha._async import ReflectionServicer
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from gradrule_server.front.calls import Context
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.public_calls import Evicted, OpenCalls, SmallReads, refuse, write

_METHOD = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
_MAX_OPEN, _MAX_OF_ADDRESS, _MAX_OF_CONNECTION = 256, 64, 16
# Seconds for the first request, and for each further one: tools keep the stream open while they call other methods.
_FIRST_S = 5.0
_NEXT_S = 60.0
_STALL_S = 20.0


class Reflection(grpc.GenericRpcHandler):
    """Tells the services of these names."""

    def __init__(self, names: Iterable[str], connections: ConnectionWatch) -> None:
        self._servicer: Any = ReflectionServicer(names)
        self._connections = connections
        self._reads = SmallReads(connections)
        self._open = OpenCalls(_MAX_OPEN, _MAX_OF_ADDRESS, _MAX_OF_CONNECTION)
        self._handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._serve)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return self._handler if handler_call_details.method == _METHOD else None

    async def _serve(self, _: AsyncIterator[bytes], context: Context) -> None:
        connection = self._connections.of(context.peer())
        with self._open.taken(connection) as has_room, connection.call():
            if not has_room:
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many reflection streams are open")
            seconds = _FIRST_S
            while (raw := await self._next(context, seconds)) is not None:
                async for answer in self._servicer.ServerReflectionInfo(_only(await _parsed(raw, context)), context):
                    await write(context, answer.SerializeToString(), _STALL_S)
                seconds = _NEXT_S

    async def _next(self, context: Context, seconds: float) -> bytes | None:
        try:
            return await self._reads.read(context, seconds)
        except Evicted:
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many requests are being read; try again")
        except TimeoutError:
            await refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"no request came within {seconds:g} s")


async def _parsed(raw: bytes, context: Context) -> ServerReflectionRequest:
    try:
        return ServerReflectionRequest.FromString(raw)
    except DecodeError:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the bytes are no ServerReflectionRequest")


async def _only(request: ServerReflectionRequest) -> AsyncIterator[ServerReflectionRequest]:
    yield request
