"""Runs graphs with local TensorFlow, functions whose types are attributes included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.framework import c_api_util, importer

import gradrule as gr

Array = np.ndarray[Any, Any]


def run_locally(graph: gr.Graph, feeds: Mapping[str, Array], fetches: Sequence[str]) -> list[Array]:
    """Returns the fetched tensors of a graph that TensorFlow runs as it is written."""
    with tf.Graph().as_default() as target:
        # tf.import_graph_def does not take functions whose types are attributes; the runtime does.
        options = c_api_util.ScopedTFImportGraphDefOptions()
        with target._c_graph.get() as inner, c_api_util.tf_buffer(graph.to_bytes()) as data:
            pywrap_tf_session.TF_GraphImportGraphDefWithResults(inner, data, options.options)
        importer._ProcessNewOps(target)
        settings = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        settings.graph_options.rewrite_options.disable_meta_optimizer = True
        with tf.compat.v1.Session(config=settings) as session:
            for name, array in graph.variables.items():
                handle = target.get_tensor_by_name(f"{name}:0")
                session.run(tf.raw_ops.AssignVariableOp(resource=handle, value=array))
            named = {_tensor(graph, name): array for name, array in feeds.items()}
            results: list[Array] = session.run([_tensor(graph, name) for name in fetches], named)
            return results


def _tensor(graph: gr.Graph, name: str) -> str:
    found = graph.aliases.get(name, name)
    return found if ":" in found else f"{found}:0"
