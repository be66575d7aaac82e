"""Traces Keras models to graphs, and records the calls of their layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from gradrule._builder.graph import Graph
from gradrule._builder.specs import LayerCall
from gradrule._tracing import tf_private
from gradrule._tracing.functions import concrete, graph_of_concrete
from gradrule._tracing.signatures import as_specs, leaf_names
from gradrule.errors import InvalidGraphError, UnsupportedError


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


def from_keras(model: Any, specs: Sequence[Any] = (), *, training: bool = False) -> Graph:
    """Implements `gradrule.from_keras`."""
    if not isinstance(model, keras.Model):
        raise InvalidGraphError(f"{type(model).__name__} is no Keras model; gr.trace takes layers and functions")
    if keras.config.backend() != "tensorflow":
        raise UnsupportedError(f"Keras runs on {keras.config.backend()}; from_keras needs its TensorFlow backend")
    given = [as_specs(spec, f"spec {index}") for index, spec in enumerate(specs)] or [_own_specs(model)]

    def call(*inputs: Any) -> Any:
        return model(*inputs, training=training)

    with layer_scopes(model) as calls:
        function = concrete(call, given, {})
    names = _names(model, given)
    aliases = _output_names(model, function.structured_outputs)
    # Variables of layers in subclassed layers have TensorFlow names without the layers between.
    paths = {tf_private.identity_of(variable.value.handle): variable.path for variable in model.variables}
    return graph_of_concrete(function, dict(enumerate(names)), aliases, calls, paths)


def load(path: Path) -> Graph:
    """Loads the graph of a model that Keras saved in one file."""
    try:
        model = keras.models.load_model(path, compile=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as cause:
        raise InvalidGraphError(
            f"Keras cannot load {path}: {cause}. Where it needs custom objects, load it with "
            "keras.models.load_model(…, custom_objects=…) and give the model to gr.from_keras"
        ) from cause
    return from_keras(model)


def _own_specs(model: Any) -> Any:
    inputs = getattr(model, "inputs", None)
    if not inputs:
        raise InvalidGraphError(
            f"the model {model.name!r} does not state its inputs, because it is subclassed or not built; "
            "give specs, one per argument of its call"
        )
    structure = getattr(model, "input", inputs)
    if isinstance(structure, list) and len(structure) == 1:
        structure = structure[0]
    return keras.tree.map_structure(_spec_of, structure)


def _spec_of(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype, name=tensor.name)


def _names(model: Any, specs: Sequence[Any]) -> list[str]:
    """Returns the inputs' names: Keras's if every input has one, else the arguments' names."""
    by_structure = [
        leaf.name or name for index, spec in enumerate(specs) for name, leaf in leaf_names(_argument(index), spec)
    ]
    own = list(getattr(model, "input_names", None) or ())
    return own if len(own) == len(by_structure) else by_structure


def _argument(index: int) -> str:
    return f"inputs_{index}" if index else "inputs"


def _output_names(model: Any, structure: Any) -> list[str] | None:
    """Returns the output layers' names; None for subclassed models, whose outputs are named by structure."""
    if isinstance(structure, dict):
        return None
    # A Sequential model has no names of outputs; Keras names those of the equal functional model after their layers.
    last = [model.layers[-1].name] if isinstance(model, keras.Sequential) else []
    own = list(getattr(model, "output_names", None) or last)
    found = leaf_names("output", structure)
    # Keras gives several outputs of one layer the layer's name each.
    return own if len(own) == len(found) and len(set(own)) == len(own) else None
