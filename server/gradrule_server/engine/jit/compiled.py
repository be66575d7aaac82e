"""Compiles a function with XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradrule_server.engine.graph_call import SessionCall


def compiled_call(function: Any, arrays: Sequence[np.ndarray]) -> SessionCall:
    """Returns a function as a call that XLA compiles when it runs first, for arguments of the shapes of these.

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
