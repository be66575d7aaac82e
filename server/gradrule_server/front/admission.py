"""How many requests, and of how many bytes, are in flight at a time: each tenant's share, and the whole.

When the whole is full, a tenant below its fair share is let in all the same: whoever came first cannot keep others out.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error

_RETRY_S = 0.2
# So many times what the server holds may be in flight while newcomers take their fair shares of it.
_MOST = 2


@dataclass(slots=True, eq=False)
class Share:
    """What one tenant has in flight."""

    requests: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Bound:
    """The most requests and bytes in flight."""

    requests: int
    size: int


class Admission:
    """Counts what is in flight. `server`: for all; `tenant`: for each. `message`: bytes that one message may have.
    Everything happens on one asyncio loop.
    """

    def __init__(self, server: Bound, tenant: Bound, message: int = 64 << 20) -> None:
        self.message = message
        self._server = server
        self._most_of_tenant = server.size
        self._tenant = tenant
        self._requests = 0
        self._size = 0
        self._active = 0

    @property
    def in_flight(self) -> int:
        """Requests of all tenants."""
        return self._requests

    def refusal(self, share: Share, size: int = 0) -> GradruleError | None:
        """OVERLOADED where a request of so many bytes cannot be taken now, naming what is full."""
        active = self._active + (not share.requests)
        bound = self._server
        if self._requests >= bound.requests and (
            self._requests >= _MOST * bound.requests or (share.requests + 1) * active > bound.requests
        ):
            return _full(f"the server already holds {self._requests} requests", "--max-concurrent-requests")
        if share.requests >= self._tenant.requests:
            return _full(f"the tenant already has {share.requests} requests in flight", "--tenant-requests")
        return self._refusal_of_bytes(share, size, active)

    def _refusal_of_bytes(self, share: Share, size: int, active: int) -> GradruleError | None:
        bound = self._server
        if (
            self._size
            and self._size + size > bound.size
            and (self._size + size > _MOST * bound.size or (share.size + size) * active > bound.size)
        ):
            return _full(f"the server already holds {self._size} bytes of requests", "--max-bytes-in-flight")
        # What is alone may be of any size.
        if share.size and share.size + size > self._tenant.size:
            return _full(f"the tenant already has {share.size} bytes in flight", "--tenant-bytes-in-flight")
        return None

    def enter(self, share: Share, size: int) -> None:
        """Counts a request in; OVERLOADED."""
        refusal = self.refusal(share, size)
        if refusal is not None:
            raise refusal
        self._active += not share.requests
        share.requests += 1
        self._requests += 1
        if size:
            self.adjust(share, size)

    def leave(self, share: Share, size: int) -> None:
        """Counts a request out."""
        share.requests -= 1
        self._requests -= 1
        self._active -= not share.requests
        if size:
            self.adjust(share, -size)

    def grow(self, share: Share, size: int) -> None:
        """Counts bytes of a request that is in, or of its answer, if there may be so many more; OVERLOADED."""
        refusal = self._refusal_of_bytes(share, size, self._active + (not share.requests))
        if refusal is not None:
            raise refusal
        self.adjust(share, size)

    def adjust(self, share: Share, size: int) -> None:
        """Counts bytes of a request that is in, or of its answer, more or less."""
        before, most = share.size, self._most_of_tenant
        after = share.size = before + size
        # However much one tenant has, it takes no more than the whole: there is as much for those who come after it.
        self._size += (after if after < most else most) - (before if before < most else most)


def _full(what: str, setting: str) -> GradruleError:
    return error(
        errors_pb2.ERROR_REASON_OVERLOADED,
        f"{what}, which is all that {setting} lets in; send the request again a little later",
        retry_after_s=_RETRY_S,
    )
