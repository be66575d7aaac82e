"""What every RPC goes through: who calls, admission, parsing, deadline, and the way from an error to a status.

Handlers take raw bytes and parse inside, so that garbage is a typed error too. Whoever is refused is refused before
anything is parsed, and where the metadata tells enough, before the request is read.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.admission import Admission
from gradrule_server.front.calls import (
    Call,
    Caller,
    Context,
    Incoming,
    Method,
    MethodTable,
    RequestT,
    StreamMethod,
    StreamTable,
    UploadMethod,
    UploadTable,
)
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.cutting import Unread
from gradrule_server.front.deadlines import Deadline, Deadlines
from gradrule_server.front.identity import Identity
from gradrule_server.front.open_streams import OpenStreams
from gradrule_server.front.outcomes import (
    MAX_COMPRESSED_BYTES,
    abort,
    compress_answers,
    incident,
    observed_of,
    when_done,
)
from gradrule_server.front.reading import Arrivals
from gradrule_server.front.rounds import Rounds
from gradrule_server.front.routing import Handler, Make, Service
from gradrule_server.front.stalls import patience
from gradrule_server.front.tenants import Tenant
from gradrule_server.identity import Principal
from gradrule_server.operations.audit import record_registration
from gradrule_server.operations.observer import ObservedRequest, Observer
from gradrule_server.operations.request_record import RequestRecord
from gradrule_server.policy import SMALL_BYTES, NodeLimits, check_parsed_size
from gradrule_server.tenant_locks import TenantLocks

_NONE: Mapping[str, Any] = MappingProxyType({})
_EMPTY: Any = Empty()

# Messages of the API, of which the front end reads only parts.
_RAW, _API = "gradrule_server.link.v1.Raw", "gradrule.v1."

AnswerT = TypeVar("AnswerT")


class Hosts(Protocol):
    """Where tenants are found, see `tenants.Tenants`."""

    def loaded(self, name: str) -> Tenant | None: ...

    async def load(self, name: str) -> Tenant: ...

    def enter(self, tenant: Tenant) -> None: ...

    def leave(self, tenant: Tenant) -> None: ...


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: of a call that sets no deadline; at most; for which a stream's answer may wait to be read; and between
    two looks at whether the credential that opened a stream still holds.
    """

    default_deadline_s: float
    max_deadline_s: float
    stall_s: float
    recheck_s: float = 3.0


class Door:
    """Lets callers in, up to a number at a time, and turns what goes wrong into statuses."""

    def __init__(
        self,
        identity: Identity,
        tenants: Hosts,
        admission: Admission,
        times: Times,
        observer: Observer | None = None,
        bounds: NodeLimits | None = None,
        connections: ConnectionWatch | None = None,
    ) -> None:
        self.observer = observer or Observer()
        self._bounds = bounds or NodeLimits()
        self._identity = identity
        self._tenants = tenants
        self._admission = admission
        self._times = times
        self._connections = connections or ConnectionWatch()
        self._open_streams = OpenStreams(identity, admission, self._connections, times.stall_s, times.recheck_s)
        self._arrivals = Arrivals(admission, self._connections)
        self._reading = TenantLocks()
        self._unread = Rounds(times.stall_s / 4)
        self._deadlines = Deadlines()
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
        rpc = f"{name.rpartition('.')[2]}/{{}}".format
        makes: dict[str, Make] = {}
        for method_name, (request_type, method) in methods.items():
            makes[method_name] = self._unary(rpc(method_name), request_type, method)
        for method_name, (request_type, upload) in uploads.items():
            makes[method_name] = self._upload(rpc(method_name), request_type, upload)
        for method_name, stream in streams.items():
            makes[method_name] = self._stream(rpc(method_name), stream)
        paths = {f"/{name}/{method_name}": make for method_name, make in makes.items()}
        return Service(self._identity, self.observer, paths)

    async def answer(
        self,
        caller: Caller,
        observed: ObservedRequest,
        request_type: type[RequestT] | None,
        method: Method[RequestT],
        raw: bytes,
        remaining: float | None,
    ) -> bytes:
        """Admits, parses and answers one request of a stream, in time; whatever goes wrong is a `GradruleError`.

        `remaining`: seconds that the caller gives it; None: the default. The answer counts until it is `let_go`;
        OVERLOADED where that is too much.
        """
        request, share, size = observed.request, caller.tenant.share, len(raw)
        with observed:
            request.bytes_in = size
            try:
                self._admission.enter(share, size)
                try:
                    with self._deadline(remaining) as deadline:
                        answer = await self._call(caller, request, request_type, method, raw, deadline.ends_at)
                finally:
                    self._admission.leave(share, size)
                data = answer if isinstance(answer, bytes) else answer.SerializeToString()
            except GradruleError:
                raise
            except Exception as cause:
                raise incident() from cause
            request.bytes_out = len(data)
            self._admission.grow(share, len(data))
            return data

    @property
    def max_deadline_s(self) -> float:
        """Seconds that a request may take at most."""
        return self._times.max_deadline_s

    def take_in(self, caller: Caller, size: int) -> None:
        """Counts bytes of a request that is still arriving; they count until they are `let_go`. OVERLOADED."""
        self._admission.grow(caller.tenant.share, size)

    def let_go(self, caller: Caller, size: int) -> None:
        """Counts an answer of a stream out: it waits no more, or nobody waits for it."""
        self._admission.adjust(caller.tenant.share, -size)

    async def run(
        self, caller: Caller, run: Callable[[float], Awaitable[Message | bytes]], remaining: float | None, size: int
    ) -> bytes:
        """What `run` answers, which takes the loop time at which it ends; it fails as `answer` does.

        `size`: bytes that the request takes.
        """
        share = caller.tenant.share
        try:
            self._admission.enter(share, size)
            try:
                with self._deadline(remaining) as deadline:
                    answer = await run(deadline.ends_at)
            finally:
                self._admission.leave(share, size)
        except GradruleError:
            raise
        except Exception as cause:
            raise incident() from cause
        return answer if isinstance(answer, bytes) else answer.SerializeToString()

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
        parsed = await self.read(request_type, raw, caller)
        answer = await method(Call(parsed, raw, request.received_ns, ends_at, caller))
        record_registration(request.rpc, parsed, answer)
        return answer

    async def read(self, request_type: type[RequestT], raw: bytes, caller: Caller) -> RequestT:
        """The message in the bytes. MALFORMED_REQUEST, and LIMIT_EXCEEDED where it would take too much memory.

        Large messages of one tenant are read one after the other, so that they take one thread.
        """
        if len(raw) <= SMALL_BYTES:
            return _parse(request_type, raw, self._bounds)
        async with self._reading.hold(caller.tenant.name):
            # Other calls go on meanwhile.
            return await asyncio.to_thread(_parse, request_type, raw, self._bounds)

    def drain(self) -> None:
        """Streams take no more requests from now on; they end when what is under way is done."""
        self.draining.set()

    async def _arrive(self, known: Principal | None, context: Context, request: RequestRecord) -> Caller:
        """Who calls, counted in; UNAUTHENTICATED. `known`: who that is, where the metadata told."""
        principal = self._identity.of_connection(context) if known is None else known
        self._connections.of(request.peer()).is_authenticated = True
        request.tenant, request.principal = principal.tenant, principal.label
        tenants = self._tenants
        tenant = tenants.loaded(principal.tenant) or await tenants.load(principal.tenant)
        tenants.enter(tenant)
        when_done(context, lambda _: tenants.leave(tenant))
        return Caller(principal, tenant)

    def _send(self, caller: Caller, data: bytes, context: Context, peer: str) -> None:
        """An answer on its way: it takes memory until its client has read it, and counts for so long. OVERLOADED where
        that is too much; whoever does not read it in time is cut off.
        """
        share, size = caller.tenant.share, len(data)
        self._admission.grow(share, size)
        counted_out = functools.partial(self._admission.adjust, share, -size)
        when_done(context, Unread(peer, patience(self._times.stall_s, size), self._unread, counted_out).done)

    def _deadline(self, remaining: float | None) -> Deadline:
        """Keeps the deadline of a request: its client's, as far as it may be, or the default."""
        times = self._times
        return self._deadlines.after(
            times.default_deadline_s if remaining is None else min(remaining, times.max_deadline_s)
        )

    def _unary(self, rpc: str, request_type: type[RequestT] | None, method: Method[RequestT]) -> Make:
        def make(known: Principal | None) -> Handler:
            async def handle(_: AsyncIterator[bytes], context: Context) -> bytes:
                async def answer(caller: Caller, request: RequestRecord) -> bytes:
                    admission, share, size = self._admission, caller.tenant.share, 0
                    admission.enter(share, 0)
                    try:
                        with self._deadline(context.time_remaining()) as deadline:
                            raw = await self._arrivals.read(context, share)
                            size = request.bytes_in = len(raw)
                            request.received_ns = time.monotonic_ns()
                            found = await self._call(caller, request, request_type, method, raw, deadline.ends_at)
                    finally:
                        admission.leave(share, size)
                    data = found if isinstance(found, bytes) else found.SerializeToString()
                    request.bytes_out = len(data)
                    self._send(caller, data, context, request.peer())
                    if request.wants_gzip and len(data) <= MAX_COMPRESSED_BYTES:
                        # Not before: clients do not repeat a refused call whose metadata they have received.
                        await compress_answers(context)
                    return data

                return await self._receive(rpc, known, context, answer)

            # gRPC reads the request of a unary call as a whole before it tells of the call.
            return grpc.stream_unary_rpc_method_handler(handle)

        return make

    def _upload(self, rpc: str, request_type: type[RequestT], method: UploadMethod[RequestT]) -> Make:
        def make(known: Principal | None) -> Handler:
            async def handle(pieces: AsyncIterator[bytes], context: Context) -> bytes:
                async def answer(caller: Caller, request: RequestRecord) -> bytes:
                    async def messages() -> AsyncIterator[RequestT]:
                        share = caller.tenant.share
                        async for raw in self._connections.of(context.peer()).messages(pieces):
                            request.bytes_in += len(raw)
                            self._admission.adjust(share, len(raw))
                            try:
                                yield await self.read(request_type, raw, caller)
                            finally:
                                self._admission.adjust(share, -len(raw))

                    async def run(_: float) -> Message | bytes:
                        made = await method(Incoming(messages(), caller.tenant))
                        record_registration(rpc, request_type(), made)
                        return made

                    answer = await self.run(caller, run, context.time_remaining(), 0)
                    request.bytes_out = len(answer)
                    return answer

                return await self._receive(rpc, known, context, answer)

            return grpc.stream_unary_rpc_method_handler(handle)

        return make

    def _stream(self, rpc: str, method: StreamMethod) -> Make:
        def make(known: Principal | None) -> Handler:
            async def handle(requests: AsyncIterator[bytes], context: Context) -> None:
                async def answer(caller: Caller, request: RequestRecord) -> None:
                    request.is_stream = True
                    streams = caller.tenant.quotas["streams"]
                    streams.reserve()
                    when_done(context, lambda _: streams.release())
                    if request.wants_gzip:
                        await compress_answers(context)
                    await self._open_streams.serve(method, caller, requests, context)

                await self._receive(rpc, known, context, answer)

            return grpc.stream_stream_rpc_method_handler(handle)

        return make

    async def _receive(
        self,
        rpc: str,
        known: Principal | None,
        context: Context,
        answer: Callable[[Caller, RequestRecord], Awaitable[AnswerT]],
    ) -> AnswerT:
        """Lets a caller in; what goes wrong ends the call.

        What is counted in for the call is counted out when gRPC is done with it: a client that reads nothing keeps it
        waiting, and what it waits with.
        """
        observed = observed_of(self.observer, rpc, context)
        try:
            with observed:
                try:
                    return await answer(await self._arrive(known, context, observed.request), observed.request)
                except GradruleError:
                    raise
                except Exception as cause:
                    raise incident() from cause
        except GradruleError as cause:
            await abort(context, cause, observed.request)


def _parse(request_type: type[RequestT], raw: bytes, bounds: NodeLimits) -> RequestT:
    check_parsed_size(raw, request_type, bounds)
    try:
        return request_type.FromString(raw)
    except DecodeError as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            f"the bytes are no {request_type.DESCRIPTOR.full_name.replace(_RAW, _API)}",
        ) from cause
