"""`gr.load` of SavedModels: signatures, functions, variables, custom gradients; of TensorFlow 2 and 1."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import gradrule as gr
from tests.unit.client.tracing.interpreter import Interpreter

X = np.array([-1.5, 0.25, 2.0], np.float32)
SPEC = tf.TensorSpec([3], tf.float32)


class Spiking(tf.Module):  # type: ignore[misc]
    """Two functions, a variable, and a custom gradient that captures a tensor, an argument and the variable."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = tf.Variable(3.0, name="slope")
        self.weight = tf.Variable([1.0, 2.0, 3.0], name="weight")

    @tf.custom_gradient
    def spike(self, x: Any) -> Any:
        e = tf.exp(x)

        def grad(dy: Any, variables: Any = None) -> Any:
            return dy * e * self.slope, [tf.reduce_sum(dy)]

        return tf.sign(x) * self.slope, grad

    @tf.function(input_signature=[SPEC])
    def __call__(self, x: Any) -> Any:
        return {"spikes": self.spike(x * self.weight)}

    @tf.function(input_signature=[tf.TensorSpec([3], tf.float32, name="image")])
    def doubled(self, x: Any) -> Any:
        def body(i: Any, v: Any) -> Any:
            return i + 1, v * 2.0

        return tf.while_loop(lambda i, v: i < 2, body, [0, x])[1]

    @tf.function
    def many(self, x: Any, training: bool = False) -> Any:
        return -x if training else x


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model"
    module = Spiking()
    module.many(tf.zeros([2]), training=True)
    module.many(tf.zeros([2]), training=False)
    signatures = {"serving_default": module.__call__, "doubled": module.doubled}
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, str(path), signatures=signatures, options=options)
    return path


def test_signatures_with_custom_gradients(folder: Path) -> None:
    graph = gr.load(folder)
    assert list(graph.inputs) == ["x"]
    assert list(graph.outputs) == ["spikes"]
    assert set(graph.variables) == {"slope", "weight"}
    value, (dx, dweight, dslope) = Interpreter(graph).gradients_of("spikes", ["x", "weight", "slope"], {"x": X})
    weight = np.array([1, 2, 3])
    np.testing.assert_allclose(value, 3 * np.sign(X))
    np.testing.assert_allclose(dx, np.exp(X * weight) * 3 * weight, rtol=1e-5)
    np.testing.assert_allclose(dweight, np.exp(X * weight) * 3 * X, rtol=1e-5)
    np.testing.assert_allclose(dslope, 3)


def test_other_signatures_and_functions(folder: Path) -> None:
    doubled = gr.load(folder, "doubled")
    assert list(doubled.inputs) == ["image"]
    np.testing.assert_allclose(Interpreter(doubled).gradients_of("output_0", ["image"], {"image": X})[0], 4 * X)
    called = gr.load(folder, signature="__call__")
    assert list(called.outputs) == ["spikes"]
    many = gr.load(folder, signature="many")
    (x,) = many.inputs
    np.testing.assert_allclose(Interpreter(many).gradients_of("output", [x], {x: X[:2]})[0], X[:2])


def test_an_unknown_signature_lists_the_valid_ones(folder: Path) -> None:
    with pytest.raises(gr.errors.InvalidGraphError) as refusal:
        gr.load(folder, "dubled")
    assert "Did you mean 'doubled'?" in refusal.value.message
    assert "'serving_default'" in refusal.value.message
    assert "'__call__', 'many'" in refusal.value.message


def test_a_function_of_several_traces(tmp_path: Path) -> None:
    module = tf.Module()
    module.both = tf.function(lambda x: x)
    module.both(tf.zeros([2]))
    module.both(tf.zeros([2, 2]))
    tf.saved_model.save(module, str(tmp_path / "m"))
    with pytest.raises(gr.errors.InvalidGraphError, match="several signatures"):
        gr.load(tmp_path / "m", "both")


def test_a_model_with_an_optimizer_of_keras_2(folder: Path, tmp_path: Path) -> None:
    """Keras 2 saves an optimizer's slots as such; without Keras 2, TensorFlow cannot restore them."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    saved = saved_model_pb2.SavedModel.FromString((model / "saved_model.pb").read_bytes())
    nodes = saved.meta_graphs[0].object_graph_def.nodes
    children = {child.local_name: child.node_id for child in nodes[0].children}
    nodes[children["doubled"]].slot_variables.add(
        original_variable_node_id=children["weight"], slot_name="m", slot_variable_node_id=children["slope"]
    )
    (model / "saved_model.pb").write_bytes(saved.SerializeToString())
    with pytest.raises(AttributeError, match="add_slot"):
        tf.saved_model.load(str(model))
    assert gr.load(model).to_bytes() == gr.load(folder).to_bytes()


def test_parts_of_a_saved_model(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "saved_model.pb", tmp_path / "renamed.pb")
    with pytest.raises(gr.errors.UnsupportedError, match="is a SavedModel, not a GraphDef; give the whole folder"):
        gr.load(tmp_path / "renamed.pb")
    with pytest.raises(gr.errors.UnsupportedError, match="one file of a SavedModel"):
        gr.load(folder / "saved_model.pb")
    meta = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes()).meta_graphs[0]
    (tmp_path / "meta.pb").write_bytes(meta.SerializeToString())
    with pytest.raises(gr.errors.UnsupportedError, match="is a MetaGraphDef, not a GraphDef"):
        gr.load(tmp_path / "meta.pb")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "saved_model.pb").write_bytes(b"\xff\xff")
    with pytest.raises(gr.errors.InvalidGraphError, match="holds no SavedModel"):
        gr.load(tmp_path / "broken")


def test_variables_without_their_files(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    shutil.rmtree(tmp_path / "model" / "variables")
    with pytest.raises(gr.errors.InvalidGraphError, match="TensorFlow cannot load the SavedModel"):
        gr.load(tmp_path / "model")


@pytest.fixture(scope="module", params=[False, True], ids=["references", "resources"])
def old_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SavedModel of TensorFlow 1."""
    path = tmp_path_factory.mktemp("old") / "model"
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 3], name="in/x")
        kernel = v1.get_variable("layer/w", initializer=tf.constant([1.0, 2.0, 3.0]), use_resource=request.param)
        bias = v1.get_variable("layer/b", initializer=tf.constant(0.5), use_resource=request.param)
        hidden = tf.nn.relu(x * kernel + bias, name="hidden")
        shifted = v1.assign_add(bias, 1.0)
        session.run(v1.global_variables_initializer())
        info = v1.saved_model.utils.build_tensor_info
        signature_of = v1.saved_model.signature_def_utils.build_signature_def
        builder = v1.saved_model.builder.SavedModelBuilder(str(path))
        signatures = {
            "serving_default": signature_of({"image": info(x)}, {"score": info(hidden)}, "predict"),
            "shift": signature_of({}, {"bias": info(tf.identity(shifted))}, "shift"),
        }
        builder.add_meta_graph_and_variables(session, ["serve"], signature_def_map=signatures)
        builder.save()
    return path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_of_tensorflow_1(old_folder: Path) -> None:
    graph = gr.load(old_folder)
    assert list(graph.inputs) == ["image"]
    assert list(graph.outputs) == ["score"]
    assert graph.inputs["in/x"] == graph.inputs["image"]
    assert set(graph.variables) == {"layer/w", "layer/b"}
    assert {node.op_type for node in graph.find()} >= {"VarHandleOp", "ReadVariableOp"}
    x = np.stack([X, -X])
    value, (dx, dw) = Interpreter(graph).gradients_of("score", ["in/x", "layer/w"], {"in/x": x})
    linear = x * [1, 2, 3] + 0.5
    np.testing.assert_allclose(value, np.maximum(linear, 0))
    np.testing.assert_allclose(dx, (linear > 0) * np.array([1, 2, 3]))
    np.testing.assert_allclose(dw, ((linear > 0) * x).sum(0))
    with pytest.raises(gr.errors.InvalidGraphError, match=r"no signature 'predict'.*'serving_default', 'shift'"):
        gr.load(old_folder, "predict")


def test_writing_by_reference_is_refused(old_folder: Path) -> None:
    by_reference = bool(gr_variables(old_folder))
    if by_reference:
        with pytest.raises(gr.errors.UnsupportedError, match=r"AssignAdd node .* writes to the variable 'layer/b'"):
            gr.load(old_folder, "shift")
    else:
        assert gr.load(old_folder, "shift").find(op_type="AssignAddVariableOp")


def gr_variables(folder: Path) -> list[str]:
    meta = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes()).meta_graphs[0]
    return [node.name for node in meta.graph_def.node if node.op == "VariableV2"]
