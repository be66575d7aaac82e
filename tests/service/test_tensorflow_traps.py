"""Overrides that TensorFlow ignores or misapplies silently: each is applied or refused with a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from tests.service import reference
from tests.service.answers import assert_close, dense, refused, rules_by_node, statuses
from tests.service.graph_defs import all_nodes, build_graph, build_graph_def, load_graph, placeholder

RuleMaker = Callable[..., str]

X = np.float32([-2, 0.5, 3])
# y = sum(sign(x) · x) with 5·dy as the gradient of sign: sign(x) + 5·x.
SIGN_TIMES_X = np.float32([-11, 3.5, 16])


@tf.function
def sign_times(x: Any) -> Any:
    return tf.sign(x) * x


@tf.function
def sign_times_twice_nested(x: Any) -> Any:
    return sign_times(x) * 1.0


def nested() -> None:
    tf.reduce_sum(sign_times(placeholder("x")), name="y")


def nested_deeply() -> None:
    tf.reduce_sum(sign_times_twice_nested(placeholder("x")), name="y")


def in_while() -> None:
    x = placeholder("x")
    start = tf.zeros_like(x)
    _, total = tf.while_loop(lambda i, t: i < 1, lambda i, t: (i + 1, t + tf.sign(x) * x), [0, start])
    tf.reduce_sum(total, name="y")


def in_if() -> None:
    x = placeholder("x")
    chosen = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.sign(x) * x, lambda: tf.zeros_like(x))
    tf.reduce_sum(chosen, name="y")


def in_case() -> None:
    x = placeholder("x")
    index = tf.cast(tf.reduce_sum(x) > 0, tf.int32)
    tf.reduce_sum(tf.switch_case(index, [lambda: tf.zeros_like(x), lambda: tf.sign(x) * x]), name="y")


def in_map_fn() -> None:
    x = placeholder("x", shape=(3,))
    tf.reduce_sum(tf.map_fn(lambda item: tf.sign(item) * item, x), name="y")


def at_top() -> None:
    x = placeholder("x")
    tf.reduce_sum(tf.sign(x) * x, name="y")


PLACES = [at_top, nested, nested_deeply, in_while, in_if, in_case, in_map_fn]


@pytest.mark.parametrize("build", PLACES)
def test_override_applies_at_any_nesting(either: Any, rule: RuleMaker, build: Callable[[], None]) -> None:
    graph_def = build_graph_def(build)
    assert any(node.op == "Sign" for node in all_nodes(graph_def))
    rule("Five", "5 * dy")
    r = either.evaluate(
        load_graph(graph_def), feeds={"x": X}, fetches=["y"], ys=["y"], xs=["x"], overrides={"Sign": "Five"}
    )
    assert_close(r.outputs["y"], np.float32(5.5))
    assert_close(r.gradients["x"], SIGN_TIMES_X)
    assert set(rules_by_node(r).values()) == {"Five"}


@pytest.mark.parametrize("build", PLACES)
def test_gradient_without_an_override_is_tensorflows(client: Any, build: Callable[[], None]) -> None:
    graph_def = build_graph_def(build)
    r = client.evaluate(load_graph(graph_def), feeds={"x": X}, ys=["y"], xs=["x"])
    wanted = reference.evaluate(graph_def, {"x": X}, ys=["y"], xs=["x"])
    assert_close(r.gradients["x"], wanted.gradients["x"])
    assert_close(r.gradients["x"], np.float32([-1, 1, 1]))


@pytest.mark.parametrize("build", [nested, nested_deeply, in_while, in_if, in_case])
def test_nested_nodes_are_named_by_their_call(client: Any, build: Callable[[], None]) -> None:
    r = client.evaluate(build_graph(build), feeds={"x": X}, ys=["y"], xs=["x"], overrides={"Sign": gr.Rule("5 * dy")})
    (node,) = rules_by_node(r)
    assert "/" in node
    by_name = client.evaluate(
        build_graph(build),
        feeds={"x": X},
        ys=["y"],
        xs=["x"],
        overrides=[gr.Override(gr.Rule("5 * dy"), node=node)],
    )
    assert_close(by_name.gradients["x"], SIGN_TIMES_X)


def test_gradient_attribute_of_a_nested_node_is_applied(client: Any, rule: RuleMaker) -> None:
    rule("Five", "5 * dy")
    graph_def = build_graph_def(nested)
    for node in all_nodes(graph_def):
        if node.op == "Sign":
            node.attr["_gradient_op_type"].s = b"Five"
    r = client.evaluate(load_graph(graph_def), feeds={"x": X}, ys=["y"], xs=["x"])
    assert_close(r.gradients["x"], SIGN_TIMES_X)


def test_each_call_of_a_function_is_overridden_separately(client: Any) -> None:
    def build() -> None:
        x = placeholder("x")
        first = tf.identity(sign_times(x), name="first")
        tf.reduce_sum(sign_times(first), name="y")

    r = client.evaluate(build_graph(build), feeds={"x": X}, ys=["y"], xs=["x"], overrides={"Sign": "ste"})
    signs = list(rules_by_node(r))
    assert len(signs) == 2
    first = np.sign(X) * X
    # d(sign(u)·u) with a straight-through sign: sign(u) + u.
    wanted = (np.sign(first) + first) * (np.sign(X) + X)
    assert_close(r.gradients["x"], wanted)
    one = client.evaluate(
        build_graph(build),
        feeds={"x": X},
        ys=["y"],
        xs=["x"],
        overrides=[gr.Override("ste", node=signs[0])],
    )
    assert statuses(one) == {signs[0]: "active"}
    assert not np.allclose(one.gradients["x"], wanted)


@tf.custom_gradient
def hundredfold(x: Any) -> Any:
    return tf.identity(x), lambda dy: 100.0 * dy


def with_custom_gradient() -> None:
    tf.reduce_sum(hundredfold(placeholder("x")) * 2.0, name="y")


def test_custom_gradient_of_another_process_is_refused_on_the_path(either: Any) -> None:
    graph = build_graph(with_custom_gradient)
    with refused("FOREIGN_GRADIENT") as refusal:
        either.evaluate(graph, feeds={"x": X}, ys=["y"], xs=["x"])
    refusal.says("CustomGradient-", "IdentityN", "default")


def test_custom_gradient_of_another_process_is_ignored_off_the_path(client: Any) -> None:
    graph = build_graph(with_custom_gradient)
    forward = client.evaluate(graph, feeds={"x": X}, fetches=["y"])
    assert_close(forward.outputs["y"], np.float32(3))


@pytest.mark.parametrize(("covering", "factor"), [("default", 2), (gr.Rule("(7 * dy0, None)"), 14)])
def test_custom_gradient_of_another_process_can_be_overridden(client: Any, covering: Any, factor: float) -> None:
    graph_def = build_graph_def(with_custom_gradient)
    (node,) = [node.name for node in graph_def.node if node.op == "IdentityN"]
    r = client.evaluate(
        load_graph(graph_def), feeds={"x": X}, ys=["y"], xs=["x"], overrides=[gr.Override(covering, node=node)]
    )
    assert_close(r.gradients["x"], np.full(3, factor, np.float32))


def silu() -> None:
    tf.reduce_sum(tf.nn.silu(placeholder("x")), name="y")


def test_graph_with_silu_gets_its_gradient(client: Any) -> None:
    graph_def = build_graph_def(silu)
    (node,) = [node for node in graph_def.node if node.op == "IdentityN"]
    assert node.attr["_gradient_op_type"].s.startswith(b"CustomGradient-")
    sigmoid = 1 / (1 + np.exp(-X))
    with refused("FOREIGN_GRADIENT"):
        client.evaluate(load_graph(graph_def), feeds={"x": X}, ys=["y"], xs=["x"])
    r = client.evaluate(
        load_graph(graph_def), feeds={"x": X}, fetches=["y"], ys=["y"], xs=["x"], overrides={"IdentityN": "default"}
    )
    assert_close(r.outputs["y"], (X * sigmoid).sum())
    assert_close(r.gradients["x"], sigmoid * (1 + X * (1 - sigmoid)))


def test_misspelt_op_type_is_refused_with_a_suggestion(either: Any) -> None:
    with refused("UNKNOWN_OP_TYPE") as refusal:
        either.evaluate(build_graph(at_top), feeds={"x": X}, ys=["y"], xs=["x"], overrides={"Sgin": "ste"})
    refusal.says("Sgin", "Did you mean", "Sign")


def test_op_type_in_wrong_case_is_refused_with_a_suggestion(either: Any) -> None:
    with refused("UNKNOWN_OP_TYPE") as refusal:
        either.evaluate(build_graph(at_top), feeds={"x": X}, ys=["y"], xs=["x"], overrides={"Matmul": "ste"})
    refusal.says("'MatMul'")


def test_op_type_that_the_graph_lacks_is_refused(either: Any) -> None:
    with refused("UNMATCHED_OVERRIDE") as refusal:
        either.evaluate(build_graph(at_top), feeds={"x": X}, ys=["y"], xs=["x"], overrides={"Add": "ste"})
    refusal.says("Add")


def test_override_applies_to_a_built_model(client: Any) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="image")])
    def model(image: Any) -> Any:
        hidden = tf.nn.relu(image @ tf.constant([[1.0, -1.0], [2.0, 1.0]]))
        return tf.identity(tf.reduce_sum(hidden), name="score")

    graph = load_graph(model.get_concrete_function().graph.as_graph_def())
    x = np.float32([[1, -1], [2, 3]])
    r = client.evaluate(graph, feeds={"image": x}, ys=["score"], xs=["image"], overrides={"Relu": gr.Rule("-dy")})
    assert_close(r.gradients["image"], -np.ones((2, 2), np.float32) @ np.array([[1, 2], [-1, 1]], np.float32))


def test_second_registration_of_a_name_is_refused(either: Any, rule: RuleMaker) -> None:
    rule("Taken", "5 * dy")
    again = either.create_rule("Taken", "5 * dy")
    assert again.name in ("Taken", "rules/Taken")
    with refused("RULE_EXISTS") as refusal:
        either.create_rule("Taken", "6 * dy")
    refusal.says("Taken", "5 * dy")


@pytest.mark.parametrize("name", ["Sign", "ste"])
def test_name_of_a_builtin_rule_is_refused(either: Any, name: str) -> None:
    with refused("RULE_EXISTS") as refusal:
        either.create_rule(name, "5 * dy")
    refusal.says(name)


def multiply() -> None:
    tf.multiply(placeholder("a"), placeholder("b"), name="y")


@pytest.mark.parametrize("expression", ["(dy,)", "(dy, dy, dy)"])
def test_wrong_number_of_gradients_is_refused(either: Any, expression: str) -> None:
    with refused("RULE_ARITY") as refusal:
        either.evaluate(
            build_graph(multiply),
            feeds={"a": X, "b": X},
            ys=["y"],
            xs=["a"],
            overrides={"Mul": gr.Rule(expression)},
        )
    refusal.says("y", "Mul", "2")


def test_single_expression_on_two_inputs_is_refused(either: Any) -> None:
    with refused("RULE_ARITY") as refusal:
        either.evaluate(
            build_graph(multiply),
            feeds={"a": X, "b": X},
            ys=["y"],
            xs=["a"],
            overrides={"Mul": gr.Rule("dy")},
        )
    refusal.says("y", "Mul", "2")


def test_rule_without_a_gradient_ends_the_path(client: Any) -> None:
    r = client.evaluate(
        build_graph(multiply),
        feeds={"a": X, "b": X},
        ys=["y"],
        xs=["a", "b"],
        overrides={"Mul": gr.Rule("(None, dy * x0)")},
    )
    assert r.gradients["a"] is None
    assert_close(r.gradients["b"], X)


@pytest.mark.parametrize("expression", ["sum(dy, axis=0)", 'cast(dy, "float64")', "dy > 0"])
def test_gradient_of_wrong_shape_or_dtype_is_refused(either: Any, expression: str) -> None:
    def build() -> None:
        tf.sign(placeholder("x", shape=(2, 3)), name="y")

    with refused("RULE_OUTPUT") as refusal:
        either.evaluate(
            build_graph(build),
            feeds={"x": np.ones((2, 3), np.float32)},
            ys=["y"],
            xs=["x"],
            overrides={"Sign": gr.Rule(expression)},
        )
    refusal.says("y", "input 0")


def integers() -> None:
    x = placeholder("x", shape=(2, 3))
    best = tf.argmax(x, axis=1, name="best")
    tf.multiply(tf.cast(best, tf.float32, name="float"), tf.reduce_sum(x, axis=1), name="y")


@pytest.mark.parametrize("op_type", ["ArgMax", "Cast"])
def test_override_on_an_integer_op_is_refused(either: Any, op_type: str) -> None:
    x = np.float32([[1, 3, 2], [5, 4, 6]])
    with refused("INACTIVE_OVERRIDE") as refusal:
        either.evaluate(build_graph(integers), feeds={"x": x}, ys=["y"], xs=["x"], overrides={op_type: "ste"})
    refusal.says({"ArgMax": "best", "Cast": "float"}[op_type])
    r = either.evaluate(
        build_graph(integers),
        feeds={"x": x},
        ys=["y"],
        xs=["x"],
        overrides=[gr.Override("ste", op_type=op_type, optional=True)],
    )
    assert set(statuses(r).values()) == {"not_differentiable"}
    assert_close(r.gradients["x"], np.float32([[1, 1, 1], [2, 2, 2]]))


def test_override_on_a_bool_op_is_refused(either: Any) -> None:
    def build() -> None:
        x = placeholder("x")
        tf.multiply(tf.cast(tf.greater(x, 0.0, name="fired"), tf.float32), x, name="y")

    with refused("INACTIVE_OVERRIDE") as refusal:
        either.evaluate(build_graph(build), feeds={"x": X}, ys=["y"], xs=["x"], overrides={"Greater": "ste"})
    refusal.says("fired")


def test_unknown_rule_is_refused_before_anything_runs(either: Any) -> None:
    graph = build_graph(at_top)
    words: dict[str, Any] = {"ys": ["y"], "xs": ["x"], "overrides": {"Sign": "ste_sing"}}
    with refused("UNKNOWN_RULE") as refusal:
        either.compile(graph, **words)
    refusal.says("ste_sing", "Did you mean", "ste_sign")
    with refused("UNKNOWN_RULE"):
        either.explain(graph, **words).raise_for_findings()


def test_node_added_by_a_gradient_is_not_overridden(client: Any) -> None:
    def build() -> None:
        x = placeholder("x")
        tf.reduce_sum(tf.abs(x) + tf.sign(x), name="y")

    r = client.evaluate(build_graph(build), feeds={"x": X}, ys=["y"], xs=["x"], overrides={"Sign": gr.Rule("5 * dy")})
    assert list(rules_by_node(r)) == ["Sign"]
    assert_close(r.gradients["x"], np.sign(X) + 5)
    with refused("UNMATCHED_OVERRIDE"):
        client.evaluate(
            build_graph(lambda: tf.abs(placeholder("x"), name="y")),
            feeds={"x": X},
            ys=["y"],
            xs=["x"],
            overrides={"Sign": "ste"},
        )


def test_op_rule_on_an_unsuitable_op_is_refused(either: Any) -> None:
    graph_def = build_graph_def(at_top)
    (sign,) = [node.name for node in graph_def.node if node.op == "Sign"]
    r = either.evaluate(load_graph(graph_def), feeds={"x": X}, ys=["y"], xs=["x"], overrides={"Sign": "Relu"})
    wanted = reference.evaluate(graph_def, {"x": X}, ys=["y"], xs=["x"], rules={sign: reference.own_gradient("Relu")})
    assert wanted.asked == {sign}
    assert_close(r.gradients["x"], wanted.gradients["x"])


def test_op_rule_on_an_op_without_its_attributes_is_refused(either: Any) -> None:
    with refused("RULE_NOT_APPLICABLE") as refusal:
        either.compile(build_graph(at_top), ys=["y"], xs=["x"], overrides={"Sign": "MatMul"})
    refusal.says("MatMul", "Sign")


def test_op_rule_of_an_op_with_other_inputs_is_refused(either: Any) -> None:
    with refused("RULE_ARITY") as refusal:
        either.compile(build_graph(at_top), ys=["y"], xs=["x"], overrides={"Sign": "ArgMax"})
    refusal.says("ArgMax", "2", "Sign")


def test_op_without_gradient_is_no_rule(either: Any) -> None:
    with refused("UNKNOWN_RULE") as refusal:
        either.compile(build_graph(at_top), ys=["y"], xs=["x"], overrides={"Sign": "RandomShuffle"})
    refusal.says("RandomShuffle")


def test_sparse_upstream_gradients_become_dense(either: Any) -> None:
    def build() -> None:
        table = placeholder("table", shape=(4, 2))
        tf.reduce_sum(tf.gather(tf.sign(table), [1, 3, 1]), name="y")

    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    r = either.evaluate(
        build_graph(build),
        feeds={"table": table},
        ys=["y"],
        xs=["table"],
        overrides={"Sign": gr.Rule("5 * dy")},
    )
    assert_close(dense(r.gradients["table"]), np.float32([[0, 0], [10, 10], [0, 0], [5, 5]]))
