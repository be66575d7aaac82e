"""Runs the steps of every RPC: authenticate, admit, read, parse, call the service method, convert errors to statuses.

Handlers receive raw bytes and parse them here, so that malformed requests get a typed error too. Callers are refused
before their request is parsed and, where the metadata is enough to refuse them, before it is read.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import TenantLocks
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.admission import Admission
from gradrule_server.front.authentication import CallerAuthenticator, CreateHandler, Handler, RpcService
from gradrule_server.front.calls import (
    MAX_COMPRESSED_BYTES,
    Call,
    Caller,
    Context,
    Method,
    MethodTable,
    RequestT,
    StreamMethod,
    StreamTable,
    Upload,
    UploadMethod,
    UploadTable,
    abort,
    compress_responses,
    log_incident,
    observe_call,
    when_done,
)
from gradrule_server.front.connections import ConnectionWatch, read_timeout
from gradrule_server.front.open_streams import CHECKS_PER_STALL, Stream
from gradrule_server.front.sockets import close_connection
from gradrule_server.front.tenants import Tenants
from gradrule_server.identity import Principal
from gradrule_server.operations.audit import record_registration
from gradrule_server.operations.request_record import Observer, RequestRecord
from gradrule_server.policy import SMALL_BYTES, NodeLimits, check_parsed_size

_NO_METHODS: Mapping[str, Any] = MappingProxyType({})
_EMPTY: Any = Empty()

# The link's messages read parts of the API's messages as bytes; errors name the API's.
_RAW_PREFIX, _API_PREFIX = "gradrule_server.link.v1.Raw", "gradrule.v1."

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Times of calls, seconds.

    Attributes:
        default_deadline_s: deadline of a call that sets none.
        max_deadline_s: longest deadline.
        stall_s: how long an answer may stay unread, see `connections.read_timeout`.
        recheck_s: interval at which the credential that opened a stream is checked again.
        stream_age_s: age at which a stream of evaluations ends, so that its client continues elsewhere; None: no limit.
    """

    default_deadline_s: float
    max_deadline_s: float
    stall_s: float
    recheck_s: float = 3.0
    stream_age_s: float | None = None


class RequestPipeline:
    """Runs the steps of every RPC around the methods of the services.

    Args:
        authenticator: finds the principal of a call.
        tenants: loads the tenant of a principal.
        admission: limits requests and bytes in flight.
        times: deadlines and timeouts.
        observer: starts the record of each request.
        limits: bounds the memory of parsed messages.
        connections: counts bytes of unfinished messages.
    """

    def __init__(
        self,
        authenticator: CallerAuthenticator,
        tenants: Tenants,
        admission: Admission,
        times: CallTimes,
        observer: Observer | None = None,
        limits: NodeLimits | None = None,
        connections: ConnectionWatch | None = None,
    ) -> None:
        self.admission = admission
        self.times = times
        self.observer = observer or Observer()
        self._limits = limits or NodeLimits()
        self._authenticator = authenticator
        self._tenants = tenants
        self._connections = connections or ConnectionWatch()
        self._parsing = TenantLocks()
        self._streams: set[Stream] = set()
        # Unary answers that gRPC sends: the peer, and the loop time until which the client has to read the answer.
        self._unread: dict[Context, tuple[str, float]] = {}
        self._is_checking = False
        self._is_draining = False

    def create_service(
        self,
        name: str,
        methods: MethodTable = _NO_METHODS,
        *,
        uploads: UploadTable = _NO_METHODS,
        streams: StreamTable = _NO_METHODS,
    ) -> grpc.GenericRpcHandler:
        """Returns a gRPC service.

        Args:
            name: full name of the service.
            methods: unary methods by name, each with the type of its request.
            uploads: methods whose request comes in several messages.
            streams: bidirectional methods.
        """
        handlers: dict[str, CreateHandler] = {}

        def add(method: str, create: Callable[..., Handler], answer: Callable[..., Awaitable[Any]]) -> None:
            serve = functools.partial(self._serve, f"{name.rpartition('.')[2]}/{method}", answer)
            handlers[f"/{name}/{method}"] = lambda known: create(functools.partial(serve, known))

        # Unary calls are declared as streams: gRPC would read the whole request before it reports the call.
        for key, (request_type, method) in methods.items():
            parsing = self.parsing(request_type, method)
            add(key, grpc.stream_unary_rpc_method_handler, functools.partial(self._answer_unary, parsing))
        for key, (request_type, upload) in uploads.items():
            answer = functools.partial(self._answer_upload, request_type, upload)
            add(key, grpc.stream_unary_rpc_method_handler, answer)
        for key, stream in streams.items():
            add(key, grpc.stream_stream_rpc_method_handler, functools.partial(self._answer_stream, stream))
        return RpcService(self._authenticator, self.observer, handlers)

    async def run(
        self,
        caller: Caller,
        record: RequestRecord,
        remaining: float | None,
        raw: bytes | Callable[[float], Awaitable[bytes]],
        method: Method[Any],
    ) -> bytes:
        """Admits one request and answers it within its deadline; raises `GradruleError` only.

        Waits while too many bytes are in flight; OVERLOADED shortly before the deadline. The bytes of the answer stay
        counted until `release_answer`.

        Args:
            caller: of the call.
            record: of the request.
            remaining: seconds that the client gives the request; None: the default deadline.
            raw: bytes of the request, or a function that reads them until the deadline, loop time.
            method: answers the request.
        """
        admission, in_flight, times = self.admission, caller.tenant.in_flight, self.times
        seconds = times.default_deadline_s if remaining is None else min(remaining, times.max_deadline_s)
        ends_at = asyncio.get_running_loop().time() + seconds
        admitted = answered = 0
        admission.admit(in_flight)
        try:
            async with asyncio.timeout_at(ends_at) as limit:
                if not isinstance(raw, bytes):
                    raw = await raw(ends_at)
                size = record.bytes_in = len(raw)
                if not admission.admit_now(in_flight, size):
                    await admission.wait(in_flight, size, ends_at)
                admitted = size
                answer = await method(Call(_EMPTY, raw, record.received_ns, ends_at, caller))
            data = answer if isinstance(answer, bytes) else answer.SerializeToString()
            answered = record.bytes_out = len(data)
        except GradruleError:
            raise
        except Exception as cause:
            if isinstance(cause, TimeoutError) and limit.expired():
                raise error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, f"not done within {seconds:.3g} s") from cause
            raise log_incident() from cause
        finally:
            admission.release(in_flight, admitted, answered)
        return data

    def parsing(self, request_type: type[RequestT] | None, method: Method[RequestT]) -> Method[RequestT]:
        """Returns a method that parses its request first; with None the method itself."""
        if request_type is None:
            return method

        async def parse_and_call(call: Call[RequestT]) -> Message | bytes:
            call.request = await self.parse(request_type, call.raw, call.caller)
            answer = await method(call)
            record_registration(call.request, answer)
            return answer

        return parse_and_call

    async def parse(self, request_type: type[RequestT], raw: bytes, caller: Caller) -> RequestT:
        """Returns the message in the bytes.

        MALFORMED_REQUEST, and LIMIT_EXCEEDED where the message would take too much memory. Large messages are parsed in
        a thread, those of one tenant one after the other, so that a tenant takes one thread.
        """
        if len(raw) <= SMALL_BYTES:
            return _parse(request_type, raw, self._limits)
        async with self._parsing.hold(caller.tenant.name):
            return await asyncio.to_thread(_parse, request_type, raw, self._limits)

    def release_answer(self, caller: Caller, size: int) -> None:
        """Stops counting bytes of an answer."""
        self.admission.count(caller.tenant.in_flight, -size)

    def drain(self) -> None:
        """Makes streams take no more requests; each stream ends when its running requests have ended."""
        self._is_draining = True
        for stream in self._streams:
            stream.stop_reading()

    async def _answer_unary(
        self, method: Method[Any], caller: Caller, record: RequestRecord, context: Context
    ) -> bytes:
        async def read(ends_at: float) -> bytes:
            """Reads the request once there is room: until then its client cannot send more than gRPC buffers."""
            connection = self._connections.get(record.peer())
            counted = await self.admission.wait_to_read(caller.tenant.in_flight, ends_at)
            try:
                raw = await connection.read(context)
            finally:
                if counted:
                    self.admission.forget_arriving(caller.tenant.in_flight, counted)
            if raw is None:
                raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the call holds no message")
            record.received_ns = time.monotonic_ns()
            return raw

        data = await self.run(caller, record, context.time_remaining(), read, method)
        return await self._send(caller, record, data, context)

    async def _answer_upload(
        self,
        request_type: type[RequestT],
        method: UploadMethod[RequestT],
        caller: Caller,
        record: RequestRecord,
        context: Context,
    ) -> bytes:
        async def messages() -> AsyncIterator[RequestT]:
            connection, in_flight = self._connections.get(record.peer()), caller.tenant.in_flight
            while (raw := await connection.read(context)) is not None:
                record.bytes_in += len(raw)
                self.admission.count(in_flight, len(raw))
                try:
                    yield await self.parse(request_type, raw, caller)
                finally:
                    self.admission.count(in_flight, -len(raw))

        async def upload(_: Call[Any]) -> Message | bytes:
            answer = await method(Upload(messages(), caller.tenant))
            record_registration(request_type(), answer)
            return answer

        data = await self.run(caller, record, context.time_remaining(), b"", upload)
        return await self._send(caller, record, data, context)

    async def _send(self, caller: Caller, record: RequestRecord, data: bytes, context: Context) -> bytes:
        """Prepares an answer to be sent, counts it until its client has read it, and returns it.

        Closes the connection of a client that does not read it in time. gRPC for Python cannot cancel a call from the
        server's side, and a status waits behind the unread message: only this frees the memory of the message.
        """
        size, stall_s, loop = len(data), self.times.stall_s, asyncio.get_running_loop()
        # Ask for the peer now: gRPC crashes if asked when the call is over.
        self._unread[context] = record.peer(), loop.time() + read_timeout(stall_s, size)
        if not self._is_checking:
            # A timer for each answer would cost more than the rest of this.
            self._is_checking = True
            loop.call_later(stall_s / CHECKS_PER_STALL, self._close_unread)

        def sent(_: object) -> None:
            del self._unread[context]
            self.release_answer(caller, size)

        when_done(context, sent)
        if record.wants_gzip and size <= MAX_COMPRESSED_BYTES:
            # Last: clients do not retry a refused call once they have received its initial metadata.
            await compress_responses(context)
        return data

    def _close_unread(self) -> None:
        """Closes the connections of clients that have not read their answers in time, while there are unread ones."""
        loop = asyncio.get_running_loop()
        for context, (peer, until) in list(self._unread.items()):
            if loop.time() > until:
                # Once: the next connection may have the same peer.
                self._unread[context] = peer, math.inf
                close_connection(peer)
        self._is_checking = bool(self._unread)
        if self._is_checking:
            loop.call_later(self.times.stall_s / CHECKS_PER_STALL, self._close_unread)

    async def _answer_stream(
        self, method: StreamMethod, caller: Caller, record: RequestRecord, context: Context
    ) -> None:
        record.is_stream = True
        streams, times = caller.tenant.quotas["streams"], self.times
        streams.reserve()
        when_done(context, lambda _: streams.release())
        if record.wants_gzip:
            await compress_responses(context)
        connection = self._connections.get(record.peer())
        stream = Stream(
            caller, context, connection, self.admission, self._authenticator, times.stall_s, times.recheck_s
        )
        if self._is_draining:
            stream.stop_reading()
        self._streams.add(stream)
        try:
            await stream.run(method(stream))
        finally:
            self._streams.discard(stream)

    async def _identify(self, known: Principal | None, context: Context, request: RequestRecord) -> Caller:
        """Returns the caller, and keeps its tenant loaded until the call is done. UNAUTHENTICATED.

        `known`: the principal, where the metadata was enough to find it.
        """
        principal = self._authenticator.from_connection(context) if known is None else known
        self._connections.get(request.peer()).is_authenticated = True
        request.tenant, request.principal = principal.tenant, principal.label
        tenants = self._tenants
        tenant = tenants.get_loaded(principal.tenant) or await tenants.load(principal.tenant)
        tenants.retain(tenant)
        when_done(context, lambda _: tenants.release(tenant))
        return Caller(principal, tenant)

    async def _serve(
        self,
        rpc: str,
        answer: Callable[[Caller, RequestRecord, Context], Awaitable[AnswerT]],
        known: Principal | None,
        _: AsyncIterator[bytes],
        context: Context,
    ) -> AnswerT:
        """Records a call, identifies its caller and answers it; errors end the call with their status.

        What the call reserves is released by `when_done`, not here: a client that reads nothing keeps the call and its
        memory alive.
        """
        observed = observe_call(self.observer, rpc, context)
        try:
            with observed:
                try:
                    caller = await self._identify(known, context, observed.request)
                    return await answer(caller, observed.request, context)
                except GradruleError:
                    raise
                except Exception as cause:
                    raise log_incident() from cause
        except GradruleError as cause:
            await abort(context, cause, observed.request)


def _parse(request_type: type[RequestT], raw: bytes, limits: NodeLimits) -> RequestT:
    check_parsed_size(raw, request_type, limits)
    try:
        return request_type.FromString(raw)
    except DecodeError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            f"the bytes are no {request_type.DESCRIPTOR.full_name.replace(_RAW_PREFIX, _API_PREFIX)}",
        ) from cause
