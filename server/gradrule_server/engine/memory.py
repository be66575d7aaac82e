"""Limits the engine's memory: that of the process, and before a run that of a program and of each call."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2
from tensorflow.core.framework import node_def_pb2

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.graph_import import label_varying
from gradrule_server.engine.memory_estimate import Estimator, MemoryNeed, static_bytes
from gradrule_server.errors import Finding, NoMemoryLeft, error
from gradrule_server.link.framing import FrameSocket, Kind
from gradrule_server.link.operating_system import HeapTrimmer, allocated_bytes, map_large_blocks, status_bytes
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy.op_tables import input_numbers

# Inputs that decide how large an output is, by op: a call may feed them.
_SIZES = input_numbers("size_inputs")
# Inputs that hold sizes have few elements; larger inputs are not read.
_MAX_SIZE_ELEMENTS = 64
# Larger constants are replaced by placeholders: only their shapes matter.
_LARGE_CONSTANT = 4096
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
# Number of results that are kept.
_MAX_RESULTS = 256

_Shapes: TypeAlias = tuple[tuple[int, ...], ...]
# Shape and values; no values if there are too many.
_Value: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
_Key: TypeAlias = tuple[_Shapes, tuple[_Value, ...]]


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


class MemoryCheck:
    """Checks the calls of one program against the memory limit. Thread-safe.

    limit: bytes; 0: none. Raises MEMORY_EXCEEDED at once if the program cannot fit with any feeds.
    """

    def __init__(self, graph: Any, limit: int) -> None:
        self._graph = graph
        self._limit = limit
        # Shapes and values of calls that fit.
        self._fitting: dict[_Key, None] = {}
        # The same with sizes rounded up to powers of two, which most calls have in common.
        self._fitting_rounded: dict[_Key, None] = {}
        self._shape_inputs: list[int] = []
        self._value_inputs: list[int] = []
        if limit:
            estimator = Estimator(limit)
            self._refuse(estimator.need(graph, graph.outputs))
            self._by_unknown_sizes = estimator.by_unknown_sizes
            self._value_inputs = [index for index, item in enumerate(graph.inputs) if _leads_to_size(item)]
            self._shape_inputs = [
                index
                for index, item in enumerate(graph.inputs)
                if item.shape.num_elements() is None and index not in self._value_inputs
            ]

    @property
    def depends_on_call(self) -> bool:
        """Whether the memory that is needed depends on the arguments of a call."""
        return bool(self._shape_inputs or self._value_inputs)

    def check(self, arguments: Sequence[Any]) -> None:
        """Raises MEMORY_EXCEEDED if a call with these arguments, tensors or NumPy arrays, cannot fit."""
        shapes = tuple([tuple(arguments[index].shape) for index in self._shape_inputs])
        values = tuple([_value_of(arguments[index]) for index in self._value_inputs])
        if (shapes, values) in self._fitting:
            return
        if not self._surely_fits(shapes, values):
            self._check(shapes, values)
        _add_result(self._fitting, (shapes, values))

    def _check(self, shapes: _Shapes, values: tuple[_Value, ...]) -> None:
        rounded = tuple(tuple(map(_round_up, shape)) for shape in shapes)
        if (rounded, values) in self._fitting_rounded:
            return
        # If larger arguments fit, these fit. If they do not, or contradict the graph, the exact arguments are checked.
        need = self._need(rounded, values)
        if need is not None and need.size <= self._limit:
            _add_result(self._fitting_rounded, (rounded, values))
            return
        need = self._need(shapes, values)
        if need is not None:
            self._refuse(need)

    def _surely_fits(self, shapes: _Shapes, values: Iterable[_Value]) -> bool:
        """Returns whether the call fits even if each unknown size were the product of those of all arguments."""
        largest = 1
        for index, shape in zip(self._shape_inputs, shapes, strict=True):
            known = self._graph.inputs[index].shape
            sizes = shape if known.rank is None else [n for n, size in zip(shape, known, strict=True) if size is None]
            largest *= max(1, math.prod(sizes))
        for shape, numbers in values:
            largest *= max(1, math.prod(shape)) * math.prod(max(abs(number), 1) for number in numbers)
        need = sum(size * largest**count for count, size in self._by_unknown_sizes.items())
        return bool(need <= self._limit)

    def _need(self, shapes: _Shapes, values: tuple[_Value, ...]) -> MemoryNeed | None:
        """Returns the memory need for arguments of these shapes and values; None if they contradict the function."""
        inputs = [tensor.op.name for tensor in self._graph.inputs]
        known = {inputs[index]: shape for index, shape in zip(self._shape_inputs, shapes, strict=True)}
        given = {inputs[index]: value for index, value in zip(self._value_inputs, values, strict=True)}
        graph_def = _without_weights(self._graph)
        for node in graph_def.node:
            if node.name in known:
                _set_shape(node, known[node.name])
            elif node.name in given:
                _set_value(node, *given[node.name])
        # This graph never runs, so its labels may stay.
        label_varying(graph_def)
        results = [tensor.name for tensor in self._graph.outputs]
        with tf.Graph().as_default() as graph:
            try:
                tensors = tf.import_graph_def(graph_def, return_elements=results, name="")
                return Estimator(self._limit).need(graph, tensors)
            except ValueError:
                # The shapes contradict each other, or a size exceeds 64 bits: the call fails with a better message.
                return None

    def _refuse(self, need: MemoryNeed) -> None:
        if need.size > self._limit:
            raise error(
                errors_pb2.ERROR_REASON_MEMORY_EXCEEDED,
                f"running this would take about {_format_bytes(need.size)}; an engine has {_format_bytes(self._limit)} "
                f"(--memory-limit). The largest tensor is {need.where}: {_format_bytes(need.largest)}",
            )


def _add_result(results: dict[_Key, None], key: _Key) -> None:
    if len(results) >= _MAX_RESULTS:
        results.clear()
    results[key] = None


def _without_weights(graph: tf.Graph) -> tf_graph_pb2.GraphDef:
    """Returns the graph with its functions as a message, with placeholders in place of large constants."""
    made = tf_graph_pb2.GraphDef(versions=graph.graph_def_versions)
    functions: dict[str, None] = {}
    for op in graph.get_operations():
        if op.type == "Const" and static_bytes(op.outputs[0]) > _LARGE_CONSTANT:
            node = made.node.add(name=op.name, op="Placeholder")
            node.attr["dtype"].type = op.outputs[0].dtype.as_datatype_enum
            _set_shape(node, tuple(op.outputs[0].shape))
            continue
        node = made.node.add()
        node.CopyFrom(op.node_def)
        functions.update(dict.fromkeys(tf_private.functions_named(node)))
    made.library.function.extend(tf_private.functions_reached(functions))
    return made


def _set_shape(node: node_def_pb2.NodeDef, shape: Sequence[int]) -> None:
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())


def _set_value(node: node_def_pb2.NodeDef, shape: tuple[int, ...], numbers: tuple[int, ...]) -> None:
    """Replaces an argument of known value by a constant, so that TensorFlow infers shapes from it."""
    if len(numbers) != math.prod(shape):
        _set_shape(node, shape)
        return
    dtype = tf.as_dtype(node.attr["dtype"].type)
    value = tf.make_tensor_proto(np.array(numbers, dtype.as_numpy_dtype).reshape(shape), dtype, shape)
    node.op = "Const"
    node.attr.clear()
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(value)


def _leads_to_size(tensor: tf.Tensor) -> bool:
    """Returns whether values of an argument, or integers computed from them, decide the size of a tensor."""
    if not tensor.dtype.is_integer:
        return False
    seen: set[str] = set()
    pending = [tensor]
    while pending:
        current = pending.pop()
        if current.name in seen:
            continue
        seen.add(current.name)
        for op in current.consumers():
            if any(taken is current for taken in _sizes_of(op)):
                return True
            pending += [output for output in op.outputs if output.dtype.is_integer]
    return False


def _sizes_of(op: tf.Operation) -> list[tf.Tensor]:
    numbers = _SIZES.get(op.type)
    return [] if numbers is None else [op.inputs[number] for number in numbers]


def _value_of(argument: Any) -> _Value:
    shape = tuple(argument.shape)
    few = math.prod(shape) <= _MAX_SIZE_ELEMENTS
    return shape, tuple(map(int, np.asarray(argument).flat)) if few else ()


def _round_up(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 1 else size


def _format_bytes(size: int) -> str:
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"
