"""What every RPC goes through: admission, parsing, deadline, and the way from an error to a status.

Handlers take raw bytes and parse inside, so that garbage is a typed error too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.status import DETAILS_KEY, code_of, status_of
from gradrule_server.policy import SMALL_BYTES, Bounds, check_unpacking

_log = logging.getLogger(__name__)

_OVERLOAD_RETRY_S = 0.2
_NONE: Mapping[str, Any] = MappingProxyType({})

Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
RequestT = TypeVar("RequestT", bound=Message)


@dataclass(frozen=True, slots=True)
class Call(Generic[RequestT]):
    """One call: the request, its bytes, when it was read (CLOCK_MONOTONIC ns) and when it ends (loop time, seconds)."""

    request: RequestT
    raw: bytes
    received_ns: int
    ends_at: float


@dataclass(frozen=True, slots=True)
class Incoming(Generic[RequestT]):
    """One call whose request comes in several messages."""

    messages: AsyncIterator[RequestT]


Method = Callable[[Call[RequestT]], Awaitable[Message | bytes]]
UploadMethod = Callable[[Incoming[RequestT]], Awaitable[Message | bytes]]
StreamMethod = Callable[[AsyncIterator[bytes], Callable[[bytes], Awaitable[None]]], Awaitable[None]]
"""A bidirectional stream: from its requests, and what writes an answer. Its return ends the stream."""

MethodTable = Mapping[str, tuple[type[Message], Method]]  # type: ignore[type-arg]  # one table holds methods of every request type
UploadTable = Mapping[str, tuple[type[Message], UploadMethod]]  # type: ignore[type-arg]  # as above
StreamTable = Mapping[str, StreamMethod]


class Door:
    """Admits calls, up to a number at a time, and turns what they raise into statuses."""

    def __init__(
        self, max_concurrent: int, default_deadline_s: float, max_deadline_s: float, bounds: Bounds | None = None
    ) -> None:
        self._bounds = bounds or Bounds()
        self._max_concurrent = max_concurrent
        self._default_deadline_s = default_deadline_s
        self._max_deadline_s = max_deadline_s
        self._in_flight = 0
        self.draining = asyncio.Event()
        """Set once the server is going away."""

    def service(
        self,
        name: str,
        methods: MethodTable = _NONE,
        *,
        uploads: UploadTable = _NONE,
        streams: StreamTable = _NONE,
    ) -> grpc.GenericRpcHandler:
        """A gRPC service from its methods, each with the type of its request.

        `uploads`: those whose request comes in several messages. `streams`: the bidirectional ones.
        """
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            method_name: grpc.unary_unary_rpc_method_handler(self._unary(request_type, method))
            for method_name, (request_type, method) in methods.items()
        }
        handlers |= {
            method_name: grpc.stream_unary_rpc_method_handler(self._upload(request_type, upload))
            for method_name, (request_type, upload) in uploads.items()
        }
        handlers |= {
            method_name: grpc.stream_stream_rpc_method_handler(self._stream(method))
            for method_name, method in streams.items()
        }
        handler: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(name, handlers)
        return handler

    async def answer(
        self, request_type: type[RequestT], method: Method[RequestT], raw: bytes, remaining: float | None
    ) -> bytes:
        """Admits, parses and answers one request, in time; whatever goes wrong is a `GradruleError`.

        `remaining`: seconds that the caller gives it; None: the default.
        """
        received_ns = time.monotonic_ns()

        async def run(ends_at: float) -> Message | bytes:
            return await method(Call(await self.read(request_type, raw), raw, received_ns, ends_at))

        return await self.run(run, remaining)

    async def run(self, run: Callable[[float], Awaitable[Message | bytes]], remaining: float | None) -> bytes:
        """What `run` answers, which takes the loop time at which it ends; it fails as `answer` does."""
        try:
            with self._admitted():
                answer = await self._in_time(run, remaining)
        except GradruleError:
            raise
        except Exception as cause:
            raise _incident() from cause
        return answer if isinstance(answer, bytes) else answer.SerializeToString()

    def drain(self) -> None:
        """Streams take no more requests from now on; they end when what is under way is done."""
        self.draining.set()

    def _unary(
        self, request_type: type[RequestT], method: Method[RequestT]
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def handle(raw: bytes, context: Context) -> bytes:
            try:
                return await self.answer(request_type, method, raw, context.time_remaining())
            except GradruleError as cause:
                await _abort(context, cause)

        return handle

    def _upload(
        self, request_type: type[RequestT], method: UploadMethod[RequestT]
    ) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        async def handle(pieces: AsyncIterator[bytes], context: Context) -> bytes:
            async def messages() -> AsyncIterator[RequestT]:
                async for raw in pieces:
                    yield await self.read(request_type, raw)

            async def run(_: float) -> Message | bytes:
                return await method(Incoming(messages()))

            try:
                return await self.run(run, context.time_remaining())
            except GradruleError as cause:
                await _abort(context, cause)

        return handle

    def _stream(self, method: StreamMethod) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
        async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
            try:
                await method(requests, context.write)
            except GradruleError as cause:
                await _abort(context, cause)
            except Exception:
                await _abort(context, _incident())

        return handle

    def _admitted(self) -> _Admission:
        if self._in_flight >= self._max_concurrent:
            raise error(
                errors_pb2.ERROR_REASON_OVERLOADED,
                f"the server already holds {self._in_flight} requests",
                retry_after_s=_OVERLOAD_RETRY_S,
            )
        return _Admission(self)

    async def _in_time(
        self, run: Callable[[float], Awaitable[Message | bytes]], remaining: float | None
    ) -> Message | bytes:
        """The one place that keeps deadlines: whatever runs when it passes is cancelled."""
        seconds = self._default_deadline_s if remaining is None else min(remaining, self._max_deadline_s)
        ends_at = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(ends_at):
                return await run(ends_at)
        except TimeoutError as cause:
            raise error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, f"not done within {seconds:.3g} s") from cause

    async def read(self, request_type: type[RequestT], raw: bytes) -> RequestT:
        """The message in the bytes. MALFORMED_REQUEST, and LIMIT_EXCEEDED where it would take too much memory."""
        if len(raw) <= SMALL_BYTES:
            return _parse(request_type, raw, self._bounds)
        # Other calls go on meanwhile.
        return await asyncio.to_thread(_parse, request_type, raw, self._bounds)

    def enter(self) -> None:
        """Counts a call in."""
        self._in_flight += 1

    def leave(self) -> None:
        """Counts a call out."""
        self._in_flight -= 1


class _Admission:
    def __init__(self, door: Door) -> None:
        self._door = door

    def __enter__(self) -> None:
        self._door.enter()

    def __exit__(self, *exc: object) -> None:
        self._door.leave()


def _parse(request_type: type[RequestT], raw: bytes, bounds: Bounds) -> RequestT:
    check_unpacking(raw, request_type, bounds)
    try:
        return request_type.FromString(raw)
    except DecodeError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"the bytes are no {request_type.DESCRIPTOR.full_name}"
        ) from cause


def _incident() -> GradruleError:
    """What a caller is told of an unforeseen failure: nothing may leak, and nothing may be lost."""
    incident = secrets.token_hex(4)
    _log.exception("incident %s", incident)
    return error(errors_pb2.ERROR_REASON_INTERNAL, f"the server failed; its log has more under incident {incident}")


async def _abort(context: Context, cause: GradruleError) -> NoReturn:
    status = status_of(cause)
    await context.abort(
        code_of(cause.reason), status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),)
    )
    raise AssertionError("abort always raises")
