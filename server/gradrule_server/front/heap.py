"""Keeps freed memory for the next large message, and returns it to the system a little later."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

# Options of mallopt(3), see <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
# Memory is returned when this much more is unused than after the last time, but at most every 3 s.
_MIN_UNUSED_BYTES = 16 << 20
_MIN_INTERVAL_S = 3.0


class _MallocInfo(ctypes.Structure):
    """What mallinfo2(3) returns; `uordblks` is the number of bytes in use."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


def keep_freed_memory() -> None:
    """Makes glibc use freed memory for large blocks, instead of new pages from the kernel.

    The first write to a new page costs ten times as much as copying to one that is there: 60 MiB take 60 ms, then 5.
    `HeapTrimmer` returns the memory. Does nothing with other C libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


class HeapTrimmer:
    """Makes glibc return unused memory once there is much of it, since gRPC's buffers are spread over many arenas.

    Unused is what the process has taken and glibc does not report as in use. Some of it can never be returned, since it
    shares pages with memory in use, so only the increase since the last time counts.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        self._info = getattr(library, "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _MallocInfo
        self._trimmed_at = 0.0
        self._unused_before: int | None = None

    def trim_if_due(self, now: float) -> bool:
        """Returns unused memory to the system if there is much, in some milliseconds. `now`: seconds of any clock."""
        if self._trim is None or self._info is None or now - self._trimmed_at < _MIN_INTERVAL_S:
            return False
        if self._unused_before is None:
            self._unused_before = self._unused()
        if self._unused() - self._unused_before < _MIN_UNUSED_BYTES:
            return False
        self._trimmed_at = now
        # Reset calls are in reference cycles, and each holds some 20 KiB of gRPC's memory.
        gc.collect()
        self._trim(0)
        self._unused_before = self._unused()
        return True

    def _unused(self) -> int:
        """Returns the bytes that this process has taken and malloc does not use; they include Python's own objects."""
        found: _MallocInfo = self._info() if self._info is not None else _MallocInfo()
        return _resident_bytes() - int(found.uordblks)


def _resident_bytes() -> int:
    """Returns the anonymous memory of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0
