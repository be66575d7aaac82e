"""Runs built graphs on NumPy arrays."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from gradrule_server.engine import tf_private

Arrays: TypeAlias = Sequence[Any]
"""NumPy arrays, or NumPy scalars and bytes for tensors of rank 0."""
GraphCall: TypeAlias = Callable[[Arrays], Arrays]

# Element types that a session takes and returns as NumPy arrays of the same type.
_SESSION_DTYPES = frozenset(
    {
        *(tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
        *(tf.bfloat16, tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.string),
    }
)


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
        return call(*arrays)

    def _started(self) -> Callable[..., list[Any]]:
        with self._lock:
            if self._call is None:
                self._call, close = tf_private.session_call(
                    self._graph, self._inputs, self._outputs, single_threaded=self._single_threaded
                )
                weakref.finalize(self, close)
            return self._call


class FunctionCall:
    """Runs a concrete function that returns a flat list. Thread-safe."""

    def __init__(self, function: Any, *, single_threaded: bool) -> None:
        self._function = function
        self._dtypes = [tensor.dtype for tensor in function.inputs]
        self._single_threaded = single_threaded

    def __call__(self, arrays: Arrays) -> Arrays:
        """Returns the values of the results for these values of the arguments."""
        arguments = [tf.constant(array, dtype) for array, dtype in zip(arrays, self._dtypes, strict=True)]
        with tf_private.on_calling_thread() if self._single_threaded else contextlib.nullcontext():
            return [tensor.numpy() for tensor in self._function(*arguments) or ()]


def graph_call(function: Any, *, single_threaded: bool, may_use_session: bool) -> GraphCall:
    """Returns the fastest way to run a concrete function that returns a flat list.

    A session takes host memory only (may_use_session: there is nothing else), and not every element type, and has to
    have something to return.
    """
    inputs, outputs = list(function.graph.inputs), list(function.graph.outputs)
    has_arrays = all(item.dtype in _SESSION_DTYPES for item in [*inputs, *outputs])
    if may_use_session and outputs and has_arrays and not function.captured_inputs:
        return SessionCall(function.graph, inputs, outputs, single_threaded=single_threaded)
    return FunctionCall(function, single_threaded=single_threaded)


def as_array(tensor: tf.Tensor) -> np.ndarray:
    """Returns a tensor's values, without a copy if it is in host memory."""
    return np.asarray(tensor.numpy(), object if tensor.dtype == tf.string else None)
