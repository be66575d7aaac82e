"""Streams whose client does not read: they are noticed, so that they can be ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gradrule_server.front.calls import Write


class WatchedWriter:
    """Writes, one message at a time; calls `on_stall` once where one takes longer than `patience_s`."""

    def __init__(self, write: Write, patience_s: float, on_stall: Callable[[], object]) -> None:
        self._write = write
        self._patience_s = patience_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, data: bytes) -> None:
        """Writes; returns when the transport has taken it."""
        self._since = self._loop.time()
        # One timer serves all writes: most end at once, and timers cost more than they do.
        if self._timer is None:
            self._timer = self._loop.call_later(self._patience_s, self._look)
        try:
            await self._write(data)
        finally:
            self._since = None

    def close(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._since = None

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return
        left = self._since + self._patience_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._on_stall()
