"""Frozen Keras layers, plain and with an override, give the results of local TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.service.structures import Structure, Table, check, values

TABLE: Table = {}
SEQUENCE = {"x": values(2, 5, 3).astype(np.float32)}


def freeze(make: Callable[[], Any], *, training: bool = False) -> Any:
    """Returns the GraphDef of a Keras model with its variables as constants."""
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    tf.keras.utils.set_random_seed(1)
    model = make()
    spec = tf.TensorSpec([None, *SEQUENCE["x"].shape[1:]], tf.float32, name="x")
    concrete = tf.function(lambda x: model(x, training=training), autograph=False).get_concrete_function(spec)
    constant = convert_variables_to_constants_v2(concrete, lower_control_flow=False).graph.as_graph_def()
    with tf.Graph().as_default() as graph:
        (result,) = tf.import_graph_def(constant, name="", return_elements=["Identity:0"])
        tf.identity(result, name="y")
    return graph.as_graph_def()


def register_layers(name: str, op_type: str, *layers: Callable[[], Any], training: bool = False, **more: Any) -> None:
    """Registers a model of these layers."""

    def make() -> Any:
        return freeze(lambda: tf.keras.Sequential([layer() for layer in layers]), training=training)

    TABLE[name] = Structure(make, SEQUENCE, ["x"], op_type, tolerance=1e-4, **more)


def recurrent(kind: str, **words: Any) -> Callable[[], Any]:
    return lambda: getattr(tf.keras.layers, kind)(4, return_sequences=True, **words)


for kind in ("LSTM", "GRU", "SimpleRNN"):
    register_layers(kind, "Tanh", recurrent(kind))
    register_layers(f"{kind} unrolled", "Tanh", recurrent(kind, unroll=True))
register_layers("LSTM backwards", "Sigmoid", recurrent("LSTM", go_backwards=True))
register_layers("bidirectional LSTM", "Sigmoid", lambda: tf.keras.layers.Bidirectional(recurrent("LSTM")()))
register_layers(
    "bidirectional GRU", "Tanh", lambda: tf.keras.layers.Bidirectional(recurrent("GRU")(), merge_mode="sum")
)
register_layers(
    "layer norm and softmax",
    "Softmax",
    tf.keras.layers.LayerNormalization,
    tf.keras.layers.Softmax,
    # Gradients of the sum of a softmax are zero.
    lambda: tf.keras.layers.Dense(2),
)
register_layers("batch norm, inference", "Relu", tf.keras.layers.ReLU, tf.keras.layers.BatchNormalization)
register_layers(
    "convolution and pooling",
    "Relu",
    lambda: tf.keras.layers.Conv1D(4, 2, activation="relu"),
    lambda: tf.keras.layers.MaxPooling1D(2),
)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_structure_equals_tensorflow(client: Any, name: str) -> None:
    check(client, TABLE[name])
