"""What a graph knows of a Keras model's layers, and what `gradrule.keras` says of keys that mean none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import gradrule as gr

layers = keras.layers


def model() -> Any:
    image = keras.Input((4,), name="image")
    block = keras.Sequential([layers.Dense(4, name="dense"), layers.ReLU(name="relu")], name="block")
    x = block(block(image))
    x = layers.Dense(4, name="dense", activation="tanh")(x)
    x = layers.Dropout(0.5, name="drop")(x)
    return keras.Model(image, layers.Activation("gelu", name="Relu6")(x))


@pytest.fixture(scope="module")
def graph() -> gr.Graph:
    return gr.from_keras(model())


def only(overrides: list[gr.Override]) -> gr.Override:
    (override,) = overrides
    return override


def test_calls_are_in_order_with_their_tensors(graph: gr.Graph) -> None:
    calls = gr.keras.layers(graph)
    assert [call.path for call in calls] == [
        "block/dense", "block/relu", "block", "block/dense", "block/relu", "block", "dense", "drop", "Relu6",
    ]  # fmt: skip
    first, second = gr.keras.layers(graph, layers.ReLU)
    assert (first.name, first.kind, first.outputs) == ("relu", layers.ReLU, ("block/relu/Relu",))
    assert second.outputs == ("block/relu/Relu_1",)
    assert first.layer == second.layer
    assert gr.keras.layers(graph, "block/dense")[1].inputs == first.outputs
    for call in calls:
        for name in (*call.inputs, *call.outputs):
            graph.tensor(name)


@pytest.mark.parametrize(
    ("which", "paths"),
    [
        ("dense", ["dense"]),
        ("relu", ["block/relu", "block/relu"]),
        ("**/dense", ["block/dense", "block/dense"]),
        ("block/*", ["block/dense", "block/relu", "block/dense", "block/relu"]),
        (keras.Model, ["block", "block"]),
        (["drop", "dense"], ["drop", "dense"]),
    ],
    ids=str,
)
def test_layers_are_found(graph: gr.Graph, which: Any, paths: list[str]) -> None:
    assert [call.path for call in gr.keras.layers(graph, which)] == paths


def test_layers_are_found_by_themselves() -> None:
    live = model()
    graph = gr.from_keras(live)
    assert [call.path for call in gr.keras.layers(graph, live.get_layer("dense"))] == ["dense"]
    assert gr.keras.layers(live, "dense") == gr.keras.layers(graph, "dense")


def test_a_call_of_another_graph_of_the_model_is_found(graph: gr.Graph) -> None:
    (other,) = gr.keras.layers(gr.from_keras(model()), "drop")
    assert gr.keras.layers(graph, other)[0].path == "drop"


def test_single_ops_are_nodes_and_others_regions(graph: gr.Graph) -> None:
    assert only(gr.keras.overrides(graph, {"relu": "ste"})).selector.node_regex == "block/relu/Relu|block/relu/Relu_1"
    region = only(gr.keras.overrides(graph, {"dense": "ste"})).selector.region
    assert list(region.outputs) == ["dense/Tanh"]
    assert region.inputs[0] == "block/relu/Relu_1"
    assert [graph.tensor(name).node.inputs[0].rpartition("/")[2] for name in region.inputs[1:]] == ["kernel", "bias"]


def test_first_matching_entry_wins(graph: gr.Graph) -> None:
    first, second = gr.keras.layers(graph, layers.ReLU)
    exception, rule = gr.keras.overrides(graph, {second: "default", layers.ReLU: ("ste", {"k": 1})})
    assert (exception.rule, exception.selector.node_regex) == ("default", "block/relu/Relu_1")
    assert (rule.rule, rule.selector.node_regex, rule.params) == ("ste", "block/relu/Relu", {"k": 1})
    assert (exception.label, rule.label) == ("block/relu", "ReLU")
    with pytest.raises(gr.errors.InvalidOverrideError, match="earlier entries match all"):
        gr.keras.overrides(graph, {(first, second): "ste", "relu": "default"})


def test_op_types_within_layers(graph: gr.Graph) -> None:
    found = only(gr.keras.overrides(graph, {("dense", ("@linear", "@bias")): "ste"}))
    assert (found.selector.node_regex, list(found.selector.pattern)) == ("dense/.*", ["@linear", "@bias"])
    found = only(gr.keras.overrides(graph, {(layers.Dense, "MatMul"): "ste"}))
    assert (found.selector.node_regex, found.selector.op_type) == ("block/dense/.*|dense/.*", "MatMul")
    assert found.label == "Dense/MatMul"
    assert only(gr.keras.overrides(graph, {"Tanh": "ste"}, optional=True)).optional


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("dnse", "no layer 'dnse'.*Did you mean 'dense'.*Layers: 'block/dense'"),
        ("Relu6", "is a layer and an op type"),
        ("drop", "only returns its input"),
        (layers.Conv2D, "no layer of class Conv2D.*Classes: 'Dense', 'ReLU'"),
        (("dense", "Tann"), "no layer 'Tann'"),
        (("dnse", "Tanh"), "no layer 'dnse'"),
        ("con*", "no layer 'con\\*'"),
        (3, "3 is no layer of this model"),
    ],
    ids=str,
)
def test_unknown_keys_are_refused(graph: gr.Graph, key: Any, message: str) -> None:
    with pytest.raises(gr.errors.InvalidOverrideError, match=message):
        gr.keras.overrides(graph, {key: "ste"})


def test_a_name_that_several_layers_have() -> None:
    image = keras.Input((4,))
    parts = [keras.Sequential([layers.Dense(4, name="dense")], name=name) for name in ("one", "two")]
    graph = gr.from_keras(keras.Model(image, parts[1](parts[0](image))))
    with pytest.raises(gr.errors.InvalidOverrideError, match="several layers: 'one/dense', 'two/dense'"):
        gr.keras.overrides(graph, {"dense": "ste"})
    assert len(gr.keras.overrides(graph, {"**/dense": "ste"})) == 2


def test_layers_in_loops_cannot_be_regions() -> None:
    graph = gr.from_keras(keras.Sequential([keras.Input((5, 3)), layers.LSTM(2, name="lstm")]))
    with pytest.raises(gr.errors.InvalidOverrideError, match=r"'lstm/lstm_cell' is called in a nested function"):
        gr.keras.overrides(graph, {layers.LSTMCell: "ste"})
    found = only(gr.keras.overrides(graph, {(layers.LSTMCell, "Tanh"): "ste"}))
    assert found.selector.node_regex == "lstm/lstm_cell/.*|(?:.*/)?lstm/lstm_cell/.*"


def test_graphs_without_layers() -> None:
    graph = gr.Graph()
    graph.relu(graph.placeholder("x", "float32", [2]))
    assert only(gr.keras.overrides(graph, {"Relu": "ste"})).selector.op_type == "Relu"
    assert gr.keras.layers(graph) == []
    with pytest.raises(gr.errors.InvalidGraphError, match=r"has no layers; make it with gr\.from_keras"):
        gr.keras.overrides(graph, {"dense": "ste"})
    with pytest.raises(gr.errors.InvalidOverrideError, match="a dict by layer or op type, not list"):
        gr.keras.overrides(graph, ["ste"])


def test_frozen_loops_keep_no_shapes_of_handles(tmp_path: Path) -> None:
    graph = gr.from_keras(keras.Sequential([keras.Input((5, 3), name="rows"), layers.GRU(2, name="gru")]))
    graph.save(tmp_path / "model.pb", freeze=True)
    with tf.Graph().as_default() as imported:
        definition = tf.compat.v1.GraphDef.FromString((tmp_path / "model.pb").read_bytes())
        tf.import_graph_def(definition, name="")
        (output,) = graph.outputs.values()
        node, _, index = output.name.partition(":")
        (gradient,) = tf.gradients(
            imported.get_tensor_by_name(f"{node}:{index or 0}"), imported.get_tensor_by_name("rows:0")
        )
    assert gradient is not None


def test_importing_gradrule_keras_does_not_import_tensorflow() -> None:
    code = "import sys, gradrule as gr; gr.keras.layers; assert not {'tensorflow', 'keras'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
