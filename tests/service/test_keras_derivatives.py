"""Gradients through a RemoteLayer: one forward pass, random numbers drawn once, lost runs, and second derivatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule._rpc.sync_client.forward import ForwardHandle
from gradrule._rpc.sync_client.programs import Program
from tests.waiting import wait_until

layers = keras.layers

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(6, 4)).astype(np.float32)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Noise(keras.layers.Layer):  # type: ignore[misc]
    """Multiplies by a weight and by random numbers from a state of the process."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        return self.scale * tf.nn.dropout(x * tf.random.uniform(tf.shape(x), 1.0, 2.0), 0.5)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def smooth(**options: Any) -> Any:
    return keras.Sequential(
        [layers.Dense(5, activation="tanh", **options), layers.Dense(3, activation="silu", **options)]
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the requests of programs."""
    counts: Counter[str] = Counter()
    for owner, name in [(Program, "forward"), (Program, "evaluate"), (ForwardHandle, "vjp"), (ForwardHandle, "close")]:
        original = getattr(owner, name)

        def counting(self: Any, *args: Any, original: Any = original, name: str = name, **options: Any) -> Any:
            if name != "close" or self.is_open:
                counts[name] += 1
            return original(self, *args, **options)

        monkeypatch.setattr(owner, name, counting)
    return counts


def handles_of(client: Any) -> int:
    return sum(tenant.handles.used for tenant in client.server_status().tenants)


@pytest.fixture
def no_handles(client: Any) -> Iterator[None]:
    """Checks that the server keeps no forward run of the test afterwards."""
    before = handles_of(client)
    yield
    wait_until(lambda: handles_of(client) <= before or None, "the release of all forward runs")


def eager(layer: Any, x: Any) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
    return y, tape.gradient(y, x)


def tape_in_function(layer: Any, x: Any) -> tuple[Any, Any]:
    found: tuple[Any, Any] = tf.function(lambda x: eager(layer, x))(x)
    return found


def tape_around_function(layer: Any, x: Any) -> tuple[Any, Any]:
    return eager(tf.function(layer), x)


def loop_in_function(layer: Any, x: Any) -> tuple[Any, Any]:
    """Applies the layer to x in each of three iterations, and sums the results."""

    def summed(x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 3, lambda i, total: (i + 1, total + layer(x)), [0, tf.zeros_like(x)])[1]

    return tape_in_function(summed, x)


WAYS = [eager, tape_in_function, tape_around_function, loop_in_function]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradient_uses_the_random_numbers_of_the_forward_pass(client: Any, way: Callable[..., Any]) -> None:
    x = tf.constant(np.full((50, 4), 0.5, np.float32))
    layer = gr.keras.RemoteLayer(Noise(), client)
    y, gradient = way(layer, x)
    assert np.unique(y).size > 50
    np.testing.assert_allclose(gradient, y / x, **CLOSE)


def test_fit_uses_the_random_numbers_of_the_forward_pass(client: Any, no_handles: None) -> None:
    remote = gr.keras.RemoteLayer(Noise(), client)
    model = keras.Sequential([keras.Input((4,)), remote])
    model.compile(keras.optimizers.SGD(0.125), lambda _, y: tf.reduce_mean(y, axis=-1))
    weight = 1.0
    for loss in model.fit(np.ones((6, 4), np.float32), X, batch_size=6, epochs=3, verbose=0).history["loss"]:
        # The loss is the weight times the mean of the drawn numbers.
        weight -= 0.125 * loss / weight
    np.testing.assert_allclose(remote.trainable_variables[0], weight, **CLOSE)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradient_equals_that_of_the_local_layer(client: Any, no_handles: None, way: Callable[..., Any]) -> None:
    part = keras.Sequential([layers.Dense(4, activation="tanh")])
    x = tf.constant(X)
    for _ in range(2):
        for found, wanted in zip(way(gr.keras.RemoteLayer(part, client), x), way(part, x), strict=True):
            np.testing.assert_allclose(found, wanted, **CLOSE)


def test_each_training_step_runs_forward_once(client: Any, calls: Counter[str], no_handles: None) -> None:
    model = keras.Sequential([keras.Input((4,)), gr.keras.RemoteLayer(smooth(), client), layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(X, X[:, :1], batch_size=2, epochs=2, verbose=0)
    assert calls == {"forward": 6, "vjp": 6}


def test_inference_keeps_nothing_on_the_server(client: Any, calls: Counter[str], no_handles: None) -> None:
    remote = gr.keras.RemoteLayer(smooth(), client)
    model = keras.Sequential([keras.Input((4,)), remote])
    model.compile("sgd", "mse")
    remote(X)
    model.predict(X, verbose=0)
    with tf.GradientTape() as tape:
        remote(tf.constant(X) * 2)
        tape.stop_recording()
    del tape
    assert calls["evaluate"] == 2
    assert calls["forward"] == 1


def test_run_of_a_tape_without_gradient_is_released(client: Any, calls: Counter[str], no_handles: None) -> None:
    remote = gr.keras.RemoteLayer(smooth(), client)
    with tf.GradientTape() as tape:
        y = remote(tf.constant(X))
    del tape, y
    wait_until(lambda: calls["close"] or None, "the release of the forward run")
    assert calls == {"forward": 1, "close": 1}


def test_persistent_tape_pulls_back_many_times(client: Any, calls: Counter[str], no_handles: None) -> None:
    layer, x = gr.keras.RemoteLayer(Noise(), client), tf.ones((6, 4))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = layer(x)
        double = 2 * y
    np.testing.assert_allclose(tape.gradient(y, x), y, **CLOSE)
    np.testing.assert_allclose(tape.gradient(double, x), 2 * y, **CLOSE)
    assert calls == {"forward": 1, "vjp": 2}
    del tape

    @tf.function
    def twice(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = layer(x)
            double = 2 * y
        return y, tape.gradient(y, x), tape.gradient(double, x)

    y, first, second = twice(x)
    np.testing.assert_allclose(first, y, **CLOSE)
    np.testing.assert_allclose(second, 2 * y, **CLOSE)
    assert calls["forward"] == 2


def test_lost_run_is_repeated_where_that_gives_the_same_numbers(client: Any, no_handles: None) -> None:
    part, x = smooth(), tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = gr.keras.RemoteLayer(part, client)(x)
    # The server releases the runs of a stream that ends.
    client._sender._stream.close()
    found = tape.gradient(y, x)
    np.testing.assert_allclose(found, eager(part, x)[1], **CLOSE)


def test_lost_run_of_a_part_with_random_numbers_is_an_error(client: Any, no_handles: None) -> None:
    layer, x = gr.keras.RemoteLayer(Noise(), client), tf.ones((6, 4))
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
    client._sender._stream.close()
    with pytest.raises(gr.errors.HandleExpiredError, match="random numbers"):
        tape.gradient(y, x)
    assert isinstance(layer.last_error, gr.errors.HandleExpiredError)


def test_used_up_quota_costs_only_a_second_forward_pass(
    client: Any, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise gr.errors.QuotaExceededError("there are too many bytes of forward handles")

    monkeypatch.setattr(Program, "forward", refuse)
    part, x = smooth(), tf.constant(X)
    layer = gr.keras.RemoteLayer(part, client)
    np.testing.assert_allclose(eager(layer, x)[1], eager(part, x)[1], **CLOSE)
    assert calls["evaluate"] == 2
    with pytest.raises(gr.errors.QuotaExceededError):
        eager(gr.keras.RemoteLayer(Noise(), client), x)


def hessian_parts(layer: Any, x: Any) -> list[Any]:
    """Returns derivatives of a function of the gradient of the layer, by the input, weights and upstream gradients."""
    scale = tf.constant(RANDOM.normal(size=3), x.dtype) * 0 + tf.range(1, 4, dtype=x.dtype)
    with tf.GradientTape() as outer:
        outer.watch([x, scale])
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = layer(x) * scale
            loss = tf.reduce_sum(y * y)
        slope = inner.gradient(loss, x)
        penalty = tf.reduce_sum(tf.square(slope)) + tf.reduce_sum(slope)
    return outer.gradient(penalty, [x, scale, *(variable.value for variable in layer.trainable_variables)])


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_second_derivatives_equal_those_of_the_local_layer(
    client: Any, no_handles: None, dtype: str, in_function: bool
) -> None:
    part = smooth(dtype=dtype)
    x = tf.constant(X, dtype)
    part(x)
    remote = gr.keras.RemoteLayer(part, client)
    compute = tf.function(hessian_parts) if in_function else hessian_parts
    tolerance = CLOSE if dtype == "float32" else {"rtol": 1e-9, "atol": 1e-12}
    for found, wanted in zip(compute(remote, x), hessian_parts(part, x), strict=True):
        np.testing.assert_allclose(found, wanted, **tolerance)


def test_jacobian_vector_products_equal_those_of_the_local_layer(client: Any) -> None:
    part, x, v = smooth(), tf.constant(X), tf.constant(X[::-1].copy())
    found = []
    for layer in (gr.keras.RemoteLayer(part, client), part):
        with tf.autodiff.ForwardAccumulator(x, v) as accumulator:
            y = layer(x)
        found.append(accumulator.jvp(y))
    np.testing.assert_allclose(found[0], found[1], **CLOSE)


def test_overrides_apply_to_the_part_only_in_second_derivatives(client: Any) -> None:
    """The server multiplies the outputs by their upstream gradients; a rule for Mul must not apply to that.

    Nor may it apply to products in the rule itself. In the part, it applies to both differentiations.
    """
    part, x = layers.Lambda(lambda x: x * x * x), tf.constant(X)
    remote = gr.keras.RemoteLayer(part, client, overrides={"Mul": "(2 * dy * x1, 2 * dy * x)"})
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = remote(x)
        slope = inner.gradient(y, x)

    @tf.custom_gradient
    def mul(a: tf.Tensor, b: tf.Tensor) -> Any:
        return a * b, lambda dy: (2 * dy * b, 2 * dy * a)

    with tf.GradientTape() as outer_local:
        outer_local.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = mul(mul(x, x), x)
        local = inner.gradient(y, x)
    # Each factor of x in a product counts twice: 2 x² + 2 (2 · 2 x²) = 10 x².
    np.testing.assert_allclose(local, 10 * X**2, **CLOSE)
    np.testing.assert_allclose(slope, local, **CLOSE)
    np.testing.assert_allclose(outer.gradient(slope, x), outer_local.gradient(local, x), **CLOSE)


class WithPenalty(keras.Model):  # type: ignore[misc]
    """Adds the squared gradient by the input to the loss, as in WGAN-GP."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part

    def call(self, x: Any) -> Any:
        return self.part(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = tf.reduce_sum(self(x, training=True))
            loss = y + tf.reduce_sum(tf.square(inner.gradient(y, x)))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def test_model_with_gradient_penalty_trains_as_without_a_server(client: Any, no_handles: None) -> None:
    losses = []
    for wrap in (lambda part: gr.keras.RemoteLayer(part, client), lambda part: part):
        keras.utils.set_random_seed(1)
        model = WithPenalty(wrap(smooth()))
        model.compile(keras.optimizers.SGD(0.01))
        losses.append(model.fit(X, X, batch_size=3, epochs=2, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], **CLOSE)


def test_derivatives_that_cannot_be_computed_are_refused(client: Any) -> None:
    x = tf.constant(X)
    with pytest.raises(gr.errors.UnsupportedError, match="random numbers"):
        hessian_parts(gr.keras.RemoteLayer(keras.Sequential([layers.Dense(3), Noise()]), client), x)
    remote = gr.keras.RemoteLayer(layers.Dense(2, activation="tanh"), client)
    with tf.GradientTape() as tape:
        tape.watch(x)
        third = hessian_parts_by_input(remote, x)
    with pytest.raises(gr.errors.UnsupportedError, match="first and second derivatives"):
        tape.gradient(third, x)


def penalty_of_embedding(layer: Any, words: Any) -> list[Any]:
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum(layer(words) ** 3)
        slices = inner.gradient(loss, layer.trainable_variables[0].value)
        assert isinstance(slices, tf.IndexedSlices)
        penalty = tf.reduce_sum(tf.convert_to_tensor(slices) ** 2)
    return [penalty, tf.convert_to_tensor(outer.gradient(penalty, layer.trainable_variables[0].value))]


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "function"])
def test_second_derivatives_of_slices_equal_those_of_the_local_layer(client: Any, wrap: Callable[..., Any]) -> None:
    part, words = layers.Embedding(5, 3), tf.constant([1, 3, 1])
    part.build(())
    found = wrap(penalty_of_embedding)(gr.keras.RemoteLayer(part, client), words)
    for one, other in zip(found, penalty_of_embedding(part, words), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def test_second_derivatives_by_different_slices_of_a_row_are_refused(client: Any) -> None:
    part, words = layers.Embedding(5, 3, embeddings_initializer="ones"), tf.constant([1, 1])
    part.build(())
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = tf.reduce_sum(gr.keras.RemoteLayer(part, client)(words) ** 2 * [[1.0], [2.0]])
        penalty = tf.reduce_sum(inner.gradient(loss, part.embeddings.value).values ** 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"make the gradient a tensor first"):
        outer.gradient(penalty, part.embeddings.value)


def hessian_parts_by_input(layer: Any, x: Any) -> Any:
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = layer(x)
        slope = inner.gradient(y, x)
    return outer.gradient(slope, x)
