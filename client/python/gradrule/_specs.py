"""What is known of a tensor before it exists."""

from __future__ import annotations

from dataclasses import dataclass

from gradrule._dtypes import name_of
from gradrule._tensors import shape_tuple
from gradrule.v1 import tensor_pb2


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name in the graph, element type and shape (None: unknown rank; a None inside: unknown dimension).

    optional: for inputs, true where the graph holds a default, so that feeding it is a choice.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    optional: bool = False

    @classmethod
    def of(cls, message: tensor_pb2.TensorSpec) -> TensorSpec:
        """From the server's message."""
        return cls(message.name, name_of(message.dtype), shape_tuple(message.shape), message.optional)
