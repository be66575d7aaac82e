"""Decides which functions XLA may compile, and compiles them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradrule_server.engine.program import SessionCall
from gradrule_server.policy.op_traits import trait_values

_MOST_OPS = 1000

_XLA = trait_values("xla")
# Half precision is left out: XLA keeps intermediate results in float32.
_DTYPES = frozenset({tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.float32, tf.float64})


def refusal_reason(function: Any) -> str:
    """Returns why XLA may not compile a function; empty if it may."""
    ops = function.graph.get_operations()
    if len(ops) > _MOST_OPS:
        return f"it has {len(ops)} ops; at most {_MOST_OPS} are compiled"
    for op in ops:
        if op.type not in _XLA:
            return f"its op {op.name!r} ({op.type}) is none of those that are compiled"
        dtype = next((tensor.dtype for tensor in (*op.inputs, *op.outputs) if tensor.dtype not in _DTYPES), None)
        if dtype is not None:
            return f"its op {op.name!r} ({op.type}) computes with {dtype.name}"
        # Kernels and XLA differ for floats outside the integer type's range.
        if op.type == "Cast" and op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_integer:
            return f"its op {op.name!r} casts floats to integers"
        if _XLA[op.type] == "floats" and not op.outputs[0].dtype.is_floating:
            return f"its op {op.name!r} ({op.type}) computes with integers"
    return ""


def compiled_call(function: Any, arrays: Sequence[np.ndarray]) -> SessionCall:
    """Returns a call of a function that XLA compiles at its first run, for arguments of these shapes.

    It runs in a session of its own: what XLA compiled is freed with the session.
    """
    specs = [tf.TensorSpec(array.shape, tensor.dtype) for array, tensor in zip(arrays, function.inputs, strict=True)]

    def run(*arguments: tf.Tensor) -> Any:
        return function(*arguments)

    compiled = tf.function(run, input_signature=specs, jit_compile=True, autograph=False).get_concrete_function()
    with tf.Graph().as_default() as graph:
        inputs = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
        outputs = list(compiled(*inputs))
    return SessionCall(graph, inputs, outputs, single_threaded=True)
