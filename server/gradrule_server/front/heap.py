"""Gives memory back to the system that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes

# Bytes freed since the last time, and seconds since then.
_MUCH_BYTES = 32 << 20
_SELDOM_S = 3.0


class HeapTrimmer:
    """Asks glibc to return free memory after much of it was freed: gRPC's buffers are spread over many arenas."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._freed = 0
        self._trimmed_at = 0.0
        self._is_first = True

    def note_freed(self, size: int) -> None:
        """Counts bytes that were freed, or soon will be."""
        self._freed += size

    def is_due(self, now: float) -> bool:
        """Whether to call `trim` now."""
        if self._trim is None or self._freed < _MUCH_BYTES or now - self._trimmed_at < _SELDOM_S:
            return False
        self._trimmed_at = now
        if not self._is_first:
            self._freed = 0
        # Once more a little later: gRPC's threads free what a connection held some time after its end.
        self._is_first = not self._is_first
        return True

    def trim(self) -> None:
        """Takes milliseconds; called in a thread."""
        if self._trim is not None:
            self._trim(0)
