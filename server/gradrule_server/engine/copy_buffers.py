"""Buffers that tensors are copied into: each is used again once nothing refers to it, and given up after a while.

The first write to a new page costs several times as much as copying to one that is there.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import deque

import numpy as np
from numpy.typing import NDArray

_KEPT_BYTES = 256 << 20
_KEPT_S = 10.0
# Smaller ones come cheap.
_LEAST_BYTES = 1 << 20
_ROUND = 1 << 20


class CopyBuffers:
    """Hands out buffers, aligned to pages. Thread-safe."""

    def __init__(self) -> None:
        # What is referred to by nothing may be so in any thread, in the middle of anything.
        self._returned: deque[mmap.mmap] = deque()
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._was_used = False
        # Buffers handed out, less those collected since.
        self._out = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """Returns a buffer of so many bytes, with any content. `MemoryError`."""
        if size < _LEAST_BYTES:
            return np.empty(size, np.uint8)
        length = -(-size // _ROUND) * _ROUND
        with self._lock:
            self._was_used = True
            self._collect()
            found = next((each for each in self._free if length <= len(each) <= 2 * length), None)
            if found is not None:
                self._free.remove(found)
        memory = _new(length) if found is None else found
        with self._lock:
            self._out += 1
        whole = np.frombuffer(memory, np.uint8)
        # Arrays made of it keep it as their base, since it is of another type.
        buffer: NDArray[np.uint8] = _Buffer(size, np.uint8, whole)
        weakref.finalize(buffer, self._give_back, memory).atexit = False
        return buffer

    def _give_back(self, memory: mmap.mmap) -> None:
        self._returned.append(memory)

    def _collect(self) -> None:
        kept = sum(map(len, self._free))
        while self._returned:
            memory = self._returned.popleft()
            self._out -= 1
            kept += len(memory)
            if kept <= _KEPT_BYTES:
                self._free.append(memory)
            else:
                kept -= len(memory)
        if self._timer is None and (self._free or self._was_used or self._out):
            self._timer = threading.Timer(_KEPT_S, self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        with self._lock:
            self._timer = None
            was_used, self._was_used = self._was_used, False
            # Those returned since the last call too: nothing else may ever collect them.
            self._collect()
            if not was_used:
                self._free.clear()


class _Buffer(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """The bytes of a buffer."""


def _new(length: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as cause:
        raise MemoryError(f"no memory for a tensor of {length} bytes") from cause
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
