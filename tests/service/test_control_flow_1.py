"""Graphs with control flow of version 1, loaded from files: values and gradients of TensorFlow 1's sessions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

import gradrule as gr

v1 = tf.compat.v1

XS = [np.array([1.0, -2.0, 3.0], np.float32), np.array([-1.0, -2.0, 0.5], np.float32)]


@pytest.fixture
def version_1() -> Iterator[None]:
    v1.disable_control_flow_v2()
    with warnings.catch_warnings():
        # TensorFlow emits warnings while saving and loading.
        warnings.simplefilter("ignore")
        yield
    v1.enable_control_flow_v2()


def simple(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.sin(x) * x, lambda: tf.tanh(x))


def identity_and_constant(x: Any) -> Any:
    positive = tf.reduce_sum(x) > 0.0
    return tf.cond(positive, lambda: x, lambda: tf.ones([3])) * tf.cond(positive, lambda: tf.constant(3.0), lambda: 2.0)


def several_results(x: Any) -> Any:
    a, b = tf.cond(tf.reduce_sum(x) > 0.0, lambda: (x * 2.0, tf.exp(x)), lambda: (tf.exp(x), x))
    return a - 3.0 * b


def one_condition_twice(x: Any) -> Any:
    positive = tf.reduce_sum(x) > 0.0
    first = tf.cond(positive, lambda: x**2, lambda: tf.sin(x))
    return tf.cond(positive, lambda: first * x, lambda: tf.exp(first))


def nested(x: Any) -> Any:
    def inner() -> Any:
        return tf.cond(x[0] > 0.0, lambda: x * 3.0, lambda: tf.cond(x[2] > 0.0, lambda: x**3, lambda: tf.exp(x)))

    return tf.cond(tf.reduce_max(x) > 2.0, lambda: tf.sin(x), inner)


def chosen(x: Any) -> Any:
    index = tf.cast(tf.reduce_sum(x) + 2.0, tf.int32)
    return tf.switch_case(index, [lambda: x, lambda: x**2, lambda: tf.sin(x)], default=lambda: tf.exp(x) * x)


def loop(x: Any) -> Any:
    scale = tf.exp(0.1 * x)
    return tf.while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, tf.sin(y) * scale + x), [0, x])[1]


def condition_in_loop(x: Any) -> Any:
    def body(i: Any, y: Any) -> Any:
        return i + 1, tf.cond(tf.equal(i % 2, 0), lambda: y * x, lambda: tf.sin(y))

    return tf.while_loop(lambda i, y: i < 3, body, [0, x])[1]


def loop_in_condition(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: loop(x), lambda: x * loop(x**2))


def loop_in_loop(x: Any) -> Any:
    def body(i: Any, y: Any) -> Any:
        return i + 1, tf.while_loop(lambda j, z: j < i + 1, lambda j, z: (j + 1, tf.sin(z) * x), [0, y])[1]

    return tf.while_loop(lambda i, y: i < 3, body, [0, x])[1]


FUNCTIONS: list[Callable[[Any], Any]] = [
    simple,
    identity_and_constant,
    several_results,
    one_condition_twice,
    nested,
    chosen,
    loop,
    condition_in_loop,
    loop_in_condition,
    loop_in_loop,
]


@pytest.mark.usefixtures("version_1")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_and_gradients_equal_a_session(
    client: gr.Client, function: Callable[[Any], Any], tmp_path: Path
) -> None:
    with tf.Graph().as_default() as graph, v1.Session() as session:
        x = v1.placeholder(tf.float32, [3], name="x")
        tf.identity(function(x), name="y")
        (tmp_path / "g.pb").write_bytes(graph.as_graph_def().SerializeToString())
        y = graph.get_tensor_by_name("y:0")
        gradient = v1.gradients(y, x)[0]
        expected = [session.run([y, gradient], {x: value}) for value in XS]
    loaded = gr.load(tmp_path / "g.pb")
    assert not {"Switch", "Merge", "Enter"} & {node.op_type for node in loaded.find()}
    assert list(loaded.inputs) == ["x"]
    assert "y:0" in {spec.name for spec in loaded.outputs.values()}
    for value, (wanted, wanted_gradient) in zip(XS, expected, strict=True):
        r = client.evaluate(loaded, {"x": value}, "y", ys="y", xs="x")
        np.testing.assert_allclose(r.outputs["y"], wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(r.gradients["x"], wanted_gradient, rtol=1e-4, atol=1e-5)


def test_a_function_that_was_frozen_with_lowered_control_flow(client: gr.Client, tmp_path: Path) -> None:
    weight = tf.Variable([1.0, 2.0, 3.0])

    @tf.function
    def fn(x: Any) -> Any:
        chosen = tf.cond(tf.reduce_sum(x) > 0.0, lambda: x * weight, lambda: tf.tanh(x) + weight)
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.sin(y) * weight), [0, chosen])[1]

    frozen = convert_variables_to_constants_v2(fn.get_concrete_function(tf.TensorSpec([3], name="x")))
    (tmp_path / "g.pb").write_bytes(frozen.graph.as_graph_def().SerializeToString())
    loaded = gr.load(tmp_path / "g.pb")
    assert list(loaded.inputs) == ["x"]
    for value in XS:
        x = tf.constant(value)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        r = client.evaluate(loaded, {"x": value}, "Identity", ys="Identity", xs="x")
        np.testing.assert_allclose(r.outputs["Identity"], y, rtol=1e-5)
        np.testing.assert_allclose(r.gradients["x"], tape.gradient(y, x), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("version_1")
@pytest.mark.parametrize("use_resource", [False, True], ids=["references", "resources"])
def test_a_saved_model_of_tensorflow_1_with_variables(client: gr.Client, use_resource: bool, tmp_path: Path) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [3], name="x")
        w = v1.get_variable("w", initializer=tf.constant([1.0, 2.0, 3.0]), use_resource=use_resource)
        h = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.sin(y * w)), [0, x])[1]
        y = tf.cond(tf.reduce_sum(x) > 0.0, lambda: h * w, lambda: h - w)
        session.run(v1.global_variables_initializer())
        expected = [session.run([y, *v1.gradients(y, [x, w])], {x: value}) for value in XS]
        v1.saved_model.simple_save(session, str(tmp_path / "m"), {"x": x}, {"y": y})
    loaded = gr.load(tmp_path / "m")
    for value, (wanted, dx, dw) in zip(XS, expected, strict=True):
        r = client.evaluate(loaded, {"x": value}, "y", ys="y", xs=["x", "w"])
        np.testing.assert_allclose(r.outputs["y"], wanted, rtol=1e-5)
        np.testing.assert_allclose(r.gradients["x"], dx, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(r.gradients["w"], dw, rtol=1e-4, atol=1e-5)


def after_an_assignment(v: Any, p: Any, x: Any) -> Any:
    with tf.control_dependencies([v.assign(x)]):
        return tf.cond(p, lambda: v.read_value() * 2.0 * x, lambda: v.read_value() * 3.0 * x)


def after_an_assignment_in_a_branch(v: Any, p: Any, x: Any) -> Any:
    return tf.cond(x > 0.0, lambda: after_an_assignment(v, p, x), lambda: v.read_value() * x)


def switches_after_an_assignment(v: Any, p: Any, x: Any) -> Any:
    with tf.control_dependencies([v.assign(x)]):
        chosen = tf.identity(p)
    no, yes = tf.raw_ops.Switch(data=v.handle, pred=chosen)
    read = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32) for handle in (no, yes)]
    values = tf.raw_ops.Switch(data=x, pred=chosen)
    return tf.raw_ops.Merge(inputs=[read[0] * values[0], read[1] * tf.sin(values[1])]).output


def merge_after_assignments_in_both_branches(v: Any, p: Any, x: Any) -> Any:
    handles = tf.raw_ops.Switch(data=v.handle, pred=p)
    values = tf.raw_ops.Switch(data=x, pred=p)
    assigned = [tf.raw_ops.AssignVariableOp(resource=h, value=y * 2.0) for h, y in zip(handles, values, strict=True)]
    products = [values[0] * 3.0, values[1] * 4.0]
    with tf.control_dependencies(assigned):
        merged = tf.raw_ops.Merge(inputs=products).output
    with tf.control_dependencies([merged]):
        return merged + v.read_value()


def loop_after_an_assignment(v: Any, p: Any, x: Any) -> Any:
    with tf.control_dependencies([v.assign(x)]):
        count = tf.cond(p, lambda: 2, lambda: 3)
        return tf.while_loop(lambda i, y: i < count, lambda i, y: (i + 1, y + v.read_value() * x), [0, 0.0])[1]


def assignments_in_a_loop(v: Any, p: Any, x: Any) -> Any:
    def body(i: Any, y: Any) -> Any:
        with tf.control_dependencies([v.assign(y + x)]):
            return i + 1, tf.cond(p, lambda: v.read_value() * 2.0 * x, lambda: v.read_value() * 3.0 * x)

    return tf.while_loop(lambda i, y: i < 2, body, [0, 0.0])[1]


@pytest.mark.usefixtures("version_1")
@pytest.mark.parametrize(
    "function",
    [
        after_an_assignment,
        after_an_assignment_in_a_branch,
        switches_after_an_assignment,
        merge_after_assignments_in_both_branches,
        loop_after_an_assignment,
        assignments_in_a_loop,
    ],
)
def test_control_flow_waits_for_its_control_inputs(
    client: gr.Client, function: Callable[[Any, Any, Any], Any], tmp_path: Path
) -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x, p = v1.placeholder(tf.float32, [], name="x"), v1.placeholder(tf.bool, [], name="p")
        v = v1.get_variable("v", initializer=1.0, use_resource=True)
        y = function(v, p, x)
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(tmp_path / "m"), {"x": x, "p": p}, {"y": y})
        fetches = [y, v1.gradients(y, x)[0]]
        expected = {value: session.run(fetches, {x: 5.0, p: value}) for value in (True, False)}
    loaded = gr.load(tmp_path / "m")
    assert not {"Switch", "Merge", "Enter"} & {node.op_type for node in loaded.find()}
    for value, (wanted, gradient) in expected.items():
        r = client.evaluate(loaded, {"x": np.float32(5.0), "p": np.bool_(value)}, "y", ys="y", xs="x")
        np.testing.assert_allclose(r.outputs["y"], wanted, rtol=1e-5)
        np.testing.assert_allclose(r.gradients["x"], gradient, rtol=1e-5)
