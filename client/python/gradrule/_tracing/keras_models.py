"""Traces Keras models to graphs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from gradrule._builder.graph import Graph
from gradrule._tracing.arguments import as_specs, leaf_names
from gradrule._tracing.functions import concrete, of_concrete
from gradrule._tracing.layer_scopes import layer_scopes
from gradrule.errors import InvalidGraphError, UnsupportedError


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
    return of_concrete(function, dict(enumerate(names)), aliases, calls)


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
            f"the model {model.name!r} does not tell its inputs, as subclassed models and unbuilt ones do not; "
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
    own = list(getattr(model, "output_names", None) or ())
    found = leaf_names("output", structure)
    # Keras gives several outputs of one layer the layer's name each.
    return own if len(own) == len(found) and len(set(own)) == len(own) else None
