"""Reads tensors of calls from memory that clients share, and writes tensors of answers into it.

The client may change its memory at any time, so every tensor there is copied before its values are read. The buffers
for these copies are reused: the first write to a new page costs several times as much as the copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref

import numpy as np
from numpy.typing import NDArray

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.framing import Buffer
from gradrule_server.link.shared_memory import ReceivedMemories, shared_memory_lost

# Writing a smaller result to shared memory saves nothing.
_LEAST_SHARED_BYTES = 64 * 1024
_PAGE = mmap.PAGESIZE

# Smaller buffers cost little, so they are not reused.
_LEAST_REUSED_BYTES = 1 << 20
_ROUND_BYTES = 1 << 20
_MAX_FREE_BYTES = 256 << 20
_FREE_AFTER_S = 10.0


class CopyBuffers:
    """Provides page-aligned buffers, reuses those that nothing refers to, and frees unused ones later. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._was_used = False
        self._expiry: threading.Thread | None = None

    def take(self, size: int) -> NDArray[np.uint8]:
        """Returns a buffer of `size` bytes with undefined content. Raises `MemoryError`."""
        if size < _LEAST_REUSED_BYTES:
            return np.empty(size, np.uint8)
        length = -(-size // _ROUND_BYTES) * _ROUND_BYTES
        with self._lock:
            self._was_used = True
            if self._expiry is None:
                self._expiry = threading.Thread(target=self._expire_regularly, daemon=True)
                self._expiry.start()
            found = next((each for each in self._free if length <= len(each) <= 2 * length), None)
            if found is not None:
                self._free.remove(found)
        memory = _new(length) if found is None else found
        whole = np.frombuffer(memory, np.uint8)
        # An array made from an instance of a subclass keeps that instance alive, not the base of the instance.
        buffer: NDArray[np.uint8] = _Buffer(size, np.uint8, whole)
        weakref.finalize(buffer, self._return, memory).atexit = False
        return buffer

    def _return(self, memory: mmap.mmap) -> None:
        # The finalizer of a buffer may run in any thread at any time, so it uses no lock.
        if sum(map(len, self._free)) + len(memory) <= _MAX_FREE_BYTES:
            self._free.append(memory)

    def _expire_regularly(self) -> None:
        while True:
            time.sleep(_FREE_AFTER_S)
            self._expire()

    def _expire(self) -> None:
        """Frees the unused buffers if none was taken since the last time."""
        with self._lock:
            was_used, self._was_used = self._was_used, False
            if not was_used:
                self._free.clear()


class _Buffer(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes of a buffer, which stays in use while this array or an array made from it exists."""


def _new(length: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as cause:
        raise MemoryError(f"no memory for a tensor of {length} bytes") from cause
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class AnswerArea:
    """The part of a client's memory into which the tensors of one answer are written."""

    def __init__(self, memory: mmap.mmap, offset: int, size: int) -> None:
        self._memory = memory
        self._position = offset
        self._end = offset + size

    def place(self, content: Buffer) -> int | None:
        """Writes a large content; returns its offset, None for a content that is small or does not fit."""
        size, start = len(content), self._position
        if size < _LEAST_SHARED_BYTES or start + size > self._end:
            return None
        self._position += -(-size // _PAGE) * _PAGE
        # NumPy lets other threads run while it copies.
        there = np.frombuffer(self._memory, np.uint8, size, start)
        np.copyto(there, np.frombuffer(content, np.uint8))
        return start


class CallMemory:
    """The part of a client's memory that one call uses.

    Args:
        memory: The whole memory.
        use: The part of it.
        buffers: Take the copies of tensors.
    """

    def __init__(self, memory: mmap.mmap, use: evaluate_pb2.SharedMemoryUse, buffers: CopyBuffers) -> None:
        self._memory = memory
        self._buffers = buffers
        self._request_bytes = self._left = use.request_bytes
        self.answer_area = AnswerArea(memory, use.answer_offset, use.answer_bytes) if use.answer_bytes else None
        """Takes large tensors of the answer; None: it has no room."""

    def read(self, offset: int, size: int, where: str, field: str) -> memoryview:
        """Returns a copy of `size` bytes. `where`, `field`: name the tensor in errors. Raises INVALID_TENSOR."""
        self._left -= size
        if self._left < 0:
            raise _invalid(
                f"tensors in shared memory take more than the {self._request_bytes} bytes of "
                "shared_memory.request_bytes",
                field,
            )
        if offset + size > len(self._memory):
            raise _invalid(
                f"{where}: {size} bytes at {offset} do not lie in a shared memory of {len(self._memory)} bytes", field
            )
        content = self._buffers.take(size)
        # `preadv` would not fill holes of the memory, but takes almost three times as long as a copy.
        np.copyto(content, np.frombuffer(self._memory, np.uint8, size, offset))
        return content.data


class AttachedMemories:
    """Holds the memory of this engine's clients, by name. Thread-safe. `received`: receives it; None: there is none."""

    def __init__(self, received: ReceivedMemories | None) -> None:
        self._received = received
        self._memories: dict[bytes, mmap.mmap] = {}
        self._buffers = CopyBuffers()
        self._lock = threading.Lock()

    def open(self, use: evaluate_pb2.SharedMemoryUse) -> CallMemory:
        """Returns the memory that a call uses. Raises INVALID_TENSOR or SHARED_MEMORY_LOST."""
        memory = self._memory(use.memory)
        if use.answer_offset + use.answer_bytes > len(memory):
            raise _invalid(f"the answer has no room in a shared memory of {len(memory)} bytes", "shared_memory")
        return CallMemory(memory, use, self._buffers)

    def detach(self, name: bytes) -> None:
        """Releases a memory. Calls that use it continue."""
        with self._lock:
            # The memory may have been passed on and never used.
            self._receive()
            self._memories.pop(name, None)

    def _memory(self, name: bytes) -> mmap.mmap:
        with self._lock:
            if name not in self._memories:
                self._receive()
            memory = self._memories.get(name)
        if memory is None:
            raise shared_memory_lost()
        return memory

    def _receive(self) -> None:
        while self._received is not None and (found := self._received.next()) is not None:
            name, fd = found
            try:
                self._memories[name] = mmap.mmap(fd, os.fstat(fd).st_size)
            except (OSError, ValueError):
                # A call that names it gets SHARED_MEMORY_LOST.
                continue
            finally:
                os.close(fd)


def _invalid(message: str, field: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_INVALID_TENSOR, message, field=field)
