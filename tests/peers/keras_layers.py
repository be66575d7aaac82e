"""Keras models of one layer each, for every layer that has a twin in PyTorch.

A layer stands after a dense layer or a convolution, so that values of both signs reach it. Linear layers are also
alone: there, presets give them the rule of a first layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras

layers = keras.layers

# The embedding, and its node whose output is compared in place of the input.
_TOKENS = "tokens"
EMBEDDING = f"{_TOKENS}/GatherV2"

Make = Callable[[], Any]
Shape = tuple[int, ...]

_IMAGE: Shape = (6, 6, 3)
_SEQUENCE: Shape = (8, 3)
_VOLUME: Shape = (4, 4, 4, 2)

_LINEAR: dict[str, tuple[Make, Shape]] = {
    "Dense": (lambda: layers.Dense(4), (6,)),
    "Dense, no bias": (lambda: layers.Dense(4, use_bias=False), (6,)),
    "Dense on sequences": (lambda: layers.Dense(4), _SEQUENCE),
    "Dense on images": (lambda: layers.Dense(4), _IMAGE),
    "EinsumDense": (lambda: layers.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d"), _SEQUENCE),
    "TimeDistributed": (lambda: layers.TimeDistributed(layers.Dense(4)), _SEQUENCE),
    "Conv1D": (lambda: layers.Conv1D(4, 3), _SEQUENCE),
    "Conv1D, same, strides 2": (lambda: layers.Conv1D(4, 3, 2, "same"), _SEQUENCE),
    "Conv1D, causal, dilated": (lambda: layers.Conv1D(4, 3, padding="causal", dilation_rate=2), _SEQUENCE),
    "Conv2D": (lambda: layers.Conv2D(4, 3), _IMAGE),
    "Conv2D, no bias": (lambda: layers.Conv2D(4, 3, use_bias=False), _IMAGE),
    "Conv2D, same, strides 2": (lambda: layers.Conv2D(4, 3, 2, "same"), _IMAGE),
    "Conv2D, same, dilated": (lambda: layers.Conv2D(4, 3, padding="same", dilation_rate=2), _IMAGE),
    "Conv3D": (lambda: layers.Conv3D(3, 2), _VOLUME),
    "Conv3D, same, strides 2": (lambda: layers.Conv3D(3, 3, 2, "same"), _VOLUME),
    "Conv1DTranspose": (lambda: layers.Conv1DTranspose(4, 3), _SEQUENCE),
    "Conv1DTranspose, same, strides 2": (lambda: layers.Conv1DTranspose(4, 3, 2, "same"), _SEQUENCE),
    "Conv2DTranspose": (lambda: layers.Conv2DTranspose(4, 3, 2), _IMAGE),
    "Conv2DTranspose, same, strides 2": (lambda: layers.Conv2DTranspose(4, 3, 2, "same"), _IMAGE),
    "Conv3DTranspose": (lambda: layers.Conv3DTranspose(3, 2), _VOLUME),
    "Conv3DTranspose, same, strides 2": (lambda: layers.Conv3DTranspose(3, 3, 2, "same"), _VOLUME),
    "DepthwiseConv1D": (lambda: layers.DepthwiseConv1D(3, depth_multiplier=2), _SEQUENCE),
    "DepthwiseConv2D": (lambda: layers.DepthwiseConv2D(3), _IMAGE),
    "DepthwiseConv2D, same, strides 2": (lambda: layers.DepthwiseConv2D(3, 2, "same", 2), _IMAGE),
    "SeparableConv1D": (lambda: layers.SeparableConv1D(4, 3), _SEQUENCE),
    "SeparableConv2D": (lambda: layers.SeparableConv2D(4, 3, 2, "same"), _IMAGE),
    "MultiHeadAttention": (lambda: _Self(layers.MultiHeadAttention(2, 3)), (5, 6)),
    "GroupQueryAttention": (lambda: _Self(layers.GroupQueryAttention(3, 4, 2)), (5, 6)),
    "SimpleRNN": (lambda: layers.SimpleRNN(4, return_sequences=True), (3, 4)),
    "LSTM": (lambda: layers.LSTM(4), (3, 4)),
    "GRU": (lambda: layers.GRU(4), (3, 4)),
    "Bidirectional": (lambda: layers.Bidirectional(layers.SimpleRNN(4)), (3, 4)),
}

_ACTIVATIONS = (
    *("celu", "elu", "exponential", "gelu", "glu", "hard_shrink", "hard_sigmoid", "hard_swish", "hard_tanh"),
    *("leaky_relu", "linear", "log_sigmoid", "log_softmax", "mish", "relu", "relu6", "selu", "sigmoid", "silu"),
    *("soft_shrink", "softmax", "softplus", "softsign", "tanh", "tanh_shrink"),
)

_OTHERS: dict[str, tuple[Make, Shape]] = {
    **{f"Activation, {name}": (partial(layers.Activation, name), (6,)) for name in _ACTIVATIONS},
    "ELU": (layers.ELU, (6,)),
    "LeakyReLU": (layers.LeakyReLU, (6,)),
    "PReLU": (lambda: layers.PReLU(shared_axes=[1, 2]), _IMAGE),
    "ReLU": (layers.ReLU, _IMAGE),
    "ReLU up to 6": (lambda: layers.ReLU(6.0), _IMAGE),
    "Softmax": (layers.Softmax, (6,)),
    "BatchNormalization after Dense": (layers.BatchNormalization, (6,)),
    "BatchNormalization after Conv1D": (layers.BatchNormalization, _SEQUENCE),
    "BatchNormalization after Conv2D": (layers.BatchNormalization, _IMAGE),
    "BatchNormalization after Conv3D": (layers.BatchNormalization, _VOLUME),
    "BatchNormalization, no gamma": (lambda: layers.BatchNormalization(scale=False), _IMAGE),
    "LayerNormalization": (layers.LayerNormalization, _SEQUENCE),
    "LayerNormalization on images": (layers.LayerNormalization, _IMAGE),
    "GroupNormalization": (lambda: layers.GroupNormalization(2), (4, 4, 6)),
    "RMSNormalization": (layers.RMSNormalization, _SEQUENCE),
    "UnitNormalization": (layers.UnitNormalization, (6,)),
    "MaxPooling1D": (layers.MaxPooling1D, _SEQUENCE),
    "MaxPooling2D": (layers.MaxPooling2D, _IMAGE),
    "MaxPooling3D": (layers.MaxPooling3D, _VOLUME),
    "AveragePooling1D": (lambda: layers.AveragePooling1D(2), _SEQUENCE),
    "AveragePooling2D": (lambda: layers.AveragePooling2D(2), _IMAGE),
    "AveragePooling2D, same": (lambda: layers.AveragePooling2D(3, 1, "same"), _IMAGE),
    "AveragePooling3D": (lambda: layers.AveragePooling3D(2), _VOLUME),
    "AdaptiveMaxPooling2D": (lambda: layers.AdaptiveMaxPooling2D(4), _IMAGE),
    "AdaptiveAveragePooling1D": (lambda: layers.AdaptiveAveragePooling1D(3), _SEQUENCE),
    "AdaptiveAveragePooling2D": (lambda: layers.AdaptiveAveragePooling2D(4), _IMAGE),
    "GlobalMaxPooling1D": (layers.GlobalMaxPooling1D, _SEQUENCE),
    "GlobalMaxPooling2D": (layers.GlobalMaxPooling2D, _IMAGE),
    "GlobalMaxPooling3D": (layers.GlobalMaxPooling3D, _VOLUME),
    "GlobalAveragePooling1D": (layers.GlobalAveragePooling1D, _SEQUENCE),
    "GlobalAveragePooling2D": (layers.GlobalAveragePooling2D, _IMAGE),
    "GlobalAveragePooling3D": (layers.GlobalAveragePooling3D, _VOLUME),
    "Flatten": (layers.Flatten, _IMAGE),
    "Reshape": (lambda: layers.Reshape((9, 12)), _IMAGE),
    "Permute": (lambda: layers.Permute((3, 1, 2)), _IMAGE),
    "RepeatVector": (lambda: layers.RepeatVector(3), (6,)),
    "Cropping1D": (lambda: layers.Cropping1D((1, 2)), _SEQUENCE),
    "Cropping2D": (lambda: layers.Cropping2D(((1, 2), (0, 1))), _IMAGE),
    "Cropping3D": (lambda: layers.Cropping3D(((1, 0), (0, 1), (1, 1))), _VOLUME),
    "ZeroPadding1D": (lambda: layers.ZeroPadding1D((1, 2)), _SEQUENCE),
    "ZeroPadding2D": (lambda: layers.ZeroPadding2D(((1, 2), (0, 1))), _IMAGE),
    "ZeroPadding3D": (lambda: layers.ZeroPadding3D(((1, 0), (0, 1), (1, 1))), _VOLUME),
    "UpSampling1D": (layers.UpSampling1D, _SEQUENCE),
    "UpSampling2D": (layers.UpSampling2D, _IMAGE),
    "UpSampling2D, bilinear": (lambda: layers.UpSampling2D(interpolation="bilinear"), _IMAGE),
    "UpSampling3D": (layers.UpSampling3D, _VOLUME),
    "Attention": (lambda: _Self(layers.Attention()), (5, 6)),
    "Rescaling": (lambda: layers.Rescaling(0.5, 0.25), _IMAGE),
    "Identity": (layers.Identity, (6,)),
    "ActivityRegularization": (layers.ActivityRegularization, (6,)),
    "Dropout": (lambda: layers.Dropout(0.5), (6,)),
    "SpatialDropout1D": (lambda: layers.SpatialDropout1D(0.5), _SEQUENCE),
    "SpatialDropout2D": (lambda: layers.SpatialDropout2D(0.5), _IMAGE),
    "SpatialDropout3D": (lambda: layers.SpatialDropout3D(0.5), _VOLUME),
    "AlphaDropout": (lambda: layers.AlphaDropout(0.5), (6,)),
    "GaussianDropout": (lambda: layers.GaussianDropout(0.5), (6,)),
    "GaussianNoise": (lambda: layers.GaussianNoise(0.5), (6,)),
}

# Layers of several inputs, and how many they get.
_MERGES: dict[str, tuple[Make, int]] = {
    "Add": (layers.Add, 3),
    "Average": (layers.Average, 2),
    "Concatenate": (layers.Concatenate, 2),
    "Dot": (lambda: layers.Dot(1), 2),
    "Maximum": (layers.Maximum, 2),
    "Minimum": (layers.Minimum, 2),
    "Multiply": (layers.Multiply, 2),
    "Subtract": (layers.Subtract, 2),
}


class _Self:
    """Calls a layer with one tensor as its query and its value."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, x: Any) -> Any:
        is_dot = isinstance(self._layer, layers.Attention)
        return self._layer([x, x]) if is_dot else self._layer(x, x)


def _before(rank: int, channels: int) -> Any:
    """Returns the layer that stands before others."""
    if rank == 2:
        return layers.Dense(channels)
    return getattr(layers, f"Conv{rank - 2}D")(channels, 2, padding="same")


def _alone(make: Make, shape: Shape) -> Make:
    def build() -> Any:
        x = keras.Input(shape)
        return keras.Model(x, make()(x))

    return build


def _after_another(make: Make, shape: Shape) -> Make:
    def build() -> Any:
        x = keras.Input(shape)
        return keras.Model(x, make()(_before(len(shape) + 1, shape[-1])(x)))

    return build


def _merging(make: Make, count: int) -> Make:
    def build() -> Any:
        x = keras.Input((5,))
        hidden = layers.Dense(6)(x)
        return keras.Model(x, make()([layers.Dense(4)(hidden) for _ in range(count)]))

    return build


def _merged(name: str, shape: Shape) -> Make:
    """Returns a model of a linear layer and a batch norm after it."""

    def build() -> Any:
        x = keras.Input(shape)
        return keras.Model(x, layers.BatchNormalization()(_LINEAR[name][0]()(x)))

    return build


def _embedding() -> Any:
    x = keras.Input((5,), dtype="int32")
    return keras.Model(x, layers.Dense(4)(layers.Embedding(7, 6, name=_TOKENS)(x)))


_BEFORE_BATCH_NORM = ("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose", "DepthwiseConv2D", "SeparableConv2D")

LAYERS: dict[str, Make] = {
    **{f"{name} (first)": _alone(make, shape) for name, (make, shape) in _LINEAR.items()},
    **{name: _after_another(make, shape) for name, (make, shape) in (_LINEAR | _OTHERS).items()},
    **{f"BatchNormalization after {name}": _merged(name, _LINEAR[name][1]) for name in _BEFORE_BATCH_NORM},
    **{name: _merging(make, count) for name, (make, count) in _MERGES.items()},
    "Embedding": _embedding,
}
