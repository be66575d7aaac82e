"""Reduces a graph to what a picture needs: nodes, attributes and shapes, without the values of constants."""

from __future__ import annotations

from collections.abc import Iterable

from gradrule.v1.graph_pb2 import Graph, Node
from gradrule.v1.tensor_pb2 import Tensor

# Larger attributes are emptied.
_MAX_VALUE_BYTES = 256


def without_values(graph: Graph) -> Graph:
    """Returns a copy without the values of tensors; their element types and shapes stay."""
    copy = Graph()
    copy.CopyFrom(graph)
    _clear(copy.node)
    for function in copy.library.function:
        _clear(function.node_def)
    return copy


def _clear(nodes: Iterable[Node]) -> None:
    for node in nodes:
        for name in list(node.attr):
            value = node.attr[name]
            if value.HasField("tensor"):
                kept = Tensor(dtype=value.tensor.dtype, tensor_shape=value.tensor.tensor_shape)
                value.tensor.CopyFrom(kept)
            elif value.ByteSize() > _MAX_VALUE_BYTES and value.WhichOneof("value") == "s":
                value.s = value.s[:_MAX_VALUE_BYTES]
