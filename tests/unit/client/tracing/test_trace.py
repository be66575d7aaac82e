"""Tests `gr.trace`: arguments, results, variables, and values that cannot be sent."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.v1 import graph_pb2
from tests.unit.client.tracing.interpreter import Interpreter

SPEC = ("float32", [3])
X = np.array([-1.5, 0.25, 2.0], np.float32)


def signs(x: Any) -> Any:
    return tf.sign(x)


@pytest.mark.parametrize(
    "spec",
    [
        tf.TensorSpec([3], tf.float32),
        gr.TensorSpec("any", "float32", (3,)),
        ("float32", [3]),
        (np.float32, (3,)),
        (tf.float32, tf.TensorShape([3])),
        X,
        tf.constant(X),
        tf.Variable(X),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_every_kind_of_spec(spec: Any) -> None:
    graph = gr.trace(signs, spec)
    assert graph.inputs == {"x": gr.TensorSpec("x", "float32", (3,))}


def test_shapes_may_have_unknown_sizes() -> None:
    graph = gr.trace(lambda x, y: (x, y), ("int64", [None, 2]), ("float64", None))
    assert graph.inputs["x"].shape == (None, 2)
    assert graph.inputs["y"].shape is None
    assert graph.inputs["y"].dtype == "float64"


def test_names_of_nested_arguments_and_results() -> None:
    def fn(a: Any, b: Any, scale: float, *rest: Any, key: Any) -> Any:
        return {"sum": a["u"] + a["v"] * scale, "rest": [rest[0], (key, b[0])], "none": None}

    graph = gr.trace(fn, {"v": SPEC, "u": SPEC}, [SPEC], 2.0, SPEC, key=SPEC)
    assert list(graph.inputs) == ["a_u", "a_v", "b_0", "rest_0", "key"]
    assert set(graph.outputs) == {"sum", "output_rest_0", "rest_1_0", "rest_1_1"}
    feeds = {name: X * (index + 1) for index, name in enumerate(graph.inputs)}
    values = Interpreter(graph).run({name: tf.constant(value) for name, value in feeds.items()})
    np.testing.assert_allclose(values[graph.tensor("sum").name], feeds["a_u"] + feeds["a_v"] * 2.0)
    np.testing.assert_allclose(values[graph.tensor("rest_1_1").name], feeds["b_0"])


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (lambda x: x + 1.0, ["output"]),
        (lambda x: (x + 1.0, -x), ["output_0", "output_1"]),
        (lambda x: {"b": -x, "a": x}, ["a", "b"]),
        (lambda x: [x], ["output_0"]),
    ],
)
def test_aliases_of_results(fn: Any, names: list[str]) -> None:
    graph = gr.trace(fn, SPEC)
    assert sorted(graph.outputs) == names
    assert all(spec.shape == (3,) for spec in graph.outputs.values())


def test_aliases_name_the_returned_tensors_themselves() -> None:
    counter = tf.Variable(0.0, name="counter")

    def fn(x: Any) -> Any:
        h = tf.tanh(x)
        # An assignment that depends on h: it runs with y, which is computed after it.
        counter.assign_add(tf.reduce_sum(h))
        return {"h": h, "y": tf.identity(h * counter), "x_again": x}

    graph = gr.trace(fn, SPEC)
    assert {alias: graph.tensor(alias).node.op_type for alias in graph.aliases} == {
        "h": "Tanh", "y": "Identity", "x_again": "Identity",
    }  # fmt: skip
    added = [node.name for node in graph.find("Identity") if "_gradrule_added" in node.attrs]
    assert added == [graph.tensor("x_again").node.name]
    assert graph.outputs["h"].shape == (3,)


def test_assignments_after_the_only_result_still_run_with_it() -> None:
    counter = tf.Variable(0.0, name="counter")

    def fn(x: Any) -> Any:
        h = tf.tanh(x)
        counter.assign_add(tf.reduce_sum(h))
        return h

    graph = gr.trace(fn, SPEC)
    (output,) = graph.aliases.values()
    assert graph.node(output).inputs == ("Tanh", "^NoOp")
    assert graph.node("NoOp").inputs == ("^AssignAddVariableOp",)


def test_identities_of_nested_functions_loops_and_branches_are_marked() -> None:
    @tf.function
    def inner(x: Any) -> Any:
        return tf.cond(x[0] > 0, lambda: tf.sin(x), lambda: tf.cos(x))

    graph = gr.trace(lambda x: inner(tf.identity(x, name="mine")), SPEC)
    message = graph_pb2.Graph.FromString(graph.to_bytes())
    bodies = [message.node, *(function.node_def for function in message.library.function)]
    identities = [node for body in bodies for node in body if node.op == "Identity"]
    assert [node.name for node in identities if not node.attr["_gradrule_added"].b] == ["mine"]


def function_from_scratch(weight: Any) -> Any:
    """Makes functions that call functions, loops and branches, as a model does whenever it is traced."""

    def sine(x: Any) -> Any:
        return tf.sin(x) * weight

    # The name of an op type.
    sine.__name__ = "Relu"
    function = tf.function(sine)

    def fn(x: Any) -> Any:
        looped = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, function(v) + x), (0, x))[1]
        return function(tf.cond(x[0] > 0, lambda: function(looped), lambda: tf.map_fn(lambda v: v * weight, x)))

    return fn


def test_the_same_function_gives_the_same_graph_each_time() -> None:
    weight = tf.Variable(2.0, name="weight")
    first, second = (gr.trace(function_from_scratch(weight), SPEC) for _ in range(2))
    assert first.to_bytes() == second.to_bytes()
    value, (gradient,) = Interpreter(first).gradients_of("output", ["x"], {"x": X})
    with tf.GradientTape() as tape:
        x = tf.constant(X)
        tape.watch(x)
        local = function_from_scratch(weight)(x)
    np.testing.assert_allclose(value, local, rtol=1e-6)
    np.testing.assert_allclose(gradient, tape.gradient(local, x), rtol=1e-5)


def test_functions_in_the_style_of_tensorflow_1() -> None:
    """The loop of `tf.nn.ctc_loss` consists of such functions."""
    labels = np.array([[1, 2, 2], [3, 1, 0]], np.int32)
    logits = np.random.default_rng(4).normal(size=(2, 6, 5)).astype(np.float32)

    def losses(x: Any) -> Any:
        return tf.nn.ctc_loss(labels, x, [3, 2], [6, 5], logits_time_major=False, blank_index=0)

    graph = gr.trace(losses, ("float32", logits.shape))
    assert any(node.op_type == "While" for node in graph.find())
    expected = losses(logits).numpy()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        definition = tf.compat.v1.GraphDef.FromString(graph.to_bytes())
        (output,) = tf.import_graph_def(definition, {"x": logits}, [graph.tensor("output").name])
        np.testing.assert_allclose(session.run(output), expected, rtol=1e-5)


def test_results_named_like_inputs_and_variables() -> None:
    weight = tf.Variable(2.0, name="weight")
    graph = gr.trace(lambda x: {"x": x * weight, "weight": weight + 1.0, "output_x": -x}, SPEC)
    assert list(graph.inputs) == ["x"]
    assert set(graph.outputs) == {"output_x_", "output_weight", "output_x"}
    assert graph.tensor("x").name == "x:0"
    values = Interpreter(graph).run({"x": tf.constant(X)})
    np.testing.assert_allclose(values[graph.tensor("output_x_").name], 2 * X)
    np.testing.assert_allclose(values[graph.tensor("output_weight").name], 3.0)


def test_ragged_and_sparse_arguments_become_component_tensors() -> None:
    graph = gr.trace(
        lambda s, r: (tf.sparse.to_dense(s), r * 2.0),
        tf.SparseTensorSpec([None, 4], tf.float32),
        tf.RaggedTensorSpec([None, None], tf.float32, ragged_rank=1),
    )
    assert list(graph.inputs) == ["s_indices", "s_values", "s_dense_shape", "r_values", "r_row_splits"]
    assert set(graph.outputs) == {"output_0", "output_1_values", "output_1_row_splits"}


def test_methods_tf_functions_and_concrete_functions() -> None:
    class Scaler(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scale = tf.Variable(2.0, name="scale")

        @tf.function(input_signature=[tf.TensorSpec([3], tf.float32, name="image")])
        def __call__(self, x: Any) -> Any:
            return self.scale * x

        def plain(self, x: Any) -> Any:
            return self.scale * x

    scaler = Scaler()
    for graph in (
        gr.trace(scaler.__call__),
        gr.trace(scaler.plain, SPEC),
        gr.trace(scaler.__call__.get_concrete_function()),
    ):
        assert list(graph.inputs) == ["x"]
        assert graph.variables == {"scale": 2.0}
        _, (dx, dscale) = Interpreter(graph).gradients_of("output", ["x", "scale"], {"x": X})
        np.testing.assert_allclose(dx, [2, 2, 2])
        np.testing.assert_allclose(dscale, X.sum())
    with pytest.raises(gr.errors.InvalidGraphError, match="give no specs"):
        gr.trace(scaler.__call__.get_concrete_function(), SPEC)


def test_variables_keep_names_types_and_values() -> None:
    twins = [tf.Variable([1.0, 2.0], name="w"), tf.Variable([3], dtype=tf.int32, name="w")]
    half = tf.Variable([1.5], dtype=tf.bfloat16, name="a/half")
    graph = gr.trace(lambda x: x + tf.cast(twins[1], tf.float32) + twins[0][0] + tf.cast(half, tf.float32), SPEC)
    assert set(graph.variables) == {"w", "w_1", "a/half"}
    assert {value.dtype.name for value in graph.variables.values()} == {"float32", "int32", "bfloat16"}
    for name, value in graph.variables.items():
        (node,) = graph.find(node=name)
        assert node.op_type == "VarHandleOp"
        assert node.attrs["shared_name"].s.decode() == name
        assert [dim.size for dim in node.attrs["shape"].shape.dim] == list(value.shape)


def test_a_node_with_the_name_of_an_input_is_renamed() -> None:
    variable = tf.Variable(1.0, name="Sign")
    graph = gr.trace(lambda Mul: tf.sign(Mul) * Mul * variable, SPEC)
    assert list(graph.inputs) == ["Mul"]
    assert list(graph.variables) == ["Sign"]
    _, (gradient,) = Interpreter(graph).gradients_of("output", ["Mul"], {"Mul": X})
    np.testing.assert_allclose(gradient, np.sign(X))


def test_captured_constants() -> None:
    small, large = tf.constant([1.0, 2.0, 3.0]), tf.constant(np.arange(3000.0, dtype=np.float32).reshape(1000, 3))
    graph = gr.trace(lambda x: x * small + tf.reduce_sum(large), SPEC)
    assert graph.variables == {}
    value, _ = Interpreter(graph).gradients_of("output", ["x"], {"x": X})
    np.testing.assert_allclose(value, X * [1, 2, 3] + np.arange(3000.0).sum(), rtol=1e-6)


def test_all_resources_that_cannot_be_sent_are_named_at_once() -> None:
    queues = [tf.queue.FIFOQueue(2, tf.float32), tf.queue.FIFOQueue(3, tf.float32)]
    iterator = iter(tf.data.Dataset.range(3))
    weight = tf.Variable(1.0)

    def fn(x: Any) -> Any:
        return x + queues[0].dequeue() + queues[1].dequeue() + tf.cast(next(iterator), tf.float32) * weight

    with pytest.raises(gr.errors.UnsupportedError) as refusal:
        gr.trace(fn, SPEC)
    assert len(refusal.value.details) == 3
    text = str(refusal.value)
    assert text.count("cannot be sent") == 3
    assert "QueueDequeueV2" in text
    assert "IteratorGetNext" in text


@pytest.mark.parametrize(
    ("specs", "kind", "says"),
    [
        ((object(),), gr.errors.InvalidTensorError, "spec 0 is object"),
        ((("flaot32", [3]),), gr.errors.InvalidTensorError, "spec 0.*flaot32"),
        ((SPEC, SPEC), gr.errors.InvalidGraphError, "cannot be traced with these specs"),
        ((("string", [3]),), gr.errors.InvalidGraphError, "cannot be traced with these specs"),
        (("float32",), gr.errors.InvalidTensorError, r"spec 0 is the dtype 'float32'.*write \('float32', shape\)"),
        ((np.float32,), gr.errors.InvalidTensorError, r"\('float32', shape\)"),
        ((float,), gr.errors.InvalidTensorError, r"\('float32', shape\)"),
        ((tf.float32,), gr.errors.InvalidTensorError, r"\('float32', shape\)"),
        (([("float32", [3]), "int32"],), gr.errors.InvalidTensorError, r"spec 0\[1\] is the dtype 'int32'"),
    ],
)
def test_invalid_specs_are_refused(specs: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        gr.trace(signs, *specs)
    with pytest.raises(gr.errors.InvalidGraphError, match="no function"):
        gr.trace(3)


def test_without_tensorflow_the_error_says_what_to_install() -> None:
    script = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'tensorflow' else real(name, *rest)\n"
        "import gradrule as gr\n"
        "for call in (lambda: gr.trace(abs), lambda: gr.from_keras(abs)):\n"
        "    try: call()\n"
        "    except gr.errors.UnsupportedError as error: assert 'pip install tensorflow' in error.message\n"
        "    else: raise SystemExit(1)\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
