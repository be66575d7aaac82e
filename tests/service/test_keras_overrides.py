"""Overrides of Keras models by layer, class and op type give the gradients of local models with rewritten layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr

layers = keras.layers

IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32)
ROWS = np.random.default_rng(1).normal(size=(3, 5, 4)).astype(np.float32)
WEIGHTS = np.array([1.0, -2.0, 3.0, 0.5, 2.0], np.float32)
CLOSE = {"rtol": 2e-4, "atol": 1e-5}


@tf.custom_gradient
def guided(x: Any) -> Any:
    y = tf.nn.relu(x)
    return y, lambda dy: tf.where((dy > 0) & (x > 0), dy, tf.zeros_like(dy))


@tf.custom_gradient
def straight_gelu(x: Any) -> Any:
    return tf.nn.gelu(x), lambda dy: 3 * dy


@tf.custom_gradient
def straight_tanh(x: Any) -> Any:
    return tf.tanh(x), lambda dy: dy


class Doubling(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Multiplies the upstream gradient by 2."""

    def call(self, x: Any, **more: Any) -> Any:
        inside = super().call

        @tf.custom_gradient
        def doubled(v: Any) -> Any:
            return inside(v, training=False), lambda dy, variables=None: (2 * dy, [None] * len(variables or ()))

        return doubled(x)


class Relevance(keras.layers.Dense):  # type: ignore[misc]
    """Implements lrp_epsilon: x * W(dy / (z + eps sign(z)))."""

    def call(self, x: Any, **more: Any) -> Any:
        kernel, bias = self.kernel.value, self.bias.value

        @tf.custom_gradient
        def layer(v: Any) -> Any:
            z = v @ tf.stop_gradient(kernel) + tf.stop_gradient(bias)

            def backward(dy: Any, variables: Any = None) -> Any:
                shares = dy / tf.where(z >= 0, z + 0.01, z - 0.01)
                return v * (shares @ tf.transpose(kernel)), [None] * len(variables or ())

            return z, backward

        return layer(x)


def vgg(relu: Any = "relu", first: Any = None, dense: Any = layers.Dense) -> Any:
    def conv(filters: int, name: str, activation: Any) -> Any:
        bias = keras.initializers.RandomNormal(seed=4)
        return layers.Conv2D(filters, 3, padding="same", activation=activation, name=name, bias_initializer=bias)

    return keras.Sequential(
        [
            keras.Input((8, 8, 3), name="image"),
            conv(4, "block1_conv1", first or relu),
            conv(4, "block1_conv2", relu),
            layers.MaxPooling2D(name="block1_pool"),
            conv(6, "block2_conv1", relu),
            layers.Flatten(name="flatten"),
            dense(5, name="scores", bias_initializer=keras.initializers.RandomNormal(seed=5)),
        ]
    )


def resnet(
    relu: Any = tf.nn.relu, last: Any = None, norm: Any = layers.BatchNormalization, smooth: Any = tf.nn.gelu
) -> Any:
    """Builds residual blocks, a nested model used twice, and a layer used once."""
    image = keras.Input((8, 8, 3), name="image")
    x = layers.Conv2D(4, 3, padding="same", name="stem")(image)
    block = keras.Sequential(
        [
            layers.Conv2D(4, 3, padding="same", name="conv", use_bias=False),
            norm(name="norm", gamma_initializer=keras.initializers.RandomNormal(1.0, seed=6)),
            layers.Activation(relu, name="relu"),
        ],
        name="block",
    )
    for step in range(2):
        x = layers.Add(name=f"add{step}")([block(x), x])
        x = layers.Activation(relu if step == 0 else last or relu, name=f"out{step}")(x)
    shared = layers.Activation(smooth, name="smooth")
    x = shared(layers.GlobalAveragePooling2D(name="pool")(shared(x)))
    return keras.Model(image, layers.Dense(3, name="scores")(x))


def recurrent(activation: Any = "tanh") -> Any:
    return keras.Sequential(
        [
            keras.Input((5, 4), name="rows"),
            layers.LSTM(3, activation=activation, name="lstm"),
            layers.Dense(2, name="top"),
        ]
    )


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self, relu: Any = tf.nn.relu) -> None:
        super().__init__()
        self.conv = layers.Conv2D(4, 3, name="conv")
        self.relu = layers.Activation(relu, name="relu")
        self.top = layers.Dense(2, name="top")

    def call(self, x: Any) -> Any:
        return self.top(tf.reduce_mean(self.relu(self.conv(x)), [1, 2]))


ACTIVATIONS = layers.Activation

# Cases: the overridden model, the rules, and the same model with rewritten layers.
CASES: dict[str, tuple[Callable[[], Any], Any, Callable[[], Any]]] = {
    "op type": (vgg, {"Relu": "guided_relu"}, lambda: vgg(guided)),
    "op type in a layer": (vgg, {("block1_conv1", "Relu"): "guided_relu"}, lambda: vgg(first=guided)),
    "op type in a class": (vgg, {(layers.Conv2D, "Relu"): "guided_relu"}, lambda: vgg(guided)),
    "glob": (vgg, {("block*", "Relu"): "guided_relu"}, lambda: vgg(guided)),
    "all but the first": (
        vgg,
        {("block1_conv1", "Relu"): "default", "Relu": "guided_relu"},
        lambda: vgg(guided, first="relu"),
    ),
    "dense": (vgg, {layers.Dense: ("lrp_epsilon", {"eps": 0.01})}, lambda: vgg(dense=Relevance)),
    "dense as a pattern": (
        vgg,
        {("scores", ("@linear", "@bias")): ("lrp_epsilon", {"eps": 0.01})},
        lambda: vgg(dense=Relevance),
    ),
    "class": (
        resnet,
        {"smooth": gr.Rule("3 * dy"), ACTIVATIONS: "guided_relu"},
        lambda: resnet(guided, smooth=straight_gelu),
    ),
    "all but the last": (
        resnet,
        {"out1": "default", "smooth": "default", ACTIVATIONS: "guided_relu"},
        lambda: resnet(guided, last=tf.nn.relu),
    ),
    "nested": (resnet, {"block/norm": gr.Rule("first(2 * dy)")}, lambda: resnet(norm=Doubling)),
    "by its own name": (resnet, {"norm": gr.Rule("first(2 * dy)")}, lambda: resnet(norm=Doubling)),
    "nested class": (
        resnet,
        {layers.BatchNormalization: gr.Rule("first(2 * dy)")},
        lambda: resnet(norm=Doubling),
    ),
    "in a loop": (recurrent, {("lstm", "Tanh"): gr.Rule("dy")}, lambda: recurrent(straight_tanh)),
    "in a cell": (recurrent, {("lstm/lstm_cell", "Tanh"): gr.Rule("dy")}, lambda: recurrent(straight_tanh)),
    "subclassed": (Subclassed, {"relu": "guided_relu"}, lambda: Subclassed(guided)),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    keras.utils.set_random_seed(2)


def frozen(graph: gr.Graph, folder: Path) -> gr.Graph:
    graph.save(folder / "model.pb", freeze=True)
    return gr.load(folder / "model.pb")


def local_gradient(model: Any, feed: Any) -> Any:
    x = tf.constant(feed)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(model(x) * WEIGHTS[: model(x).shape[-1]])
    return tape.gradient(y, x).numpy()


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_the_rewritten_model(client: Any, tmp_path: Path, name: str) -> None:
    build, rules, rewrite = CASES[name]
    feed = ROWS if build is recurrent else IMAGES
    model, reference = build(), rewrite()
    expected_plain, _ = local_gradient(model, feed), reference(feed)
    reference.set_weights(model.get_weights())
    graph = gr.from_keras(model, feed[:0]) if build is Subclassed else gr.from_keras(model)
    (x,), (y,) = graph.inputs, graph.outputs
    weights = np.tile(WEIGHTS[: model(feed).shape[-1]], (len(feed), 1))
    overrides = gr.keras.overrides(graph, rules)
    # A subclassed model's graph contains the batch size of its example.
    graph = gr.from_keras(model, ("float32", [None, *feed.shape[1:]])) if build is Subclassed else graph
    found = client.evaluate(
        frozen(graph, tmp_path), {x: feed}, ys=[y], xs=[x], grad_ys={y: weights}, overrides=overrides
    )
    expected = local_gradient(reference, feed)
    np.testing.assert_allclose(found.gradients[x], expected, **CLOSE)
    assert not np.allclose(expected, expected_plain, **CLOSE)


def test_params_by_label_reach_layers(client: Any, tmp_path: Path) -> None:
    graph = gr.from_keras(resnet())
    overrides = gr.keras.overrides(graph, {layers.BatchNormalization: gr.Rule("first(k * dy)", params={"k": 1.0})})
    program = client.compile(frozen(graph, tmp_path), ys=["scores"], xs=["image"], overrides=overrides)
    one, two = (
        program.evaluate({"image": IMAGES}, params={"BatchNormalization": {"k": k}} if k else None) for k in (None, 2.0)
    )
    assert {row.label for row in one.overrides} == {"BatchNormalization"}
    assert not np.allclose(one.gradients["image"], two.gradients["image"])
    program.delete()


def test_layer_off_the_path_is_refused_unless_optional(client: Any, tmp_path: Path) -> None:
    graph = gr.from_keras(vgg())
    model = frozen(graph, tmp_path)
    words: dict[str, Any] = {"feeds": {"image": IMAGES}, "ys": ["block1_conv1/Relu"], "xs": ["image"]}
    rules = {("block2_conv1", "Relu"): "guided_relu"}
    with pytest.raises(gr.errors.InactiveOverrideError):
        client.evaluate(model, overrides=gr.keras.overrides(graph, rules), **words)
    result = client.evaluate(model, overrides=gr.keras.overrides(graph, rules, optional=True), **words)
    assert [row.status for row in result.overrides] == ["off_path"]
    # One layer of a class on the path is enough.
    result = client.evaluate(model, overrides=gr.keras.overrides(graph, {(layers.Conv2D, "Relu"): "ste"}), **words)
    assert {row.status for row in result.overrides} == {"active", "off_path"}


def test_classes_with_hundreds_of_layers(client: Any) -> None:
    """The names of these layers together are far longer than a regular expression may be."""
    x = inputs = keras.Input((4,), name="x")
    for number in range(120):
        x = layers.ReLU(name=f"a_rather_long_name_of_a_layer_{number}")(layers.Dense(4)(x))
    graph = gr.from_keras(keras.Model(inputs, x))
    for key in (layers.ReLU, (layers.ReLU, "Relu")):
        explanation = client.explain(
            graph, ys=list(graph.outputs), xs="x", overrides=gr.keras.overrides(graph, {key: "guided_relu"})
        )
        assert len(explanation.overrides) == 120
