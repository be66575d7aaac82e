"""Limits how many requests and bytes are in flight at a time, for each tenant and for the server.

When the server is full, a tenant below its fair share is still admitted, so that no tenant can keep others out.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error

_RETRY_S = 0.2
# Tenants below their fair share may fill the server up to this many times its limits.
_MAX_OVERFILL = 2


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
