"""Builds a graph node by node; equal nodes are added once."""

from __future__ import annotations

import numpy as np

from gradrule.common.dtypes import as_dt
from gradrule.v1 import graph_pb2, tensor_pb2
from gradrule_server.rules import dtypes

# Version of TensorFlow's graph format, which all supported releases of TensorFlow read.
_PRODUCER = 1087

Attr = int | bool | graph_pb2.AttrValue


def type_attr(dtype: int) -> graph_pb2.AttrValue:
    """Returns an attribute that holds an element type."""
    return graph_pb2.AttrValue(type=as_dt(dtype))


class GraphBuilder:
    """Builds a graph. Every method returns the name of a node, which is the name of its first output."""

    def __init__(self) -> None:
        self.graph = graph_pb2.Graph(versions=graph_pb2.Versions(producer=_PRODUCER))
        self._added: dict[tuple[object, ...], str] = {}
        self._counts: dict[str, int] = {}

    def placeholder(self, name: str, dtype: int, *, scalar: bool = False) -> str:
        """Adds a placeholder of any shape, or of rank 0 (`scalar`)."""
        if ("placeholder", name) not in self._added:
            shape = graph_pb2.AttrValue(shape=tensor_pb2.TensorShape(unknown_rank=not scalar))
            self.graph.node.add(name=name, op="Placeholder", attr={"dtype": type_attr(dtype), "shape": shape})
            self._added["placeholder", name] = name
        return name

    def constant(self, value: float | bool | list[int], dtype: int) -> str:
        """Adds a constant of rank 0, or a vector of ints."""
        content = np.asarray(value).astype(dtypes.NUMPY[dtype])
        raw = content.tobytes()
        key = ("constant", raw, content.ndim, dtype)
        if key not in self._added:
            shape = tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=size) for size in content.shape])
            tensor = tensor_pb2.Tensor(dtype=as_dt(dtype), tensor_shape=shape, tensor_content=raw)
            name = self._unique_name("Const")
            self.graph.node.add(
                name=name, op="Const", attr={"dtype": type_attr(dtype), "value": graph_pb2.AttrValue(tensor=tensor)}
            )
            self._added[key] = name
        return self._added[key]

    def add(self, op: str, *inputs: str, name: str | None = None, **attrs: Attr) -> str:
        """Adds a node.

        Args:
            op: Its op type.
            inputs: Its inputs.
            name: Its name, to which a number may be appended; None: the op type.
            attrs: Its attributes. An int is an element type.
        """
        values = {key: _attr(value) for key, value in attrs.items()}
        node_key = (op, inputs, tuple((key, value.SerializeToString()) for key, value in sorted(values.items())))
        if node_key not in self._added:
            unique = self._unique_name(name or op)
            self.graph.node.add(name=unique, op=op, input=inputs, attr=values)
            self._added[node_key] = unique
        return self._added[node_key]

    def _unique_name(self, stem: str) -> str:
        number = self._counts.get(stem, 0)
        self._counts[stem] = number + 1
        return stem if number == 0 else f"{stem}_{number}"


def _attr(value: Attr) -> graph_pb2.AttrValue:
    if isinstance(value, graph_pb2.AttrValue):
        return value
    return graph_pb2.AttrValue(b=value) if isinstance(value, bool) else type_attr(value)
