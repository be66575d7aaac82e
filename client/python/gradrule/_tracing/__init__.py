"""Makes graphs from TensorFlow functions, Keras models and SavedModels.

TensorFlow is imported at the first call; no other package of the client but `keras` imports it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradrule.errors import UnsupportedError

if TYPE_CHECKING:
    from gradrule._builder.graph import Graph


def trace(fn: Any, /, *specs: Any, **kwspecs: Any) -> Graph:
    """Traces a Python function, `tf.function`, Keras model or `ConcreteFunction` to a graph.

    Inputs become placeholders named after the arguments (`x`; `x_0`, `x_key` within structures). Outputs get aliases:
    `output`, `output_0`, … or the keys of a dict (`output_x` if `x` is an input or a variable). Variables that the
    function uses are in `graph.variables`, by name; Keras's by `variable.path`. Lookup tables become functions of
    constants, with the entries that the tables have now. A `tf.custom_gradient` becomes a region with a rule, named
    after the Python function; so does a gradient registered in this process.

    Args:
        fn: the function or model to trace.
        specs: one per positional argument: `tf.TensorSpec`, `gr.TensorSpec`, `(dtype, shape)`, an example array, or
            lists, tuples and dicts of these. Ragged and sparse specs become their component tensors. Numbers, strings
            and None are passed unchanged, but dtypes without a shape are refused. None for a `tf.function` with a
            signature and for a `ConcreteFunction`.
        kwspecs: the same for keyword arguments.

    Returns:
        The graph, with aliases and variables.

    Raises:
        UnsupportedError: TensorFlow is not installed, or the function uses resources that a graph cannot hold, such as
            iterators and queues, or changes a lookup table.
        InvalidGraphError: `fn` cannot be traced with these specs.
    """
    require("trace")
    from gradrule._tracing import functions

    if functions.is_keras_model(fn):
        from gradrule._tracing import keras_models

        return keras_models.from_keras(fn, specs, **kwspecs)
    return functions.trace(fn, specs, kwspecs)


def from_keras(model: Any, /, *specs: Any, training: bool = False) -> Graph:
    """Traces a Keras model to a graph.

    Inputs and outputs get Keras's names as aliases. Variables have the paths and the order of `model.variables`. Nodes
    of a layer are in the scope of its name; nodes of a nested model's layers in `model/layer`. A layer's
    path (`conv1`, `model/layer`) names its output, wherever a tensor's name is valid.

    Args:
        model: a Keras model.
        specs: as for `trace`; only subclassed models need them.
        training: as in `model(x, training=…)`; the graph then holds the assignments of moving averages too.

    Returns:
        The graph, with aliases, variables and `layers`.

    Raises:
        UnsupportedError, InvalidGraphError: as `trace`.
    """
    require("from_keras")
    from gradrule._tracing import keras_models

    return keras_models.from_keras(model, specs, training=training)


def load_saved_model(folder: Path, signature: str) -> Graph:
    """Loads the graph of one signature of a SavedModel."""
    require("load", f"{folder} is a SavedModel; ")
    from gradrule._tracing import saved_models

    return saved_models.load(folder, signature)


def load_keras(path: Path) -> Graph:
    """Loads the graph of a model in a `.keras` or `.h5` file, in inference mode."""
    require("load", f"{path} is a Keras file; ")
    from gradrule._tracing import keras_models

    return keras_models.load(path)


def require(what: str, why: str = "") -> None:
    """Raises `UnsupportedError` with the command that installs TensorFlow, if it is missing for `gr.{what}`."""
    if importlib.util.find_spec("tensorflow") is None:
        raise UnsupportedError(
            f"{why}gr.{what} needs TensorFlow, which is not installed here: pip install tensorflow (or tensorflow-cpu)"
        )
