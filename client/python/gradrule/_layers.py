"""Calls of Keras layers, as a graph that was traced from a model remembers them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer. A layer that a model uses twice has two.

    path: names of the layers from the model down, `encoder/conv1`; nodes that the call made lie in the scope of that
    name. kind: the layer's class. layer: the layer's identity: equal for calls of one layer, wherever it is used.
    inputs, outputs: names of the tensors that went in and came out; both empty for a call in a nested function (the
    body of a loop, as recurrent layers have), whose tensors have no name at the top of the graph.
    """

    path: str
    kind: type[Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layer: int = field(repr=False)

    @property
    def name(self) -> str:
        """The layer's own name."""
        return self.path.rpartition("/")[2]
