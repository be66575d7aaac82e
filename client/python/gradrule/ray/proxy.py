"""Handles RPCs in the gRPC proxies of Ray Serve: passes raw messages to a replica, and its status to the client.

Ray Serve's own handlers lose the deadline of a call and the trailers of a failed one, which have the typed error. So
the handlers here run around those of Ray Serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from ray.serve._private import constants
from ray.serve._private.proxy_request_response import gRPCStreamingType

from gradrule.ray import rpcs
from gradrule.ray.leaving_replicas import LEAVING
from gradrule.ray.routing import program_key
from gradrule.ray.rpcs import RPCS, Ending, Rpc
from gradrule.ray.stream_requests import StreamRequests

_TYPES = {
    (False, False): gRPCStreamingType.UNARY_UNARY,
    (False, True): gRPCStreamingType.UNARY_STREAM,
    (True, False): gRPCStreamingType.STREAM_UNARY,
    (True, True): gRPCStreamingType.STREAM_STREAM,
}

# Serve's handler shows what this logger writes.
_log = logging.getLogger("ray.serve")

# As of a server, see `ConnectionSettings` there: the clients send a ping every 8 s while a call is open.
_GRPC_OPTIONS = [
    ("grpc.keepalive_time_ms", 60_000),
    # The first is the timeout of TCP, the second that of a PING.
    ("grpc.keepalive_timeout_ms", 60_000),
    ("grpc.http2.ping_timeout_ms", 60_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # By default gRPC cancels some calls, without a reason, where a thousand start at once.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
]
# A server does not read a stream while more of its requests run or have answers that the client has not read. Ray takes
# any number of answers into memory, so the proxy must wait.
_MAX_REQUESTS = 32

# Codes of Ray Serve for a replica that has ended (methods of a replica raise nothing) and for an application that the
# proxy does not know yet. In both cases, clients may try again.
_NO_REPLICA = (None, grpc.StatusCode.OK, grpc.StatusCode.INTERNAL, grpc.StatusCode.NOT_FOUND)


def configure_proxy() -> list[Any]:
    """Gives the gRPC server of this proxy the options of a gradrule server. Returns no HTTP middleware.

    Ray Serve has no setting for this. By default, gRPC closes the connection of a client that sends three pings without
    a message, so a session that is idle for half a minute would be lost. Ray Serve calls this before it starts the
    server, if RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH says so.
    """
    constants.DEFAULT_GRPC_SERVER_OPTIONS.extend(_GRPC_OPTIONS)
    return []


def add_services(_: object, server: Any) -> None:
    """Adds all services of gradrule to a gRPC proxy of Ray Serve. For `grpc_servicer_functions`.

    Args:
        server: `gRPCGenericServer` of Ray Serve.
    """
    if _GRPC_OPTIONS[0] not in constants.DEFAULT_GRPC_SERVER_OPTIONS:
        _log.warning(
            "gradrule: this proxy ends connections that are idle for half a minute, and their sessions. Restart Ray "
            "Serve with the controller_options of deploy/ray/serve.yaml"
        )
    for service, entries in groupby(RPCS, key=lambda rpc: rpc.service):
        # Without this, Ray Serve would put its own handlers in the place of these.
        server.add_passthrough_service(service)
        handlers = {rpc.method: _handler(rpc, server.service_handler_factory) for rpc in entries}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def _handler(rpc: Rpc, factory: Callable[..., Any]) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Returns the handler of one RPC. It has no codecs, so messages stay bytes."""
    kind = _TYPES[rpc.has_request_stream, rpc.has_response_stream]
    serve_handler = factory(service_method=rpc.path, streaming_type=kind)
    if rpc.has_response_stream:
        make = grpc.stream_stream_rpc_method_handler if rpc.has_request_stream else grpc.unary_stream_rpc_method_handler
        return make(_stream_handler(rpc, serve_handler))
    make_unary = grpc.stream_unary_rpc_method_handler if rpc.has_request_stream else grpc.unary_unary_rpc_method_handler
    return make_unary(_unary_handler(rpc, serve_handler))


def _unary_handler(rpc: Rpc, serve_handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[bytes]]:
    async def handle_unary(request: Any, context: Any) -> bytes:
        call = CallContext(context, call_metadata(rpc, request, context))
        answer = await serve_handler(request, call)
        if not isinstance(answer, Ending):
            await call.abort()
        if answer.message is None:
            await _abort(context, answer)
        context.set_trailing_metadata(answer.trailers)
        return answer.message

    return handle_unary


def _stream_handler(rpc: Rpc, serve_handler: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[bytes]]:
    async def handle_stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        call = CallContext(context, call_metadata(rpc, request, context))
        leaving = asyncio.Event()
        window = RequestWindow(rpc)
        if rpc.path == rpcs.STREAM_EVALUATE:
            # The server answers what has arrived and ends the stream. Sessions go on: their state is on the replica.
            request = _until(request, leaving)
            LEAVING.add(call.request_id, leaving.set)
        if rpc.has_request_stream:
            request = window.limited(request)
        ending = None
        try:
            async with contextlib.aclosing(serve_handler(request, call)) as answers:  # type: ignore[type-var]  # an async generator
                async for answer in answers:
                    if isinstance(answer, Ending):
                        ending = answer
                    else:
                        yield answer
                        # The client has read it, or gRPC's buffer for the client has room.
                        window.count_answer(answer)
        finally:
            window.close()
            LEAVING.remove(call.request_id)
        if ending is None:
            await call.abort()
        if ending.code == grpc.StatusCode.OK.name and leaving.is_set():
            ending = replace(ending, code=grpc.StatusCode.UNAVAILABLE.name, details="the replica is going away")
        if ending.code != grpc.StatusCode.OK.name:
            await _abort(context, ending)
        context.set_trailing_metadata(ending.trailers)

    return handle_stream


async def _abort(context: Any, ending: Ending) -> NoReturn:
    """Ends a call as the server ended it."""
    await context.abort(grpc.StatusCode[ending.code], ending.details, ending.trailers)
    raise AssertionError("abort raises")


def call_metadata(rpc: Rpc, request: Any, context: Any) -> list[tuple[str, str | bytes]]:
    """Returns the metadata that Ray Serve and the replica get: the client's, and that of `rpcs`."""
    metadata = [(key, value) for key, value in context.invocation_metadata() if key not in rpcs.SET_BY_PROXY]
    # Ray Serve's name for the call, which must be unique in this process.
    metadata.append((rpcs.REQUEST_ID, str(uuid.uuid4())))
    left_s = context.time_remaining()
    if left_s is not None:
        metadata.append((rpcs.TIMEOUT, repr(left_s)))
    if rpc.path == rpcs.EVALUATE:
        metadata.append((rpcs.PROGRAM, program_key(request)))
    return metadata


async def _until(requests: AsyncIterator[bytes], end: asyncio.Event) -> AsyncIterator[bytes]:
    """Yields messages until there are no more or the event is set."""
    ended = asyncio.ensure_future(end.wait())
    try:
        while True:
            message = asyncio.ensure_future(anext(requests, None))
            try:
                await asyncio.wait({message, ended}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not message.done():
                    message.cancel()
            if end.is_set() or (data := await message) is None:
                return
            yield data
    finally:
        ended.cancel()


class RequestWindow:
    """Lets a limited number of requests of a stream wait for answers that the client reads."""

    def __init__(self, rpc: Rpc) -> None:
        self._requests = StreamRequests(rpc)
        self._pending = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    async def limited(self, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yields the messages of a client; those that complete a request when there is room."""
        async for message in messages:
            if change := self._requests.change_by_request(message):
                await self._has_room.wait()
                self._change(change)
            yield message

    def count_answer(self, answer: bytes) -> None:
        """Counts a message of the server that the client has read."""
        self._change(self._requests.change_by_answer(answer))

    def close(self) -> None:
        """Ends the waiting of `limited`, once nothing answers any more."""
        self._has_room.set()

    def _change(self, by: int) -> None:
        self._pending = max(0, self._pending + by)
        if self._pending < _MAX_REQUESTS:
            self._has_room.set()
        else:
            self._has_room.clear()


class CallContext:
    """Stands for gRPC's context of a call towards Ray Serve: adds metadata, and keeps the status that Serve sets.

    Args:
        context: gRPC's own.
        metadata: What `invocation_metadata` returns.
    """

    def __init__(self, context: Any, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._context = context
        self._metadata = metadata
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self.request_id = str(dict(metadata)[rpcs.REQUEST_ID])
        self.auth_context = context.auth_context
        self.peer = context.peer
        self.peer_identities = context.peer_identities
        self.peer_identity_key = context.peer_identity_key

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str:
        return self._details

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, _: object) -> None:
        """Ignores the trailers that Ray Serve sets: those of the server have a request ID."""

    def set_compression(self, _: object) -> None:
        """Ignores the compression that Ray Serve sets: it sets none."""

    async def abort(self) -> NoReturn:
        """Ends a call for which no replica gave an answer."""
        code = self._code
        trailers: tuple[tuple[str, str | bytes], ...] = ()
        if code in _NO_REPLICA:
            code = grpc.StatusCode.UNAVAILABLE
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            # Clients take this code without details for a message that is too large.
            trailers = (("grpc-status-details-bin", _overloaded(self._details)),)
        await self._context.abort(code, self._details or "the replica is gone", trailers)
        raise AssertionError("abort raises")


def _overloaded(message: str) -> bytes:
    """Returns the typed error of a call that Ray Serve refused because too many wait."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="gradrule"))
    code: int = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    status: bytes = status_pb2.Status(code=code, message=message, details=[detail]).SerializeToString()
    return status
