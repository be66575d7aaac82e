"""Graphs from live TensorFlow and Keras: the client's home of TensorFlow, which is imported at the first call."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradrule.errors import UnsupportedError

if TYPE_CHECKING:
    from gradrule._graph import Graph


def trace(fn: Any, /, *specs: Any, **kwspecs: Any) -> Graph:
    """The graph of a Python function, `tf.function`, Keras model or `ConcreteFunction`.

    specs: one per argument: `tf.TensorSpec`, `gr.TensorSpec`, `(dtype, shape)`, an example array, or lists, tuples and
    dicts of those; ragged and sparse specs become the tensors that they consist of. Numbers, strings and None are taken
    as they are. A `tf.function` with a signature, and a `ConcreteFunction`, take none.

    Inputs are placeholders named after the arguments (`x`; `x_0`, `x_key` within structures). Outputs have aliases:
    `output`, `output_0`, … or the keys of a dict (`output_x` where `x` is an input or a
    variable). Variables that the function uses are `graph.variables`, by name.
    A `tf.custom_gradient` becomes a region of the graph with a rule, named after the Python function, and so do
    gradients registered in this process.

    Raises `UnsupportedError` where TensorFlow is missing, or where the function needs what cannot travel: tables,
    iterators, and other resources.
    """
    require("trace")
    from gradrule._tracing import functions

    return functions.trace(fn, specs, kwspecs)


def from_keras(model: Any, /, *specs: Any, training: bool = False) -> Graph:
    """The graph of a Keras model.

    specs: as for `trace`; needed by subclassed models only. training: as in `model(x, training=…)`; what the model
    assigns then (moving averages) is part of the graph. Inputs and outputs have aliases by Keras's names. Nodes of a
    layer lie in the scope of its name, those of a nested model's layers in `model/layer`.
    """
    require("from_keras")
    from gradrule._tracing import keras_models

    return keras_models.from_keras(model, specs, training=training)


def load_saved_model(folder: Path, signature: str) -> Graph:
    """The graph of one signature of a SavedModel."""
    require("load", f"{folder} is a SavedModel; ")
    from gradrule._tracing import saved_models

    return saved_models.load(folder, signature)


def load_keras(path: Path) -> Graph:
    """The graph of a model in a `.keras` or `.h5` file, in inference mode."""
    require("load", f"{path} is a file of Keras's; ")
    from gradrule._tracing import keras_models

    return keras_models.load(path)


def require(what: str, why: str = "") -> None:
    """Raises `UnsupportedError`, which says what to install, where there is no TensorFlow for `gr.{what}`."""
    if importlib.util.find_spec("tensorflow") is None:
        raise UnsupportedError(
            f"{why}gr.{what} needs TensorFlow, which is not installed here: pip install tensorflow (or tensorflow-cpu)"
        )
