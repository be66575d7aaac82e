"""Handles the bytes of large tensors without protobuf: cuts them out of requests, and uses memory that clients share.

Bytes that are cut out of a request are views, so parsing copies none of them. The client may change its shared memory
at any time, so every tensor there is copied before its values are read. The buffers for these copies are reused: the
first write to a new page costs several times as much as the copy.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradrule.common import tensor_codec
from gradrule.common.dtypes import dtype_name
from gradrule.common.wire_format import LENGTH_DELIMITED, MalformedError, fields, prefix
from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.framing import Buffer, Kind
from gradrule_server.link.shared_memory import ReceivedMemories, shared_memory_lost
from gradrule_server.link.v1 import link_pb2

LargeTensors: TypeAlias = Mapping[tuple[str, int], memoryview]
"""Bytes of tensors (packed ones still packed), by their repeated field and their index in it.

They last as long as the request.
"""

NO_LARGE_TENSORS: LargeTensors = MappingProxyType({})
# Smaller tensors stay in the request.
_LEAST_CUT_BYTES = 16 * 1024
# Writing a smaller result to shared memory saves nothing.
_LEAST_SHARED_BYTES = 64 * 1024
_PAGE = mmap.PAGESIZE

# Smaller buffers cost little, so they are not reused.
_LEAST_REUSED_BYTES = 1 << 20
_ROUND_BYTES = 1 << 20
_MAX_FREE_BYTES = 256 << 20
_FREE_AFTER_S = 10.0

_TENSOR_FIELDS = ("feeds", "grad_ys", "tangents", "vectors")

# Field numbers on the path from a frame's message to the request in it, and from a tensor's field to its bytes.
_CALL = link_pb2.RunRequest.REQUEST_FIELD_NUMBER
_PATHS: dict[Kind, Sequence[int]] = {
    Kind.RUN: (_CALL,),
    Kind.FORWARD: (link_pb2.ForwardRequest.RUN_FIELD_NUMBER, _CALL),
    Kind.PULL_BACK: (link_pb2.PullBackRequest.REQUEST_FIELD_NUMBER,),
    Kind.SESSION: (link_pb2.SessionRequest.RUN_FIELD_NUMBER, link_pb2.SessionRun.RUN_FIELD_NUMBER, _CALL),
}
_TENSOR_PATH = (tensor_pb2.NamedTensor.VALUE_FIELD_NUMBER, tensor_pb2.TensorSource.INLINE_TENSOR_FIELD_NUMBER)
_CONTENT = tensor_pb2.Tensor.TENSOR_CONTENT_FIELD_NUMBER
_PACKED = tensor_pb2.Tensor.PACKED_FIELD_NUMBER
_PACKED_CONTENT = tensor_pb2.PackedTensor.CONTENT_FIELD_NUMBER
_EVALUATE = {evaluate_pb2.EvaluateRequest.DESCRIPTOR.fields_by_name[name].number: name for name in _TENSOR_FIELDS}
_PULL_BACK = {evaluate_pb2.PullBackRequest.GRAD_YS_FIELD_NUMBER: "grad_ys"}


class CutPayload(NamedTuple):
    """The message of a frame without the bytes of its large tensors, and these bytes."""

    payload: bytes
    contents: LargeTensors


class _Unusual(MalformedError):
    """The message has one tensor in several parts, which protobuf allows; it is parsed as a whole."""


_Change: TypeAlias = Callable[[memoryview, int], "bytes | memoryview | None"]
"""Makes the new value of a field from its value and its index; None drops the field."""


def cut_large_tensors(kind: Kind, payload: bytes | memoryview) -> CutPayload:
    """Cuts large tensors out of a payload; returns a small payload unchanged."""
    if isinstance(payload, bytes):
        return CutPayload(payload, NO_LARGE_TENSORS)
    path = _PATHS.get(kind)
    if path is None:
        return CutPayload(bytes(payload), NO_LARGE_TENSORS)
    names = _PULL_BACK if kind is Kind.PULL_BACK else _EVALUATE
    contents: dict[tuple[str, int], memoryview] = {}
    try:
        return CutPayload(_without_tensors(names, contents, path, payload, 0), contents)
    except MalformedError:
        return CutPayload(bytes(payload), {})


def _without_tensors(
    names: Mapping[int, str],
    contents: dict[tuple[str, int], memoryview],
    path: Sequence[int],
    value: memoryview,
    before: int,
) -> bytes:
    """Returns the message without the large tensors in these fields of the request at the end of the path."""
    if before:
        raise _Unusual
    if path:
        return _changed(value, {path[0]: partial(_without_tensors, names, contents, path[1:])})

    def cut(name: str, entry: memoryview, index: int) -> bytes | memoryview:
        def keep(content: memoryview, before: int) -> None:
            if before or (name, index) in contents:
                raise _Unusual
            contents[name, index] = content

        return entry if len(entry) < _LEAST_CUT_BYTES else _without_content(keep, _TENSOR_PATH, entry, 0)

    return _changed(value, {number: partial(cut, name) for number, name in names.items()})


def _without_content(
    keep: Callable[[memoryview, int], None], path: Sequence[int], value: memoryview, before: int
) -> bytes:
    """Returns the message without the bytes at the end of the path, which are kept."""
    if before:
        raise _Unusual
    if path:
        return _changed(value, {path[0]: partial(_without_content, keep, path[1:])})
    return _changed(value, {_CONTENT: keep, _PACKED: partial(_without_packed_content, keep)})


def _without_packed_content(keep: Callable[[memoryview, int], None], value: memoryview, before: int) -> bytes:
    if before:
        raise _Unusual
    return _changed(value, {_PACKED_CONTENT: keep})


def _changed(message: memoryview, changes: Mapping[int, _Change]) -> bytes:
    """Returns the message with other values in some of its fields."""
    parts: list[bytes | memoryview] = []
    seen = dict.fromkeys(changes, 0)
    position = 0
    for number, start, end in fields(message, 0, len(message)):
        before, position = position, end
        change = changes.get(number)
        if change is None:
            parts.append(message[before:end])
            continue
        if message[before] & 7 != LENGTH_DELIMITED:
            raise _Unusual
        changed = change(message[start:end], seen[number])
        seen[number] += 1
        if changed is not None:
            parts += [prefix(number, len(changed)), changed]
    return b"".join(parts)


class CopyBuffers:
    """Provides page-aligned buffers, reuses those that nothing refers to, and frees unused ones later. Thread-safe."""

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
        if size < _LEAST_REUSED_BYTES:
            return np.empty(size, np.uint8)
        length = -(-size // _ROUND_BYTES) * _ROUND_BYTES
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
        # An array made from an instance of a subclass keeps that instance alive, not the base of the instance.
        buffer: NDArray[np.uint8] = _Buffer(size, np.uint8, whole)
        weakref.finalize(buffer, self._return, memory).atexit = False
        return buffer

    def _return(self, memory: mmap.mmap) -> None:
        self._returned.append(memory)

    def _collect(self) -> None:
        kept = sum(map(len, self._free))
        while self._returned:
            memory = self._returned.popleft()
            self._out -= 1
            kept += len(memory)
            if kept <= _MAX_FREE_BYTES:
                self._free.append(memory)
            else:
                kept -= len(memory)
        if self._timer is None and (self._free or self._was_used or self._out):
            self._timer = threading.Timer(_FREE_AFTER_S, self._expire)
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

    def place(self, contents: Sequence[Buffer]) -> list[int | None]:
        """Writes large contents; returns their offsets, None for a content that is small or does not fit."""
        return [self._place(content) for content in contents]

    def _place(self, content: Buffer) -> int | None:
        size, start = len(content), self._position
        if size < _LEAST_SHARED_BYTES or start + size > self._end:
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
        """Replaces tensors of a call that lie in shared memory by inline tensors without bytes, and copies their bytes.

        `contents`: bytes of tensors that were cut out of the call. Returns these with the copied bytes, and the area
        for the answer. Raises INVALID_TENSOR or SHARED_MEMORY_LOST.
        """
        use = call.shared_memory
        memory = self._memory(use.memory)
        if use.answer_offset + use.answer_bytes > len(memory):
            raise _invalid(f"the answer has no room in a shared memory of {len(memory)} bytes", "shared_memory")
        found = dict(contents)
        left = use.request_bytes
        for field in _TENSOR_FIELDS:
            for index, item in enumerate(getattr(call, field)):
                if item.value.HasField("shared_memory"):
                    source = item.value.shared_memory
                    left -= source.size_bytes
                    if left < 0:
                        raise _invalid(
                            f"tensors in shared memory take more than the {use.request_bytes} bytes of "
                            "shared_memory.request_bytes",
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
