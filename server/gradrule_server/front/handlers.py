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
from typing import Generic, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.status import DETAILS_KEY, code_of, status_of

_log = logging.getLogger(__name__)

_OVERLOAD_RETRY_S = 0.2

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
MethodTable = Mapping[str, tuple[type[Message], Method]]  # type: ignore[type-arg]  # one table holds methods of every request type

StreamMethod = Callable[[Incoming[RequestT]], Awaitable[Message | bytes]]
StreamTable = Mapping[str, tuple[type[Message], StreamMethod]]  # type: ignore[type-arg]  # as above


class Door:
    """Admits calls, up to a number at a time, and turns what they raise into statuses."""

    def __init__(self, max_concurrent: int, default_deadline_s: float, max_deadline_s: float) -> None:
        self._max_concurrent = max_concurrent
        self._default_deadline_s = default_deadline_s
        self._max_deadline_s = max_deadline_s
        self._in_flight = 0

    def service(self, name: str, methods: MethodTable, streams: StreamTable | None = None) -> grpc.GenericRpcHandler:
        """A gRPC service from its methods, each with the type of its request.

        `streams`: those whose request comes in several messages.
        """
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            method_name: grpc.unary_unary_rpc_method_handler(self._unary(request_type, method))
            for method_name, (request_type, method) in methods.items()
        }
        for method_name, (request_type, stream_method) in (streams or {}).items():
            handlers[method_name] = grpc.stream_unary_rpc_method_handler(self._incoming(request_type, stream_method))
        handler: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(name, handlers)
        return handler

    def _unary(
        self, request_type: type[RequestT], method: Method[RequestT]
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def handle(raw: bytes, context: Context) -> bytes:
            received_ns = time.monotonic_ns()

            async def run(ends_at: float) -> Message | bytes:
                return await method(Call(_parse(request_type, raw), raw, received_ns, ends_at))

            return await self._answer(run, context)

        return handle

    def _incoming(
        self, request_type: type[RequestT], method: StreamMethod[RequestT]
    ) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        async def handle(pieces: AsyncIterator[bytes], context: Context) -> bytes:
            async def messages() -> AsyncIterator[RequestT]:
                async for raw in pieces:
                    yield _parse(request_type, raw)

            async def run(_: float) -> Message | bytes:
                return await method(Incoming(messages()))

            return await self._answer(run, context)

        return handle

    async def _answer(self, run: Callable[[float], Awaitable[Message | bytes]], context: Context) -> bytes:
        """What a method answers, or the status of what it raises. `run` takes the loop time at which the call ends."""
        try:
            with self._admitted():
                answer = await self._in_time(run, context)
        except GradruleError as cause:
            await _abort(context, cause)
        except Exception:
            # The border of the server: nothing unforeseen may leak, and nothing may be lost.
            incident = secrets.token_hex(4)
            _log.exception("incident %s", incident)
            await _abort(
                context,
                error(
                    errors_pb2.ERROR_REASON_INTERNAL, f"the server failed; its log has more under incident {incident}"
                ),
            )
        return answer if isinstance(answer, bytes) else answer.SerializeToString()

    def _admitted(self) -> _Admission:
        if self._in_flight >= self._max_concurrent:
            raise error(
                errors_pb2.ERROR_REASON_OVERLOADED,
                f"the server already holds {self._in_flight} requests",
                retry_after_s=_OVERLOAD_RETRY_S,
            )
        return _Admission(self)

    async def _in_time(self, run: Callable[[float], Awaitable[Message | bytes]], context: Context) -> Message | bytes:
        """The one place that keeps deadlines: whatever runs when it passes is cancelled."""
        remaining = context.time_remaining()
        seconds = self._default_deadline_s if remaining is None else min(remaining, self._max_deadline_s)
        ends_at = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(ends_at):
                return await run(ends_at)
        except TimeoutError as cause:
            raise error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, f"not done within {seconds:.3g} s") from cause

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


def _parse(request_type: type[RequestT], raw: bytes) -> RequestT:
    try:
        return request_type.FromString(raw)
    except DecodeError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST, f"the bytes are no {request_type.DESCRIPTOR.full_name}"
        ) from cause


async def _abort(context: Context, cause: GradruleError) -> NoReturn:
    status = status_of(cause)
    await context.abort(
        code_of(cause.reason), status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),)
    )
    raise AssertionError("abort always raises")
