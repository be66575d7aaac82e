"""Reads the deadline of a request: the header `Grpc-Timeout`, in gRPC's notation."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.datastructures import Headers

from gradrule_gateway.problems import Problem, malformed
from gradrule_gateway.routes import Route

_now = time.monotonic
DEFAULT_S = 30.0
"""Deadline of a call without the header; the gRPC clients have the same."""
COMPILE_S = 300.0
"""What a call gets besides if the server may compile a program for it."""
_HEADER = "Grpc-Timeout"
_NOTATION = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# gRPC counts in nanoseconds of 64 bits, which the longest deadlines of its own notation exceed.
_MAX_S = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time at which a request must be done: reading, converting, all calls of the server.

    Attributes:
        end: The time, as `time.monotonic` counts; None: no deadline.
        is_default: True if the request has none of its own.
    """

    end: float | None
    is_default: bool = True

    def remaining_s(self) -> float | None:
        """Returns the time that is left, seconds; 0 if none is left, None without a deadline."""
        return None if self.end is None else max(0.0, self.end - _now())

    @contextlib.asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancels the block of the `with` statement at the deadline. Raises `Problem`."""
        try:
            async with asyncio.timeout(self.remaining_s()):
                yield
        except TimeoutError:
            raise Problem("DEADLINE_EXCEEDED", "the request was not done within its deadline (Grpc-Timeout)") from None


def deadline_of(headers: Headers, route: Route) -> Deadline:
    """Returns the deadline of a request that has just begun. Raises `Problem`."""
    given = headers.getlist(_HEADER)
    if not given:
        # An upload takes as long as its bytes need to arrive.
        seconds = DEFAULT_S + (COMPILE_S if route.may_compile else 0.0)
        return Deadline(None if route.body == "bytes" else _now() + seconds)
    if len(given) > 1:
        raise malformed("the header occurs more than once", _HEADER)
    found = _NOTATION.fullmatch(given[0])
    if found is None or not int(found[1]):
        raise malformed("expected at most 8 digits and a unit (H, M, S, m, u or n), such as 5S", _HEADER)
    return Deadline(_now() + min(int(found[1]) * _UNITS[found[2]], _MAX_S), is_default=False)
