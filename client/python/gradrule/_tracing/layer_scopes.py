"""Records the calls of layers while a model is traced, and puts their nodes into name scopes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from gradrule._builder.layer_calls import LayerCall
from gradrule._tracing import tf_private


@dataclass(frozen=True, slots=True, eq=False)
class TracedCall:
    """Holds one call of a layer, with tensors of TensorFlow's graphs."""

    path: str
    layer: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]

    def named(self, name_of: Callable[[Any], str | None]) -> LayerCall:
        """Converts tensors to names; `name_of` returns None for tensors without a name at the top level."""
        inputs = tuple(dict.fromkeys(map(name_of, self.inputs)))
        outputs = tuple(dict.fromkeys(map(name_of, self.outputs)))
        names = [name for name in (*inputs, *outputs) if name is not None]
        if len(names) < len(inputs) + len(outputs):
            inputs = outputs = ()
        return LayerCall(self.path, type(self.layer), _strings(inputs), _strings(outputs), id(self.layer))


@contextlib.contextmanager
def layer_scopes(root: Any, *, include_root: bool = False) -> Iterator[list[TracedCall]]:
    """Puts the nodes of a layer into the scope of its name within the context; nested layers into `outer/inner`.

    Without this context, Keras opens a layer's scope twice, and TensorFlow names the second scope `dense_1`, which may
    be the name of another layer.

    Args:
        root: A Keras model or layer.
        include_root: Whether the root itself has a scope.

    Yields:
        A list to which each call of a layer is added when it ends.
    """
    stack: list[str] = []
    calls: list[TracedCall] = []
    layers = [layer for layer in root._flatten_layers(include_self=include_root) if include_root or layer is not root]
    replaced = [(layer, layer.call) for layer in layers]
    for layer, call in replaced:
        object.__setattr__(layer, "call", _in_scope(layer, call, stack, calls))
    try:
        yield calls
    finally:
        for layer, call in replaced:
            if call == getattr(type(layer), "call", None) or getattr(call, "__self__", None) is layer:
                object.__delattr__(layer, "call")
            else:
                object.__setattr__(layer, "call", call)


def _in_scope(layer: Any, call: Callable[..., Any], stack: list[str], calls: list[TracedCall]) -> Callable[..., Any]:
    @functools.wraps(call)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        stack.append(layer.name)
        try:
            path = "/".join(stack)
            # With a final slash, TensorFlow enters the scope again instead of making a new one.
            with tf.name_scope(f"{path}/"):
                outputs = call(*args, **kwargs)
            taken = [args, {name: value for name, value in kwargs.items() if not name.endswith("mask")}]
            calls.append(TracedCall(path, layer, _tensors(taken), _tensors(outputs)))
            return outputs
        finally:
            stack.pop()

    return scoped


def _tensors(structure: Any) -> tuple[Any, ...]:
    """Returns the tensors that are not constants from before the call."""
    leaves = keras.tree.flatten(structure)
    return tuple(leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and not tf_private.is_eager(leaf))


def _strings(names: tuple[str | None, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name is not None)
