"""Holds a built program: its arguments, the layout of its results, and the function or session that runs its graph."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from gradrule.v1 import evaluate_pb2, override_pb2, tensor_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.engine.tf_errors import TENSORFLOW_ERRORS, translate_error

if TYPE_CHECKING:
    from gradrule_server.engine.arguments import FeedPlan
    from gradrule_server.engine.backward import TwoPartProgram
    from gradrule_server.engine.batching import MergedRuns
    from gradrule_server.engine.derivatives import DerivativeLayout
    from gradrule_server.engine.jit import XlaCall

_T = TypeVar("_T")

Arrays: TypeAlias = Sequence[Any]
"""NumPy arrays, or NumPy scalars and bytes for tensors of rank 0. Arguments may be tensors too."""

# Element types that a session takes and returns as NumPy arrays of the same type.
_SESSION_DTYPES = frozenset(
    {
        *(tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
        *(tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.string),
    }
)

# TensorFlow uses the memory of an array as it is if its address is a multiple of this.
_ALIGNMENT = 64
# Smaller arrays are left to TensorFlow.
_LARGE = 1 << 20


class SessionCall:
    """Runs a graph in a session on the CPU. Thread-safe. The first call optimizes the graph and takes longer."""

    def __init__(
        self, graph: tf.Graph, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.Tensor], *, single_threaded: bool
    ) -> None:
        self._graph, self._inputs, self._outputs = graph, inputs, outputs
        self._single_threaded = single_threaded
        self._lock = threading.Lock()
        self._call: Callable[..., list[Any]] | None = None

    def __call__(self, arrays: Arrays) -> Arrays:
        """Returns the values of the outputs for these values of the inputs."""
        call = self._call or self._started()
        return call(*map(_aligned, arrays))

    def on_device(self, arguments: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the results as tensors, for arguments that are tensors or arrays."""
        # A result may share the memory of an argument.
        return list(map(tf_private.shared_tensor, self(as_tensors(arguments, self._inputs))))

    def _started(self) -> Callable[..., list[Any]]:
        with self._lock:
            if self._call is None:
                self._call, close = tf_private.session_call(
                    self._graph, self._inputs, self._outputs, single_threaded=self._single_threaded
                )
                weakref.finalize(self, close)
            return self._call


def _aligned(value: Any) -> Any:
    """Returns an array whose memory a session uses as it is; a small one may stay as it is.

    A session copies any other array, and its copy ends the process if there is no memory. This one raises MemoryError.
    """
    if isinstance(value, tf.Tensor):
        return as_array(value)
    size = getattr(value, "nbytes", 0)
    if size < _LARGE or value.dtype.hasobject or value.__array_interface__["data"][0] % _ALIGNMENT == 0:
        return value
    copy = aligned_bytes(size).view(value.dtype).reshape(value.shape)
    np.copyto(copy, value)
    return copy


def aligned_bytes(size: int) -> np.ndarray:
    """Returns memory that a session uses as it is, with undefined content. Raises `MemoryError`."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + size]


class FunctionCall:
    """Runs a concrete function that returns a flat list. Thread-safe."""

    def __init__(self, function: Any, *, single_threaded: bool) -> None:
        self._function = function
        self._captures = function.captured_inputs
        self._inputs = function.inputs[: len(function.inputs) - len(self._captures)]
        self._single_threaded = single_threaded

    def __call__(self, arrays: Arrays) -> Arrays:
        """Returns the values of the results for these values of the arguments."""
        return [tensor.numpy() for tensor in self.on_device(arrays)]

    def on_device(self, arguments: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the results as tensors, for arguments that are tensors or arrays."""
        tensors = as_tensors(arguments, self._inputs)
        with tf_private.on_calling_thread() if self._single_threaded else contextlib.nullcontext():
            return tf_private.call_with_captures(self._function, tensors, self._captures)


def create_graph_call(built: BuiltProgram, *, may_use_session: bool) -> SessionCall | FunctionCall:
    """Returns the fastest way to run a program.

    A session takes host memory only (may_use_session: there is nothing else), and not every element type, and has to
    have something to return.
    """
    graph = built.graph
    inputs, outputs = list(graph.inputs), list(graph.outputs)
    has_arrays = all(item.dtype in _SESSION_DTYPES for item in [*inputs, *outputs])
    if may_use_session and outputs and has_arrays and not graph.external_captures:
        return SessionCall(graph, inputs, outputs, single_threaded=built.small)
    return FunctionCall(built.function, single_threaded=built.small)


def as_array(tensor: tf.Tensor) -> np.ndarray:
    """Returns a tensor's values, without a copy if it is in host memory."""
    value = tf_private.shared_array(tensor)
    # A string of rank 0 is bytes.
    return np.asarray(value, object if isinstance(value, bytes) else None)


def as_tensors(values: Sequence[Any], like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns values as tensors, of the types of others. Arrays are copied: the memory of a request is freed later."""
    return [
        value if isinstance(value, tf.Tensor) else tf.constant(value, tensor.dtype)
        for value, tensor in zip(values, like, strict=True)
    ]


def shape_from(shape: tensor_pb2.TensorShape) -> tf.TensorShape:
    """Returns the shape that a message describes."""
    return tf.TensorShape(None if shape.unknown_rank else [None if dim.size < 0 else dim.size for dim in shape.dim])


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of the built function: the value of a placeholder or variable, an upstream gradient, a direction.

    `default`: its value in calls that do not feed it.
    """

    name: str
    dtype: tf.DType
    shape: tf.TensorShape
    default: tf.Tensor | None = None

    @classmethod
    def of(cls, spec: tensor_pb2.TensorSpec, default: tf.Tensor | None = None) -> Input:
        """Returns the argument for a tensor that a message describes."""
        return cls(spec.name, tf.as_dtype(spec.dtype), shape_from(spec.shape), default)


@dataclass(frozen=True, slots=True)
class ParamInput:
    """A param of a bound rule, always float64."""

    rule: int
    name: str


_function_lock = threading.Lock()


@dataclass(slots=True, weakref_slot=True, eq=False)
class BuiltProgram:
    """A program with its graph, from feeds, fed grad_ys, directions and params to fetches and derivatives."""

    graph: Any = None
    inputs: list[Input] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of inputs, by the other names that calls may use for them."""
    grad_ys: list[Input] = field(default_factory=list)
    stacked: bool = False
    """Whether all fed grad_ys, and so all gradients, have one more axis in front, of one size."""
    directions: list[Input] = field(default_factory=list)
    """Tangents of a JVP, vectors of an HVP."""
    params: list[ParamInput] = field(default_factory=list)
    max_rank: int = 0
    """Highest rank of the tensors of a call."""
    max_unpacking: int = 0
    """Bytes that packed tensors of a call may take unpacked, per byte packed, beyond `FREE_BYTES`."""
    small: bool = False
    """Whether it has few ops and no loops or branches: then it is faster on the calling thread."""
    unused: list[bool] = field(default_factory=list)
    """For each input, whether no result depends on it, so that calls need not feed it."""
    outputs: list[str] = field(default_factory=list)
    kind: evaluate_pb2.Derivative.ValueType = evaluate_pb2.DERIVATIVE_VJP
    layout: DerivativeLayout = field(default_factory=list)
    """Layout of the derivatives among the results."""
    merged_runs: MergedRuns | None = None
    """Whether calls run together; None if the program does not declare batching."""
    jit: bool = False
    """Whether XLA computes the calls."""
    device: str = "CPU:0"
    """Where it runs."""
    updates: list[str] = field(default_factory=list)
    """Variables whose new values are the last results."""
    result_types: list[int] = field(default_factory=list)
    """The element type (`Dt`) of each result."""
    two_parts: TwoPartProgram | None = None
    """Set if the forward and the backward part are separate functions; `function` is then the forward part."""
    statuses: list[override_pb2.ResolutionStatus.ValueType] = field(default_factory=list)
    default_gradient_nodes: list[str] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    without_gradient: list[override_pb2.Resolution] = field(default_factory=list)
    call: SessionCall | FunctionCall | XlaCall = field(init=False)
    """Runs the graph."""
    feed_plan: FeedPlan = field(init=False)
    specs: dict[str, list[tensor_pb2.TensorSpec]] = field(default_factory=dict)
    _function: Any = None

    @property
    def function(self) -> Any:
        """A concrete function that runs the graph; made when it is first needed, because it is a copy of the graph."""
        with _function_lock:
            if self._function is None:
                self._function = tf_private.callable_function(self.graph)
            return self._function

    def inputs_of(self, node: str) -> list[str]:
        """Returns the names, as in the uploaded graph, of the inputs of a node; none for a node within a function."""
        graph = self.graph
        try:
            op = graph.get_operation_by_name(f"{IMPORT_SCOPE}{node}")
        except KeyError:
            return []
        fed = {tensor.ref(): item.name for tensor, item in zip(graph.inputs, self.inputs, strict=False)}
        return [fed.get(tensor.ref(), tensor.name.removeprefix(IMPORT_SCOPE)) for tensor in op.inputs]

    def run(self, values: Arrays) -> Arrays:
        """Runs the graph on arrays or tensors; returns arrays. Translates the errors of TensorFlow."""
        return self._translated(self.call, values)

    def run_on_device(self, values: Arrays) -> list[tf.Tensor]:
        """Runs the graph on arrays or tensors; returns tensors. Translates the errors of TensorFlow."""
        return self._translated(self.call.on_device, values)

    def _translated(self, call: Callable[[Arrays], _T], values: Arrays) -> _T:
        try:
            return call(values)
        except TENSORFLOW_ERRORS as cause:
            # The executor that runs small programs names no node, so the program runs again.
            named = (lambda: FunctionCall(self.function, single_threaded=False)(values)) if self.small else None
            raise translate_error(cause, named, self.inputs_of) from cause
