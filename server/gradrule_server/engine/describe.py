"""Tells of a program what building it tells, and builds less: gradients of nodes that are alike are built once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule.v1 import evaluate_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.allowed import check_ops
from gradrule_server.engine.build import begin, build, function_arguments
from gradrule_server.engine.built import Built
from gradrule_server.engine.estimate import bytes_of, need_of
from gradrule_server.engine.repeats import Repeats
from gradrule_server.link.v1 import link_pb2

_VJP = (evaluate_pb2.DERIVATIVE_UNSPECIFIED, evaluate_pb2.DERIVATIVE_VJP)


def describe(request: link_pb2.CompileRequest, values: Sequence[tf.Tensor], device: str) -> Built:
    """Returns what `build` returns, without what runs it; raises the same errors.

    Where gradients are differentiated again, or built in a function of their own, and where the program might not fit
    into memory, it is built as a whole.
    """
    if request.derivative in _VJP and not request.stacked_grad_ys and not request.split:
        built = _described(request, values)
        if built is not None:
            return built
    return build(request, values, device)


def _described(request: link_pb2.CompileRequest, values: Sequence[tf.Tensor]) -> Built | None:
    """None where the program might need more memory than there is."""
    graph_def = tf_graph_pb2.GraphDef.FromString(request.graph)
    functions = tf_private.add_functions(graph_def.library)
    try:
        graph = tf_private.RecordingGraph()
        with graph.as_default():
            repeats = Repeats(graph, graph_def)
            built, trace = begin(request, graph_def, values, repeats)
            arguments = [
                tf.compat.v1.placeholder(spec.dtype, spec.shape, spec.name) for spec in function_arguments(built)
            ]
            with tf_private.sums_made_by(repeats.sum):
                outputs = trace.run(arguments)
        if not request.trusted:
            check_ops(graph)
        if request.memory_limit and _most_bytes(graph, outputs) > request.memory_limit:
            return None
        return built
    finally:
        tf_private.remove_functions(functions)


def _most_bytes(graph: tf_private.RecordingGraph, outputs: Sequence[tf.Tensor]) -> int:
    """Bytes of all tensors that the built program would have, at least."""
    repeated = sum(bytes_of(tensor) for op in graph.made for tensor in op.outputs)
    return need_of(graph, outputs, sys.maxsize).size + repeated
