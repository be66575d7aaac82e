"""What every RPC goes through: admission, parsing, deadline, and the way from an error to a status.

Handlers take raw bytes and parse inside, so that garbage is a typed error too.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.status import DETAILS_KEY, code_of, status_of
from gradrule_server.operations.audit import note_registration
from gradrule_server.operations.observer import Observed, Observer
from gradrule_server.operations.request import REQUEST_ID, Request

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
        self,
        max_concurrent: int,
        default_deadline_s: float,
        max_deadline_s: float,
        observer: Observer | None = None,
    ) -> None:
        self.observer = observer or Observer()
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
            method_name: grpc.unary_unary_rpc_method_handler(self._unary(_rpc(name, method_name), request_type, method))
            for method_name, (request_type, method) in methods.items()
        }
        handlers |= {
            method_name: grpc.stream_unary_rpc_method_handler(
                self._upload(_rpc(name, method_name), request_type, upload)
            )
            for method_name, (request_type, upload) in uploads.items()
        }
        handlers |= {
            method_name: grpc.stream_stream_rpc_method_handler(self._stream(_rpc(name, method_name), method))
            for method_name, method in streams.items()
        }
        handler: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(name, handlers)
        return handler

    async def answer(
        self,
        request_type: type[RequestT],
        method: Method[RequestT],
        raw: bytes,
        remaining: float | None,
        observed: Observed,
    ) -> bytes:
        """Admits, parses and answers one request, in time; whatever goes wrong is a `GradruleError`.

        `remaining`: seconds that the caller gives it; None: the default.
        """

        async def run(ends_at: float) -> Message | bytes:
            request = _parse(request_type, raw)
            answer = await method(Call(request, raw, observed.request.received_ns, ends_at))
            note_registration(observed.request.rpc, request, answer)
            return answer

        with observed:
            observed.request.bytes_in = len(raw)
            return _measured(observed.request, await self.run(run, remaining))

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
        self, rpc: str, request_type: type[RequestT], method: Method[RequestT]
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def handle(raw: bytes, context: Context) -> bytes:
            observed = self._observed(rpc, context)
            try:
                return await self.answer(request_type, method, raw, context.time_remaining(), observed)
            except GradruleError as cause:
                await _abort(context, cause, observed.request)

        return handle

    def _upload(
        self, rpc: str, request_type: type[RequestT], method: UploadMethod[RequestT]
    ) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        async def handle(pieces: AsyncIterator[bytes], context: Context) -> bytes:
            observed = self._observed(rpc, context)

            async def messages() -> AsyncIterator[RequestT]:
                async for raw in pieces:
                    observed.request.bytes_in += len(raw)
                    yield _parse(request_type, raw)

            async def run(_: float) -> Message | bytes:
                answer = await method(Incoming(messages()))
                note_registration(rpc, request_type(), answer)
                return answer

            try:
                with observed:
                    return _measured(observed.request, await self.run(run, context.time_remaining()))
            except GradruleError as cause:
                await _abort(context, cause, observed.request)

        return handle

    def _stream(self, rpc: str, method: StreamMethod) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
        async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
            observed = self._observed(rpc, context)
            observed.request.is_stream = True
            try:
                with observed:
                    try:
                        await method(requests, context.write)
                    except GradruleError:
                        raise
                    except Exception as cause:
                        raise _incident() from cause
            except GradruleError as cause:
                await _abort(context, cause, observed.request)

        return handle

    def _observed(self, rpc: str, context: Context) -> Observed:
        """An RPC that begins; its caller learns the id under which the log has it."""
        observed = self.observer.rpc(rpc, context.invocation_metadata(), context.peer)
        context.set_trailing_metadata(((REQUEST_ID, observed.request.id),))
        return observed

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

    @property
    def in_flight(self) -> int:
        """Calls that were counted in and not yet out."""
        return self._in_flight

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


def _incident() -> GradruleError:
    """What a caller is told of an unforeseen failure: nothing may leak, and nothing may be lost."""
    incident = secrets.token_hex(4)
    _log.exception("incident %s", incident)
    return error(errors_pb2.ERROR_REASON_INTERNAL, f"the server failed; its log has more under incident {incident}")


def _rpc(service: str, method: str) -> str:
    """`gradrule.v1.RuleService`, `GetRule` → `RuleService/GetRule`."""
    return f"{service.rpartition('.')[2]}/{method}"


def _measured(request: Request, answer: bytes) -> bytes:
    request.bytes_out = len(answer)
    return answer


async def _abort(context: Context, cause: GradruleError, request: Request) -> NoReturn:
    status = status_of(cause)
    trailers = ((DETAILS_KEY, status.SerializeToString()), (REQUEST_ID, request.id))
    await context.abort(code_of(cause.reason), status.message, trailing_metadata=trailers)
    raise AssertionError("abort always raises")
