"""Reads tensors of calls from memory that clients share, and writes tensors of answers into it.

The client may change its memory at any time, so every tensor there is copied before its values are read.
"""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.engine.program import aligned_bytes
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.framing import Buffer
from gradrule_server.link.shared_memory import ReceivedMemories, shared_memory_lost

# Writing a smaller result to shared memory saves nothing.
_LEAST_SHARED_BYTES = 64 * 1024
_PAGE = mmap.PAGESIZE


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
    """

    def __init__(self, memory: mmap.mmap, use: evaluate_pb2.SharedMemoryUse) -> None:
        self._memory = memory
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
        content = aligned_bytes(size)
        # `preadv` would not fill holes of the memory, but takes almost three times as long as a copy.
        np.copyto(content, np.frombuffer(self._memory, np.uint8, size, offset))
        return content.data


class AttachedMemories:
    """Holds the memory of this engine's clients, by name. Thread-safe. `received`: receives it; None: there is none."""

    def __init__(self, received: ReceivedMemories | None) -> None:
        self._received = received
        self._memories: dict[bytes, mmap.mmap] = {}
        self._lock = threading.Lock()

    def open(self, use: evaluate_pb2.SharedMemoryUse) -> CallMemory:
        """Returns the memory that a call uses. Raises INVALID_TENSOR or SHARED_MEMORY_LOST."""
        memory = self._memory(use.memory)
        if use.answer_offset + use.answer_bytes > len(memory):
            raise _invalid(f"the answer has no room in a shared memory of {len(memory)} bytes", "shared_memory")
        return CallMemory(memory, use)

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
