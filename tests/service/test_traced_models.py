"""SavedModels, Keras files and traced functions on a real server, with variables and custom gradients, compared with
local TensorFlow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service.answers import assert_close, dense, rules_by_node, statuses

v1 = tf.compat.v1

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
SPEC = tf.TensorSpec([None, 3], tf.float32)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    keras.utils.set_random_seed(5)
    with warnings.catch_warnings():
        # TensorFlow and Keras emit warnings while saving and loading.
        warnings.simplefilter("ignore")
        yield


def taped(fn: Callable[[Any], Any], x: Any, variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns y and the gradients of its sum in local TensorFlow: by x where differentiable, and by variables."""
    at = tf.constant(x)
    wanted = dict(variables) | ({"x": at} if at.dtype.is_floating else {})
    with tf.GradientTape() as tape:
        tape.watch(at)
        y = fn(at)
    return y.numpy(), {name: to_array(found) for name, found in tape.gradient(y, wanted).items()}


def to_array(gradient: Any) -> Any:
    return None if gradient is None else tf.convert_to_tensor(gradient).numpy()


def assert_equals_local(
    client: Any, graph: gr.Graph, fn: Callable[[Any], Any], x: Any, variables: Mapping[str, Any], **words: Any
) -> Any:
    """Compares the value and all gradients for one input and one output; returns the server's result."""
    (feed,), (fetch,) = graph.inputs, graph.outputs
    y, gradients = taped(fn, x, variables)
    xs = {name: feed if name == "x" else name for name in gradients}
    r = client.evaluate(graph, {feed: x}, [fetch], ys=[fetch], xs=list(xs.values()), **words)
    assert_close(r.outputs[fetch], y)
    for name, wanted in gradients.items():
        assert (r.gradients[xs[name]] is None) == (wanted is None)
        if wanted is not None:
            np.testing.assert_allclose(dense(r.gradients[xs[name]]), wanted, rtol=1e-4, atol=1e-5)
    return r


# SavedModels.


class Spiking(tf.Module):  # type: ignore[misc]
    """Has variables, two signatures, a loop that calls a function, and a custom gradient that uses a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = tf.Variable(3.0, name="slope")
        self.weight = tf.Variable([[1.0, -2.0, 0.5]], name="weight")

    @tf.custom_gradient
    def spike(self, x: Any) -> Any:
        def grad(dy: Any, variables: Any = None) -> Any:
            return dy * self.slope / (1.0 + tf.abs(x)) ** 2, [tf.reduce_sum(dy) * 11.0]

        return tf.sign(x) * self.slope, grad

    @tf.function(input_signature=[SPEC])
    def score(self, x: Any) -> Any:
        return self.spike(x * self.weight) * x

    @tf.function(input_signature=[SPEC])
    def folded(self, x: Any) -> Any:
        def body(i: Any, v: Any) -> Any:
            return i + 1, tf.tanh(self.score(v)) * self.weight

        return tf.while_loop(lambda i, v: i < 3, body, [0, x])[1]

    def unfolded(self, x: Any) -> Any:
        """Computes `folded` without the loop, in which TensorFlow itself does not differentiate such a gradient."""
        for _ in range(3):
            x = tf.tanh(self.score(x)) * self.weight
        return x


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    module = Spiking()
    signatures = {"serving_default": module.score, "fold": module.folded}
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, str(path), signatures=signatures, options=options)
    return path


@pytest.mark.parametrize("signature", ["serving_default", "fold", "score", "folded"])
def test_every_signature_of_a_saved_model_equals_local(either: Any, saved: Path, signature: str) -> None:
    module = Spiking()
    fn = module.unfolded if "fold" in signature else module.score
    graph = gr.load(saved, signature)
    assert set(graph.variables) == {"slope", "weight"}
    assert_equals_local(either, graph, fn, X, {"slope": module.slope, "weight": module.weight})


def test_custom_gradient_in_a_saved_model_can_be_overridden(client: Any, saved: Path) -> None:
    module = Spiking()
    graph = gr.load(saved)
    rule = gr.Rule("(2 * dy, None)")
    names = {resolution.label for resolution in client.explain(graph, ys=list(graph.outputs), xs=["x"]).overrides}
    (region,) = names
    r = client.evaluate(graph, {"x": X}, ys=list(graph.outputs), xs=["x"], overrides=[gr.Override(rule, region=region)])
    weight, slope = module.weight.numpy(), module.slope.numpy()
    assert_close(r.gradients["x"], np.sign(X * weight) * slope + 2 * X * weight)


def test_saved_weights_can_be_replaced_by_feeds(either: Any, saved: Path) -> None:
    graph = gr.load(saved)
    (fetch,) = graph.outputs
    program = either.compile(graph, fetches=[fetch], ys=[fetch], xs=["x", "weight"])
    other = Spiking()
    for scale in (1.0, -0.5):
        other.weight.assign(np.float32([[scale, 2 * scale, 1.0]]))
        y, gradients = taped(other.score, X, {"weight": other.weight})
        r = program.evaluate({"x": X, "weight": other.weight.numpy()})
        assert r.timings.compile == 0.0
        assert_close(r.outputs[fetch], y)
        assert_close(r.gradients["weight"], gradients["weight"], rtol=1e-4)
    either.delete_program(program.name)


@pytest.mark.parametrize("resources", [False, True], ids=["references", "resources"])
def test_saved_model_of_tensorflow_1_equals_local(either: Any, tmp_path: Path, resources: bool) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 3], name="in/x")
        kernel = v1.get_variable("layer/w", initializer=tf.constant([[1.0], [-2.0], [3.0]]), use_resource=resources)
        score = tf.nn.relu(x @ kernel, name="score")
        wanted = v1.gradients(score, [x, kernel])
        session.run(v1.global_variables_initializer())
        y, by_x, by_kernel = session.run([score, *wanted], {x: X})
        v1.saved_model.simple_save(session, str(tmp_path / "model"), {"x": x}, {"x": score})
    graph = gr.load(tmp_path / "model")
    assert (list(graph.inputs), list(graph.outputs)) == (["x"], ["output_x"])
    r = either.evaluate(graph, {"x": X}, ["output_x"], ys=["output_x"], xs=["x", "layer/w"])
    assert_close(r.outputs["output_x"], y)
    assert_close(r.gradients["x"], by_x)
    assert_close(r.gradients["layer/w"], by_kernel)


# Keras.


def dense_model() -> Any:
    x = keras.Input((3,), name="x")
    hidden = keras.layers.Dense(5, activation="silu", name="first")(x)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    return keras.Model(x, keras.layers.Dense(2, activation="relu", name="last")(hidden))


def weights_of(model: Any) -> dict[str, Any]:
    return {variable.path: variable.value for variable in model.trainable_variables}


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_keras_files_equal_local(either: Any, tmp_path: Path, suffix: str) -> None:
    model = dense_model()
    model.save(tmp_path / f"model{suffix}")
    r = assert_equals_local(either, gr.load(tmp_path / f"model{suffix}"), model, X, weights_of(model))
    assert set(rules_by_node(r).values()) == {"swish_impl"}


@pytest.mark.parametrize("shape", [(3,), (4, 4, 3)], ids=["rows", "images"])
def test_batch_norm_in_training_mode_equals_local(either: Any, shape: tuple[int, ...]) -> None:
    """Normalizes by the batch itself; images use TensorFlow's fused op."""
    inputs = keras.Input(shape, name="x")
    model = keras.Model(inputs, keras.layers.BatchNormalization(name="norm")(inputs))
    x = np.random.default_rng(1).normal(2.0, 3.0, (6, *shape)).astype(np.float32)
    graph = gr.from_keras(model, training=True)
    dy = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    with tf.GradientTape() as tape:
        at = tf.constant(x)
        tape.watch(at)
        y = model(at, training=True)
    sources = {"x": at, **weights_of(model)}
    wanted = tape.gradient(y, sources, output_gradients=tf.constant(dy))
    r = either.evaluate(graph, {"x": x}, ["norm"], ys=["norm"], xs=list(sources), grad_ys={"norm": dy})
    np.testing.assert_allclose(r.outputs["norm"], y, rtol=1e-4, atol=1e-5)
    for name, gradient in wanted.items():
        np.testing.assert_allclose(r.gradients[name], gradient, rtol=1e-3, atol=1e-4)


def test_dropout_with_a_seed_equals_local(client: Any) -> None:
    inputs = keras.Input((3,), name="x")
    model = keras.Model(inputs, keras.layers.Dropout(0.5, seed=3, name="drop")(inputs))
    graph = gr.from_keras(model, training=True)
    r = client.evaluate(graph, {"x": X}, ["drop"], ys=["drop"], xs=["x"])
    # Called after tracing has read the seed's state, and so with the same state.
    y = model(X, training=True).numpy()
    assert 0 < np.count_nonzero(y) < y.size
    assert_close(r.outputs["drop"], y)
    assert_close(r.gradients["x"], np.where(y != 0, np.float32(2), np.float32(0)))


def test_gradients_of_an_embedding_are_sparse(either: Any) -> None:
    tokens = keras.Input((3,), dtype="int32", name="tokens")
    embedded = keras.layers.Embedding(6, 2, name="table")(tokens)
    model = keras.Model(tokens, keras.layers.Dense(1, name="head")(embedded))
    ids = np.int32([[1, 4, 1], [0, 4, 5]])
    r = assert_equals_local(either, gr.from_keras(model), model, ids, weights_of(model))
    gradient = r.gradients["table/embeddings"]
    assert isinstance(gradient, gr.Sparse)
    assert gradient.indices.tolist() == ids.ravel().tolist()
    assert gradient.dense_shape.tolist() == [6, 2]


def test_gradients_at_a_layers_output(client: Any) -> None:
    model = dense_model()
    graph = gr.from_keras(model)
    (product,) = graph.find(scope="last", op_type="MatMul")
    middle = product.inputs[0]
    r = client.evaluate(graph, {"x": X}, [middle], ys=["last"], xs=[middle])
    at = tf.constant(r.outputs[middle])
    with tf.GradientTape() as tape:
        tape.watch(at)
        y = model.get_layer("last")(at)
    assert_close(r.gradients[middle], tape.gradient(y, at).numpy())


def test_per_example_gradients_of_a_kernel(client: Any) -> None:
    model = dense_model()
    graph = gr.from_keras(model)
    kernel = "first/kernel"
    found = client.jacobian(graph, {"x": X}, ys=["last"], xs=[kernel])["last"][kernel]
    with tf.GradientTape() as tape:
        y = model(tf.constant(X))
    wanted = tape.jacobian(y, weights_of(model)[kernel]).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_forward_once_pull_back_many(client: Any) -> None:
    model = dense_model()
    graph = gr.from_keras(model)
    program = client.compile(graph, fetches=["last"], ys=["last"], xs=["x", "first/kernel"])
    with tf.GradientTape(persistent=True) as tape:
        at = tf.constant(X)
        tape.watch(at)
        y = model(at)
    with program.forward({"x": X}) as handle:
        assert_close(handle.outputs["last"], y.numpy())
        for seed in range(2):
            dy = np.random.default_rng(seed).normal(size=y.shape).astype(np.float32)
            sources = {"x": at, "first/kernel": weights_of(model)["first/kernel"]}
            wanted = tape.gradient(y, sources, output_gradients=tf.constant(dy))
            found = handle.vjp({"last": dy})
            for name, gradient in wanted.items():
                np.testing.assert_allclose(found[name], gradient, rtol=1e-4, atol=1e-6)
    client.delete_program(program.name)


# Functions with custom gradients in each kind of control flow.


def with_spikes(kind: str, backward: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls `spike_fn` inside that kind of control flow."""

    @tf.custom_gradient
    def spike_fn(v: Any) -> Any:
        return tf.cast(v > 0, v.dtype), lambda dy: backward(v, dy)

    @tf.function(autograph=False)
    def inner(v: Any) -> Any:
        return spike_fn(v) * v

    def in_call(x: Any) -> Any:
        return inner(inner(x) + x)

    def in_loop(x: Any) -> Any:
        return tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, 0.7 * v + spike_fn(v) * x), [0, x])[1]

    def in_branch(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0, lambda: spike_fn(x) * x, lambda: tf.sin(spike_fn(x - 1.0) + x))

    def in_map(x: Any) -> Any:
        return tf.map_fn(lambda row: tf.reduce_sum(spike_fn(row)) * row, x)

    def in_all(x: Any) -> Any:
        def body(i: Any, v: Any) -> Any:
            return i + 1, tf.cond(tf.equal(i % 2, 0), lambda: inner(v) + x, lambda: tf.tanh(v) * inner(x))

        return tf.while_loop(lambda i, v: i < 3, body, [0, x])[1]

    return {"call": in_call, "loop": in_loop, "branch": in_branch, "map": in_map, "all": in_all}[kind]


def surrogate(v: Any, dy: Any) -> Any:
    return dy / (1.0 + 5.0 * tf.abs(v)) ** 2


@pytest.mark.parametrize("kind", ["call", "loop", "branch", "map", "all"])
@pytest.mark.parametrize("x", [X, -X], ids=["x", "minus"])
def test_custom_gradients_in_control_flow(client: Any, kind: str, x: Any) -> None:
    fn = with_spikes(kind, surrogate)
    graph = gr.trace(fn, SPEC)
    r = assert_equals_local(client, graph, fn, x, {})
    assert {resolution.label for resolution in r.overrides} == {"spike_fn"}
    assert "active" in statuses(r).values()


@pytest.mark.parametrize("kind", ["call", "loop", "branch", "map", "all"])
def test_function_is_overridden_by_name(either: Any, kind: str) -> None:
    """A rule for the region acts like the same rule as the function's custom gradient."""
    graph = gr.trace(with_spikes(kind, surrogate), SPEC)
    wanted = with_spikes(kind, lambda v, dy: tf.where(tf.abs(v) <= 1.0, dy * v, 0.25 * dy))
    override = gr.Override(gr.Rule("where(abs(x) <= 1, dy * x, 0.25 * dy)"), region="spike_fn")
    assert_equals_local(either, graph, wanted, X, {}, overrides=[override])


def test_variables_in_control_flow(either: Any) -> None:
    """One variable is read by a loop, one by a branch, and one twice by a called function."""
    w = tf.Variable([[0.5, -0.2, 0.1], [0.4, 0.6, -0.3], [-0.8, 0.7, 0.2]], name="w")
    b = tf.Variable([0.1, 0.2, -0.3], name="b")
    scale = tf.Variable(1.5, name="scale")

    @tf.function(autograph=False)
    def scaled(v: Any) -> Any:
        return v * scale + scale

    def fn(x: Any) -> Any:
        def body(i: Any, v: Any) -> Any:
            return i + 1, tf.tanh(v @ w) + scaled(x)

        looped = tf.while_loop(lambda i, v: i < 3, body, [0, x])[1]
        return tf.cond(tf.reduce_sum(x) > -100.0, lambda: looped + b, lambda: looped)

    graph = gr.trace(fn, SPEC)
    assert set(graph.variables) == {"w", "b", "scale"}
    assert_equals_local(either, graph, fn, X, {"w": w, "b": b, "scale": scale})


# Outputs that are intermediate tensors.


def features_and_score(x: Any) -> Any:
    h = tf.tanh(2.0 * x)
    return {"h": h, "y": tf.reduce_sum(h**3)}


def test_an_alias_is_the_tensor_itself(either: Any) -> None:
    graph = gr.trace(features_and_score, SPEC)
    h = np.tanh(2 * X)
    r = either.evaluate(graph, {"x": X}, ["h"], ys="y", xs=["h", "x"])
    assert_close(r.outputs["h"], h)
    np.testing.assert_allclose(r.gradients["h"], 3 * h**2, rtol=1e-5)
    np.testing.assert_allclose(r.gradients["x"], 6 * h**2 * (1 - h**2), rtol=1e-4, atol=1e-6)
    fed = either.evaluate(graph, {"x": X, "h": np.ones_like(X)}, ["y", "h"])
    assert_close(fed.outputs["y"], np.float32(X.size))
    stopped = either.evaluate(graph, {"x": X}, ys="y", xs="x", stop_gradients="h")
    assert stopped.gradients["x"] is None


def test_grad_cam_of_a_submodel_in_both_modes(client: Any) -> None:
    layers = keras.layers
    image = keras.Input((6, 6, 2), name="image")
    conv = layers.Conv2D(3, 3, name="conv")(image)
    y = layers.Dense(2, name="score")(
        layers.GlobalAveragePooling2D()(layers.BatchNormalization(name="norm")(conv) ** 2)
    )
    model = keras.Model(image, [conv, y])
    x = np.random.default_rng(3).normal(size=(4, 6, 6, 2)).astype(np.float32)
    # Training assigns moving averages, which depend on the convolution.
    for training in (False, True):
        graph = gr.from_keras(model, training=training)
        with tf.GradientTape() as tape:
            features, score = model(x, training=training)
        r = client.evaluate(graph, {"image": x}, ["score"], ys="score", xs="conv")
        np.testing.assert_allclose(r.gradients["conv"], tape.gradient(score, features), rtol=1e-4, atol=1e-6)


def test_moving_averages_change_with_the_output(client: Any) -> None:
    image = keras.Input((3,), name="x")
    norm = keras.layers.BatchNormalization(name="norm")(image)
    graph = gr.from_keras(keras.Model(image, [norm, keras.layers.Dense(1, name="y")(norm)]), training=True)
    with client.session(graph) as session:
        before = dict(session.read())
        session.evaluate({"x": X}, ["y"])
        after = session.read()
    assert {name for name in before if not np.array_equal(before[name], after[name])} == {
        "norm/moving_mean", "norm/moving_variance",
    }  # fmt: skip


def test_overrides_do_not_select_identities_that_tracing_added(either: Any) -> None:
    @tf.function
    def inner(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 1e9, lambda: tf.sin(x), lambda: 2.0 * x)

    graph = gr.trace(lambda x: {"y": inner(tf.identity(x, name="mine")), "same": x}, SPEC)
    r = either.evaluate(graph, {"x": X}, ys="y", xs="x", overrides={"Identity": "gradient_reversal"})
    np.testing.assert_allclose(r.gradients["x"], np.full_like(X, -2.0))
    assert set(rules_by_node(r)) == {"mine"}
    everywhere = gr.Override("gradient_reversal", node="**", op_type="Identity")
    r = either.evaluate(graph, {"x": X}, ys="y", xs="x", overrides=[everywhere])
    assert set(rules_by_node(r)) == {"mine"}
    named = gr.Override("gradient_reversal", node=graph.tensor("same").node)
    r = either.evaluate(graph, {"x": X}, ys="same", xs="x", overrides=[named])
    np.testing.assert_allclose(r.gradients["x"], -np.ones_like(X))


LABELS = np.array([[1, 2], [2, 1]], np.int32)
CTC_LOSSES: dict[str, Callable[[Any], Any]] = {
    "dense labels": lambda x: tf.nn.ctc_loss(LABELS, x, [2, 2], [5, 4], logits_time_major=False, blank_index=0),
    "sparse labels": lambda x: tf.nn.ctc_loss(
        tf.sparse.from_dense(LABELS), x, None, [5, 4], logits_time_major=False, blank_index=0
    ),
    "Keras": lambda x: keras.losses.CTC()(LABELS, x),
}


@pytest.mark.parametrize("name", CTC_LOSSES)
def test_the_ctc_loss_equals_local(client: Any, name: str) -> None:
    logits = np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)
    graph = gr.trace(CTC_LOSSES[name], tf.TensorSpec([2, 5, 4], tf.float32, name="x"))
    assert_equals_local(client, graph, tf.function(CTC_LOSSES[name]), logits, {})
