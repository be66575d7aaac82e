"""Reads tensors from memory that a client shares, and writes results there.

The client may change its memory at any time, so every tensor is copied before its values are read. The buffers for
these copies are reused: the first write to a new page costs several times as much as the copy.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.engine.large_tensors import LargeTensors
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.framing import Buffer
from gradrule_server.link.shared_memory import ReceivedMemories, shared_memory_lost

_KEPT_BYTES = 256 << 20
_KEPT_S = 10.0
# Smaller buffers cost little.
_LEAST_KEPT_BYTES = 1 << 20
_ROUND = 1 << 20


class CopyBuffers:
    """Provides page-aligned buffers, reuses those that nothing refers to, and frees them after a while. Thread-safe."""

    def __init__(self) -> None:
        # The finalizer of a buffer may run in any thread at any time, so it uses no lock.
        self._returned: deque[mmap.mmap] = deque()
        self._free: list[mmap.mmap] = []
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._was_used = False
        # Number of buffers in use.
        self._out = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """Returns a buffer of `size` bytes with undefined content. Raises `MemoryError`."""
        if size < _LEAST_KEPT_BYTES:
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
        # A subclass: arrays made of it keep it, and not its base, alive.
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
            # Collects those returned since the last call too, since there may be no further call.
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


_FIELDS = ("feeds", "grad_ys", "tangents", "vectors")
# Writing a smaller result to shared memory saves nothing.
_LEAST_BYTES = 64 * 1024
_PAGE = mmap.PAGESIZE


class AnswerArea:
    """The part of a client's memory into which the tensors of one answer are written."""

    def __init__(self, memory: mmap.mmap, offset: int, size: int) -> None:
        self._memory = memory
        self._position = offset
        self._end = offset + size

    def place(self, contents: Sequence[Buffer]) -> list[int | None]:
        """Writes large contents; returns their offsets, None for a content that is small or does not fit."""
        return [self._place(content) for content in contents]

    def _place(self, content: Buffer) -> int | None:
        size, start = len(content), self._position
        if size < _LEAST_BYTES or start + size > self._end:
            return None
        self._position += -(-size // _PAGE) * _PAGE
        # NumPy lets other threads run while it copies.
        there = np.frombuffer(self._memory, np.uint8, size, start)
        np.copyto(there, np.frombuffer(content, np.uint8))
        return start


class AttachedMemories:
    """Holds the memory of this engine's clients, by name. Thread-safe. `received`: receives it; None: there is none."""

    def __init__(self, received: ReceivedMemories | None) -> None:
        self._received = received
        self._memories: dict[bytes, mmap.mmap] = {}
        self._buffers = CopyBuffers()
        self._lock = threading.Lock()

    def open(
        self, call: evaluate_pb2.EvaluateRequest, contents: LargeTensors
    ) -> tuple[LargeTensors, AnswerArea | None]:
        """Replaces tensors in shared memory by inline ones without bytes, and copies their bytes, as for large tensors.

        Returns the bytes of tensors, with those of `contents`, and the room for the answer. INVALID_TENSOR,
        SHARED_MEMORY_LOST.
        """
        if not call.HasField("shared_memory"):
            return contents, None
        use = call.shared_memory
        memory = self._memory(use.memory)
        if use.answer_offset + use.answer_bytes > len(memory):
            raise _invalid(f"the answer has no room in a shared memory of {len(memory)} bytes", "shared_memory")
        found = dict(contents)
        left = use.request_bytes
        for field in _FIELDS:
            for index, item in enumerate(getattr(call, field)):
                if item.value.HasField("shared_memory"):
                    source = item.value.shared_memory
                    left -= source.size_bytes
                    if left < 0:
                        raise _invalid(
                            f"tensors in shared memory take more than the {use.request_bytes} bytes that "
                            "shared_memory.request_bytes tells",
                            field,
                        )
                    found[field, index] = _copy(memory, source, self._buffers, f"{field}[{item.name!r}]", field)
                    inline = tensor_pb2.Tensor(dtype=source.dtype, tensor_shape=source.shape)
                    item.value.inline_tensor.CopyFrom(inline)
        return found, AnswerArea(memory, use.answer_offset, use.answer_bytes) if use.answer_bytes else None

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


def _copy(
    memory: mmap.mmap, source: tensor_pb2.SharedMemoryTensor, buffers: CopyBuffers, where: str, field: str
) -> memoryview:
    """Copies a tensor out of the memory; returns its bytes. Raises INVALID_TENSOR."""
    shape = tensor_codec.shape_tuple(source.shape)
    if shape is None or any(size is None or size < 0 for size in shape):
        raise _invalid(f"{where}: a tensor's shape must be known", field)
    try:
        dtype = tensor_codec.numpy_dtype(source.dtype)
    except ValueError as cause:
        raise _invalid(f"{where}: {cause}", field) from cause
    if not tensor_codec.has_plain_bytes(np.empty(0, dtype)):
        raise _invalid(f"{where} is {dtype_name(source.dtype)}; such tensors travel inline", field)
    wanted = math.prod(size or 0 for size in shape) * dtype.itemsize
    if source.size_bytes != wanted:
        raise _invalid(
            f"{where} has {source.size_bytes} bytes in shared memory, but {dtype_name(source.dtype)} of shape "
            f"{list(shape)} takes {wanted}",
            field,
        )
    if source.offset + source.size_bytes > len(memory):
        raise _invalid(
            f"{where}: {source.size_bytes} bytes at {source.offset} do not lie in a shared memory of "
            f"{len(memory)} bytes",
            field,
        )
    content = buffers.take(wanted)
    # `preadv` would not fill holes of the memory, but takes almost three times as long as a copy.
    np.copyto(content, np.frombuffer(memory, np.uint8, wanted, source.offset))
    return content.data


def _invalid(message: str, field: str) -> GradruleError:
    return error(errors_pb2.ERROR_REASON_INVALID_TENSOR, message, field=field)


def placed_tensor(number: int, shape: Sequence[int], offset: int, size: int) -> bytes:
    """Returns the encoded reference to a result that was written into shared memory."""
    message = tensor_pb2.SharedMemoryTensor(offset=offset, size_bytes=size, shape=tensor_codec.shape_message(shape))
    message.dtype = number  # type: ignore[assignment]
    return message.SerializeToString()
