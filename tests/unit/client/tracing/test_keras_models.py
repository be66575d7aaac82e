"""`gr.from_keras` and Keras files: names, variables, and gradients equal to Keras's own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.unit.client.tracing.interpreter import Interpreter

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    keras.utils.set_random_seed(1)
    with warnings.catch_warnings():
        # h5py and Keras warn of their own ways when a model is saved as .h5.
        warnings.simplefilter("ignore")
        yield


def functional() -> Any:
    image = keras.Input((3,), name="image")
    inner = keras.Sequential(
        [keras.layers.Dense(4, activation="gelu", name="first"), keras.layers.BatchNormalization(name="norm")],
        name="inner",
    )
    hidden = keras.layers.Dense(3, activation="silu", name="dense")(inner(image))
    hidden = keras.layers.Dense(3, activation="relu", name="dense_1")(hidden)
    return keras.Model(image, {"score": keras.layers.Dense(2, name="head")(hidden), "hidden": hidden})


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="own")
        self.dense = keras.layers.Dense(3, activation="swish")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(x) * (2.0 if training else 1.0)


MODELS: dict[str, Any] = {
    "functional": functional,
    "sequential": lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, activation="silu")]),
    "convolution": lambda: keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Reshape((3, 1, 1)),
            keras.layers.Conv2D(2, 2, padding="same", activation="relu6"),
            keras.layers.GlobalAveragePooling2D(),
        ]
    ),
    "embedding": lambda: keras.Sequential(
        [keras.Input((3,)), keras.layers.Lambda(lambda v: tf.cast(v > 0, tf.int32)), keras.layers.Embedding(2, 4)]
    ),
}


def keras_gradients(model: Any, output: Any, training: bool = False) -> list[Any]:
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=training)
        y = y if output is None else y[output]
    found = tape.gradient(y, [x, *(variable.value for variable in model.trainable_variables)])
    return [None if item is None else tf.convert_to_tensor(item).numpy() for item in found]


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_keras_own(kind: str) -> None:
    model = MODELS[kind]()
    graph = gr.from_keras(model)
    output = "score" if kind == "functional" else None
    (x,) = graph.inputs
    names = [variable.path for variable in model.trainable_variables]
    _, found = Interpreter(graph).gradients_of(output or next(iter(graph.outputs)), [x, *names], {x: X})
    for name, actual, expected in zip([x, *names], found, keras_gradients(model, output), strict=True):
        if expected is None:
            assert actual is None, name
        else:
            np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6, err_msg=name)


def test_names_are_keras_names() -> None:
    model = functional()
    graph = gr.from_keras(model)
    assert list(graph.inputs) == ["image"]
    assert set(graph.outputs) == {"score", "hidden"}
    assert set(graph.variables) == {variable.path for variable in model.variables}


def test_nodes_are_in_the_scope_of_their_layer() -> None:
    graph = gr.from_keras(functional())
    for scope in ("inner/first", "inner/norm", "dense", "dense_1", "head"):
        assert graph.find(scope=scope), scope
    assert [node.name for node in graph.find(op_type="Relu")] == ["dense_1/Relu"]
    assert len(graph.find(op_type="IdentityN", scope="dense")) == 1


def test_tracing_does_not_change_the_model() -> None:
    model = functional()
    before = model(X)
    gr.from_keras(model)
    assert all("call" not in vars(layer) for layer in model.layers)
    np.testing.assert_array_equal(model(X)["score"], before["score"])


def test_training_mode() -> None:
    model = functional()
    graph = gr.from_keras(model, training=True)
    assert graph.find(op_type="AssignVariableOp")
    value, _ = Interpreter(graph).gradients_of("score", ["image"], {"image": X})
    np.testing.assert_allclose(value, model(X, training=True)["score"], rtol=1e-4, atol=1e-5)
    assert not gr.from_keras(model).find(op_type="AssignVariableOp")


def test_subclassed_models_need_specs() -> None:
    model = Subclassed()
    with pytest.raises(gr.errors.InvalidGraphError, match=r"'own' does not state its inputs.*give specs"):
        gr.from_keras(model)
    graph = gr.from_keras(model, ("float32", [None, 3]))
    assert list(graph.inputs) == ["inputs"]
    value, _ = Interpreter(graph).gradients_of("output", ["inputs"], {"inputs": X})
    np.testing.assert_allclose(value, model(X), rtol=1e-5, atol=1e-6)
    doubled = gr.trace(model, ("float32", [None, 3]), training=True)
    value, _ = Interpreter(doubled).gradients_of("output", ["inputs"], {"inputs": X})
    np.testing.assert_allclose(value, 2 * model(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cell", [keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN])
def test_recurrent_layers(cell: Any) -> None:
    model = keras.Sequential([keras.Input((5, 3)), cell(4), keras.layers.Dense(1)])
    graph = gr.from_keras(model)
    (x,) = graph.inputs
    # A layer's seeds are variables, too, which it does not use without dropout.
    assert set(graph.variables) == {variable.path for variable in model.trainable_variables}
    assert graph.outputs
    assert tf.compat.v1.GraphDef.FromString(graph.to_bytes()).library.function
    assert graph.inputs[x].shape == (None, 5, 3)


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_files(tmp_path: Path, suffix: str) -> None:
    model = MODELS["sequential"]()
    path = tmp_path / f"model{suffix}"
    model.save(path)
    graph = gr.load(path)
    (x,) = graph.inputs
    value, _ = Interpreter(graph).gradients_of(next(iter(graph.outputs)), [x], {x: X})
    np.testing.assert_allclose(value, model(X), rtol=1e-5, atol=1e-6)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "model.keras").write_bytes(b"nothing")
    with pytest.raises(gr.errors.InvalidGraphError, match=r"Keras cannot load .*model\.keras"):
        gr.load(tmp_path / "model.keras")
    with pytest.raises(gr.errors.InvalidGraphError, match="No such file"):
        gr.load(tmp_path / "none.keras")
    with pytest.raises(gr.errors.InvalidGraphError, match="no Keras model"):
        gr.from_keras(keras.layers.Dense(2))


class Block(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.first, self.second = keras.layers.Dense(3, name="a"), keras.layers.Dense(3, name="b")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


class Blocks(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="blocks")
        self.blocks = [Block("one"), Block("two")]

    def call(self, x: Any) -> Any:
        return self.blocks[0](self.blocks[1](x))


def test_variables_of_nested_layers_have_the_names_of_keras() -> None:
    model = Blocks()
    model(np.ones((1, 3), np.float32))
    graph = gr.from_keras(model, ("float32", [None, 3]))
    own = [(variable.path, variable.numpy().tolist()) for variable in model.variables]
    assert [(name, value.tolist()) for name, value in graph.variables.items()] == own, "also in the order of Keras"
    assert "blocks/two/a/kernel" in graph.variables


def test_variables_of_models_in_functions_have_the_names_of_keras() -> None:
    model, spec = Blocks(), tf.TensorSpec([None, 3])
    model(X)
    paths = {variable.path for variable in model.variables}
    models = [model]
    assert set(gr.trace(lambda x: tf.reduce_sum(models[0](x)), spec).variables) == paths
    assert set(gr.trace(tf.function(model.blocks[0]), spec).variables) == {v.path for v in model.blocks[0].variables}
    assert set(gr.trace(lambda x: x * model.blocks[0].first.kernel[0], spec).variables) == {"blocks/one/a/kernel"}
    # Nothing of Keras remains changed.
    assert keras.Variable.value.fget.__module__.startswith("keras.")


def test_the_output_of_a_sequential_model_is_named_after_its_layer() -> None:
    layers = [keras.Input((3,)), keras.layers.Dense(2, name="first"), keras.layers.Dense(2, name="head")]
    model = keras.Sequential(layers)
    assert list(gr.from_keras(model).outputs) == ["head"]
    assert list(gr.from_keras(keras.Model(model.inputs, model.outputs)).outputs) == ["head"]
