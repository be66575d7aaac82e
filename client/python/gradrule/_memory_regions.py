"""Memory without a name, of which regions are taken and given back by themselves."""

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


def rounded(size: int) -> int:
    """Returns the size of the pages that so many bytes take."""
    return -(-size // PAGE) * PAGE


class Region:
    """A part of a memory, in use for as long as this object lives."""

    __slots__ = ("__weakref__", "memory", "offset", "size")

    def __init__(self, memory: Memory, offset: int, size: int) -> None:
        self.memory = memory
        self.offset = offset
        self.size = size
        weakref.finalize(self, memory.give_back, offset, size).atexit = False

    def write(self, start: int, content: Any) -> None:
        """Copies bytes into the region, from `start` bytes after its begin on."""
        size = len(content)
        # NumPy lets other threads run while it copies.
        there = np.frombuffer(self.memory.mapping, np.uint8, size, self.offset + start)
        np.copyto(there, np.frombuffer(content, np.uint8))

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tensor_codec.Array:
        """Returns an array that lies at an offset of the memory, and keeps the region in use."""
        whole: _Owner = _Owner((self.size,), np.uint8, self.memory.mapping, self.offset)
        whole.region = self
        return np.ndarray(shape, dtype, whole, offset - self.offset)


class _Owner(np.ndarray[Any, Any]):
    """The bytes of a region. NumPy keeps it as the base of arrays in them, since it is of another type."""

    region: Region


class Memory:
    """Memory of one size, which two processes can share. Safe to share between threads. Raises `OSError`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("gradrule-client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False
        # Not every system has it, and what else is here is imported on all of them.
        import fcntl

        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self.mapping = mmap.mmap(self.fd, size)
        # Where the kernel has no large pages for it, small ones must do.
        with contextlib.suppress(OSError):
            self.mapping.madvise(mmap.MADV_HUGEPAGE)
        self._lock = threading.Lock()
        self._free = [(0, size)]
        # Regions may end at any time, in the middle of taking another one too.
        self._given_back: deque[tuple[int, int]] = deque()
        # Up to here memory was asked for, and is there.
        self._backed = 0

    @property
    def is_backed(self) -> bool:
        """Whether any memory was asked for since the last `trim`."""
        return bool(self._backed)

    def take(self, size: int) -> Region | None:
        """Returns a region; None where there is no room for it, or no memory."""
        with self._lock:
            self._collect()
            size = rounded(size)
            index = next((index for index, (start, end) in enumerate(self._free) if end - start >= size), None)
            if index is None:
                return None
            start, end = self._free[index]
            if start + size > self._backed:
                try:
                    # Without this, memory that the system does not have would end the process as it is written to.
                    os.posix_fallocate(self.fd, self._backed, start + size - self._backed)
                except OSError:
                    return None
                self._backed = start + size
            self._free[index : index + 1] = [(start + size, end)] if start + size < end else []
        return Region(self, start, size)

    def give_back(self, offset: int, size: int) -> None:
        """Notes that a region has ended."""
        self._given_back.append((offset, offset + size))

    def trim(self) -> None:
        """Gives the memory behind the last region in use back to the system."""
        with self._lock:
            self._collect()
            start, end = self._free[-1] if self._free else (self.size, self.size)
            if end == self.size and start < self._backed:
                with contextlib.suppress(OSError):
                    self.mapping.madvise(mmap.MADV_REMOVE, start, self._backed - start)
                    self._backed = start

    def _collect(self) -> None:
        while self._given_back:
            start, end = self._given_back.popleft()
            index = bisect.bisect(self._free, (start, end))
            if index < len(self._free) and self._free[index][0] == end:
                end = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, end))
