"""Shortens TensorFlow's search for constants, which makes building a large graph take time that grows with its square.

To infer the shape of a Reshape, a Sum or a Fill, TensorFlow looks whether the tensor that tells sizes is a constant:
it follows inputs backwards until it meets a node that is none. Behind the Shape of a tensor of unknown size lies the
whole network, and the search begins anew for each node that a gradient makes. The search also stops at a node that
has no kernel, and no op has a kernel of the label below. So nodes whose values vary from call to call get the label
while the graph is built: the search ends with the same answer, only earlier.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule_server.engine import tf_private
from gradrule_server.policy.op_traits import ops_with

_KERNEL_ATTR = "_kernel"
_LABEL = b"varies"
# Known from the shape of their input alone, even where the input's values vary.
_KNOWN_BY_SHAPE = ops_with("tells_shape")


def label_varying(graph_def: tf_graph_pb2.GraphDef, varying: Iterable[str] = ()) -> list[str]:
    """Labels the nodes whose values cannot be constants; returns their names.

    A node without inputs that is no Const varies, and so does a node that takes a varying one. A node that stands
    before one of its inputs may go without a label, which costs time alone.

    Args:
        graph_def: The graph. It cannot run while it has the labels.
        varying: Names of nodes outside the graph that vary.
    """
    known = set(varying)
    labelled = []
    for node in graph_def.node:
        sources = [source for source in node.input if not source.startswith("^")]
        if sources:
            varies = node.op not in _KNOWN_BY_SHAPE and any(source.partition(":")[0] in known for source in sources)
        else:
            varies = node.op != "Const"
        if varies:
            known.add(node.name)
            node.attr[_KERNEL_ATTR].s = _LABEL
            labelled.append(node.name)
    return labelled


def remove_labels(graph: tf.Graph, names: Iterable[str]) -> None:
    """Takes the labels from ops of these names, without which the graph can run."""
    for name in names:
        tf_private.clear_attribute(graph.get_operation_by_name(name), _KERNEL_ATTR)
