"""Divides anonymous shared memory into regions that are released when nothing refers to them."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from gradrule.common import tensor_codec

PAGE = mmap.PAGESIZE
MIN_LARGE_BYTES = 64 * 1024
"""Size in bytes from which a tensor may lie in shared memory."""


def rounded_to_pages(size: int) -> int:
    """Returns a size rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


class Region:
    """Reserves a part of a memory until this object is deleted."""

    __slots__ = ("__weakref__", "memory", "offset", "size")

    def __init__(self, memory: Memory, offset: int, size: int) -> None:
        self.memory = memory
        self.offset = offset
        self.size = size
        weakref.finalize(self, memory.release, offset, size).atexit = False

    def write(self, start: int, content: Any) -> None:
        """Copies bytes into the region, `start` bytes after its beginning."""
        size = len(content)
        # NumPy releases the GIL while it copies.
        target = np.frombuffer(self.memory.mapping, np.uint8, size, self.offset + start)
        np.copyto(target, np.frombuffer(content, np.uint8))

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tensor_codec.Array:
        """Returns an array at an offset of the memory; the array keeps the region reserved."""
        whole: _Owner = _Owner((self.size,), np.uint8, self.memory.mapping, self.offset)
        whole.region = self
        return np.ndarray(shape, dtype, whole, offset - self.offset)


class _Owner(np.ndarray[Any, Any]):
    """Keeps a region reserved: NumPy keeps this subclass as the base of arrays in the region."""

    region: Region


class Memory:
    """Holds memory of a fixed size that two processes can share. Thread-safe. Raises `OSError`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("gradrule-client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False
        # Imported here because Windows has no fcntl.
        import fcntl

        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.mapping = mmap.mmap(self.fd, size)
        # Huge pages are optional.
        with contextlib.suppress(OSError):
            self.mapping.madvise(mmap.MADV_HUGEPAGE)
        self._lock = threading.Lock()
        self._free = [(0, size)]
        # Not protected by the lock: the garbage collector may release a region while this thread holds the lock.
        self._released: deque[tuple[int, int]] = deque()
        # The system has reserved the memory before this offset.
        self._backed = 0

    @property
    def is_backed(self) -> bool:
        """Whether the system has reserved memory for the regions."""
        return bool(self._backed)

    def reserve(self, size: int) -> Region | None:
        """Returns a region, or None if there is no free space or the system has no memory."""
        with self._lock:
            self._collect()
            size = rounded_to_pages(size)
            index = next((index for index, (start, end) in enumerate(self._free) if end - start >= size), None)
            if index is None:
                return None
            start, end = self._free[index]
            if start + size > self._backed:
                try:
                    # Reserve now: writing to memory that the system cannot provide would end the process.
                    os.posix_fallocate(self.fd, self._backed, start + size - self._backed)
                except OSError:
                    return None
                self._backed = start + size
            self._free[index : index + 1] = [(start + size, end)] if start + size < end else []
        return Region(self, start, size)

    def release(self, offset: int, size: int) -> None:
        """Records that a region is no longer in use."""
        self._released.append((offset, offset + size))

    def trim(self) -> None:
        """Returns the memory behind the last region in use to the system."""
        with self._lock:
            self._collect()
            start, end = self._free[-1] if self._free else (self.size, self.size)
            if end == self.size and start < self._backed:
                with contextlib.suppress(OSError):
                    self.mapping.madvise(mmap.MADV_REMOVE, start, self._backed - start)
                    self._backed = start

    def _collect(self) -> None:
        while self._released:
            start, end = self._released.popleft()
            index = bisect.bisect(self._free, (start, end))
            if index < len(self._free) and self._free[index][0] == end:
                end = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, end))
