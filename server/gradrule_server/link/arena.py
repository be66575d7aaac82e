"""Memory that front end and engine share, for payloads that are too large for their socket.

It has no name and lives as long as one of the two. One side writes an arena and knows what of it is free; the other
reads what it is told of, and neither can make it shorter.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

ARENA_BYTES = 512 * 1024 * 1024
"""Room of an arena; only what is written takes memory."""
LEAST_PLACED_BYTES = 256 * 1024
"""Smaller payloads go through the socket, which is as fast then."""

_PAGE = mmap.PAGESIZE
# What stat counts in.
_BLOCK = 512
# linux/falloc.h
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02

_libc = ctypes.CDLL(None, use_errno=True)


class Chunk(NamedTuple):
    """Where in an arena a payload lies."""

    offset: int
    length: int


def is_supported() -> bool:
    """Whether this system has memory without a name that cannot be made shorter."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def make_arena(size: int = ARENA_BYTES) -> int:
    """The descriptor of new memory. Whoever has it cannot change its size, so reading never fails. `OSError`."""
    fd = os.memfd_create("gradrule", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class Outgoing:
    """The arena that this side writes. Thread-safe. Takes over the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self._map = _mapped(fd, mmap.PROT_READ | mmap.PROT_WRITE)
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, len(self._map))]
        self._closed = False

    def place(self, parts: Sequence[bytes | memoryview]) -> Chunk | None:
        """Writes the parts one after another; None where there is no room for them, or no memory."""
        length = sum(len(part) for part in parts)
        start = self._take(_rounded(length))
        if start is None:
            return None
        try:
            # Without this, memory that the system does not have would end the process as it is written to.
            os.posix_fallocate(self.fd, start, length)
        except OSError:
            self.release(Chunk(start, length))
            return None
        position = start
        for part in parts:
            self._map[position : position + len(part)] = part
            position += len(part)
        return Chunk(start, length)

    def release(self, chunk: Chunk) -> None:
        """The reader is done with it."""
        with self._lock:
            self._give(chunk.offset, chunk.offset + _rounded(chunk.length))

    def trim(self) -> None:
        """Gives the memory of all that is free back to the system. Takes a while; nothing can be placed meanwhile."""
        with self._lock:
            if self._closed:
                return
            # The number may be another file's once this is closed.
            fd = os.dup(self.fd)
            ranges, self._free = self._free, []
        try:
            for start, end in ranges:
                _punch(fd, start, end - start)
        finally:
            os.close(fd)
            with self._lock:
                for start, end in ranges:
                    self._give(start, end)

    @property
    def used_bytes(self) -> int:
        """What is not free."""
        with self._lock:
            return len(self._map) - sum(end - start for start, end in self._free)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory in use now; pages that any process has written to count."""
        with self._lock:
            return 0 if self._closed else _held(self.fd)

    def close(self) -> None:
        """Nothing more is placed or released."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._free = []
            self._map.close()
            os.close(self.fd)

    def _take(self, size: int) -> int | None:
        with self._lock:
            # The first that fits: what is free at the front was written to before, and is there already.
            for index, (start, end) in enumerate(self._free):
                if end - start >= size:
                    self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                    return start
        return None

    def _give(self, start: int, end: int) -> None:
        if self._closed:
            return
        index = bisect.bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))


class Incoming:
    """The arena that the other side writes, and may change at any time. Takes over the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.inode = os.fstat(fd).st_ino
        self._map = _mapped(fd, mmap.PROT_READ)

    def read(self, chunk: Chunk, suffix: bytes = b"") -> bytes:
        """A copy of a payload, with the suffix. `ValueError` where it lies outside, `OSError` without memory."""
        self._check(chunk)
        # Pages that were never written are made by reading them.
        os.posix_fallocate(self.fd, chunk.offset, chunk.length)
        with memoryview(self._map) as whole, whole[chunk.offset : chunk.offset + chunk.length] as payload:
            return b"".join((payload, suffix))

    def view(self, chunk: Chunk) -> memoryview:
        """The payload where it lies: it is there until the other side is told that this one is done with it."""
        self._check(chunk)
        return memoryview(self._map)[chunk.offset : chunk.offset + chunk.length]

    @property
    def held_bytes(self) -> int:
        """Bytes of memory in use now; pages that any process has written to count."""
        return 0 if self._map.closed else _held(self.fd)

    def close(self) -> None:
        """Nothing more is read."""
        if not self._map.closed:
            self._map.close()
            os.close(self.fd)

    def _check(self, chunk: Chunk) -> None:
        if chunk.length <= 0 or chunk.offset + chunk.length > len(self._map):
            raise ValueError(f"{chunk} lies outside an arena of {len(self._map)} bytes")


def _mapped(fd: int, protection: int) -> mmap.mmap:
    mapped = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, protection)
    # Pages of 4 KiB cost more than the copying. Where the kernel has no others, they must do.
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _held(fd: int) -> int:
    return os.fstat(fd).st_blocks * _BLOCK


def _rounded(length: int) -> int:
    return -(-length // _PAGE) * _PAGE


def _punch(fd: int, start: int, length: int) -> None:
    """Through the C library: Python's own way would keep all other threads waiting."""
    off_t = ctypes.c_int64
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, off_t(start), off_t(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
