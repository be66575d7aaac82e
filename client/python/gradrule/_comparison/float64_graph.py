"""Converts a graph from float32 to float64, which makes finite differences precise."""

from __future__ import annotations

import numpy as np

from gradrule._builder.graph import Graph
from gradrule.common import tensor_codec
from gradrule.v1 import graph_pb2
from gradrule.v1.tensor_pb2 import Dt, Tensor


def widened(graph: Graph) -> Graph:
    """Returns the graph with float64 for every float32, constants and variables included.

    The result cannot run if one of its ops does not support float64.
    """
    message = graph_pb2.Graph.FromString(graph.to_bytes_without_overrides())
    for node in message.node:
        _widen_node(node)
    for function in message.library.function:
        for argument in (*function.signature.input_arg, *function.signature.output_arg):
            if argument.type == Dt.DT_FLOAT:
                argument.type = Dt.DT_DOUBLE
        for attr in function.attr.values():
            _widen_attr(attr)
        for node in function.node_def:
            _widen_node(node)
    wide = Graph.from_bytes(message.SerializeToString(deterministic=True))
    for name, array in graph.variables.items():
        wide.variables[name] = array.astype(np.float64) if array.dtype == np.float32 else array
    return wide


def _widen_node(node: graph_pb2.Node) -> None:
    for attr in node.attr.values():
        _widen_attr(attr)


def _widen_attr(attr: graph_pb2.AttrValue) -> None:
    match attr.WhichOneof("value"):
        case "type" if attr.type == Dt.DT_FLOAT:
            attr.type = Dt.DT_DOUBLE
        case "tensor":
            _widen_tensor(attr.tensor)
        case "func":
            for inner in attr.func.attr.values():
                _widen_attr(inner)
        case "list":
            for index, number in enumerate(attr.list.type):
                if number == Dt.DT_FLOAT:
                    attr.list.type[index] = Dt.DT_DOUBLE
            for tensor in attr.list.tensor:
                _widen_tensor(tensor)
            for function in attr.list.func:
                for inner in function.attr.values():
                    _widen_attr(inner)


def _widen_tensor(tensor: Tensor) -> None:
    if tensor.dtype == Dt.DT_FLOAT:
        tensor.CopyFrom(tensor_codec.to_message(tensor_codec.to_numpy(tensor).astype(np.float64)))
