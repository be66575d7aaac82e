"""Making a graph node by node; equal nodes are made once."""

from __future__ import annotations

import numpy as np

from gradrule._dtypes import as_dt
from gradrule.v1 import graph_pb2, tensor_pb2
from gradrule_server.rules import dtypes

# Version of TensorFlow's graph format that the nodes are written in: any that a supported TensorFlow reads.
_PRODUCER = 1087

Attr = int | bool | graph_pb2.AttrValue


def type_attr(dtype: int) -> graph_pb2.AttrValue:
    """An attribute that holds an element type."""
    return graph_pb2.AttrValue(type=as_dt(dtype))


class GraphBuilder:
    """A graph that grows; every method returns the name of a node's first output (`Mul:0` is `Mul`)."""

    def __init__(self) -> None:
        self.graph = graph_pb2.Graph(versions=graph_pb2.Versions(producer=_PRODUCER))
        self._made: dict[tuple[object, ...], str] = {}
        self._counts: dict[str, int] = {}

    def placeholder(self, name: str, dtype: int, *, scalar: bool = False) -> str:
        """A value from outside, of any shape, or of rank 0."""
        if ("placeholder", name) not in self._made:
            shape = graph_pb2.AttrValue(shape=tensor_pb2.TensorShape(unknown_rank=not scalar))
            self.graph.node.add(name=name, op="Placeholder", attr={"dtype": type_attr(dtype), "shape": shape})
            self._made["placeholder", name] = name
        return name

    def constant(self, value: float | bool | list[int], dtype: int) -> str:
        """A rank 0 constant, or a vector of ints."""
        content = np.asarray(value).astype(dtypes.NUMPY[dtype])
        raw = content.tobytes()
        key = ("constant", raw, content.ndim, dtype)
        if key not in self._made:
            shape = tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=size) for size in content.shape])
            tensor = tensor_pb2.Tensor(dtype=as_dt(dtype), tensor_shape=shape, tensor_content=raw)
            name = self._fresh("Const")
            self.graph.node.add(
                name=name, op="Const", attr={"dtype": type_attr(dtype), "value": graph_pb2.AttrValue(tensor=tensor)}
            )
            self._made[key] = name
        return self._made[key]

    def add(self, op: str, *inputs: str, name: str | None = None, **attrs: Attr) -> str:
        """A node; an attribute that is an int is an element type, a bool a bool, others as they are."""
        values = {key: _attr(value) for key, value in attrs.items()}
        made = (op, inputs, tuple((key, value.SerializeToString()) for key, value in sorted(values.items())))
        if made not in self._made:
            fresh = self._fresh(name or op)
            self.graph.node.add(name=fresh, op=op, input=inputs, attr=values)
            self._made[made] = fresh
        return self._made[made]

    def _fresh(self, stem: str) -> str:
        number = self._counts.get(stem, 0)
        self._counts[stem] = number + 1
        return stem if number == 0 else f"{stem}_{number}"


def _attr(value: Attr) -> graph_pb2.AttrValue:
    if isinstance(value, graph_pb2.AttrValue):
        return value
    return graph_pb2.AttrValue(b=value) if isinstance(value, bool) else type_attr(value)
