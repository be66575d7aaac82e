"""Tests that graphs with variables compute the same before and after the variables are replaced by values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1.graph_pb2 import AttrValue, Graph
from gradrule.v1.tensor_pb2 import Dt, TensorShape
from gradrule_server import graphs
from gradrule_server.errors import reason_name
from tests.unit.graphs.helpers import expand, findings_of, node, nodes_of, placeholder, reasons_of, run
from tests.unit.graphs.helpers import graph as graph_of

v1 = tf.compat.v1
W = np.array([2.0, -1.0, 0.5], np.float32)
X = np.array([1.0, 3.0, -2.0], np.float32)


class Built:
    """Holds a graph with a placeholder `x` and a variable `w`, and runs it with TensorFlow."""

    def __init__(self, make: Callable[[Any, Any], Any], *, use_resource: bool = True) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default():
            x = v1.placeholder(tf.float32, [3], name="x")
            w = v1.get_variable("w", initializer=tf.constant(W), use_resource=use_resource)
            self.y = tf.identity(make(w, x), name="y")
            self.initialise = v1.global_variables_initializer()
        self.message = Graph.FromString(self.graph.as_graph_def().SerializeToString())

    def run(self) -> Any:
        """Returns y, with the initial value of the variable."""
        with v1.Session(graph=self.graph) as session:
            session.run(self.initialise)
            return session.run(self.y, {"x:0": X})


def check(built: Built) -> graphs.Expanded:
    """Asserts the same y as TensorFlow's, with the variable fed as an input and computed by its initialiser."""
    wanted = built.run()
    expanded = expand(built.message, ["y"], variables=["w"])
    got = run(expanded.graph_bytes, ["y:0"], {"x": X, "w": W})[0]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    initialised = expand(built.message, ["y"])
    assert "w" not in [item.name for item in initialised.inputs]
    np.testing.assert_allclose(run(initialised.graph_bytes, ["y:0"], {"x": X})[0], wanted, rtol=1e-6)
    return expanded


def _plain(w: Any, x: Any) -> Any:
    return tf.reduce_sum(w * x)


def _assigned_between_reads(w: Any, x: Any) -> Any:
    before = w * 1.0
    with tf.control_dependencies([before]):
        update = w.assign_add(x)
    with tf.control_dependencies([update]):
        again = w.assign(w.read_value() * 2.0)
    with tf.control_dependencies([again]):
        return w.read_value() * x - before


def _in_a_loop(w: Any, x: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        with tf.control_dependencies([w.assign_add(x)]):
            return i + 1, total + w.read_value() * x

    _, total = tf.while_loop(lambda i, _: i < 3, body, [tf.constant(0), tf.zeros([3])], parallel_iterations=1)
    with tf.control_dependencies([total]):
        return total * 10.0 + w.read_value()


def _in_a_branch(w: Any, x: Any) -> Any:
    def then() -> Any:
        with tf.control_dependencies([w.assign_sub(x)]):
            return tf.reduce_sum(x)

    chosen = tf.cond(tf.reduce_sum(x) > 0, then, lambda: tf.reduce_sum(w.read_value()))
    with tf.control_dependencies([chosen]):
        return w.read_value() + chosen


def _in_nested_calls(w: Any, x: Any) -> Any:
    @tf.function
    def inner(scale: Any) -> Any:
        w.assign_add(x * scale)
        return w.read_value() * 2.0

    @tf.function
    def outer() -> Any:
        first = inner(tf.constant(1.0))
        return first + inner(tf.constant(2.0)) + w

    return outer()


def _a_loop_in_a_call_in_a_branch(w: Any, x: Any) -> Any:
    @tf.function
    def loop() -> Any:
        for _ in tf.range(2):
            if tf.reduce_sum(w) > 0.0:
                w.assign(w * x)
            else:
                w.assign_add(x)
        return w.read_value()

    @tf.function
    def case(index: Any) -> Any:
        return tf.switch_case(index, [lambda: x, loop, lambda: w + x])

    chosen = case(tf.constant(1))
    # TensorFlow adds no control edges outside functions: without this edge the read may run before or after.
    with tf.control_dependencies([chosen]):
        return chosen + w.read_value()


def _moving_average(w: Any, x: Any) -> Any:
    mean = tf.reduce_mean(x)
    update = w.assign_sub((w - mean) * 0.1)
    with tf.control_dependencies([update]):
        return (x - mean) + 0.0 * w.read_value() + w.read_value()


def _gathered(w: Any, x: Any) -> Any:
    picked = tf.gather(w, [2, 0, 2])
    nd = tf.gather_nd(w, [[1], [1], [0]])
    return picked * x + nd + tf.cast(tf.shape(w)[0], tf.float32)


CASES = [
    _plain,
    _assigned_between_reads,
    _in_a_loop,
    _in_a_branch,
    _moving_average,
    _gathered,
]


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_same_as_tensorflow(make: Callable[[Any, Any], Any], use_resource: bool) -> None:
    if not use_resource and make in (_in_a_loop, _in_a_branch):
        pytest.skip("functions take no references")
    check(Built(make, use_resource=use_resource))


@pytest.mark.parametrize("make", [_in_nested_calls, _a_loop_in_a_call_in_a_branch])
def test_same_as_tensorflow_in_calls(make: Callable[[Any, Any], Any]) -> None:
    check(Built(make))


SCATTERS = [
    lambda w, x: w.scatter_add(tf.IndexedSlices(x[:2], tf.constant([1, 1]))),
    lambda w, x: w.scatter_sub(tf.IndexedSlices(x[:2], tf.constant([1, 0]))),
    lambda w, x: w.scatter_update(tf.IndexedSlices(x[:2], tf.constant([2, 0]))),
    lambda w, x: w.scatter_min(tf.IndexedSlices(x[:2], tf.constant([2, 0]))),
    lambda w, x: w.scatter_max(tf.IndexedSlices(x[:2], tf.constant([2, 0]))),
    lambda w, x: w.scatter_nd_add([[0], [2]], x[:2]),
    lambda w, x: w[1:].assign(x[:2]),
]


@pytest.mark.parametrize("write", SCATTERS)
@pytest.mark.parametrize("use_resource", [True, False], ids=["resource", "reference"])
def test_partial_writes(write: Callable[[Any, Any], Any], use_resource: bool) -> None:
    def make(w: Any, x: Any) -> Any:
        with tf.control_dependencies([write(w, x)]):
            return w.read_value()

    check(Built(make, use_resource=use_resource))


def test_a_scalar_update_is_broadcast_to_whole_rows() -> None:
    def make(w: Any, x: Any) -> Any:
        handle = w.handle
        write = tf.raw_ops.ResourceScatterAdd(resource=handle, indices=[[0], [2]], updates=tf.constant(5.0))
        with tf.control_dependencies([write]):
            return w.read_value() * x

    check(Built(make))


def _variable(name: str = "w", shared: str = "", op: str = "VarHandleOp", **attrs: AttrValue) -> Any:
    shape = AttrValue()
    shape.shape.dim.add(size=3)
    return node(
        name, op, dtype=AttrValue(type=Dt.DT_FLOAT), shape=shape, shared_name=AttrValue(s=shared.encode()), **attrs
    )


def _read(name: str, of: str) -> Any:
    return node(name, "ReadVariableOp", of, dtype=AttrValue(type=Dt.DT_FLOAT))


def test_a_variable_without_a_value_is_an_input() -> None:
    expanded = expand(graph_of(_variable(), _read("y", "w")), ["y"])
    assert [(item.name, item.dtype, item.optional) for item in expanded.inputs] == [("w", Dt.DT_FLOAT, False)]
    assert [dim.size for dim in expanded.inputs[0].shape.dim] == [3]
    assert nodes_of(expanded)["w"].op == "Placeholder"
    with_value = expand(graph_of(_variable(), _read("y", "w")), ["y"], variables=["w"])
    assert [item.optional for item in with_value.inputs] == [True]


def test_nodes_of_one_shared_name_are_one_variable() -> None:
    message = graph_of(
        _variable("a", "weights"),
        _variable("b", "weights"),
        _variable("c", "cd2c89b7-88b7-44c8-ad83-06c2a9158347"),
        _variable("d", "cd2c89b7-88b7-44c8-ad83-06c2a9158347"),
        _read("ra", "a"),
        _read("rb", "b"),
        _read("rc", "c"),
        _read("rd", "d"),
        node("y", "AddN", "ra", "rb", "rc", "rd"),
    )
    expanded = expand(message, ["y"], ys=["y"], xs=["b", "weights"], variables=["weights", "c"])
    assert {(item.name, item.optional) for item in expanded.inputs} == {("a", True), ("c", True), ("d", False)}
    assert expanded.input_aliases == {"b": "a", "weights": "a"}
    assert expanded.tensor_names["b"] == expanded.tensor_names["weights"] == "a:0"


def test_values_for_unknown_variables_are_refused() -> None:
    message = graph_of(_variable("kernel"), _read("y", "kernel"))
    (finding,) = findings_of(message, ["y"], variables=["kernal"])
    assert reason_name(finding.reason) == "UNKNOWN_TENSOR"
    assert "'kernel'" in finding.message
    assert reasons_of(message, ["y"], variables=["kernel", "kernel:0"]) == ["UNKNOWN_FEED"]


def test_an_initial_value_that_depends_on_itself_is_ignored() -> None:
    message = graph_of(
        _variable(),
        _read("r", "w"),
        node("w/Assign", "AssignVariableOp", "w", "r", dtype=AttrValue(type=Dt.DT_FLOAT)),
        _read("y", "w"),
    )
    assert [item.name for item in expand(message, ["y"]).inputs] == ["w"]


def test_an_initialiser_may_read_other_variables() -> None:
    with tf.Graph().as_default() as graph:
        a = v1.get_variable("a", initializer=tf.constant(W), use_resource=True)
        b = v1.get_variable(
            "b", initializer=tf.identity(a.initial_value) * 3.0 + 0.0 * a.read_value(), use_resource=True
        )
        tf.identity(b.read_value() + 1.0, name="y")
    message = Graph.FromString(graph.as_graph_def().SerializeToString())
    expanded = expand(message, ["y"])
    assert not expanded.inputs
    np.testing.assert_allclose(run(expanded.graph_bytes, ["y:0"], {})[0], W * 3 + 1)
    given = expand(message, ["y"], variables=["a"])
    assert [item.name for item in given.inputs] == ["a"]


def test_updates_are_returned_on_request() -> None:
    built = Built(_in_a_loop)
    expanded = expand(built.message, ["y"], variables=["w"], with_updates=True)
    assert list(expanded.updates) == ["w"]
    got = run(expanded.graph_bytes, [expanded.updates["w"]], {"x": X, "w": W})[0]
    np.testing.assert_allclose(got, W + 3 * X)
    assert not expand(built.message, ["y"], variables=["w"]).updates


def test_a_variable_that_only_functions_create_has_its_shared_name() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [3], name="x")

        @tf.function(autograph=False)
        def body(value: Any) -> Any:
            handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[3], shared_name="inner")
            tf.raw_ops.AssignAddVariableOp(resource=handle, value=value)
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

        def loop(i: Any, value: Any) -> Any:
            return i + 1, value + body(x)

        _, total = tf.while_loop(lambda i, _: i < 2, loop, [tf.constant(0), tf.zeros([3])])
        tf.identity(total, name="y")
    message = Graph.FromString(graph.as_graph_def().SerializeToString())
    expanded = expand(message, ["y"], ys=["y"], xs=["inner"], variables=["inner"], with_updates=True)
    assert [item.name for item in expanded.inputs] == ["x", "inner"]
    y, updated = run(expanded.graph_bytes, ["y:0", expanded.updates["inner"]], {"x": X, "inner": W})
    np.testing.assert_allclose(y, 2 * W + 3 * X)
    np.testing.assert_allclose(updated, W + 2 * X)


def test_all_unsupported_uses_of_variables_are_reported_together() -> None:
    with tf.Graph().as_default() as graph:
        w = v1.get_variable("w", initializer=tf.constant(W), use_resource=True)
        step = tf.raw_ops.ResourceApplyGradientDescent(var=w.handle, alpha=0.1, delta=tf.constant(W), name="sgd")
        queue = tf.queue.FIFOQueue(3, [tf.float32], name="queue")
        called = tf.numpy_function(lambda: np.float32(1), [], tf.float32, name="python")
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1]), 0)
        data = v1.data.make_one_shot_iterator(tf.data.Dataset.range(3)).get_next()
        with tf.control_dependencies([step]):
            tf.add_n(
                [
                    queue.dequeue(),
                    called,
                    tf.cast(table.lookup(tf.constant("a")), tf.float32),
                    tf.cast(data, tf.float32),
                ],
                name="y",
            )
    message = Graph.FromString(graph.as_graph_def().SerializeToString())
    findings = findings_of(message, ["y"])
    assert {reason_name(finding.reason) for finding in findings} == {"UNSUPPORTED_OP"}
    text = "\n".join(finding.message for finding in findings)
    for name in ("'sgd'", "'queue'", "hash_table", "python", "Iterator"):
        assert name in text, name
    # Unsupported nodes are accepted if no result needs them.
    expand(message, ["w/Read/ReadVariableOp"])


def test_a_read_of_another_type_is_refused() -> None:
    message = graph_of(_variable(), node("y", "ReadVariableOp", "w", dtype=AttrValue(type=Dt.DT_INT32)))
    assert reasons_of(message, ["y"]) == ["TYPE_MISMATCH"]


def test_handles_that_are_chosen_at_run_time_are_refused() -> None:
    message = graph_of(
        _variable("a", "a"),
        _variable("b", "b"),
        placeholder("p", Dt.DT_BOOL),
        node("chosen", "Select", "p", "a", "b"),
        _read("y", "chosen"),
    )
    assert set(reasons_of(message, ["y"])) == {"UNSUPPORTED_OP"}


def test_overrides_know_reads_by_their_uploaded_op() -> None:
    message = graph_of(_variable(), _read("r", "w"), node("y", "Neg", "r"))
    expanded = expand(message, ys=["y"], xs=["w"], overrides=[])
    assert nodes_of(expanded)["r"].op == "Identity"


def test_an_initialiser_on_a_cycle_is_refused() -> None:
    graph = graph_of(
        node("w", "VarHandleOp", dtype=AttrValue(type=Dt.DT_FLOAT), shape=AttrValue(shape=TensorShape())),
        node("zero", "ZerosLike", "again"),
        node("again", "ZerosLike", "zero"),
        node("w/Assign", "AssignVariableOp", "w", "zero", "^cycle", dtype=AttrValue(type=Dt.DT_FLOAT)),
        node("cycle", "NoOp", "^w/Assign"),
        node("y", "ReadVariableOp", "w", dtype=AttrValue(type=Dt.DT_FLOAT)),
    )
    assert set(reasons_of(graph, ["y"])) == {"GRAPH_CYCLE"}
