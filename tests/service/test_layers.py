"""Layers of Keras get the rules of LRP presets as wholes, with the relevance that their definition gives.

The reference applies the definition to the Keras layer itself, with other weights: it knows nothing of ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import refused

layers = keras.layers
EPS = 1e-6
Parts = list[Any]


def ground(layer: Any, x: Any, weights: Parts) -> Any:
    """Returns the layer's output for other weights, given in the order of `layer.get_weights()`."""
    return layer.stateless_call(weights, [], x)[0]


def linear_relevance(layer: Any, x: np.ndarray, r: np.ndarray, parts: list[tuple[Any, Any, Any]]) -> np.ndarray:
    """Returns the sum over groups of x_i∘W_iᵀ(c·R/st(Σ W_i x_i + b)).

    A group is (share c, [(function of x, function of the weights)], function of the bias).
    """
    total = np.zeros_like(x, np.float64)
    kernel, *bias = (value.astype(np.float64) for value in layer.get_weights())
    for share, pairs, of_bias in parts:
        value = tf.constant(x, tf.float64)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(value)
            inputs = [of_x(value) for of_x, _ in pairs]
            tape.watch(inputs)
            no_bias = [np.zeros_like(item) for item in bias]
            outputs = [ground(layer, a, [of_w(kernel), *no_bias]) for a, (_, of_w) in zip(inputs, pairs, strict=True)]
            z = tf.add_n(outputs) + ground(layer, tf.zeros_like(value), [np.zeros_like(kernel), *map(of_bias, bias)])
        u = share * r / (z + np.where(z >= 0, EPS, -EPS))
        for a, output in zip(inputs, outputs, strict=True):
            total += a * tape.gradient(output, a, u)
    return total


def same(value: Any) -> Any:
    return value


def plus(value: Any) -> Any:
    return tf.maximum(value, 0) if tf.is_tensor(value) else np.maximum(value, 0)


def minus(value: Any) -> Any:
    return tf.minimum(value, 0) if tf.is_tensor(value) else np.minimum(value, 0)


EPSILON = [(1.0, [(same, same)], same)]
ZPLUS = [(1.0, [(plus, plus), (minus, minus)], plus)]
ALPHA_BETA = [(2.0, [(plus, plus), (minus, minus)], plus), (-1.0, [(plus, minus), (minus, plus)], minus)]

DENSE: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "Dense": (lambda: layers.Dense(4), (6,)),
    "Dense without bias": (lambda: layers.Dense(4, use_bias=False), (6,)),
    "Dense on three axes": (lambda: layers.Dense(4), (5, 3)),
    "EinsumDense with heads": (lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"), (5, 3)),
    "EinsumDense over two axes": (lambda: layers.EinsumDense("abc,dbc->ad", (4,)), (5, 3)),
}
CONVOLUTIONS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "Conv1D": (lambda: layers.Conv1D(4, 3), (8, 3)),
    "Conv1D, dilated": (lambda: layers.Conv1D(4, 3, dilation_rate=2), (8, 3)),
    "Conv2D": (lambda: layers.Conv2D(4, 3, strides=2, padding="same"), (7, 7, 3)),
    "Conv2D, dilated": (lambda: layers.Conv2D(4, 3, dilation_rate=2, padding="same"), (8, 8, 3)),
    "Conv3D": (lambda: layers.Conv3D(2, 2), (4, 4, 4, 2)),
    "DepthwiseConv2D": (lambda: layers.DepthwiseConv2D(3), (6, 6, 3)),
    "Conv1DTranspose": (lambda: layers.Conv1DTranspose(4, 3), (8, 3)),
    "Conv2DTranspose": (lambda: layers.Conv2DTranspose(4, 3, strides=2, padding="same"), (5, 5, 3)),
    "Conv3DTranspose": (lambda: layers.Conv3DTranspose(2, 2), (3, 3, 3, 2)),
}
ACTIVATIONS = (
    *("celu", "elu", "gelu", "hard_shrink", "hard_sigmoid", "hard_swish", "hard_tanh", "leaky_relu", "log_sigmoid"),
    *("mish", "relu", "relu6", "selu", "sigmoid", "silu", "soft_shrink", "softplus", "softsign", "squareplus"),
    *("tanh", "tanh_shrink"),
)


def model_of(layer: Any, shape: tuple[int, ...]) -> Any:
    """Returns a float64 model of one layer with random weights."""
    x = keras.Input(shape, dtype="float64")
    model = keras.Model(x, layer(x))
    random = np.random.default_rng(1)
    for variable in model.weights:
        value = random.normal(size=variable.shape)
        variable.assign(np.abs(value) + 0.5 if "variance" in variable.path else value)
    return model


def relevance(client: Any, model: Any, preset: str) -> tuple[np.ndarray, np.ndarray, Any, Any]:
    """Returns the input, the relevance at the output, the relevance of the input, and the resolutions."""
    graph = gr.from_keras(model)
    (x_name,), (y_name,) = graph.inputs, graph.outputs
    random = np.random.default_rng(2)
    x = random.normal(size=(2, *model.input_shape[1:]))
    r = random.normal(size=model(x).shape)
    result = client.evaluate(
        graph, {x_name: x}, ys=[y_name], xs=[x_name], grad_ys={y_name: r}, overrides=[gr.Preset(preset, optional=True)]
    )
    return x, r, result.gradients[x_name], result.overrides


@pytest.fixture(autouse=True)
def float64() -> Any:
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("name", DENSE)
def test_dense_layers_get_epsilon_with_their_bias(client: Any, name: str) -> None:
    make, shape = DENSE[name]
    layer = make()
    x, r, found, overrides = relevance(client, model_of(layer, shape), "epsilon_plus")
    np.testing.assert_allclose(found, linear_relevance(layer, x, r, EPSILON), rtol=1e-7, atol=1e-7)
    assert [override.rule for override in overrides] == ["lrp_epsilon"]


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(("preset", "parts"), [("epsilon_plus", ZPLUS), ("epsilon_alpha2_beta1", ALPHA_BETA)])
def test_convolutions_get_their_rule_with_their_bias(client: Any, name: str, preset: str, parts: Parts) -> None:
    make, shape = CONVOLUTIONS[name]
    layer = make()
    x, r, found, overrides = relevance(client, model_of(layer, shape), preset)
    np.testing.assert_allclose(found, linear_relevance(layer, x, r, parts), rtol=1e-7, atol=1e-7)
    assert len(overrides) == 1


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_pass_relevance_as_a_whole(client: Any, name: str) -> None:
    _, r, found, _ = relevance(client, model_of(layers.Activation(name), (6,)), "epsilon_plus")
    np.testing.assert_array_equal(found, r)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (layers.PReLU, (6,)),
        (lambda: layers.ReLU(max_value=6.0, negative_slope=0.1, threshold=0.2), (6,)),
        (layers.BatchNormalization, (6,)),
        (layers.BatchNormalization, (4, 4, 3)),
        (lambda: layers.BatchNormalization(center=True, scale=False), (4, 3)),
    ],
    ids=["PReLU", "ReLU with slopes", "batch norm of rank 2", "batch norm of rank 4", "batch norm without gamma"],
)
def test_layers_with_parameters_of_their_own_pass_relevance(client: Any, layer: Any, shape: tuple[int, ...]) -> None:
    _, r, found, _ = relevance(client, model_of(layer(), shape), "epsilon_plus")
    np.testing.assert_array_equal(found, r)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (layers.LayerNormalization, (5, 3)),
        (lambda: layers.GroupNormalization(groups=2), (4, 4, 4)),
        (layers.UnitNormalization, (4,)),
        (lambda: layers.Activation("softmax"), (6,)),
    ],
    ids=["layer norm", "group norm", "unit norm", "softmax"],
)
def test_layers_without_a_rule_keep_their_gradient(client: Any, layer: Any, shape: tuple[int, ...]) -> None:
    model = model_of(layer(), shape)
    x, r, found, _ = relevance(client, model, "epsilon_plus")
    value = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(value)
        y = model(value)
    np.testing.assert_allclose(found, tape.gradient(y, value, r), rtol=1e-9, atol=1e-12)


def test_attention_gives_rules_to_its_projections_and_keeps_products_of_data(client: Any) -> None:
    x = keras.Input((5, 6), dtype="float64")
    model = keras.Model(x, layers.MultiHeadAttention(2, 3)(x, x))
    _, _, found, overrides = relevance(client, model, "epsilon_plus")
    assert np.isfinite(found).all()
    with_epsilon = [override for override in overrides if override.rule == "lrp_epsilon"]
    assert len(with_epsilon) == 4
    assert all(override.op_type.startswith("BatchMatMulV2+") for override in with_epsilon)


@pytest.mark.parametrize("kind", ["@linear", "@dense"])
def test_data_may_be_either_operand(client: Any, kind: str) -> None:
    g = gr.Graph()
    weights = np.arange(1.0, 7.0).reshape(2, 3)
    x = g.placeholder("x", "float64", [3, 2])
    g.matmul(g.constant(weights), x, name="y")
    value, r = np.array([[1.0, -2.0], [3.0, 0.5], [-1.0, 2.0]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    z = weights @ value
    wanted = value * (weights.T @ (r / (z + np.where(z >= 0, EPS, -EPS))))
    for override in (gr.Override("lrp_epsilon", layer=kind), gr.Override("lrp_epsilon", op_type="MatMul")):
        result = client.evaluate(g, {"x": value}, ys=["y"], xs=["x"], grad_ys={"y": r}, overrides=[override])
        np.testing.assert_allclose(result.gradients["x"], wanted, rtol=1e-12)


def test_product_of_data_with_data_is_refused_by_rules_for_weights(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float64", [2, 2])
    g.matmul(g.op("Tanh", x), g.op("Sigmoid", x), name="y")
    with refused("RULE_NOT_APPLICABLE") as refusal:
        client.evaluate(g, {"x": np.eye(2)}, ys=["y"], xs=["x"], overrides={"MatMul": "lrp_epsilon"})
    assert "both operands depend on the same x" in refusal.message


def test_preset_refuses_ops_with_parameters_that_it_leaves_out(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [1, 4, 4, 1])
    attrs = {"strides": [1, 1, 1, 1], "rates": [1, 1, 1, 1], "padding": "SAME"}
    g.op("Relu", g.op("Dilation2D", x, g.constant(np.ones((2, 2, 1), np.float32)), name="layer", **attrs), name="y")
    feeds = {"x": np.ones((1, 4, 4, 1), np.float32)}
    preset = gr.Preset("epsilon_plus")
    with refused("UNMATCHED_OVERRIDE") as refusal:
        client.evaluate(g, feeds, ys=["y"], xs=["x"], overrides=[preset])
    assert "'layer' (Dilation2D), which applies parameters" in refusal.message
    chosen = [gr.Override("default", node="layer"), preset]
    assert client.evaluate(g, feeds, ys=["y"], xs=["x"], overrides=chosen).gradients["x"].shape == (1, 4, 4, 1)


def test_layer_is_selected_alone(client: Any) -> None:
    g = gr.Graph()
    g.op("Relu", g.placeholder("x", "float32", [None]), name="y")
    for conditions, text in (
        ({"layer": "@activation", "op_type": "Relu"}, "cannot be given with layer"),
        ({"layer": "@activation", "rank": 1}, "rank cannot be given"),
        ({"layer": "@activations"}, "Did you mean '@activation'"),
    ):
        override = gr.Override("guided_relu", **conditions)
        with refused("INVALID_OVERRIDE") as refusal:
            client.evaluate(g, {"x": [1.0]}, ys=["y"], xs=["x"], overrides=[override])
        assert text in refusal.message


@pytest.mark.parametrize("kind", ["SimpleRNN", "GRU", "LSTM"])
def test_relevance_passes_through_recurrent_layers_in_loops(client: Any, kind: str) -> None:
    make = getattr(layers, kind)
    keras.utils.set_random_seed(0)
    x = keras.Input((5, 3), dtype="float64")
    rolled = make(4, unroll=False)
    unrolled = make(4, unroll=True)
    models = [keras.Model(x, layer(x)) for layer in (rolled, unrolled)]
    unrolled.set_weights(rolled.get_weights())
    found = [relevance(client, model, "epsilon_plus")[2] for model in models]
    assert np.abs(found[0]).max() > 0
    np.testing.assert_allclose(found[0], found[1], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "before"), [("SimpleRNN", False), ("LSTM", True)], ids=["first", "after a dense layer"]
)
def test_first_layers_in_loops_are_those_of_the_unrolled_loop(client: Any, kind: str, before: bool) -> None:
    make = getattr(layers, kind)
    keras.utils.set_random_seed(0)
    x = keras.Input((4, 3), dtype="float64")
    data = layers.Dense(3)(x) if before else x
    rolled, unrolled = make(4, unroll=False), make(4, unroll=True)
    models = [keras.Model(x, layer(data)) for layer in (rolled, unrolled)]
    unrolled.set_weights(rolled.get_weights())
    answers = [relevance(client, model, "epsilon_plus_flat") for model in models]
    np.testing.assert_allclose(answers[0][2], answers[1][2], rtol=1e-7, atol=1e-9)
    flat = [override for override in answers[0][3] if override.rule == "lrp_flat" and override.status == "active"]
    assert len(flat) == 1


PADDED: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "same, dilated": (lambda: layers.Conv2D(4, 3, dilation_rate=2, padding="same"), (8, 8, 3)),
    "causal": (lambda: layers.Conv1D(4, 3, padding="causal"), (8, 3)),
    "causal, dilated": (lambda: layers.Conv1D(4, 3, dilation_rate=2, padding="causal"), (8, 3)),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_of_a_convolution_holds_no_data(client: Any, name: str) -> None:
    make, shape = PADDED[name]
    layer = make()
    x, r, found, _ = relevance(client, model_of(layer, shape), "epsilon_plus_flat")
    kernel, bias = layer.get_weights()
    ones = tf.ones(x.shape, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(ones)
        z = ground(layer, ones, [np.ones_like(kernel), np.zeros_like(bias)])
    u = r / (z + np.where(z >= 0, EPS, -EPS))
    np.testing.assert_allclose(found, tape.gradient(z, ones, u), rtol=1e-9)


@pytest.mark.parametrize("name", ["Conv1D", "Conv1D, dilated", "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"])
def test_batch_norm_is_folded_into_a_convolution(client: Any, name: str) -> None:
    make, shape = CONVOLUTIONS[name]
    x = keras.Input(shape, dtype="float64")
    model = keras.Model(x, layers.BatchNormalization()(make()(x)))
    random = np.random.default_rng(1)
    for variable in model.weights:
        variable.assign(random.uniform(0.5, 1.5, variable.shape))
    graph = gr.from_keras(model)
    (x_name,), (y_name,) = graph.inputs, graph.outputs
    feeds = {x_name: random.normal(size=(2, *shape))}
    upstream = {y_name: random.normal(size=model(feeds[x_name]).shape)}
    plain, folded = (
        client.evaluate(graph, feeds, fetches=[y_name], ys=[y_name], xs=[x_name], grad_ys=upstream, rewrites=rewrites)
        for rewrites in ((), ("fold_batch_norm",))
    )
    assert len(folded.rewritten) == 1
    np.testing.assert_allclose(folded.outputs[y_name], plain.outputs[y_name], rtol=1e-10)
    np.testing.assert_allclose(folded.gradients[x_name], plain.gradients[x_name], rtol=1e-10)


def test_skip_connection_of_the_input_is_no_bias(client: Any) -> None:
    x = keras.Input((6,), dtype="float64")
    layer = layers.Dense(6, use_bias=False)
    model = keras.Model(x, layers.Add()([layer(x), x]))
    value, r, found, overrides = relevance(client, model, "epsilon_plus")
    (kernel,) = layer.get_weights()
    z = value @ kernel
    y = z + value
    share = r / (y + np.where(y >= 0, EPS, -EPS))
    wanted = value * share + value * ((z * share / (z + np.where(z >= 0, EPS, -EPS))) @ kernel.T)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    assert sorted(override.rule for override in overrides) == ["lrp_epsilon", "lrp_norm"]


def test_gradients_of_weights_change_no_relevance(client: Any) -> None:
    x = keras.Input((6,), dtype="float64")
    model = keras.Model(x, layers.Dense(3)(layers.Dense(5, activation="relu")(x)))
    graph = gr.from_keras(model)
    (x_name,), (y_name,) = graph.inputs, graph.outputs
    feeds = {x_name: np.random.default_rng(0).normal(size=(2, 6))}
    found = [
        client.evaluate(graph, feeds, ys=[y_name], xs=xs, overrides=[gr.Preset("epsilon_plus")])
        for xs in ([x_name], [x_name, *graph.variables])
    ]
    np.testing.assert_allclose(found[0].gradients[x_name], found[1].gradients[x_name], rtol=1e-12)
    assert [str(item) for item in found[0].overrides] == [str(item) for item in found[1].overrides]


def test_bias_of_a_product_with_the_weights_first(client: Any) -> None:
    g = gr.Graph()
    weights, bias = np.arange(1.0, 7.0).reshape(2, 3), np.array([[0.5], [-2.0]])
    x = g.placeholder("x", "float64", [3, 4])
    g.op("AddV2", g.matmul(g.constant(weights), x), g.constant(bias), name="y")
    value = np.random.default_rng(0).normal(size=(3, 4))
    z = weights @ value + bias
    result = client.evaluate(
        g, {"x": value}, ys=["y"], xs=["x"], overrides=[gr.Override("lrp_epsilon", layer="@dense")]
    )
    wanted = value * (weights.T @ (1 / (z + np.where(z >= 0, EPS, -EPS))))
    np.testing.assert_allclose(result.gradients["x"], wanted, rtol=1e-12)
    assert result.overrides[0].nodes[-1] == "y"


def test_scaled_data_with_an_added_mask_is_no_batch_norm(client: Any) -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float64", [1, 1, 5, 5])
    with g.name_scope("a"):
        scaled = g.multiply(x, g.constant(0.125, "float64"))
        masked = g.op("AddV2", scaled, g.constant(np.ones((1, 1, 5, 5))))
    g.op("Relu", masked, name="y")
    feeds = {"x": np.ones((1, 1, 5, 5))}
    for extra in (False, True):
        if extra:
            # A node that no y needs changes no gradient.
            g.op("Sub", scaled, g.constant(np.ones((1, 1, 5, 5))), name="unused")
        result = client.evaluate(g, feeds, ys=["y"], xs=["x"], overrides=[gr.Preset("epsilon_plus")])
        np.testing.assert_array_equal(result.gradients["x"], np.full((1, 1, 5, 5), 0.125))
