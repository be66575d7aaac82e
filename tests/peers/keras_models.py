"""Whole Keras models for the comparison with zennit: builds them, and writes them for a process without Keras.

python -m tests.peers.keras_models FOLDER writes models/NAME.json (layers and their inputs) and models/NAME.npz
(weights, an input and the outputs) for each model. Values are float64, but for layers that have no float64 on CPUs.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from tests.peers.keras_layers import LAYERS

Array = NDArray[Any]
layers = keras.layers

_SIZE, _CLASSES = 48, 10
# Batch norms get the moving averages of a batch; one example of it is compared, two of models of one layer.
_BATCH = 4


class AddPositions(keras.layers.Layer):  # type: ignore[misc]
    """Adds a learned vector per position."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.positions = self.add_weight(shape=shape[1:], name="positions")

    def call(self, x: Any) -> Any:
        return x + self.positions


class AddToken(keras.layers.Layer):  # type: ignore[misc]
    """Puts a learned vector before the first position."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.token = self.add_weight(shape=(1, 1, shape[-1]), name="token")

    def call(self, x: Any) -> Any:
        token = keras.ops.broadcast_to(self.token, (keras.ops.shape(x)[0], 1, x.shape[-1]))
        return keras.ops.concatenate([token, x], axis=1)


class FirstPosition(keras.layers.Layer):  # type: ignore[misc]
    """Takes the vector of the first position."""

    def call(self, x: Any) -> Any:
        return x[:, 0]


def _application(name: str) -> Callable[[], Any]:
    def make() -> Any:
        shape = (_SIZE, _SIZE, 3)
        build = getattr(keras.applications, name)
        return build(weights=None, input_shape=shape, classes=_CLASSES, classifier_activation=None)

    return make


def _convnext() -> Any:
    """Returns ConvNeXtTiny; its grouped convolutions are depthwise ones, as TensorFlow has float64 gradients of these.

    With a group per channel, both compute the same.
    """

    def depthwise(layer: Any) -> Any:
        config = layer.get_config()
        if config.get("groups", 1) == 1:
            return type(layer).from_config(config)
        return layers.DepthwiseConv2D(config["kernel_size"], padding=config["padding"], name=config["name"])

    return keras.models.clone_model(_application("ConvNeXtTiny")(), clone_function=depthwise)


def _vgg16() -> Any:
    """Returns VGG16 with smaller dense layers, which hold nine tenths of its weights."""
    base = keras.applications.VGG16(weights=None, input_shape=(_SIZE, _SIZE, 3), include_top=False)
    x = layers.Flatten()(base.output)
    x = layers.Dense(128, activation="relu")(x)
    return keras.Model(base.input, layers.Dense(_CLASSES)(layers.Dense(128, activation="relu")(x)))


def _vision_transformer() -> Any:
    """Returns a ViT: patches, a class token, blocks that normalize first."""
    images = keras.Input((32, 32, 3))
    x = layers.Conv2D(48, 8, strides=8)(images)
    x = AddPositions()(AddToken()(layers.Reshape((-1, 48))(x)))
    for _ in range(4):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 12)(normal, normal)])
        hidden = layers.Dense(96, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(48)(hidden)])
    return keras.Model(images, layers.Dense(_CLASSES)(FirstPosition()(layers.LayerNormalization()(x))))


def _bert() -> Any:
    """Returns a BERT-like encoder after its embeddings: blocks that normalize last, and a pooler."""
    embeddings = keras.Input((16, 48))
    x = layers.LayerNormalization()(AddPositions()(embeddings))
    for _ in range(4):
        x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(4, 12)(x, x)]))
        hidden = layers.Dense(48)(layers.Dense(96, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, hidden]))
    return keras.Model(embeddings, layers.Dense(_CLASSES)(layers.Dense(48, activation="tanh")(FirstPosition()(x))))


_APPLICATIONS = ("ResNet50", "MobileNetV2", "EfficientNetB0", "DenseNet121")
MODELS: dict[str, Callable[[], Any]] = {
    "VGG16": _vgg16,
    **{name: _application(name) for name in _APPLICATIONS},
    "ConvNeXtTiny": _convnext,
    "ViT": _vision_transformer,
    "BERT": _bert,
}
MODELS_AND_LAYERS = MODELS | LAYERS
# Models that normalize pixels themselves.
_TAKE_PIXELS = ("EfficientNetB0", "ConvNeXtTiny")
# On CPUs TensorFlow has no float64 pooling of volumes, and it resizes in float32.
_FLOAT32 = ("MaxPooling3D", "AveragePooling3D", "UpSampling2D, bilinear")


def model_and_input(name: str) -> tuple[Any, Array]:
    """Returns a model and an input, the same at every call, with random weights that keep activations in range."""
    keras.backend.clear_session()
    dtype = "float32" if name in _FLOAT32 else "float64"
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    random = np.random.default_rng(zlib.crc32(name.encode()))
    # Before the layers are made: each dropout takes its seed then.
    keras.utils.set_random_seed(1)
    model = MODELS_AND_LAYERS[name]()
    shape = (_BATCH, *model.input_shape[1:])
    if "int" in model.inputs[0].dtype:
        x = random.integers(0, 7, shape, np.int32)
    else:
        x = random.normal(size=shape).astype(dtype)
    if name in _TAKE_PIXELS:
        x = 128 + 50 * x
    for variable in model.weights:
        if keras.backend.is_float_dtype(variable.dtype):
            variable.assign(_random_weight(variable, random))
    norms = [layer for layer in model.layers if isinstance(layer, layers.BatchNormalization)]
    for norm in norms:
        norm.momentum = 0.0
    if norms:
        # The moving averages become those of this batch.
        model(x, training=True)
    return model, x[: 2 if name in LAYERS else 1]


def _random_weight(variable: Any, random: np.random.Generator) -> Array:
    value = random.normal(size=variable.shape)
    name = variable.path.rpartition("/")[2]
    if name.endswith("kernel"):
        shape = variable.shape
        # A kernel of attention's queries, keys and values is (inputs, heads, outputs).
        parts = shape[:1] if len(shape) == 3 and "attention_output" not in variable.path else shape[:-1]
        fan_in = np.prod(shape[:2] if "depthwise" in variable.path and shape[-1] == 1 else parts)
        return value * np.sqrt(2 / fan_in)
    if name == "gamma":
        return 1 + 0.1 * value
    if name == "variable":
        # ConvNeXt's scale of a layer.
        return 0.2 + 0.05 * value
    if "variance" in name or name == "scale":
        return random.uniform(0.5, 1.5, variable.shape)
    return value if name in ("positions", "token") else 0.1 * value


def exported(model: Any) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """Returns the steps of a functional model, each after its inputs, and their weights."""
    steps: list[dict[str, Any]] = []
    weights: dict[str, Array] = {}
    results: dict[int, str] = {id(model.inputs[0]): "input"}

    def visit(tensor: Any) -> str:
        """Returns the name of the step that computes a tensor, after those that it needs."""
        if id(tensor) in results:
            return results[id(tensor)]
        history = tensor._keras_history
        node = history.operation._inbound_nodes[history.node_index]
        inputs = [visit(item) for item in node.input_tensors]
        for operation in _operations(history.operation):
            name = f"{len(steps)}"
            for key, value in _weights(operation):
                weights[f"{name}/{key}"] = value
            config = json.loads(json.dumps(operation.get_config(), default=str)) if _is_layer(operation) else {}
            steps.append({"name": name, "kind": type(operation).__name__, "config": config, "inputs": inputs})
            inputs = [name]
        results[id(tensor)] = inputs[0]
        return inputs[0]

    visit(model.outputs[0])
    return steps, weights


def _is_layer(operation: Any) -> bool:
    return isinstance(operation, layers.Layer)


def _operations(operation: Any) -> Iterator[Any]:
    if isinstance(operation, keras.Sequential):
        yield from operation.layers
    else:
        yield operation


def _weights(operation: Any) -> Iterator[tuple[str, Array]]:
    if not _is_layer(operation):
        return
    if isinstance(operation, layers.Normalization):
        # They are constants if the layer was made with them.
        yield "mean", np.asarray(operation.mean).astype(np.float64).ravel()
        yield "variance", np.asarray(operation.variance).astype(np.float64).ravel()
        return
    for variable in operation.weights:
        yield variable.path.rpartition(f"{operation.name}/")[2], np.asarray(variable)


def main() -> None:
    folder = Path(sys.argv[1]) / "models"
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or MODELS_AND_LAYERS:
        model, x = model_and_input(name)
        steps, weights = exported(model)
        outputs = np.asarray(model(x))
        description = {"steps": steps, "is_layer": name in LAYERS}
        (folder / f"{name}.json").write_text(json.dumps(description) + "\n")
        np.savez(folder / f"{name}.npz", input=x, outputs=outputs, **weights)
        print(f"{name}: {model.count_params():,} weights, outputs up to {np.abs(outputs).max():.3g}", flush=True)


if __name__ == "__main__":
    main()
