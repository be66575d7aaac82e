"""Describes the tensors of a graph, and the calls of Keras layers in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradrule._builder.notebook_text import short_repr
from gradrule.common.dtypes import dtype_name
from gradrule.common.tensor_codec import shape_tuple
from gradrule.v1 import tensor_pb2


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor.

    Attributes:
        name: name in the graph.
        dtype: name of the element type.
        shape: sizes, None for an unknown size; None: unknown rank.
        optional: for inputs: whether the graph holds a default, so that a request need not feed it.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    optional: bool = False

    @classmethod
    def from_message(cls, message: tensor_pb2.TensorSpec) -> TensorSpec:
        """Converts a message.

        Args:
            message: The server's description of a tensor.
        """
        return cls(message.name, dtype_name(message.dtype), shape_tuple(message.shape), message.optional)


@dataclass(frozen=True, slots=True, repr=False)
class LayerCall:
    """Describes one call of a layer; a layer that a model uses twice has two calls.

    Attributes:
        path: names of the nested layers, `encoder/conv1`; the call's nodes are in the scope of that name.
        kind: class of the layer.
        inputs: names of the input tensors. Empty for a call in a nested function, such as a loop's body, whose tensors
            have no name at the top level of the graph.
        outputs: names of the output tensors; empty in the same case.
        layer: identity of the layer; equal for all calls of one layer.
    """

    path: str
    kind: type[Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layer: int = field(repr=False)

    def __repr__(self) -> str:
        return short_repr(f"<LayerCall {self.path!r} {self.kind.__name__}>")

    @property
    def name(self) -> str:
        """Name of the layer, the last part of the path."""
        return self.path.rpartition("/")[2]
