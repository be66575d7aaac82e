"""Parts of Keras models on a real server train, save and fail like local models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr

layers = keras.layers

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 4)).astype(np.float32)
Y = (X[:, :1] ** 2 + X[:, 1:2]).astype(np.float32)
WORDS = RANDOM.integers(0, 12, size=(48, 6)).astype(np.int32)

# Server and tests run the same kernels in differently optimized programs.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def global_policy() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")


def local(part: Any) -> Any:
    return part


def middle() -> Any:
    return keras.Sequential(
        [
            layers.Dense(8, name="dense", kernel_regularizer=keras.regularizers.L2(0.01)),
            layers.BatchNormalization(name="norm"),
            layers.Activation("relu", name="relu", activity_regularizer=keras.regularizers.L2(0.01)),
            layers.Dropout(0.3, name="drop", seed=5),
        ],
        name="middle",
    )


def plain(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    part = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3, seed=5)]
    return keras.Sequential([keras.Input((4,)), wrap(part), layers.Dense(1, dtype="float32")]), X


def dense_norm_dropout(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="tanh"), wrap(middle()), layers.Dense(1)])
    return model, X


def single_layer(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    model = keras.Sequential([keras.Input((4,)), wrap(layers.Dense(3, activation="softplus")), layers.Dense(1)])
    return model, X


def with_custom_gradient(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    # TensorFlow's silu has a gradient function of its own.
    model = keras.Sequential([keras.Input((4,)), wrap(layers.Dense(3, activation="silu")), layers.Dense(1)])
    return model, X


def embedding_first(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    words = keras.Input((6,), dtype="int32")
    hidden = wrap(layers.Embedding(12, 4))(words)
    return keras.Model(words, layers.Dense(1)(layers.Flatten()(hidden))), WORDS


def mask_from_inside(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    words = keras.Input((6,), dtype="int32")
    hidden = wrap(layers.Embedding(12, 4, mask_zero=True))(words)
    return keras.Model(words, layers.Dense(1)(layers.GRU(3)(hidden))), WORDS


def mask_from_outside(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    words = keras.Input((6,), dtype="int32")
    hidden = layers.Embedding(12, 4, mask_zero=True)(words)
    return keras.Model(words, layers.Dense(1)(wrap(layers.LSTM(3))(hidden))), WORDS


def several_inputs_and_outputs(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    left, right = keras.Input((3,), name="left"), keras.Input((2,), name="right")
    joined = layers.Concatenate()([left, right])
    part = keras.Model(
        {"left": left, "right": right},
        {"sum": layers.Dense(2, activation="gelu")(joined), "top": keras.ops.argmax(joined, -1), "left": left * 2},
    )
    whole = keras.Input((4,))
    found = wrap(part)({"left": whole[:, :3], "right": whole[:, 2:]})
    top = keras.ops.cast(found["top"], "float32")[:, None]
    return keras.Model(whole, layers.Dense(1)(layers.Concatenate()([found["sum"], found["left"], top]))), X


def two_embeddings(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    """One table is read by gathers only, the other one by a product too, so that its gradient is dense."""
    words = keras.Input((6,), dtype="int32")
    table, tied = layers.Embedding(12, 4, name="table"), keras.layers.ReversibleEmbedding(12, 4, name="tied")
    scores = tied(tied(words), reverse=True)
    part = wrap(keras.Model(words, layers.Concatenate()([table(words), scores])))
    return keras.Sequential([keras.Input((6,), dtype="int32"), part, layers.Flatten(), layers.Dense(1)]), WORDS


def assigned_kernel(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Assigns a normalized kernel in every training step, and reads it again."""
    part = layers.SpectralNormalization(layers.Dense(6, activation="tanh"), power_iterations=2)
    return keras.Sequential([keras.Input((4,)), layers.Dense(5), wrap(part), layers.Dense(1)]), X


def subclassed(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.part = wrap([layers.Dense(5, activation="elu"), layers.LayerNormalization()])
            self.head = layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.head(self.part(x))

    if wrap is local:
        return subclassed(keras.Sequential)
    return Own(), X


KINDS = [
    dense_norm_dropout, single_layer, with_custom_gradient, embedding_first, mask_from_inside,
    mask_from_outside, several_inputs_and_outputs, subclassed, two_embeddings, assigned_kernel,
]  # fmt: skip


def trained(build: Any, wrap: Callable[[Any], Any], **more: Any) -> tuple[list[float], list[Any], Any, Any]:
    keras.utils.set_random_seed(3)
    model, x = build(wrap)
    model.compile(keras.optimizers.Adam(0.01), "mse", **more)
    losses = model.fit(x, Y, epochs=3, batch_size=16, shuffle=False, verbose=0).history["loss"]
    return losses, model.get_weights(), model.predict(x, verbose=0), model.evaluate(x, Y, verbose=0)


@pytest.mark.parametrize("build", KINDS, ids=lambda build: build.__name__)
def test_model_trains_as_without_a_server(client: Any, build: Any) -> None:
    expected = trained(build, local)
    actual = trained(build, lambda part: gr.keras.RemoteLayer(part, client))
    for found, wanted in zip(actual, expected, strict=True):
        for one, other in zip(found, wanted, strict=True) if isinstance(found, list) else [(found, wanted)]:
            np.testing.assert_allclose(one, other, **CLOSE)
    assert actual[0][-1] < actual[0][0]


@pytest.mark.parametrize("build", [dense_norm_dropout, two_embeddings], ids=lambda build: build.__name__)
def test_model_trains_eagerly(client: Any, build: Any) -> None:
    expected = trained(build, local, run_eagerly=True)
    actual = trained(build, lambda part: gr.keras.RemoteLayer(part, client), run_eagerly=True)
    np.testing.assert_allclose(actual[0], expected[0], **CLOSE)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_mixed_precision_equals_local_keras(client: Any, policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    expected = trained(plain, keras.Sequential)
    actual = trained(plain, lambda part: gr.keras.RemoteLayer(part, client))
    # Fused ops round 16-bit values at other places.
    tolerance = {"rtol": 0.02} if policy != "float64" else {"rtol": 1e-6}
    np.testing.assert_allclose(actual[0], expected[0], **tolerance)
    assert actual[1][0].dtype == (np.float64 if policy == "float64" else np.float32)


def binary(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
    part = [layers.Dense(16, name="hidden"), layers.Lambda(tf.sign, name="binarize")]
    return keras.Sequential([keras.Input((4,)), wrap(part), layers.Dense(1)]), X


@pytest.mark.parametrize("key", ["Sign", "binarize", ("binarize", "Sign"), layers.Lambda])
def test_overrides_train_layers_without_a_gradient(client: Any, key: Any) -> None:
    def first_kernel(wrap: Callable[[Any], Any]) -> tuple[Any, Any]:
        keras.utils.set_random_seed(3)
        model, x = binary(wrap)
        model.compile(keras.optimizers.SGD(0.05), "mse")
        before = model.get_weights()[0]
        losses = model.fit(x, Y, epochs=8, batch_size=16, shuffle=False, verbose=0).history["loss"]
        return np.abs(model.get_weights()[0] - before).max(), losses[-1]

    with warnings.catch_warnings():
        # Keras warns that the kernel has no gradient.
        warnings.simplefilter("ignore")
        still, stuck = first_kernel(keras.Sequential)
    moved, loss = first_kernel(lambda part: gr.keras.RemoteLayer(part, client, overrides={key: "ste_sign"}))
    assert still == 0
    assert moved > 0.01
    assert loss < stuck


def test_overrides_equal_tf_custom_gradient(client: Any) -> None:
    @tf.custom_gradient
    def ste(x: Any) -> Any:
        return tf.sign(x), lambda dy: tf.where(tf.abs(x) <= 2.0, dy, tf.zeros_like(dy))

    dense = layers.Dense(5)
    here = keras.Sequential([dense, layers.Lambda(ste)])
    there = gr.keras.RemoteLayer([dense, layers.Lambda(tf.sign)], client, overrides={"Sign": ("ste_sign", {"clip": 1})})
    there.params = {"Sign": {"clip": 2.0}}
    for function in (lambda f: f, tf.function):
        found = []
        for layer in (here, there):
            x = tf.constant(X)

            def gradients(layer: Any = layer, x: Any = x) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = layer(x)
                    loss = tf.reduce_sum(y * y * tf.range(5.0) + y)
                return tape.gradient(loss, [x, *(variable.value for variable in dense.trainable_variables)])

            found.append(function(gradients)())
        for one, other in zip(*found, strict=True):
            np.testing.assert_allclose(one, other, **CLOSE)


def test_gradients_of_gathered_weights_are_slices_of_the_same_rows(client: Any) -> None:
    here = layers.Embedding(12, 4)
    here.build(())
    there = gr.keras.RemoteLayer(here, client)
    words = tf.constant(WORDS[:2])
    for function in (lambda f: f, tf.function):
        found = []
        for layer in (here, there):

            def gradient(layer: Any = layer) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(layer(words) ** 2)
                return tape.gradient(loss, here.embeddings.value)

            found.append(function(gradient)())
        local, remote = found
        assert isinstance(remote, tf.IndexedSlices)
        assert remote.indices.numpy().tolist() == local.indices.numpy().tolist() == WORDS[:2].reshape(-1).tolist()
        np.testing.assert_allclose(remote.values, local.values, **CLOSE)
        assert remote.dense_shape.numpy().tolist() == [12, 4]


def test_slice_of_a_model_shares_its_weights(client: Any) -> None:
    model, _ = dense_norm_dropout(local)
    remote = gr.keras.RemoteLayer(model.layers[1:], client)
    whole = keras.Sequential([keras.Input((4,)), model.layers[0], remote])
    np.testing.assert_allclose(whole(X), model(X), **CLOSE)
    model.layers[-1].bias.assign([7.0])
    np.testing.assert_allclose(whole(X), model(X), **CLOSE)
    assert whole.count_params() == model.count_params()


def test_frozen_layers_stay_unchanged(client: Any) -> None:
    keras.utils.set_random_seed(1)
    part = middle()
    remote = gr.keras.RemoteLayer(part, client)
    x = tf.constant(X)
    assert not np.allclose(remote(x, training=True), remote(x, training=True))
    part.trainable = False
    part.layers[-1].rate = 0.0
    before = part.get_weights()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(remote(x, training=True))
    assert tape.gradient(y, x) is not None
    for one, other in zip(part.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_layer_raises_the_errors_of_the_client(client: Any) -> None:
    remote = gr.keras.RemoteLayer(layers.Dense(2), client, overrides={"MatMul": "no_such_rule"})
    x = tf.constant(X)
    remote(x)
    with tf.GradientTape() as tape:
        y = remote(x)
        weights = [variable.value for variable in remote.trainable_variables]
    with pytest.raises(gr.errors.UnknownRuleError, match="no_such_rule"):
        tape.gradient(y, weights)
    model = keras.Sequential([keras.Input((4,)), remote])
    model.compile("sgd", "mse")
    with pytest.raises(gr.errors.UnknownRuleError, match="there is no rule 'no_such_rule'"):
        model.fit(X, np.zeros((48, 2)), verbose=0)
    assert isinstance(remote.last_error, gr.errors.UnknownRuleError)
    np.testing.assert_allclose(remote(x), remote.part(x), **CLOSE)


def test_unknown_layers_are_refused(client: Any) -> None:
    remote = gr.keras.RemoteLayer(middle(), client, overrides={"dens": "ste"})
    with tf.GradientTape() as tape:
        y = remote(tf.constant(X))
        weights = [variable.value for variable in remote.trainable_variables]
    with pytest.raises(gr.errors.InvalidOverrideError, match=r"no layer 'dens'.*Did you mean 'dense'"):
        tape.gradient(y, weights)


def test_program_that_the_server_lost_is_compiled_again(client: Any) -> None:
    remote = gr.keras.RemoteLayer(layers.Dense(2, name=f"dense_{RANDOM.integers(1 << 40)}"), client)
    before = {program.name for program in client.list_programs()}
    first = remote(X)
    (made,) = {program.name for program in client.list_programs()} - before
    client.delete_program(made)
    np.testing.assert_array_equal(remote(X), first)
    client.delete_program(made)
    remote.release()
    remote.release()
    np.testing.assert_array_equal(remote(X), first)
    remote.release()
    assert made not in {program.name for program in client.list_programs()}


# h5py and Keras emit warnings of their own.
@pytest.mark.filterwarnings("ignore")
def test_model_with_a_remote_part_is_saved_and_loaded(client: Any, tmp_path: Path) -> None:
    def build() -> Any:
        remote = gr.keras.RemoteLayer(
            middle(), client, overrides={"relu": ("leaky_k_relu", {"k": 1.0})}, params={"relu": {"k": 2.0}}, name="far"
        )
        return keras.Sequential([keras.Input((4,)), remote, layers.Dense(1)])

    model, other = build(), build()
    assert not np.allclose(model(X), other(X))
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(model(X), other(X))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=False)
    np.testing.assert_array_equal(model(X), loaded(X))
    found, wanted = ({**each.get_layer("far").get_config(), "part": None} for each in (loaded, model))
    assert found == wanted
    loaded.get_layer("far").client = client
    np.testing.assert_array_equal(model(X), loaded(X))


def test_part_that_cannot_be_saved_is_refused(client: Any) -> None:
    remote = gr.keras.RemoteLayer(middle(), client, overrides=[gr.Override("ste", scope="relu")])
    with pytest.raises(gr.errors.UnsupportedError, match="cannot be saved"):
        remote.get_config()


def test_invalid_part_is_refused(client: Any) -> None:
    with pytest.raises(gr.errors.InvalidGraphError, match="int is no Keras layer"):
        gr.keras.RemoteLayer(3, client)
    with pytest.raises(gr.errors.UnsupportedError, match=r"takes a gr\.Client or an address"):
        gr.keras.RemoteLayer(layers.Dense(2), 3)


def test_untracked_state_is_refused(client: Any) -> None:
    class Counting(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "hidden", tf.Variable(2.0, name="hidden"))

        def call(self, x: Any) -> Any:
            return x * self.hidden

    with pytest.raises(gr.errors.UnsupportedError, match=r"not Keras variables.*hidden"):
        gr.keras.RemoteLayer(Counting(), client)(X)


def test_batches_of_any_size_share_one_program(client: Any) -> None:
    remote = gr.keras.RemoteLayer(layers.Dense(2, name=f"dense_{RANDOM.integers(1 << 40)}"), client)
    before = len(client.list_programs())
    for size in (1, 7, 48):
        assert remote(X[:size]).shape == (size, 2)
    assert len(client.list_programs()) == before + 1
    remote.release()


def test_variables_without_keras_are_refused_while_fitting(client: Any) -> None:
    class Scale(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = tf.Variable(2.0, name="scale")

        def call(self, x: Any) -> Any:
            return self.scale * x

    model = keras.Sequential([keras.Input((3,)), gr.keras.RemoteLayer(Scale(), client), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(gr.errors.UnsupportedError, match="scale"):
        model.fit(np.ones((4, 3), np.float32), np.ones((4, 1), np.float32), verbose=0)


def stateful(wrap: Callable[[Any], Any]) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input(batch_shape=(4, 3, 2)), wrap(layers.LSTM(3, stateful=True)), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_states_of_recurrent_layers_are_kept(client: Any) -> None:
    x, y = RANDOM.normal(size=(8, 3, 2)).astype(np.float32), np.ones((8, 1), np.float32)
    found = []
    for model in (stateful(lambda part: gr.keras.RemoteLayer(part, client)), stateful(local)):
        losses = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
        outputs = [model(x[:4]), model(x[:4])]
        assert not np.allclose(*outputs)
        found.append(np.concatenate([losses, *(np.ravel(output) for output in outputs)]))
    np.testing.assert_allclose(found[0], found[1], **CLOSE)


def test_random_numbers_of_the_global_seed_generator(client: Any) -> None:
    remote = gr.keras.RemoteLayer(layers.Lambda(lambda x: x * keras.random.uniform((3,)), output_shape=(3,)), client)
    x = tf.ones((1, 3))
    first, second = remote(x), remote(x)
    assert not np.allclose(first, second)


def test_remote_layer_in_a_remote_layer_is_refused(client: Any) -> None:
    inner = gr.keras.RemoteLayer(layers.Dense(2), client, name="inner")
    with pytest.raises(gr.errors.UnsupportedError, match=r"contains the RemoteLayer 'inner'.*inner layer's `part`"):
        gr.keras.RemoteLayer([layers.Dense(3), inner], client)
