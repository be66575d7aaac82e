"""Limits the engine's memory: that of the process, and that of a program before it runs."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections.abc import Container, Iterator

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.engine.kept_bytes import STRING_BYTES
from gradrule_server.errors import Finding, NoMemoryLeft, error
from gradrule_server.link.framing import FrameSocket, Kind
from gradrule_server.link.operating_system import HeapTrimmer, allocated_bytes, map_large_blocks, status_bytes
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy.op_tables import trait_values

# Numbers of the inputs whose memory an op's outputs share; each: output n shares that of input n.
_VIEWS = trait_values("view")
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
# Threads that TensorFlow starts for each core: those that compute, those of functions, those of sessions, those of XLA.
_TF_THREADS_PER_CORE = 4
_MAX_STACK = 8 << 20
# A process that holds less than this share of its limit holds nothing that another process would not hold too.
_NOTHING_SHARE = 0.05
_REMEDY = (
    "Send a smaller batch or graph, delete programs and handles that are not needed, or start the server with a larger "
    "--memory-limit"
)
# Programs refer to themselves, so only the garbage collector frees all of their memory: in 10 ms, or 400 if it is much.
_MAX_GARBAGE_BYTES = 16 << 20


class _ProcessLimit:
    """The memory limit of this process."""

    bytes = 0
    first_allocated = first_resident = 0
    """Bytes that were allocated, and that lay in memory, when the limit was set."""


def limit_memory(limit: int, threads: int = 0) -> None:
    """Limits the memory of this process to `limit` bytes, as the kernel counts them; 0: no limit.

    What is reserved and not used does not count: that of now, and the stacks of threads that start later: `threads`,
    and TensorFlow's.
    """
    _ProcessLimit.bytes, _ProcessLimit.first_allocated = limit, allocated_bytes()
    _ProcessLimit.first_resident = status_bytes("RssAnon")
    if not limit:
        return
    reserved = max(0, status_bytes("VmData") - _ProcessLimit.first_resident)
    most = limit + reserved + _stack_bytes() * (threads + _TF_THREADS_PER_CORE * len(os.sched_getaffinity(0)))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def memory_error(what: str) -> NoMemoryLeft:
    """Returns MEMORY_EXCEEDED for a request for which no memory is left, with what was in use and the limit."""
    limit = f"{_format_bytes(_ProcessLimit.bytes)} (--memory-limit)" if _ProcessLimit.bytes else "the machine's memory"
    # What failed has freed its memory by now, so the most that was ever in use says more.
    used = _format_bytes(
        max(status_bytes("RssAnon"), status_bytes("VmHWM") - status_bytes("RssFile") - status_bytes("RssShmem"))
    )
    message = f"no memory is left; up to {used} of {limit} were in use: {what}. {_REMEDY}"
    holds_nothing = allocated_bytes() - _ProcessLimit.first_allocated < _NOTHING_SHARE * _ProcessLimit.bytes
    return NoMemoryLeft([Finding(errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, message)], holds_nothing=holds_nothing)


def exhausted_error() -> NoMemoryLeft:
    """Returns MEMORY_EXCEEDED to encode while there is memory, for a time when `memory_error` itself has none."""
    return NoMemoryLeft([Finding(errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, f"no memory is left. {_REMEDY}")])


class ProgramMemory:
    """Measures the memory of each program, reports it to the front end, and frees that of unloaded programs.

    Thread-safe. `frames`: the link. `device`: where programs run.
    """

    def __init__(self, frames: FrameSocket, device: str) -> None:
        self._frames = frames
        self._gpu = device if device.startswith("GPU") else ""
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._measuring = 0
        self._garbage_bytes = 0
        self._trimmer = HeapTrimmer()

    @contextlib.contextmanager
    def measured(self, key: str) -> Iterator[None]:
        """Measures what the code within this context adds to a program."""
        before = self._allocated()
        with self._mapping_large_blocks():
            yield
        self._sizes[key] = self._sizes.get(key, 0) + max(0, self._allocated() - before)
        self._trimmer.trim_if_due(time.monotonic())
        self.report(key)

    @contextlib.contextmanager
    def _mapping_large_blocks(self) -> Iterator[None]:
        """Keeps large constants and messages out of the heap: there, the holes that they leave count as memory."""
        with self._lock:
            self._measuring += 1
            map_large_blocks(is_on=True)
        try:
            yield
        finally:
            with self._lock:
                self._measuring -= 1
                map_large_blocks(is_on=self._measuring > 0)

    def unloaded(self, key: str) -> None:
        """Frees the memory of a program to which nothing refers any more, at the latest with the next ones."""
        self._garbage_bytes += self._sizes.pop(key, 0)
        if self._garbage_bytes >= _MAX_GARBAGE_BYTES:
            self.free()
            self.report()

    def free(self) -> None:
        """Frees all memory to which nothing refers, and returns it to the system."""
        self._garbage_bytes = 0
        self._trimmer.trim(time.monotonic())

    def report(self, key: str = "") -> None:
        """Tells the front end how much memory is in use, and how much of it a program takes."""
        used = _ProcessLimit.first_resident + allocated_bytes() - _ProcessLimit.first_allocated
        notice = link_pb2.MemoryNotice(key=key, program_bytes=self._sizes.get(key, 0), used_bytes=used)
        self._frames.send(Kind.MEMORY_NOTICE, 0, notice.SerializeToString())

    def _allocated(self) -> int:
        on_gpu = tf.config.experimental.get_memory_info(self._gpu)["current"] if self._gpu else 0
        return allocated_bytes() + int(on_gpu)


def _stack_bytes() -> int:
    """Returns the size of a new thread's stack, which glibc takes from the limit of the main thread's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _MAX_STACK if soft == resource.RLIM_INFINITY else min(soft, _MAX_STACK)


def check_memory(graph: tf.Graph, kept: Container[int], limit: int) -> None:
    """Raises MEMORY_EXCEEDED if a program cannot fit into memory, whatever it computes between arguments and results.

    Tensors whose shapes are not known count as 0. What runs out of memory in a run ends at the limit of the process.

    Args:
        graph: The program's graph.
        kept: Positions of arguments that the engine does not hold in its own memory.
        limit: Bytes; 0: no limit.
    """
    if not limit:
        return
    arguments = [tensor for index, tensor in enumerate(graph.inputs) if index not in kept and tensor.consumers()]
    constants = [op.outputs[0] for op in graph.get_operations() if op.type == "Const"]
    # Equal tensors take memory once.
    tensors = list({tensor.ref(): tensor for tensor in (*arguments, *constants, *map(_viewed, graph.outputs))}.values())
    size = sum(map(_static_bytes, tensors))
    if size > limit:
        largest = max(tensors, key=_static_bytes)
        name, dtype = largest.op.name.removeprefix(IMPORT_SCOPE), largest.dtype.base_dtype.name
        raise error(
            errors_pb2.ERROR_REASON_MEMORY_EXCEEDED,
            f"arguments, constants and results take {_format_bytes(size)}; an engine has {_format_bytes(limit)} "
            f"(--memory-limit). The largest tensor is {name!r} ({largest.op.type}), {dtype} of shape "
            f"{list(largest.shape)}: {_format_bytes(_static_bytes(largest))}",
        )


def _viewed(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory a tensor shares: itself, or the one of which it is a view."""
    while (number := _VIEWS.get(tensor.op.type)) is not None:
        tensor = tensor.op.inputs[tensor.value_index if number == "each" else int(number)]
    return tensor


def _static_bytes(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor; 0 if its shape or type is not known."""
    elements = tensor.shape.num_elements()
    if elements is None or tensor.dtype in (tf.variant, tf.resource):
        return 0
    return int(elements) * (STRING_BYTES if tensor.dtype == tf.string else int(tensor.dtype.size))


def _format_bytes(size: int) -> str:
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
