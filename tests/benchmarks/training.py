"""Contenders of the rows `sessions`: training steps, remote layers and gradients of Keras models, here and on a server.

Both sides of a pair make the same model with the same weights, and take and return NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import gradrule as gr
from tests.benchmarks.driver_loop import Contender

LOCAL = ("keras", "local layer", "local gradient")
"""Kinds of contenders that need no server."""
KINDS = ("training session", "remote layer", "gradient", *LOCAL)
_TIMEOUT_S = 600.0
_RATE = 1e-3


class _Calls:
    """A contender that makes one call after the other. `kept`: what must live as long as the contender."""

    def __init__(self, call: Callable[[], object], kept: object = None) -> None:
        self.call = call
        self._kept = kept

    def many(self, count: int, in_flight: int) -> object:
        raise ValueError("training steps of one model run one after the other")


def contender(kind: str, work: str, target: str) -> Contender:
    """Returns a contender, ready to be called.

    kind: one of `KINDS`. target: the server; those of `LOCAL` ignore it. work: name of a model, see `_model`.
    """
    import keras

    keras.utils.set_random_seed(0)
    layers, x, t = _model(work)
    if kind.endswith("gradient"):
        model = keras.Sequential([keras.layers.Input(x.shape[1:]), *layers])
        return _gradient(model, x, target if kind == "gradient" else "")
    if kind == "remote layer":
        # The first layer stays here, so that the remote one has a gradient by its input.
        layers = [layers[0], gr.keras.RemoteLayer(layers[1:], gr.connect(target, timeout=_TIMEOUT_S))]
    model = keras.Sequential([keras.layers.Input(x.shape[1:]), *layers])
    if kind == "training session":
        return _session(model, x, t, target)
    model.compile(optimizer=keras.optimizers.Adam(_RATE), loss="mse")
    return _Calls(lambda: model.train_on_batch(x, t))


def _session(model: Any, x: np.ndarray, t: np.ndarray, target: str) -> Contender:
    import tensorflow as tf

    def loss(x: Any, t: Any) -> dict[str, Any]:
        return {"loss": tf.reduce_mean(tf.square(model(x, training=True) - t))}

    graph = gr.trace(
        loss, *(tf.TensorSpec([None, *array.shape[1:]], array.dtype, name=n) for n, array in (("x", x), ("t", t)))
    )
    client = gr.connect(target, timeout=_TIMEOUT_S)
    session = client.session(graph)
    session.__enter__()
    optimizer = gr.optimizers.Adam(_RATE)
    return _Calls(lambda: session.step({"x": x, "t": t}, "loss", optimizer).loss, (client, session))


def _gradient(model: Any, x: np.ndarray, target: str) -> Contender:
    import tensorflow as tf

    spec = tf.TensorSpec([None, *x.shape[1:]], x.dtype, name="x")
    if target:
        client = gr.connect(target, timeout=_TIMEOUT_S)
        graph = gr.trace(lambda x: {"y": model(x)}, spec)
        program = client.compile(graph, ys=["y"], xs=["x"])
        return _Calls(lambda: program.evaluate({"x": x}).gradients["x"], client)

    @tf.function(input_signature=[spec])
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x)
        return tape.gradient(y, x)

    return _Calls(lambda: gradient(tf.constant(x)).numpy())


def _model(name: str) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Returns the layers of a model, and a batch of inputs and targets."""
    import keras
    from keras import layers

    draw = np.random.default_rng(0).normal

    def batch(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        return draw(size=inputs).astype(np.float32), draw(size=outputs).astype(np.float32)

    match name:
        case "dense":
            return [layers.Dense(16, activation="relu"), layers.Dense(10)], *batch((32, 32), (32, 10))
        case "cnn":
            convolutions = [layers.Conv2D(width, 3, activation="relu") for width in (16, 32, 32)]
            rest = [layers.GlobalAveragePooling2D(), layers.Dense(10)]
            return [*convolutions, *rest], *batch((32, 28, 28, 1), (32, 10))
        case "resnet50":
            network = keras.applications.ResNet50(weights=None, input_shape=(96, 96, 3), classifier_activation=None)
            return [network], *batch((8, 96, 96, 3), (8, 1000))
        case "lstm":
            return [layers.LSTM(64)], *batch((32, 50, 64), (32, 64))
        case _:
            raise ValueError(f"there is no model {name!r}")
