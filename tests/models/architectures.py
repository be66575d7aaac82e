"""Models of the sizes and kinds that people have, with random weights and small inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.models.substitution import Substitution

layers = keras.layers

RELU = Substitution("Relu", tf.nn, "relu")
RELU6 = Substitution("Relu6", tf.nn, "relu6")
SIGMOID = Substitution("Sigmoid", tf.nn, "sigmoid")
TANH = Substitution("Tanh", tf.math, "tanh")


def _gelu(erfc: Callable[[Any], Any]) -> Callable[..., Any]:
    def gelu(features: Any, approximate: bool = False) -> Any:
        assert not approximate
        return 0.5 * features * erfc(-features * tf.cast(0.7071067811865476, features.dtype))

    return gelu


ERFC = Substitution("Erfc", tf.nn, "gelu", own=tf.math.erfc, around=_gelu)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model, what it is fed with, and the ops whose gradient rules replace.

    make: a Keras model. shape: of one example. vocabulary: of models that take numbers of words, and so have no
    gradient by the input; 0 for others.
    """

    name: str
    make: Callable[[], Any]
    shape: tuple[int, ...]
    activation: Substitution
    vocabulary: int = 0

    def model(self) -> Any:
        """The model, the same at every call; no weight, moving average or bias is all zeros or all ones."""
        keras.utils.set_random_seed(7)
        made = self.make()
        rng = np.random.default_rng(7)
        for variable in made.variables:
            value = np.asarray(variable)
            if value.size and np.issubdtype(value.dtype, np.floating) and np.ptp(value) == 0:
                variable.assign(value + rng.uniform(0.0, 0.3, value.shape).astype(value.dtype))
        return made

    def example(self, count: int = 2) -> Any:
        """A batch for the model."""
        rng = np.random.default_rng(11)
        if self.vocabulary:
            return rng.integers(0, self.vocabulary, (count, *self.shape)).astype(np.int32)
        return rng.normal(size=(count, *self.shape)).astype(np.float32)


def _application(name: str, size: int, activation: Substitution) -> Architecture:
    def make() -> Any:
        builder = getattr(keras.applications, name)
        return builder(weights=None, input_shape=(size, size, 3), classes=10, classifier_activation=None)

    return Architecture(name, make, (size, size, 3), activation)


def _transformer() -> Any:
    tokens = keras.Input((12,), dtype="int32", name="tokens")
    x = layers.Embedding(50, 16, name="words")(tokens)
    x = x + layers.Embedding(12, 16, name="places")(keras.ops.arange(12))
    for index in range(2):
        attended = layers.MultiHeadAttention(2, 8, name=f"attention_{index}")(x, x, use_causal_mask=index == 1)
        x = layers.LayerNormalization(name=f"norm_{index}")(x + attended)
        hidden = layers.Dense(32, activation="relu", name=f"up_{index}")(x)
        x = layers.LayerNormalization(name=f"last_norm_{index}")(x + layers.Dense(16, name=f"down_{index}")(hidden))
    return keras.Model(tokens, layers.Dense(5, name="head")(layers.GlobalAveragePooling1D()(x)), name="transformer")


def _recurrent(cell: Any) -> Any:
    steps = keras.Input((9, 6), name="steps")
    x = cell(12, return_sequences=True, name="first")(steps)
    return keras.Model(steps, layers.Dense(4, name="head")(cell(8, name="second")(x)), name="recurrent")


ARCHITECTURES = [
    _application("MobileNetV3Small", 32, RELU6),
    Architecture("Transformer", _transformer, (12,), RELU, vocabulary=50),
    Architecture("LSTM", lambda: _recurrent(layers.LSTM), (9, 6), TANH),
    Architecture("GRU", lambda: _recurrent(layers.GRU), (9, 6), SIGMOID),
    _application("VGG16", 32, RELU),
    _application("ResNet50", 32, RELU),
    _application("ResNet50V2", 32, RELU),
    _application("EfficientNetB0", 32, SIGMOID),
    _application("DenseNet121", 32, RELU),
    _application("InceptionV3", 75, RELU),
    _application("Xception", 71, RELU),
    _application("NASNetMobile", 32, RELU),
    _application("ConvNeXtTiny", 32, ERFC),
]
