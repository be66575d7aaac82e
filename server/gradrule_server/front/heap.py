"""Keeps freed memory for the next large message for a while, then gives it back to the system."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

# Options of mallopt(3), see <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
# Bytes that were freed and are still taken from the system, beyond those after the last time; and seconds since then.
_MUCH_BYTES = 16 << 20
_SELDOM_S = 3.0


class _MallocInfo(ctypes.Structure):
    """What mallinfo2(3) returns: `uordblks` bytes in use, `hblkhd` of them in blocks of their own."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


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
    """Asks glibc to return free memory once there is much of it: gRPC's buffers are spread over many arenas.

    How much there is follows from what the process takes and what glibc says is in use. Some of it can never be
    returned, since pages are shared with what is in use: only what was added since the last time counts.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        self._info = getattr(library, "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _MallocInfo
        self._trimmed_at = 0.0
        self._rest: int | None = None

    def trim_if_due(self, now: float) -> bool:
        """Returns memory if there is much to return; takes milliseconds then. `now`: seconds of any clock."""
        if self._trim is None or self._info is None or now - self._trimmed_at < _SELDOM_S:
            return False
        if self._rest is None:
            self._rest = self._unused()
        if self._unused() - self._rest < _MUCH_BYTES:
            return False
        self._trimmed_at = now
        # Calls that were reset lie in reference cycles, and each holds some 20 KiB of gRPC's memory.
        gc.collect()
        self._trim(0)
        self._rest = self._unused()
        return True

    def _unused(self) -> int:
        """Bytes that this process takes and malloc has not handed out; Python's own objects are among them."""
        found: _MallocInfo = self._info() if self._info is not None else _MallocInfo()
        return _resident_bytes() - int(found.uordblks)


def _resident_bytes() -> int:
    """Memory of this process that is no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0
