"""Seeds, sparse gradients, gradients of branches that TensorFlow loses, and control flow of version 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service import reference
from tests.service.answers import assert_close, refused, rules_by_node
from tests.service.graph_defs import build_graph, build_graph_def, load_graph, placeholder

X = np.float32([-2, 0.5, 3])


def with_seeded_dropout() -> None:
    tf.compat.v1.set_random_seed(7)
    tf.multiply(tf.nn.dropout(placeholder("x"), rate=0.5, seed=11), 1.0, name="y")


def test_dropout_with_op_seeds_drops_the_same_values_in_the_gradient(client: Any) -> None:
    graph_def = build_graph_def(with_seeded_dropout)
    x = np.linspace(1, 2, 64, dtype=np.float32)
    program = client.compile(load_graph(graph_def), fetches=["y"], ys=["y"], xs=["x"])
    first, second = program.evaluate({"x": x}), program.evaluate({"x": x})
    for r in (first, second):
        assert_close(r.gradients["x"], np.where(r.outputs["y"] == 0, 0, 2).astype(np.float32))
    # The first call of a new program draws the numbers of a new session.
    wanted = reference.evaluate(graph_def, {"x": x}, ["y"], ["y"], ["x"])
    assert_close(first.outputs["y"], wanted.outputs["y"])
    assert_close(first.gradients["x"], wanted.gradients["x"])
    assert not np.array_equal(first.outputs["y"], second.outputs["y"])
    program.delete()


def test_gradients_of_lookups_are_sparse_or_dense(client: Any) -> None:
    def build() -> None:
        table = placeholder("table", shape=(None, 2))
        found = tf.nn.embedding_lookup(table, placeholder("ids", tf.int32))
        tf.reduce_sum(tf.tanh(found) * found, name="y")

    table, ids = np.arange(10, dtype=np.float32).reshape(5, 2) / 10, np.int32([3, 1, 3])
    graph_def = build_graph_def(build)
    feeds = {"table": table, "ids": ids}
    r = client.evaluate(load_graph(graph_def), feeds, ys=["y"], xs=["table"], overrides={"Tanh": gr.Rule("-dy")})
    gradient = r.gradients["table"]
    assert r.gradient_kinds["table"] == "sparse"
    assert isinstance(gradient, gr.Sparse)
    assert gradient.indices.tolist() == [3, 1, 3]
    wanted = np.zeros_like(table)
    np.add.at(wanted, ids, np.tanh(table[ids]) - table[ids])
    assert_close(gradient.to_dense(), wanted)


def branch_in_branch(x: Any) -> Any:
    def inner() -> Any:
        return tf.cond(x[0] < 1.0, lambda: tf.sign(x) * x, lambda: x)

    return tf.cond(tf.reduce_sum(x) > 0.0, inner, lambda: -x)


def case_in_case_in_loop(x: Any) -> Any:
    def body(i: Any, value: Any) -> Any:
        outer = [lambda: value, lambda: tf.switch_case(i, [lambda: x, lambda: tf.sign(x) * x])]
        return i + 1, tf.switch_case(i, outer)

    return tf.while_loop(lambda i, _: i < 2, body, [0, x])[1]


@pytest.mark.parametrize("structure", [branch_in_branch, case_in_case_in_loop])
def test_params_reach_a_branch_in_a_branch(either: Any, structure: Callable[[Any], Any]) -> None:
    graph = build_graph(lambda: tf.reduce_sum(structure(placeholder("x")), name="y"))
    rule = gr.Rule("alpha * dy", params=["alpha"])
    words: dict[str, Any] = {"feeds": {"x": X}, "ys": ["y"], "xs": ["x"]}
    override = gr.Override(rule, op_type="Sign", params={"alpha": 5.0}, label="sign")
    r = either.evaluate(graph, overrides=[override], **words)
    assert_close(r.gradients["x"], np.sign(X) + 5 * X)
    again = either.evaluate(graph, overrides=[override], params={"sign": {"alpha": -1.0}}, **words)
    assert_close(again.gradients["x"], np.sign(X) - X)


def test_params_of_a_code_rule_reach_a_branch_in_a_branch(client: Any) -> None:
    def dense_in(x: Any) -> Any:
        weights = tf.constant([[1.0, -2.0], [0.5, 1.0], [2.0, 0.25]])

        def inner() -> Any:
            return tf.cond(x[0] < 1.0, lambda: x[None] @ weights, lambda: tf.zeros([1, 2]))

        return tf.cond(tf.reduce_sum(x) > 0.0, inner, lambda: tf.zeros([1, 2]))

    def flat(x: Any) -> Any:
        return x[None] @ tf.constant([[1.0, -2.0], [0.5, 1.0], [2.0, 0.25]])

    def gradient(structure: Callable[[Any], Any]) -> Any:
        graph = build_graph(lambda: tf.reduce_sum(structure(placeholder("x")), name="y"))
        overrides = {"MatMul": ("lrp_epsilon", {"eps": 0.5})}
        return client.evaluate(graph, feeds={"x": X}, ys=["y"], xs=["x"], overrides=overrides).gradients["x"]

    assert_close(gradient(dense_in), gradient(flat))
    assert not np.allclose(gradient(flat), [-1, 1.5, 2.25])


@pytest.mark.parametrize("kind", ["If", "Case"])
def test_branch_accepts_one_tensor_twice(either: Any, kind: str) -> None:
    """As when a function with a branch is called with one tensor for two arguments."""

    @tf.function(input_signature=[tf.TensorSpec([None])] * 2, autograph=False)
    def function(a: Any, b: Any) -> Any:
        branches = [lambda: tf.sign(a) * b * b, lambda: a]
        if kind == "If":
            return tf.cond(tf.reduce_sum(a) > 0.0, *branches)
        return tf.switch_case(tf.size(a) - 3, branches)

    def build() -> None:
        x = placeholder("x")
        tf.reduce_sum(function(x, x), name="y")

    r = either.evaluate(build_graph(build), feeds={"x": X}, ys=["y"], xs=["x"], overrides={"Sign": gr.Rule("5 * dy")})
    assert_close(r.gradients["x"], 5 * X**2 + 2 * np.sign(X) * X)
    assert len(rules_by_node(r)) == 1


@pytest.fixture
def control_flow_of_version_1() -> Iterator[None]:
    tf.compat.v1.disable_control_flow_v2()
    yield
    tf.compat.v1.enable_control_flow_v2()


@pytest.mark.usefixtures("control_flow_of_version_1")
@pytest.mark.parametrize("kind", ["cond", "while"])
def test_control_flow_of_version_1_is_refused(either: Any, kind: str) -> None:
    def build() -> None:
        x = placeholder("x")
        if kind == "cond":
            found = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.sign(x) * x, lambda: x)
        else:
            found = tf.while_loop(lambda i, _: i < 3, lambda i, value: (i + 1, tf.sign(value)), [0, x])[1]
        tf.reduce_sum(found, name="y")

    graph_def = build_graph_def(build)
    expected = {"cond": {"Switch", "Merge"}, "while": {"Enter", "Exit", "NextIteration", "LoopCond", "Switch", "Merge"}}
    present = {node.op for node in graph_def.node} & expected["while"]
    assert present == expected[kind]
    with refused("UNSUPPORTED_OP") as refusal:
        # Bytes are sent as they are; gr.load would convert the graph.
        either.evaluate(graph_def.SerializeToString(), feeds={"x": X}, fetches=["y"], ys=["y"], xs=["x"])
    refusal.says("control flow of version 1", "enable_control_flow_v2", "lower_control_flow=False")
    nodes = {detail.node for detail in refusal.error.details}
    assert {node.name for node in graph_def.node if node.op in ("Merge", "Enter", "Exit")} & nodes
