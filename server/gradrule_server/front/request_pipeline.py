"""Runs the steps of every RPC: authenticate, admit, read, parse, call the service method, convert errors to statuses.

Handlers receive raw bytes and parse them here, so that malformed requests get a typed error too. Callers are refused
before their request is parsed and, where the metadata is enough to refuse them, before it is read.
"""

from __future__ import annotations

import asyncio
import functools
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
from gradrule_server.front.admission import Admission, UnaryRequests
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
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.open_streams import OpenStreams
from gradrule_server.front.tenants import Tenants
from gradrule_server.front.time_limits import Deadline, Deadlines, IntervalChecks, UnreadAnswer, read_timeout
from gradrule_server.identity import Principal
from gradrule_server.operations.audit import record_registration
from gradrule_server.operations.request_record import ObservedRequest, Observer, RequestRecord
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
        stall_s: how long an answer may stay unread, see `time_limits.read_timeout`.
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
        self.observer = observer or Observer()
        self._limits = limits or NodeLimits()
        self._authenticator = authenticator
        self._tenants = tenants
        self._admission = admission
        self._times = times
        self._connections = connections or ConnectionWatch()
        self._open_streams = OpenStreams(authenticator, admission, self._connections, times.stall_s, times.recheck_s)
        self._unary_requests = UnaryRequests(admission, self._connections)
        self._parsing = TenantLocks()
        self._unread_checks = IntervalChecks(times.stall_s / 4)
        self._deadlines = Deadlines()
        self.draining = asyncio.Event()
        """Set once the server stops."""

    @property
    def stream_age_s(self) -> float | None:
        """Age at which a stream of evaluations ends, seconds; None: no limit."""
        return self._times.stream_age_s

    @property
    def max_deadline_s(self) -> float:
        """Longest deadline of a request, seconds."""
        return self._times.max_deadline_s

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
        rpc = f"{name.rpartition('.')[2]}/{{}}".format
        handlers: dict[str, CreateHandler] = {}
        for method_name, (request_type, method) in methods.items():
            handlers[method_name] = self._unary(rpc(method_name), request_type, method)
        for method_name, (request_type, upload) in uploads.items():
            handlers[method_name] = self._upload(rpc(method_name), request_type, upload)
        for method_name, stream in streams.items():
            handlers[method_name] = self._stream(rpc(method_name), stream)
        paths = {f"/{name}/{method_name}": create for method_name, create in handlers.items()}
        return RpcService(self._authenticator, self.observer, paths)

    async def answer(
        self,
        caller: Caller,
        observed: ObservedRequest,
        request_type: type[RequestT] | None,
        method: Method[RequestT],
        raw: bytes,
        remaining: float | None,
    ) -> bytes:
        """Admits, parses and answers one request of a stream within its deadline; raises `GradruleError` only.

        Waits while too many bytes are in flight; OVERLOADED shortly before the deadline. The bytes of the answer stay
        counted until `release_answer`.

        Args:
            caller: of the stream.
            observed: record of the request.
            request_type: None for a method that reads the bytes itself.
            method: answers the request.
            raw: bytes of the request.
            remaining: seconds that the client gives the request; None: the default deadline.
        """
        request = observed.request

        def call(ends_at: float) -> Awaitable[Message | bytes]:
            return self._call(caller, request, request_type, method, raw, ends_at)

        with observed:
            request.bytes_in = len(raw)
            data = await self.run(caller, call, remaining, len(raw))
            request.bytes_out = len(data)
            self._admission.adjust_bytes(caller.tenant.in_flight, len(data))
            return data

    async def run(
        self,
        caller: Caller,
        function: Callable[[float], Awaitable[Message | bytes]],
        remaining: float | None,
        size: int,
    ) -> bytes:
        """Admits a request of `size` bytes and runs a function for it within its deadline; fails as `answer` does.

        `function` takes the deadline, event loop time, seconds.
        """
        in_flight, admitted = caller.tenant.in_flight, 0
        try:
            self._admission.admit(in_flight)
            try:
                with self._deadline(remaining) as deadline:
                    await self._admission.admit_bytes(in_flight, size, deadline.ends_at)
                    admitted = size
                    answer = await function(deadline.ends_at)
            finally:
                self._admission.release(in_flight, admitted)
        except GradruleError:
            raise
        except Exception as cause:
            raise log_incident() from cause
        return answer if isinstance(answer, bytes) else answer.SerializeToString()

    async def parse(self, request_type: type[RequestT], raw: bytes, caller: Caller) -> RequestT:
        """Returns the message in the bytes.

        MALFORMED_REQUEST, and LIMIT_EXCEEDED where the message would take too much memory. Large messages are parsed in
        a thread, those of one tenant one after the other, so that a tenant takes one thread.
        """
        if len(raw) <= SMALL_BYTES:
            return _parse(request_type, raw, self._limits)
        async with self._parsing.hold(caller.tenant.name):
            return await asyncio.to_thread(_parse, request_type, raw, self._limits)

    def reserve_chunk(self, caller: Caller, size: int, arrived: int) -> None:
        """Counts bytes of a request that is arriving until `release_chunks`; OVERLOADED, LIMIT_EXCEEDED.

        `arrived`: the bytes of the request that are counted already.
        """
        self._admission.admit_arrived(caller.tenant.in_flight, size, arrived)

    def release_chunks(self, caller: Caller, size: int) -> None:
        """Stops counting bytes of a request that was arriving."""
        self._admission.forget_arrived(caller.tenant.in_flight, size)

    def release_answer(self, caller: Caller, size: int) -> None:
        """Stops counting bytes of an answer."""
        self._admission.adjust_bytes(caller.tenant.in_flight, -size)

    async def wait_for_room(self, caller: Caller) -> None:
        """Waits until a message of any size may arrive on a stream."""
        in_flight = caller.tenant.in_flight
        counted = await self._admission.admit_arrival(in_flight, None)
        if counted:
            self._admission.forget_arrived(in_flight, counted)

    def drain(self) -> None:
        """Makes streams take no more requests; each stream ends when its running requests have ended."""
        self.draining.set()

    def _call(
        self,
        caller: Caller,
        request: RequestRecord,
        request_type: type[RequestT] | None,
        method: Method[RequestT],
        raw: bytes,
        ends_at: float,
    ) -> Awaitable[Message | bytes]:
        if request_type is None:
            return method(Call(_EMPTY, raw, request.received_ns, ends_at, caller))
        return self._parse_and_call(caller, request, request_type, method, raw, ends_at)

    async def _parse_and_call(
        self,
        caller: Caller,
        request: RequestRecord,
        request_type: type[RequestT],
        method: Method[RequestT],
        raw: bytes,
        ends_at: float,
    ) -> Message | bytes:
        parsed = await self.parse(request_type, raw, caller)
        answer = await method(Call(parsed, raw, request.received_ns, ends_at, caller))
        record_registration(parsed, answer)
        return answer

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

    def _watch_answer(self, caller: Caller, data: bytes, context: Context, peer: str) -> None:
        """Counts an answer until its client has read it, and closes the connection if that takes too long."""
        in_flight, size = caller.tenant.in_flight, len(data)
        self._admission.adjust_bytes(in_flight, size)
        on_done = functools.partial(self._admission.adjust_bytes, in_flight, -size)
        unread = UnreadAnswer(peer, read_timeout(self._times.stall_s, size), self._unread_checks, on_done)
        when_done(context, unread.finish)

    def _deadline(self, remaining: float | None) -> Deadline:
        """Returns the deadline of a request: the client's, up to the longest allowed, or the default."""
        times = self._times
        return self._deadlines.after(
            times.default_deadline_s if remaining is None else min(remaining, times.max_deadline_s)
        )

    def _unary(self, rpc: str, request_type: type[RequestT] | None, method: Method[RequestT]) -> CreateHandler:
        def create(known: Principal | None) -> Handler:
            async def handle(_: AsyncIterator[bytes], context: Context) -> bytes:
                async def answer(caller: Caller, request: RequestRecord) -> bytes:
                    admission, in_flight, admitted = self._admission, caller.tenant.in_flight, 0
                    admission.admit(in_flight)
                    try:
                        with self._deadline(context.time_remaining()) as deadline:
                            raw = await self._unary_requests.read(context, in_flight, deadline.ends_at)
                            size = request.bytes_in = len(raw)
                            request.received_ns = time.monotonic_ns()
                            await admission.admit_bytes(in_flight, size, deadline.ends_at)
                            admitted = size
                            response = await self._call(caller, request, request_type, method, raw, deadline.ends_at)
                    finally:
                        admission.release(in_flight, admitted)
                    data = response if isinstance(response, bytes) else response.SerializeToString()
                    request.bytes_out = len(data)
                    self._watch_answer(caller, data, context, request.peer())
                    if request.wants_gzip and len(data) <= MAX_COMPRESSED_BYTES:
                        # Last: clients do not retry a refused call once they have received its initial metadata.
                        await compress_responses(context)
                    return data

                return await self._serve(rpc, known, context, answer)

            # Declared as a stream: gRPC would read the whole request of a unary call before it reports the call.
            return grpc.stream_unary_rpc_method_handler(handle)

        return create

    def _upload(self, rpc: str, request_type: type[RequestT], method: UploadMethod[RequestT]) -> CreateHandler:
        def create(known: Principal | None) -> Handler:
            async def handle(pieces: AsyncIterator[bytes], context: Context) -> bytes:
                async def answer(caller: Caller, request: RequestRecord) -> bytes:
                    async def messages() -> AsyncIterator[RequestT]:
                        in_flight = caller.tenant.in_flight
                        async for raw in self._connections.get(context.peer()).messages(pieces):
                            request.bytes_in += len(raw)
                            self._admission.adjust_bytes(in_flight, len(raw))
                            try:
                                yield await self.parse(request_type, raw, caller)
                            finally:
                                self._admission.adjust_bytes(in_flight, -len(raw))

                    async def run(_: float) -> Message | bytes:
                        response = await method(Upload(messages(), caller.tenant))
                        record_registration(request_type(), response)
                        return response

                    answer = await self.run(caller, run, context.time_remaining(), 0)
                    request.bytes_out = len(answer)
                    return answer

                return await self._serve(rpc, known, context, answer)

            return grpc.stream_unary_rpc_method_handler(handle)

        return create

    def _stream(self, rpc: str, method: StreamMethod) -> CreateHandler:
        def create(known: Principal | None) -> Handler:
            async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
                async def answer(caller: Caller, request: RequestRecord) -> None:
                    request.is_stream = True
                    streams = caller.tenant.quotas["streams"]
                    streams.reserve()
                    when_done(context, lambda _: streams.release())
                    if request.wants_gzip:
                        await compress_responses(context)
                    await self._open_streams.serve(method, caller, requests, context)

                await self._serve(rpc, known, context, answer)

            return grpc.stream_stream_rpc_method_handler(handle)

        return create

    async def _serve(
        self,
        rpc: str,
        known: Principal | None,
        context: Context,
        answer: Callable[[Caller, RequestRecord], Awaitable[AnswerT]],
    ) -> AnswerT:
        """Records a call, identifies its caller and answers it; errors end the call with their status.

        What the call reserves is released by `when_done`, not here: a client that reads nothing keeps the call and its
        memory alive.
        """
        observed = observe_call(self.observer, rpc, context)
        try:
            with observed:
                try:
                    return await answer(await self._identify(known, context, observed.request), observed.request)
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
