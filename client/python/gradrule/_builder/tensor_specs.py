"""Describes tensors by name, element type and shape."""

from __future__ import annotations

from dataclasses import dataclass

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
    def of(cls, message: tensor_pb2.TensorSpec) -> TensorSpec:
        """Converts a message.

        Args:
            message: The server's description of a tensor.
        """
        return cls(message.name, dtype_name(message.dtype), shape_tuple(message.shape), message.optional)
