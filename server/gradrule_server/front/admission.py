"""Limits how many requests and bytes are in flight, for each tenant and for the server, also while requests arrive.

When the server is full of requests, more are refused; when it is full of bytes, requests wait. A tenant below its fair
share is still admitted, so that no tenant can keep others out. gRPC would read the whole message of a unary call before
it reports the call. Here the server asks for the message, so that the call is counted and has a deadline before its
message arrives.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import grpc

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import waiting_time
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Caller, Context
from gradrule_server.front.connections import ConnectionWatch, read_uncancelled
from gradrule_server.limits import ARRIVING_PER_BYTE

_RETRY_S = 0.2
# Tenants below their fair share may fill the server up to this many times its limits.
_MAX_OVERFILL = 2
# A longer request needs only this share of a limit to be free: requests are seldom all gone at the same time.
_MOST_NEEDED = 7 / 8
# Shorter requests that fit do not wait behind others.
_SMALL_BYTES = 64 << 10

# A chunked request without a timeout of its own must arrive within this time; its default deadline starts then.
_DEFAULT_S = 60.0
# Smaller chunks are joined in one buffer: as separate objects they would take far more memory than is counted.
_MIN_PIECE_BYTES = 64 << 10
# Number of refused requests whose further chunks are recognized; the oldest are forgotten first.
_MAX_REFUSED = 1024


@dataclass(slots=True, eq=False)
class TenantBytes:
    """The bytes that one tenant has of what a `ByteLimit` limits, and its requests that wait for more."""

    size: int = 0
    waiting: deque[_WaitingRequest] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class InFlight:
    """What one tenant has in flight.

    Attributes:
        requests: number of requests.
        running: bytes of requests that run, and of answers. Several copies of them exist.
        arriving: bytes of requests that arrive, or that wait until they may run. One copy of them exists.
    """

    requests: int = 0
    running: TenantBytes = field(default_factory=TenantBytes)
    arriving: TenantBytes = field(default_factory=TenantBytes)

    @property
    def size(self) -> int:
        """Number of bytes in flight."""
        return self.running.size + self.arriving.size


@dataclass(frozen=True, slots=True)
class InFlightLimits:
    """The most requests and bytes in flight."""

    requests: int
    size: int


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A request that waits; `turn` is done once its bytes are counted."""

    size: int
    turn: asyncio.Future[None]


class ByteLimit:
    """Counts bytes; requests for which there is no room wait, those of one tenant in order, tenants in turn.

    Args:
        server: most bytes of all tenants together.
        tenant: most bytes of each tenant.
        active_tenants: returns the number of tenants that share the server.
        what: what is counted, for error messages.
    """

    def __init__(self, server: int, tenant: int, active_tenants: Callable[[], int], what: str) -> None:
        self._what = what
        self._server = server
        self._tenant = tenant
        self._active_tenants = active_tenants
        self._size = 0
        # The tenants that wait, in the order of their turns.
        self._queue: dict[TenantBytes, None] = {}
        self._is_serving = False

    def has_room(self, tenant: TenantBytes, size: int, *, is_queued: bool = False) -> bool:
        """Returns whether bytes fit. `is_queued`: whether others wait for room in the server."""
        server = self._server
        if not self._is_below_quota(tenant, size):
            return False
        if not is_queued and self._size + min(size, int(_MOST_NEEDED * server)) <= server:
            return True
        return (tenant.size + size) * self._active_tenants() <= server and self._size + size <= _MAX_OVERFILL * server

    def try_admit(self, tenant: TenantBytes, size: int) -> bool:
        """Counts bytes if they fit and nobody waits, or if they are few; returns whether that was so."""
        if (self._queue and size > _SMALL_BYTES) or not self.has_room(tenant, size):
            return False
        self.count(tenant, size)
        return True

    def admit_now(self, tenant: TenantBytes, size: int) -> None:
        """Counts bytes that cannot wait; OVERLOADED where they do not fit."""
        if not self.has_room(tenant, size):
            raise self._full(tenant, size, 0.0)
        self.count(tenant, size)

    def count(self, tenant: TenantBytes, size: int) -> None:
        """Counts bytes without a limit; stops counting them where `size` is negative."""
        before, limit = tenant.size, self._server
        after = tenant.size = before + size
        # One tenant counts for at most the server's limit, so that other tenants get as much after it.
        self._size += (after if after < limit else limit) - (before if before < limit else limit)
        if size < 0:
            self.serve_soon()

    async def wait(self, tenant: TenantBytes, size: int, ends_at: float | None) -> None:
        """Waits until bytes fit, and counts them; OVERLOADED shortly before the deadline."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        request = _WaitingRequest(size, loop.create_future())
        tenant.waiting.append(request)
        self._queue.setdefault(tenant)
        self.serve_soon()
        patience_s = None if ends_at is None else waiting_time(ends_at - started)
        try:
            async with asyncio.timeout(patience_s):
                await request.turn
        except TimeoutError:
            if not self._leave(tenant, request):
                raise self._full(tenant, size, loop.time() - started) from None
        except BaseException:
            if self._leave(tenant, request):
                self.count(tenant, -size)
            raise

    def serve_soon(self) -> None:
        """Admits waiting requests that fit, after the event loop's current step."""
        if self._queue and not self._is_serving:
            self._is_serving = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _leave(self, tenant: TenantBytes, request: _WaitingRequest) -> bool:
        """Makes a request wait no longer; returns whether its bytes have been counted."""
        if request.turn.done() and not request.turn.cancelled():
            return True
        if request in tenant.waiting:
            tenant.waiting.remove(request)
            if not tenant.waiting:
                del self._queue[tenant]
            self.serve_soon()
        return False

    def _serve(self) -> None:
        """Admits at most one request of each tenant, then one more of those that got one, and so on."""
        self._is_serving = False
        is_queued = False
        turns = list(self._queue)
        while turns:
            served = []
            for tenant in turns:
                request = tenant.waiting[0]
                if request.turn.done():
                    # It has been cancelled, and leaves when its task runs.
                    tenant.waiting.popleft()
                elif self.has_room(tenant, request.size, is_queued=is_queued):
                    tenant.waiting.popleft()
                    self.count(tenant, request.size)
                    request.turn.set_result(None)
                else:
                    # Without this, those after it could take what gets free for ever.
                    is_queued = is_queued or self._is_below_quota(tenant, request.size)
                    continue
                del self._queue[tenant]
                if tenant.waiting:
                    self._queue[tenant] = None
                    served.append(tenant)
            turns = served

    def _is_below_quota(self, tenant: TenantBytes, size: int) -> bool:
        return tenant.size + min(size, int(_MOST_NEEDED * self._tenant)) <= self._tenant

    def _full(self, tenant: TenantBytes, size: int, waited_s: float) -> GradruleError:
        waited = f"; the request waited {waited_s:.1f} s for {size} more" if waited_s else ""
        if not self._is_below_quota(tenant, size):
            return _overloaded(f"the tenant has {tenant.size} {self._what} already", "--tenant-bytes-in-flight", waited)
        return _overloaded(f"the server holds {self._size} {self._what} already", "--max-bytes-in-flight", waited)


class Admission:
    """Counts requests and bytes in flight. Belongs to one event loop.

    Args:
        server: limits of all tenants together.
        tenant: limits of each tenant.
        max_message_bytes: size of the largest message.
    """

    def __init__(self, server: InFlightLimits, tenant: InFlightLimits, max_message_bytes: int = 64 << 20) -> None:
        self.max_message_bytes = max_message_bytes
        self._server = server
        self._tenant = tenant
        self._requests = 0
        self._active_tenants = 0
        self._running = ByteLimit(
            server.size, tenant.size, self._count_tenants, "bytes of running requests and of answers"
        )
        self._arriving = ByteLimit(
            ARRIVING_PER_BYTE * server.size,
            ARRIVING_PER_BYTE * tenant.size,
            self._count_tenants,
            "bytes of requests that arrive or wait",
        )

    @property
    def in_flight(self) -> int:
        """Number of requests of all tenants."""
        return self._requests

    def find_refusal(self, in_flight: InFlight) -> GradruleError | None:
        """Returns OVERLOADED, naming the limit, where a request cannot be admitted now."""
        active = self._active_tenants + (not in_flight.requests)
        limits = self._server
        if self._requests >= limits.requests and (
            self._requests >= _MAX_OVERFILL * limits.requests or (in_flight.requests + 1) * active > limits.requests
        ):
            return _overloaded(f"the server already holds {self._requests} requests", "--max-concurrent-requests")
        if in_flight.requests >= self._tenant.requests:
            return _overloaded(f"the tenant already has {in_flight.requests} requests in flight", "--tenant-requests")
        return None

    def admit(self, in_flight: InFlight) -> None:
        """Counts a request until `release`; OVERLOADED."""
        refusal = self.find_refusal(in_flight)
        if refusal is not None:
            raise refusal
        self._active_tenants += not in_flight.requests
        in_flight.requests += 1
        self._requests += 1

    async def admit_bytes(self, in_flight: InFlight, size: int, ends_at: float) -> None:
        """Counts the bytes of a request that has arrived, once it may run; OVERLOADED shortly before its deadline.

        `ends_at`: loop time of the deadline.
        """
        if self._running.try_admit(in_flight.running, size):
            return
        self._arriving.count(in_flight.arriving, size)
        try:
            await self._running.wait(in_flight.running, size, ends_at)
        finally:
            self._arriving.count(in_flight.arriving, -size)

    def release(self, in_flight: InFlight, size: int) -> None:
        """Stops counting a request and its bytes."""
        in_flight.requests -= 1
        self._requests -= 1
        if size:
            self._running.count(in_flight.running, -size)
        if not in_flight.requests:
            self._active_tenants -= 1
            # The fair shares of the others have grown.
            self._running.serve_soon()
            self._arriving.serve_soon()

    def adjust_bytes(self, in_flight: InFlight, size: int) -> None:
        """Counts bytes without a limit; stops counting them where `size` is negative."""
        self._running.count(in_flight.running, size)

    async def admit_arrival(self, in_flight: InFlight, ends_at: float | None) -> int:
        """Waits until a message may arrive; returns the bytes that count as arriving from now on.

        As long as there is room for a message of any size, nothing is counted. OVERLOADED shortly before the deadline.
        """
        tenant, size = in_flight.arriving, self.max_message_bytes
        if not tenant.size or (not tenant.waiting and self._arriving.has_room(tenant, size)):
            return 0
        await self._arriving.wait(tenant, size, ends_at)
        return size

    def admit_arrived(self, in_flight: InFlight, size: int, arrived: int = 0) -> None:
        """Counts bytes of a request that are arriving already, so they cannot wait; OVERLOADED.

        LIMIT_EXCEEDED where the request, of which `arrived` bytes are counted, is longer than any may be.
        """
        most = max(self._tenant.size, self.max_message_bytes)
        if arrived + size > most:
            message = f"the request has more than {most} bytes, the most that --tenant-bytes-in-flight lets one have"
            raise error(errors_pb2.ERROR_REASON_LIMIT_EXCEEDED, message)
        self._arriving.admit_now(in_flight.arriving, size)

    def forget_arrived(self, in_flight: InFlight, size: int) -> None:
        """Stops counting bytes as arriving."""
        self._arriving.count(in_flight.arriving, -size)

    def _count_tenants(self) -> int:
        return max(self._active_tenants, 1)


def _overloaded(problem: str, setting: str, waited: str = "") -> GradruleError:
    return error(
        errors_pb2.ERROR_REASON_OVERLOADED,
        f"{problem}, which is all that {setting} lets in{waited}; send the request again a little later",
        retry_after_s=_RETRY_S,
    )


class UnaryRequests:
    """Reads the requests of unary calls. `connections`: limits the bytes of requests that have not arrived whole."""

    def __init__(self, admission: Admission, connections: ConnectionWatch) -> None:
        self._admission = admission
        self._connections = connections

    async def read(self, context: Context, in_flight: InFlight, ends_at: float) -> bytes:
        """Returns the request of a call. Its bytes are not counted any more.

        Reads it once there is room for it: until then its client cannot send more than gRPC buffers.
        MALFORMED_REQUEST where the call has no message; OVERLOADED where too many requests arrive or wait.
        """
        connection = self._connections.get(context.peer())
        counted = await self._admission.admit_arrival(in_flight, ends_at)
        connection.start_read()
        raw: object = grpc.aio.EOF
        try:
            raw = await read_uncancelled(context.read())
        finally:
            connection.finish_read(raw)
            if counted:
                self._admission.forget_arrived(in_flight, counted)
        if raw is grpc.aio.EOF:
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the call holds no message")
        return cast(bytes, raw)


class _ChunkedRequest:
    """A request of which some chunks have arrived."""

    __slots__ = ("ends_at", "pieces", "size", "timer")

    def __init__(self, ends_at: float | None, timer: asyncio.TimerHandle) -> None:
        self.ends_at = ends_at
        self.timer = timer
        self.pieces: list[bytes | bytearray] = []
        self.size = 0

    def add(self, chunk: bytes) -> None:
        """Keeps a chunk."""
        self.size += len(chunk)
        if len(chunk) >= _MIN_PIECE_BYTES:
            self.pieces.append(chunk)
        elif self.pieces and isinstance(self.pieces[-1], bytearray):
            self.pieces[-1] += chunk
        else:
            self.pieces.append(bytearray(chunk))


class ByteCounter(Protocol):
    """Counts the bytes of chunks of each tenant, see `request_pipeline.RequestPipeline`."""

    def reserve_chunk(self, caller: Caller, size: int, arrived: int) -> None: ...

    def release_chunks(self, caller: Caller, size: int) -> None: ...


class RequestChunks:
    """The chunked requests of one stream, by request id.

    Args:
        byte_counter: counts the bytes of chunks.
        caller: of the stream.
        max_requests: number of requests that may arrive at a time.
        max_deadline_s: seconds that a request may take to arrive at most.
        on_late: called with the id of a request that has not arrived in time, and the error to answer it with.
    """

    def __init__(
        self,
        byte_counter: ByteCounter,
        caller: Caller,
        *,
        max_requests: int,
        max_deadline_s: float,
        on_late: Callable[[int, GradruleError], None],
    ) -> None:
        self._byte_counter = byte_counter
        self._caller = caller
        self._max_requests = max_requests
        self._max_deadline_s = max_deadline_s
        self._on_late = on_late
        self._arriving: dict[int, _ChunkedRequest] = {}
        # Requests that were answered with an error before all their chunks had arrived.
        self._refused: OrderedDict[int, None] = OrderedDict()

    @property
    def has_any(self) -> bool:
        """Whether requests are arriving in chunks, or were refused before all their chunks had arrived."""
        return bool(self._arriving or self._refused)

    @property
    def are_arriving(self) -> bool:
        """Whether requests are arriving in chunks."""
        return bool(self._arriving)

    def size(self, number: int) -> int:
        """Returns how many bytes of a request have arrived."""
        arriving = self._arriving.get(number)
        return 0 if arriving is None else arriving.size

    def forget_refused(self, number: int) -> bool:
        """Forgets that a request was refused; returns whether it was."""
        if number not in self._refused:
            return False
        del self._refused[number]
        return True

    def add(self, number: int, chunk: bytes, remaining: float | None) -> GradruleError | None:
        """Keeps a chunk, or returns the error to answer its request with. Drops chunks of refused requests.

        Args:
            number: id of the request.
            chunk: bytes of the request.
            remaining: seconds that the client gives the request; only read from its first chunk.
        """
        if number in self._refused:
            return None
        arriving = self._arriving.get(number)
        if arriving is None:
            if len(self._arriving) >= self._max_requests:
                self._refuse(number)
                return error(
                    errors_pb2.ERROR_REASON_OVERLOADED,
                    f"{self._max_requests} requests of the stream are arriving in chunks already; "
                    "send one after the other",
                )
            arriving = self._arriving[number] = self._start(number, remaining)
        try:
            self._byte_counter.reserve_chunk(self._caller, len(chunk), arriving.size)
        except GradruleError as refusal:
            self._refuse(number)
            return refusal
        arriving.add(chunk)
        return None

    def complete(self, number: int) -> None:
        """Notes that all chunks of a request have arrived, so that it cannot be late any more."""
        self._arriving[number].timer.cancel()

    async def join(self, number: int, rest: bytes) -> tuple[bytes, float | None]:
        """Returns the bytes of a complete request, no longer counted, and the seconds that it has left."""
        arriving = self._arriving[number]
        try:
            # In a thread, since it takes long for large requests.
            raw = await asyncio.to_thread(b"".join, (*arriving.pieces, rest))
        finally:
            self.drop(number)
        if arriving.ends_at is None:
            return raw, None
        return raw, max(arriving.ends_at - asyncio.get_running_loop().time(), 0.0)

    def drop(self, number: int) -> bool:
        """Forgets a request; returns whether it was arriving, which means that it has no answer yet."""
        self.forget_refused(number)
        arriving = self._arriving.pop(number, None)
        if arriving is None:
            return False
        arriving.timer.cancel()
        self._byte_counter.release_chunks(self._caller, arriving.size)
        arriving.pieces.clear()
        return True

    def drop_all(self) -> None:
        """Forgets all requests."""
        for number in list(self._arriving):
            self.drop(number)

    def _start(self, number: int, remaining: float | None) -> _ChunkedRequest:
        loop = asyncio.get_running_loop()
        seconds = _DEFAULT_S if remaining is None else min(max(remaining, 0.0), self._max_deadline_s)
        timer = loop.call_later(seconds, self._refuse_late, number, seconds)
        return _ChunkedRequest(None if remaining is None else loop.time() + seconds, timer)

    def _refuse_late(self, number: int, seconds: float) -> None:
        self._refuse(number)
        message = f"not all chunks of the request have come within {seconds:.3g} s"
        self._on_late(number, error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, message))

    def _refuse(self, number: int) -> None:
        """Drops a request and its chunks that are still to come."""
        self.drop(number)
        self._refused[number] = None
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
