"""Detects answers that their client does not read, and closes the connection or ends the stream.

gRPC for Python cannot cancel a call from the server's side, and a status waits behind the unread message. Only closing
the connection frees the memory of the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gradrule_server.front.calls import Write
from gradrule_server.front.sockets import close_connection
from gradrule_server.front.timers import IntervalChecks

_MIN_BYTES_PER_S = 1 << 20


def read_timeout(stall_s: float, size: int) -> float:
    """Returns the seconds that a client has to read an answer of `size` bytes."""
    return stall_s + size / _MIN_BYTES_PER_S


class UnreadAnswer:
    """A unary answer that gRPC is sending. Closes the client's connection if it is not read in time.

    Args:
        peer: as gRPC gives it. Kept here, since gRPC crashes if asked for the peer of a call that is over.
        timeout_s: seconds that the client has.
        checks: what calls `check` at intervals.
        on_done: called when gRPC has finished the call.
    """

    __slots__ = ("_checks", "_left_s", "_on_done", "_peer")

    def __init__(self, peer: str, timeout_s: float, checks: IntervalChecks, on_done: Callable[[], object]) -> None:
        self._peer = peer
        self._left_s = timeout_s
        self._checks = checks
        self._on_done = on_done
        checks.add(self)

    def check(self) -> None:
        """Closes the connection if the time is up."""
        before, self._left_s = self._left_s, self._left_s - self._checks.interval_s
        if before >= 0 > self._left_s:
            close_connection(self._peer)

    def finish(self, _: object) -> None:
        """Stops the checks; gRPC calls this when it has finished the call."""
        self._checks.discard(self)
        self._on_done()


class WatchedWriter:
    """Writes messages of a stream one at a time; calls `on_stall` once if one is not read within `read_timeout`."""

    def __init__(self, write: Write, stall_s: float, on_stall: Callable[[], object]) -> None:
        self._write = write
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, data: bytes) -> None:
        """Writes a message; returns when the transport has taken it."""
        self._due = due = self._loop.time() + read_timeout(self._stall_s, len(data))
        # Many writes share one timer: most end at once, and setting a timer costs more than a write.
        if self._timer is None or self._timer.when() > due:
            self._set_timer(due)
        try:
            await self._write(data)
        finally:
            self._due = None

    def close(self) -> None:
        """Stops watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = None

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._due > self._loop.time():
            self._set_timer(self._due)
        else:
            self._on_stall()
