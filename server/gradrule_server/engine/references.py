"""Reference forwards: what a program's tensors are where all xs are a baseline."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.imports import import_graph
from gradrule_server.engine.names import IMPORT_SCOPE, message_of, readable
from gradrule_server.errors import error

_SCOPE = "reference"


class Reference:
    """Imports the program's graph a second time for each baseline, the xs replaced by it; only what is used is run."""

    def __init__(
        self, graph_def: tf_graph_pb2.GraphDef, feeds: Mapping[str, tf.Tensor], xs: Mapping[str, tf.Tensor]
    ) -> None:
        self._graph_def = graph_def
        self._feeds = feeds
        self._xs = xs
        self._graph = tf.compat.v1.get_default_graph()
        self._scopes: dict[str, str] = {}

    def of(self, tensor: tf.Tensor, baseline: tf.Tensor) -> tf.Tensor:
        """The tensor's counterpart; RULE_NOT_APPLICABLE inside loops and branches."""
        baseline = tf_private.from_graph(self._graph, baseline)
        # Placeholders are arguments here, outside the import.
        if any(tensor is x for x in self._xs.values()):
            return self._baseline(tensor, baseline)
        if any(tensor is fed for fed in self._feeds.values()):
            return tensor
        if tensor.graph is not self._graph or not tensor.name.startswith(IMPORT_SCOPE):
            raise error(
                errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
                f"{tensor.name!r} lies in a loop or a branch, where there is no reference forward",
            )
        name = tensor.name.removeprefix(IMPORT_SCOPE)
        if baseline.name not in self._scopes:
            # Gradients may be built in a graph of their own; the forward part has one place.
            with self._graph.as_default():
                self._scopes[baseline.name] = self._import(baseline)
        return self._graph.get_tensor_by_name(f"{self._scopes[baseline.name]}/{name}")

    def _import(self, baseline: tf.Tensor) -> str:
        scope = f"{_SCOPE}_{len(self._scopes)}"
        bound = {**self._feeds, **{name: self._baseline(x, baseline) for name, x in self._xs.items()}}
        try:
            # Gradients are built inside a name scope, and the import's names must not depend on it.
            with self._graph.name_scope(None):
                import_graph(self._graph_def, bound, [], scope=scope)
        except (ValueError, TypeError) as cause:
            raise error(
                errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
                f"the graph cannot be run with the xs replaced by a baseline: {readable(message_of(cause))}",
            ) from cause
        return scope

    @staticmethod
    def _baseline(x: tf.Tensor, baseline: tf.Tensor) -> tf.Tensor:
        return tf.broadcast_to(tf.cast(baseline, x.dtype), tf.shape(x))
