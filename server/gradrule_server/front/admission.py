"""Limits how many requests and bytes are in flight, for each tenant and for the server, also while requests arrive.

When the server is full, a tenant below its fair share is still admitted, so that no tenant can keep others out. gRPC
would read the whole message of a unary call before it reports the call. Here the server asks for the message, so that
the call is counted and has a deadline before its message arrives.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import grpc

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Caller, Context
from gradrule_server.front.connections import ConnectionWatch, read_uncancelled
from gradrule_server.front.time_limits import IntervalChecks

_RETRY_S = 0.2
# Tenants below their fair share may fill the server up to this many times its limits.
_MAX_OVERFILL = 2

# How much of a message has arrived is unknown, so one that takes longer than this counts as the largest possible.
_QUICK_S = 1.0

# A chunked request without a timeout of its own must arrive within this time; its default deadline starts then.
_DEFAULT_S = 60.0
# Smaller chunks are joined in one buffer: as separate objects they would take far more memory than is counted.
_MIN_PIECE_BYTES = 64 << 10
# Number of refused requests whose further chunks are recognized; the oldest are forgotten first.
_MAX_REFUSED = 1024


@dataclass(slots=True, eq=False)
class InFlight:
    """The requests and bytes that one tenant has in flight."""

    requests: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class InFlightLimits:
    """The most requests and bytes in flight."""

    requests: int
    size: int


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
        self._size = 0
        self._active_tenants = 0

    @property
    def in_flight(self) -> int:
        """Number of requests of all tenants."""
        return self._requests

    def find_refusal(self, in_flight: InFlight, size: int = 0) -> GradruleError | None:
        """Returns OVERLOADED, naming the limit, where a request of `size` bytes cannot be admitted now."""
        active = self._active_tenants + (not in_flight.requests)
        limits = self._server
        if self._requests >= limits.requests and (
            self._requests >= _MAX_OVERFILL * limits.requests or (in_flight.requests + 1) * active > limits.requests
        ):
            return _overloaded(f"the server already holds {self._requests} requests", "--max-concurrent-requests")
        if in_flight.requests >= self._tenant.requests:
            return _overloaded(f"the tenant already has {in_flight.requests} requests in flight", "--tenant-requests")
        return self._find_byte_refusal(in_flight, size, active)

    def _find_byte_refusal(self, in_flight: InFlight, size: int, active: int) -> GradruleError | None:
        limits = self._server
        if (
            self._size
            and self._size + size > limits.size
            and (self._size + size > _MAX_OVERFILL * limits.size or (in_flight.size + size) * active > limits.size)
        ):
            return _overloaded(f"the server already holds {self._size} bytes of requests", "--max-bytes-in-flight")
        # A tenant's only request may have any size.
        if in_flight.size and in_flight.size + size > self._tenant.size:
            return _overloaded(f"the tenant already has {in_flight.size} bytes in flight", "--tenant-bytes-in-flight")
        return None

    def admit(self, in_flight: InFlight, size: int) -> None:
        """Counts a request of `size` bytes until `release`; OVERLOADED."""
        refusal = self.find_refusal(in_flight, size)
        if refusal is not None:
            raise refusal
        self._active_tenants += not in_flight.requests
        in_flight.requests += 1
        self._requests += 1
        if size:
            self.adjust_bytes(in_flight, size)

    def release(self, in_flight: InFlight, size: int) -> None:
        """Stops counting a request and `size` bytes."""
        in_flight.requests -= 1
        self._requests -= 1
        self._active_tenants -= not in_flight.requests
        if size:
            self.adjust_bytes(in_flight, -size)

    def admit_bytes(self, in_flight: InFlight, size: int) -> None:
        """Counts more bytes of an admitted request or of its answer; OVERLOADED."""
        refusal = self._find_byte_refusal(in_flight, size, self._active_tenants + (not in_flight.requests))
        if refusal is not None:
            raise refusal
        self.adjust_bytes(in_flight, size)

    def adjust_bytes(self, in_flight: InFlight, size: int) -> None:
        """Counts bytes without a limit; stops counting them where `size` is negative."""
        before, limit = in_flight.size, self._server.size
        after = in_flight.size = before + size
        # One tenant counts for at most the server's limit, so that other tenants get as much after it.
        self._size += (after if after < limit else limit) - (before if before < limit else limit)


def _overloaded(problem: str, setting: str) -> GradruleError:
    return error(
        errors_pb2.ERROR_REASON_OVERLOADED,
        f"{problem}, which is all that {setting} lets in; send the request again a little later",
        retry_after_s=_RETRY_S,
    )


class _UnaryRequest:
    """A unary request that is arriving."""

    __slots__ = ("_admission", "_checks", "_in_flight", "counted", "refusal", "task")

    def __init__(self, admission: Admission, in_flight: InFlight) -> None:
        self._admission = admission
        self._in_flight = in_flight
        self._checks = 0
        self.counted = 0
        self.refusal: GradruleError | None = None
        self.task = cast("asyncio.Task[object]", asyncio.current_task())

    def check(self) -> None:
        """Counts the request at the second check, since a whole interval has passed by then."""
        self._checks += 1
        if self._checks != 2:
            return
        try:
            self._admission.admit_bytes(self._in_flight, self._admission.max_message_bytes)
        except GradruleError as refusal:
            self.refusal = refusal
            self.task.cancel()
        else:
            self.counted = self._admission.max_message_bytes


class UnaryRequests:
    """Reads the requests of unary calls; slow ones count as the largest possible message while they arrive."""

    def __init__(self, admission: Admission, connections: ConnectionWatch, quick_s: float = _QUICK_S) -> None:
        self._admission = admission
        self._connections = connections
        self._checks = IntervalChecks(quick_s)

    async def read(self, context: Context, in_flight: InFlight) -> bytes:
        """Returns the request of a call, with its bytes counted.

        MALFORMED_REQUEST where the call has no message; OVERLOADED where too many bytes are in flight.
        """
        arriving = _UnaryRequest(self._admission, in_flight)
        self._checks.add(arriving)
        connection = self._connections.get(context.peer())
        connection.start_read()
        raw: object = grpc.aio.EOF
        try:
            raw = await read_uncancelled(context.read())
        except asyncio.CancelledError:
            if arriving.refusal is None:
                raise
            arriving.task.uncancel()
            raise arriving.refusal from None
        finally:
            self._checks.discard(arriving)
            connection.finish_read(raw)
            if arriving.counted:
                self._admission.adjust_bytes(in_flight, -arriving.counted)
        if raw is grpc.aio.EOF:
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the call holds no message")
        data = cast(bytes, raw)
        self._admission.admit_bytes(in_flight, len(data))
        return data


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
    """Counts the bytes in flight of each tenant, see `request_pipeline.RequestPipeline`."""

    def reserve_bytes(self, caller: Caller, size: int) -> None: ...

    def release_bytes(self, caller: Caller, size: int) -> None: ...


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
            self._byte_counter.reserve_bytes(self._caller, len(chunk))
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
        self._byte_counter.release_bytes(self._caller, arriving.size)
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
