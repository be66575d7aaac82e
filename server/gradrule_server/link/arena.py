"""Memory that front end and engine share, for payloads that are too large for their socket.

The memory has no name and exists as long as one of both processes. Each arena has one writer, which knows what of it is
free, and one reader. Neither can make it shorter, so reading never fails.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger(__name__)

ARENA_BYTES = 512 * 1024 * 1024
"""Size of an arena; only pages that were written take memory."""
MIN_PLACED_BYTES = 256 * 1024
"""Smaller payloads go through the socket, which is as fast for them."""

_PAGE = mmap.PAGESIZE
# The unit of `st_blocks`.
_BLOCK = 512
# linux/falloc.h
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
# An arena keeps its memory this long: the next large message is sent twice as fast then.
_TRIM_AFTER_S = 2.0

_libc = ctypes.CDLL(None, use_errno=True)


class Chunk(NamedTuple):
    """The place of a payload in an arena, bytes."""

    offset: int
    length: int


def has_sealed_memory() -> bool:
    """Returns whether this system has memory without a name whose size can be sealed."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


def make_arena(size: int = ARENA_BYTES) -> int:
    """Makes memory whose size cannot change. Returns its descriptor. Raises `OSError`."""
    fd = os.memfd_create("gradrule", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class Outgoing:
    """The arena that this process writes. Thread-safe. Owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = _mapped(fd, mmap.PROT_READ | mmap.PROT_WRITE)
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, len(self._map))]
        self._closed = False

    def place(self, parts: Sequence[bytes | memoryview]) -> Chunk | None:
        """Writes a payload, given in parts. Returns None if there is no room or no memory for it."""
        length = sum(len(part) for part in parts)
        start = self._reserve(_rounded(length))
        if start is None:
            return None
        try:
            # Allocate first: writing to memory that the system does not have would end the process.
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
        """Frees a chunk that the reader is done with."""
        with self._lock:
            self._free_range(chunk.offset, chunk.offset + _rounded(chunk.length))

    def trim(self) -> None:
        """Returns the memory of all free ranges to the system. Takes a while, in which nothing can be placed."""
        with self._lock:
            if self._closed:
                return
            # After `close` the number may belong to another file.
            fd = os.dup(self.fd)
            ranges, self._free = self._free, []
        try:
            for start, end in ranges:
                _punch(fd, start, end - start)
        finally:
            os.close(fd)
            with self._lock:
                for start, end in ranges:
                    self._free_range(start, end)

    @property
    def held_bytes(self) -> int:
        """The bytes of memory in use now. Pages that any process has written count."""
        with self._lock:
            return 0 if self._closed else _held(self.fd)

    def close(self) -> None:
        """Frees the arena; later calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._free = []
            self._map.close()
            os.close(self.fd)

    def _reserve(self, size: int) -> int | None:
        """Reserves a range. Returns its start; None if no free range is large enough."""
        with self._lock:
            # First fit: pages at the front were probably written before, so they need not be allocated again.
            for index, (start, end) in enumerate(self._free):
                if end - start >= size:
                    self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                    return start
        return None

    def _free_range(self, start: int, end: int) -> None:
        """Adds a range to the free ones, joined with its neighbours. The lock is held."""
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
    """The arena that the other process writes, and may change at any time. Owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = _mapped(fd, mmap.PROT_READ)

    def read(self, chunk: Chunk, suffix: bytes = b"") -> bytes:
        """Returns a copy of a payload, with `suffix` appended.

        Raises `ValueError` if the chunk lies outside the arena, and `OSError` if there is no memory.
        """
        self._check(chunk)
        # Reading pages that were never written allocates them.
        os.posix_fallocate(self.fd, chunk.offset, chunk.length)
        with memoryview(self._map) as whole, whole[chunk.offset : chunk.offset + chunk.length] as payload:
            return b"".join((payload, suffix))

    def view(self, chunk: Chunk) -> memoryview:
        """Returns a payload without copying it: it is valid until its request is answered."""
        self._check(chunk)
        return memoryview(self._map)[chunk.offset : chunk.offset + chunk.length]

    @property
    def held_bytes(self) -> int:
        """The bytes of memory in use now. Pages that any process has written count."""
        return 0 if self._map.closed else _held(self.fd)

    def close(self) -> None:
        """Frees the arena."""
        if not self._map.closed:
            self._map.close()
            os.close(self.fd)

    def _check(self, chunk: Chunk) -> None:
        if chunk.length <= 0 or chunk.offset + chunk.length > len(self._map):
            raise ValueError(f"{chunk} lies outside an arena of {len(self._map)} bytes")


@dataclass(frozen=True, slots=True)
class Arenas:
    """One process's ends of the two arenas of a link."""

    outgoing: Outgoing
    incoming: Incoming

    @classmethod
    def make(cls) -> tuple[Arenas, list[int]]:
        """Makes both arenas. Returns also the descriptors for `from_descriptors` in the engine. Raises `OSError`."""
        outgoing = Outgoing(make_arena())
        try:
            incoming = Incoming(make_arena())
        except OSError:
            outgoing.close()
            raise
        return cls(outgoing, incoming), [outgoing.fd, incoming.fd]

    @classmethod
    def from_descriptors(cls, incoming: int, outgoing: int) -> Arenas:
        """Opens arenas that the other process made. Owns the descriptors, in the order in which `make` returns them."""
        return cls(Outgoing(outgoing), Incoming(incoming))

    @property
    def held_bytes(self) -> int:
        """The bytes of memory that both take now; 0 after `close`."""
        return self.outgoing.held_bytes + self.incoming.held_bytes

    def close(self) -> None:
        """Frees both."""
        self.outgoing.close()
        self.incoming.close()


class ArenaTransfers:
    """The front end's use of the arenas: returns their memory to the system when they are not used for a while.

    `notify_trim`: sends the engine the message to do the same with its arena; it is called with an empty payload.
    """

    def __init__(self, arenas: Arenas, loop: asyncio.AbstractEventLoop, notify_trim: Callable[[bytes], None]) -> None:
        self._arenas = arenas
        self._loop = loop
        self._notify_trim = notify_trim
        self._used_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def place(self, payload: Sequence[bytes]) -> Chunk | None:
        """Writes a payload; see `Outgoing.place`."""
        self._note_use()
        return self._arenas.outgoing.place(payload)

    def release(self, chunk: Chunk) -> None:
        """Frees a payload that the engine is done with."""
        self._arenas.outgoing.release(chunk)

    def read(self, chunk: Chunk, suffix: bytes, *, is_wanted: bool) -> bytes:
        """Returns a payload of the engine, with `suffix`; nothing if it is not wanted. `ValueError`, `OSError`."""
        payload = self._arenas.incoming.read(chunk, suffix) if is_wanted else b""
        self._note_use()
        return payload

    def close(self) -> None:
        """Frees the arenas."""
        if self._timer is not None:
            self._timer.cancel()
        self._arenas.close()

    def _note_use(self) -> None:
        self._used_at = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        due = self._used_at + _TRIM_AFTER_S
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._trim)
            return
        self._timer = None
        trimming = self._loop.run_in_executor(None, self._arenas.outgoing.trim)
        trimming.add_done_callback(_log_failure)
        self._notify_trim(b"")


def _log_failure(trimming: asyncio.Future[None]) -> None:
    if not trimming.cancelled() and (cause := trimming.exception()) is not None:
        # The memory may be returned at the next trim.
        _log.warning("an arena keeps its memory: %s", cause)


def _mapped(fd: int, protection: int) -> mmap.mmap:
    mapped = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, protection)
    # With pages of 4 KiB, page faults cost more than the copying. Not every kernel offers huge pages.
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def _held(fd: int) -> int:
    return os.fstat(fd).st_blocks * _BLOCK


def _rounded(length: int) -> int:
    """Rounds up to whole pages."""
    return -(-length // _PAGE) * _PAGE


def _punch(fd: int, start: int, length: int) -> None:
    """Returns a range's memory to the system. Calls the C library: Python's own function holds the interpreter lock."""
    off_t = ctypes.c_int64
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, off_t(start), off_t(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
