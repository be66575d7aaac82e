"""Streams whose client does not read: they are noticed, so that they can be ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gradrule_server.front.calls import Write

# Bytes a second: so slowly an answer may be read.
_SLOWEST = 1 << 20


def patience(stall_s: float, size: int) -> float:
    """Seconds within which an answer of so many bytes is to be read."""
    return stall_s + size / _SLOWEST


class WatchedWriter:
    """Writes, one message at a time; calls `on_stall` once where one is not read within its `patience`."""

    def __init__(self, write: Write, stall_s: float, on_stall: Callable[[], object]) -> None:
        self._write = write
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, data: bytes) -> None:
        """Writes; returns when the transport has taken it."""
        self._due = due = self._loop.time() + patience(self._stall_s, len(data))
        # One timer serves many writes: most end at once, and timers cost more than they do.
        if self._timer is None or self._timer.when() > due:
            self._look_at(due)
        try:
            await self._write(data)
        finally:
            self._due = None

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = None

    def _look_at(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._due > self._loop.time():
            self._look_at(self._due)
        else:
            self._on_stall()
