"""Moves the values of large constants out of a graph, so that programs share them.

A moved constant is still a Const with a type and a shape, but its tensor has no values; an attribute names them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from gradrule.common import tensor_codec
from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule.v1.tensor_pb2 import Dt, Tensor
from gradrule_server.graphs.ir import CONTENT_ATTR, Node
from gradrule_server.policy import Limits, tensor_fault

_CONSTANT = "Const"
# Each moved constant is an argument of the program: 1.5 µs per call. Besides, TensorFlow computes what depends on
# constants alone once, and what depends on arguments at each call.
MIN_BYTES = 4096
# TensorFlow reads sizes and axes while it builds a program, so they stay in the graph. They are never that many.
_MIN_INDEX_BYTES = 1 << 16
_INDICES = frozenset({Dt.DT_INT32, Dt.DT_INT64})
_MOVED = _INDICES | {
    *(Dt.DT_HALF, Dt.DT_BFLOAT16, Dt.DT_FLOAT, Dt.DT_DOUBLE, Dt.DT_COMPLEX64, Dt.DT_COMPLEX128),
    *(Dt.DT_INT8, Dt.DT_INT16, Dt.DT_UINT8, Dt.DT_UINT16, Dt.DT_UINT32, Dt.DT_UINT64),
}
# Values of eight bytes can be encoded in one.
_MAX_GROWTH = 8
_ALIGNMENT = 64


class Contents:
    """Values of tensors in one sequence of bytes, equal values once."""

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self._places: dict[str, tuple[int, int]] = {}
        self.size = 0
        """Bytes of the sequence."""

    @property
    def name(self) -> str:
        """A digest that determines the bytes."""
        return hashlib.sha256("".join(self._places).encode()).hexdigest()

    def has_room(self, values: memoryview, limits: Limits) -> bool:
        """Returns whether the sequence may have these values too: it is at most as long as a graph may be."""
        return self.size + _ALIGNMENT + len(values) <= limits.graph_bytes

    def add(self, values: bytes | memoryview) -> str:
        """Adds the values of a tensor, row-major and little-endian; returns their SHA-256, hex."""
        digest = hashlib.sha256(values).hexdigest()
        if digest not in self._places:
            padding = bytes(-self.size % _ALIGNMENT)
            self._places[digest] = (self.size + len(padding), len(values))
            self._parts += [padding, values]
            self.size += len(padding) + len(values)
        return digest

    def offset(self, digest: str) -> int:
        """Returns the position of the first byte of values."""
        return self._places[digest][0]

    def values(self, digest: str) -> bytes:
        """Returns the values of a digest."""
        start, length = self._places[digest]
        position = 0
        for part in self._parts:
            if position <= start and start + length <= position + len(part):
                return bytes(part[start - position : start - position + length])
            position += len(part)
        raise KeyError(digest)

    def parts(self, most: int) -> Iterator[bytes]:
        """Yields the bytes in parts of at most `most` bytes."""
        for part in self._parts:
            with memoryview(part) as whole:
                for start in range(0, len(whole), most):
                    yield bytes(whole[start : start + most])

    def move_to(self, memory: memoryview) -> None:
        """Frees the bytes; from now on they are read from `memory`."""
        self._parts = [memory]


def move_constants(graph: Graph, limits: Limits, contents: Contents) -> Graph:
    """Returns the graph without the values of its large constants, which are added to `contents`.

    The graph is changed. Constants that are not valid stay; the check of the graph reports them. Those beyond the bytes
    that a graph may have stay too.
    """
    moved = False
    for body in (graph.node, *(function.node_def for function in graph.library.function)):
        for node in body:
            if CONTENT_ATTR in node.attr:
                # Only this function may name values.
                del node.attr[CONTENT_ATTR]
            if node.op != _CONSTANT or "value" not in node.attr or not node.attr["value"].HasField("tensor"):
                continue
            tensor = node.attr["value"].tensor
            if is_large(tensor) and tensor_fault(tensor, limits) is None:
                values = little_endian(tensor)
                if not contents.has_room(values, limits):
                    continue
                moved = True
                node.attr[CONTENT_ATTR].s = contents.add(values).encode()
                tensor.CopyFrom(Tensor(dtype=tensor.dtype, tensor_shape=tensor.tensor_shape))
    # A message does not return the memory of its fields.
    return Graph.FromString(graph.SerializeToString()) if moved else graph


def little_endian(tensor: Tensor) -> memoryview:
    """Returns the values of a tensor of numbers, row-major and little-endian. Raises `ValueError`."""
    array = tensor_codec.to_numpy(tensor)
    array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
    return array.reshape(-1).view(np.uint8).data


def is_large(tensor: Tensor) -> bool:
    """Returns whether the values of a tensor of known shape are kept apart from messages.

    Tensors of which one value stands for many are small messages, and stay.
    """
    encoded = tensor.ByteSize()
    if encoded <= MIN_BYTES or tensor.dtype not in _MOVED:
        return False
    size = math.prod(dim.size for dim in tensor.tensor_shape.dim) * tensor_codec.numpy_dtype(tensor.dtype).itemsize
    least = _MIN_INDEX_BYTES if tensor.dtype in _INDICES else MIN_BYTES
    return least < size <= _MAX_GROWTH * encoded


def constant_digest(node: Node) -> str:
    """Returns the SHA-256 of a constant's values, hex; empty for all other nodes."""
    value = node.attrs.get(CONTENT_ATTR) if node.op == _CONSTANT else None
    return "" if value is None else value.s.decode()


def restore_values(nodes: Sequence[Node], contents: Contents) -> int:
    """Gives moved constants their values back; returns the bytes of these values."""
    size = 0
    for node in nodes:
        digest = constant_digest(node)
        if digest:
            tensor = node.attrs["value"].tensor
            values = contents.values(digest)
            full = Tensor(dtype=tensor.dtype, tensor_shape=tensor.tensor_shape, tensor_content=values)
            node.attrs = {"dtype": node.attrs["dtype"], "value": AttrValue(tensor=full)}
            size += len(values)
    return size
