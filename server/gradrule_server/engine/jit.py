"""Runs programs with XLA, which compiles them for each set of argument shapes at the first call with these shapes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.engine.program import Arrays, FunctionCall, SessionCall, as_tensors
from gradrule_server.engine.tf_errors import clean_message, error_message, out_of_memory
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.policy.op_tables import trait_values

# The time to compile grows with the number of ops, and a call waits for it.
_MAX_OPS = 1000
# Number of sets of shapes for which the code of one program is kept.
_MAX_SHAPES = 8
_MAX_FINDINGS = 20

_XLA = trait_values("xla")
# Half precision is left out: XLA keeps intermediate results in float32.
_DTYPES = frozenset({tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.float32, tf.float64})
_REMEDY = "compile the program with jit=off"

_Shapes: TypeAlias = tuple[tuple[int, ...], ...]


class XlaCall:
    """Runs a program with XLA. Thread-safe. The first call with new shapes compiles, which takes seconds.

    function: what XLA compiles. plain: runs it without XLA.
    """

    def __init__(self, function: Any, plain: SessionCall | FunctionCall) -> None:
        self._function = function
        self._plain = plain
        self._compiled = lru_cache(_MAX_SHAPES)(partial(_compiled_call, function))
        self._lock = threading.Lock()

    def __call__(self, arrays: Arrays) -> Arrays:
        """Returns the values of the outputs. Raises EXECUTION_FAILED if only XLA fails, else the program's error."""
        try:
            return self._call_for(arrays)(arrays)
        except (tf.errors.OpError, ValueError) as cause:
            if isinstance(cause, tf.errors.OpError) and out_of_memory(cause):
                raise
            # TensorFlow's kernels say what is wrong with the arguments, and at which node.
            self._plain(arrays)
            message = f"XLA cannot run the program: {clean_message(error_message(cause))}; {_REMEDY}"
            raise error(errors_pb2.ERROR_REASON_EXECUTION_FAILED, message) from cause

    def on_device(self, arguments: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the results as tensors, for arguments that are tensors or arrays."""
        return list(map(tf_private.shared_tensor, self(as_tensors(arguments, self._function.inputs))))

    def _call_for(self, arrays: Arrays) -> SessionCall:
        shapes = tuple([tuple(array.shape) for array in arrays])
        with self._lock:
            return self._compiled(shapes)


def check_xla(graph: tf.Graph) -> None:
    """Raises UNSUPPORTED_OP with the ops of a graph that XLA does not compute as TensorFlow's kernels do.

    Raises LIMIT_EXCEEDED if the graph has too many ops.
    """
    ops = graph.get_operations()
    if len(ops) > _MAX_OPS:
        message = f"the program has {len(ops)} ops with its gradients; XLA compiles at most {_MAX_OPS}: {_REMEDY}"
        raise error(errors_pb2.ERROR_REASON_LIMIT_EXCEEDED, message, field="jit")
    # One node for each op type and reason.
    refused = {(op.type, reason): op.name.removeprefix(IMPORT_SCOPE) for op in ops if (reason := _refusal(op))}
    if refused:
        raise GradruleError(
            [
                Finding(
                    errors_pb2.ERROR_REASON_UNSUPPORTED_OP,
                    f"Node {name!r} ({op_type}) {reason}, so XLA would not compute it as TensorFlow does: {_REMEDY}",
                    name,
                )
                for (op_type, reason), name in refused.items()
            ][:_MAX_FINDINGS]
        )


def _refusal(op: tf.Operation) -> str:
    """Returns why XLA may not compile an op; empty if it may."""
    if op.type not in _XLA:
        return "is of none of the types that are compiled"
    dtype = next((tensor.dtype for tensor in (*op.inputs, *op.outputs) if tensor.dtype not in _DTYPES), None)
    if dtype is not None:
        return f"computes with {dtype.name}"
    # Kernels and XLA differ for floats outside the integer type's range.
    if op.type == "Cast" and op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_integer:
        return "casts floats to integers"
    if _XLA[op.type] == "floats" and not op.outputs[0].dtype.is_floating:
        return "computes with integers"
    return ""


def _compiled_call(function: Any, shapes: _Shapes) -> SessionCall:
    """Returns a call of a function that XLA compiles at its first run, for arguments of these shapes.

    It runs in a session of its own: what XLA compiled is freed with the session.
    """
    specs = [tf.TensorSpec(shape, tensor.dtype) for shape, tensor in zip(shapes, function.inputs, strict=True)]

    def run(*arguments: tf.Tensor) -> Any:
        return function(*arguments)

    compiled = tf.function(run, input_signature=specs, jit_compile=True, autograph=False).get_concrete_function()
    with tf.Graph().as_default() as graph:
        inputs = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
        outputs = list(compiled(*inputs))
    return SessionCall(graph, inputs, outputs, single_threaded=True)
