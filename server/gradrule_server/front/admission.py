"""Limits how many requests and bytes are in flight, for each tenant and for the server.

When the server is full of requests, more are refused; when it is full of bytes, requests wait. A tenant below its fair
share is still admitted, so that no tenant can keep others out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import waiting_time
from gradrule_server.errors import GradruleError, error
from gradrule_server.limits import ARRIVING_PER_BYTE

_RETRY_S = 0.2
# Tenants below their fair share may fill the server up to this many times its limits.
_MAX_OVERFILL = 2
# A longer request needs only this share of a limit to be free: requests are seldom all gone at the same time.
_MOST_NEEDED = 7 / 8
# Shorter requests that fit do not wait behind others.
_SMALL_BYTES = 64 << 10


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
        arriving: bytes of requests that arrive in chunks, or that wait until they may run. One copy of them exists.
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
        self.queue: dict[TenantBytes, None] = {}
        """The tenants that wait, in the order of their turns."""
        self._is_serving = False

    def count(self, tenant: TenantBytes, change: int) -> None:
        """Counts bytes without a limit; stops counting them where `change` is negative."""
        before, limit = tenant.size, self._server
        after = tenant.size = before + change
        # One tenant counts for at most the server's limit, so that other tenants get as much after it.
        self._size += (after if after < limit else limit) - (before if before < limit else limit)
        if change < 0 and self.queue:
            self.serve_soon()

    def has_room(self, tenant: TenantBytes, size: int, *, is_queued: bool = False) -> bool:
        """Returns whether bytes fit. `is_queued`: whether others wait for room in the server."""
        server = self._server
        if not self._is_below_quota(tenant, size):
            return False
        if not is_queued and self._size + min(size, int(_MOST_NEEDED * server)) <= server:
            return True
        return (tenant.size + size) * self._active_tenants() <= server and self._size + size <= _MAX_OVERFILL * server

    async def wait(self, tenant: TenantBytes, size: int, ends_at: float | None) -> None:
        """Waits until bytes fit, and counts them; OVERLOADED shortly before the deadline, loop time."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        request = _WaitingRequest(size, loop.create_future())
        tenant.waiting.append(request)
        self.queue.setdefault(tenant)
        self.serve_soon()
        try:
            async with asyncio.timeout(None if ends_at is None else waiting_time(ends_at - started)):
                await request.turn
        except TimeoutError:
            if not self._leave(tenant, request):
                raise self.full(tenant, size, loop.time() - started) from None
        except BaseException:
            if self._leave(tenant, request):
                self.count(tenant, -size)
            elif ends_at is not None and loop.time() >= ends_at:
                # The loop was so late that the deadline of the request has passed too, and cancels it.
                raise self.full(tenant, size, loop.time() - started) from None
            raise

    def serve_soon(self) -> None:
        """Admits waiting requests that fit, after the event loop's current step."""
        if not self._is_serving:
            self._is_serving = True
            asyncio.get_running_loop().call_soon(self._serve)

    def full(self, tenant: TenantBytes, size: int, waited_s: float = 0.0) -> GradruleError:
        """Returns OVERLOADED for `size` bytes that do not fit, naming the limit."""
        waited = f"; the request waited {waited_s:.1f} s for {size} more" if waited_s else ""
        if not self._is_below_quota(tenant, size):
            return _overloaded(f"the tenant has {tenant.size} {self._what} already", "--tenant-bytes-in-flight", waited)
        return _overloaded(f"the server holds {self._size} {self._what} already", "--max-bytes-in-flight", waited)

    def _leave(self, tenant: TenantBytes, request: _WaitingRequest) -> bool:
        """Makes a request wait no longer; returns whether its bytes have been counted."""
        if request.turn.done() and not request.turn.cancelled():
            return True
        if request in tenant.waiting:
            tenant.waiting.remove(request)
            if not tenant.waiting:
                del self.queue[tenant]
            self.serve_soon()
        return False

    def _serve(self) -> None:
        """Admits at most one request of each tenant, then one more of those that got one, and so on."""
        self._is_serving = False
        is_queued = False
        turns = list(self.queue)
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
                del self.queue[tenant]
                if tenant.waiting:
                    self.queue[tenant] = None
                    served.append(tenant)
            turns = served

    def _is_below_quota(self, tenant: TenantBytes, size: int) -> bool:
        return tenant.size + min(size, int(_MOST_NEEDED * self._tenant)) <= self._tenant


class Admission:
    """Counts requests and bytes in flight. Belongs to one event loop.

    Args:
        server: limits of all tenants together.
        tenant: limits of each tenant.
        max_message_bytes: size of the largest message.
    """

    def __init__(self, server: InFlightLimits, tenant: InFlightLimits, max_message_bytes: int = 64 << 20) -> None:
        self._max_message_bytes = max_message_bytes
        self._server = server
        self._tenant = tenant
        self.in_flight = 0
        """Number of requests of all tenants."""
        self._active_tenants = 0

        def count_tenants() -> int:
            return max(self._active_tenants, 1)

        self._running = ByteLimit(server.size, tenant.size, count_tenants, "bytes of running requests and of answers")
        self._arriving = ByteLimit(
            ARRIVING_PER_BYTE * server.size,
            ARRIVING_PER_BYTE * tenant.size,
            count_tenants,
            "bytes of requests that arrive or wait",
        )

    def admit(self, in_flight: InFlight) -> None:
        """Counts a request until `release`. OVERLOADED, naming the limit, where it is one too many."""
        most, active = self._server.requests, self._active_tenants + (not in_flight.requests)
        if self.in_flight >= most and (
            self.in_flight >= _MAX_OVERFILL * most or (in_flight.requests + 1) * active > most
        ):
            raise _overloaded(f"the server already holds {self.in_flight} requests", "--max-concurrent-requests")
        if in_flight.requests >= self._tenant.requests:
            problem = f"the tenant already has {in_flight.requests} requests in flight"
            raise _overloaded(problem, "--tenant-requests")
        self._active_tenants = active
        in_flight.requests += 1
        self.in_flight += 1

    def admit_now(self, in_flight: InFlight, size: int) -> bool:
        """Counts the bytes of a request that has arrived, if it may run now; returns whether it may.

        It may if its bytes fit, and nobody waits or they are few.
        """
        limit, tenant = self._running, in_flight.running
        if (limit.queue and size > _SMALL_BYTES) or not limit.has_room(tenant, size):
            return False
        limit.count(tenant, size)
        return True

    async def wait(self, in_flight: InFlight, size: int, ends_at: float) -> None:
        """Counts the bytes of a request that has arrived, once it may run; OVERLOADED shortly before its deadline.

        `ends_at`: loop time of the deadline.
        """
        self._arriving.count(in_flight.arriving, size)
        try:
            await self._running.wait(in_flight.running, size, ends_at)
        finally:
            self._arriving.count(in_flight.arriving, -size)

    def release(self, in_flight: InFlight, size: int, answer: int = 0) -> None:
        """Stops counting a request and its bytes, and counts those of its answer until `count` subtracts them."""
        in_flight.requests -= 1
        self.in_flight -= 1
        self._running.count(in_flight.running, answer - size)
        if not in_flight.requests:
            self._active_tenants -= 1
            # The fair shares of the others have grown.
            for limit in (self._running, self._arriving):
                if limit.queue:
                    limit.serve_soon()

    def count(self, in_flight: InFlight, change: int) -> None:
        """Counts bytes of answers and uploads, which no limit refuses; stops that where `change` is negative."""
        self._running.count(in_flight.running, change)

    async def wait_to_read(self, in_flight: InFlight, ends_at: float | None = None) -> int:
        """Waits until a message may be read; returns the bytes that count as arriving until `forget_arriving`.

        As long as there is room for a message of any size, nothing is counted. OVERLOADED shortly before the deadline.
        """
        tenant, size = in_flight.arriving, self._max_message_bytes
        if not tenant.size or (not tenant.waiting and self._arriving.has_room(tenant, size)):
            return 0
        await self._arriving.wait(tenant, size, ends_at)
        return size

    def admit_chunk(self, in_flight: InFlight, size: int, arrived: int) -> None:
        """Counts a chunk of a request, which cannot wait any more, until `forget_arriving`; OVERLOADED.

        LIMIT_EXCEEDED where the request, of which `arrived` bytes are counted, is longer than any may be.
        """
        most = max(self._tenant.size, self._max_message_bytes)
        if arrived + size > most:
            message = f"the request has more than {most} bytes, the most that --tenant-bytes-in-flight lets one have"
            raise error(errors_pb2.ERROR_REASON_LIMIT_EXCEEDED, message)
        if not self._arriving.has_room(in_flight.arriving, size):
            raise self._arriving.full(in_flight.arriving, size)
        self._arriving.count(in_flight.arriving, size)

    def forget_arriving(self, in_flight: InFlight, size: int) -> None:
        """Stops counting bytes as arriving."""
        self._arriving.count(in_flight.arriving, -size)


def _overloaded(problem: str, setting: str, waited: str = "") -> GradruleError:
    return error(
        errors_pb2.ERROR_REASON_OVERLOADED,
        f"{problem}, which is all that {setting} lets in{waited}; send the request again a little later",
        retry_after_s=_RETRY_S,
    )
