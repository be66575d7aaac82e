"""Keeps freed memory for the next large message for a while, then gives it back to the system."""

from __future__ import annotations

import ctypes

# Bytes freed since the last time, and seconds since then.
_MUCH_BYTES = 32 << 20
_SELDOM_S = 3.0


# Options of mallopt(3), see <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Has glibc hand out large blocks from memory that was freed before, instead of new pages from the kernel.

    The first write to a new page costs ten times as much as copying to one that is there: 60 MiB take 60 ms, then 5.
    `HeapTrimmer` gives the memory back. Does nothing where the C library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


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
