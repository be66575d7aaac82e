"""Graphs from functions and models give TensorFlow's values and gradients; overrides reach their nodes by alias."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr

X = np.array([[-1.5, 0.25, 2.0], [0.5, -3.0, 1.0]], np.float32)
SPEC = ("float32", [None, 3])


def branching(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sin(x) * x, lambda: -x)


def looping(x: Any) -> Any:
    return tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * tf.sin(x)), [0, x])[1]


def calling(x: Any) -> Any:
    inner = tf.function(lambda v: tf.tanh(v) * v)
    return inner(inner(x)) + x


def mapping(x: Any) -> Any:
    return tf.map_fn(lambda row: row * tf.reduce_sum(row), x)


@pytest.mark.parametrize("fn", [branching, looping, calling, mapping], ids=lambda fn: fn.__name__)
def test_functions_give_the_results_of_tensorflow(either: Any, fn: Callable[..., Any]) -> None:
    graph = gr.trace(fn, SPEC)
    result = either.evaluate(graph, {"x": X}, fetches=["output"], ys=["output"], xs=["x"])
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = fn(x)
    np.testing.assert_allclose(result.outputs["output"], y, rtol=1e-5)
    np.testing.assert_allclose(result.gradients["x"], tape.gradient(y, x), rtol=1e-5, atol=1e-6)


def graph_with_aliases() -> gr.Graph:
    graph = gr.trace(lambda x: {"score": tf.sign(x) * x, "other": -x}, SPEC)
    graph.aliases["image"] = "x"
    return graph


def test_overrides_reach_traced_nodes(either: Any) -> None:
    graph = graph_with_aliases()
    words = {"ys": "score", "xs": "image", "overrides": {"Sign": "ste_sign"}}
    result = either.evaluate(graph, {"image": X}, fetches=["score"], **words)
    assert list(result.outputs) == ["score"]
    assert list(result.gradients) == ["image"]
    np.testing.assert_allclose(result.gradients["image"], np.sign(X) + X * (np.abs(X) <= 1))
    np.testing.assert_array_equal(result.gradients["x"], result.gradients["image"])
    explained = either.explain(graph, fetches=["score"], **words)
    assert (list(explained.outputs), list(explained.xs)) == (["score"], ["image"])


def test_aliases_of_an_equal_program_that_is_loaded_do_not_count(either: Any) -> None:
    results = {"fetches": ["score"], "ys": ["score"]}
    first = either.compile(graph_with_aliases(), **results, xs=["x"])
    graph = graph_with_aliases()
    del graph.aliases["image"]
    graph.aliases["picture"] = "x"
    second = either.compile(graph, **results, xs=["x"])
    assert first.digests == second.digests
    assert [name in first.aliases for name in ("image", "picture")] == [True, False]
    assert [name in second.aliases for name in ("image", "picture")] == [False, True]


def test_programs_accept_aliases(either: Any) -> None:
    program = either.compile(graph_with_aliases(), fetches=["score"], ys=["score"], xs=["image"])
    try:
        found = either.program(program.name)
        for each in (program, found):
            assert dict(each.aliases) == dict(graph_with_aliases().aliases)
            assert list(each.inputs) == ["image"]
            assert list(each.outputs) == list(each.ys) == ["score"]
            result = each(image=X)
            np.testing.assert_allclose(result.outputs["score"], np.abs(X))
            assert list(result.gradients) == ["image"]
            weighted = each.evaluate({"x": X}, grad_ys={"score": 2 * np.ones_like(X)})
            np.testing.assert_allclose(weighted.gradients["image"], 2 * np.sign(X))
    finally:
        either.delete_program(program.name)


def test_aliases_are_part_of_the_program(client: Any) -> None:
    graph = graph_with_aliases()
    first = client.compile(graph, fetches=["score"])
    graph.aliases["picture"] = "x"
    second = client.compile(graph, fetches=["score"])
    try:
        assert first.name != second.name
        assert set(second.aliases) - set(first.aliases) == {"picture"}
    finally:
        client.delete_program(first.name)
        client.delete_program(second.name)


def test_error_of_a_misspelt_alias_names_the_others(either: Any) -> None:
    with pytest.raises(gr.errors.UnknownTensorError, match=r"'scor'.*Aliases: 'image', 'other', 'score'"):
        either.evaluate(graph_with_aliases(), {"image": X}, fetches=["scor"])
    with pytest.raises(gr.errors.UnknownFeedError, match=r"'imag'.*Aliases: 'image', 'other', 'score'"):
        either.evaluate(graph_with_aliases(), {"imag": X}, fetches=["score"])


def test_frozen_models_give_the_results_of_tensorflow(either: Any, tmp_path: Path) -> None:
    weight = tf.Variable([[1.0, -1.0], [2.0, 0.5], [0.0, 3.0]], name="weight")
    gr.trace(lambda x: tf.nn.relu(x @ weight), SPEC).save(tmp_path / "model.pb", freeze=True)
    result = either.evaluate(gr.load(tmp_path / "model.pb"), {"x": X}, ["output"], ys=["output"], xs=["x"])
    linear = X @ weight.numpy()
    np.testing.assert_allclose(result.outputs["output"], np.maximum(linear, 0), rtol=1e-6)
    np.testing.assert_allclose(result.gradients["x"], (linear > 0) @ weight.numpy().T, rtol=1e-6)


def test_layers_of_keras_name_their_outputs(either: Any) -> None:
    """In evaluate, programs, derivatives and regions."""
    image = keras.Input((3,), name="image")
    hidden = keras.layers.Dense(4, activation="tanh", name="conv1")(image)
    model = keras.Model(image, keras.layers.Dense(2, name="head")(hidden))
    first, head = model.get_layer("conv1"), model.get_layer("head")
    with tf.GradientTape() as tape:
        middle = first(tf.constant(X))
        tape.watch(middle)
        y = head(middle)
    wanted = tape.gradient(y, middle).numpy()
    graph = gr.from_keras(model)
    words: dict[str, Any] = {"fetches": ["conv1"], "ys": ["head"], "xs": {"hidden": ["conv1"], "inputs": ["image"]}}
    program = either.compile(graph, **words)
    for r in (either.evaluate(graph, {"image": X}, **words), program(image=X), program.evaluate({"image": X})):
        np.testing.assert_allclose(r.outputs["conv1"], middle, rtol=1e-5)
        assert list(r.outputs) == ["conv1"]
        np.testing.assert_allclose(r.gradients["hidden"]["conv1"], wanted, rtol=1e-5)
    cut = either.evaluate(graph, {"image": X}, ys="head", xs="image", stop_gradients="conv1")
    assert cut.gradients["image"] is None
    fed = either.evaluate(graph, {"conv1": np.zeros((1, 4), np.float32)}, ["head"])
    np.testing.assert_allclose(fed.outputs["head"], head.bias.numpy()[None])
    blocks = either.jacobian(graph, {"image": X[:1]}, ys=["head"], xs=["conv1"])
    np.testing.assert_allclose(blocks["head"]["conv1"][0, :, 0], head.kernel.numpy().T, rtol=1e-6)
    region = gr.Override(gr.Rule("3 * dy"), region=gr.Region(inputs=["conv1"], outputs=["head"]))
    words = {"ys": "head", "xs": "conv1", "grad_ys": [np.ones((2, 2), np.float32)]}
    with pytest.raises(gr.errors.GradruleError, match="shape"):
        either.evaluate(graph, {"image": X}, overrides=[region], **words)
