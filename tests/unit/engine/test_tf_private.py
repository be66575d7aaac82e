"""Tests that the private parts of TensorFlow that gradrule uses exist and work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.core.protobuf import rewriter_config_pb2

from gradrule.common import op_definitions
from gradrule_server.engine import tf_private


def test_gradient_registry_distinguishes_function_none_and_missing() -> None:
    registered = tf_private.registered_gradients()
    assert callable(registered["Sign"])
    assert registered["StopGradient"] is None
    assert len(registered) > 500
    assert tf_private.gradient_of("StopGradient") is None
    with pytest.raises(LookupError):
        tf_private.gradient_of("NoSuchOp")


def test_the_op_definitions_are_those_of_the_table_that_ships() -> None:
    assert op_definitions.digest_of(tf_private.all_op_definitions()) == op_definitions.digest()


def test_small_functions_may_run_on_the_calling_thread() -> None:
    function = tf.function(lambda x: x * 2, input_signature=[tf.TensorSpec([None])]).get_concrete_function()
    with tf_private.on_calling_thread():
        assert function(tf.constant([1.0, 2.0])).numpy().tolist() == [2.0, 4.0]


def test_reached_functions_are_listed_once_in_order() -> None:
    library = function_pb2.FunctionDefLibrary()
    for name, runs in {"reached_a": ["reached_c", "reached_b"], "reached_b": ["reached_c"], "reached_c": []}.items():
        function = library.function.add()
        function.signature.name = name
        for number, called in enumerate(runs):
            node = function.node_def.add(name=f"n{number}", op="StatefulPartitionedCall")
            node.attr["f"].func.name = called
            for types in ("Tin", "Tout"):
                node.attr[types].list.SetInParent()
    added = tf_private.add_functions(library)
    try:
        reached = [function.signature.name for function in tf_private.functions_reached(["reached_a", "reached_b"])]
    finally:
        tf_private.remove_functions(added)
    assert reached == ["reached_a", "reached_b", "reached_c"]


def test_a_tensor_of_an_outer_graph_is_captured() -> None:
    @tf.function(input_signature=[tf.TensorSpec([])], autograph=False)
    def outer(x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            graph = tf.compat.v1.get_default_graph()
            seen = tf_private.in_graph(graph, x)
            assert seen.graph is graph
            assert tf_private.in_graph(graph, total) is total
            return i + 1, total + seen

        return tf.while_loop(lambda i, _: i < 3, body, [0, 0.0])[1]

    assert outer(tf.constant(2.0)).numpy() == 6.0


def test_ops_in_loops_and_branches_of_gradients_use_gradrule() -> None:
    """Checks the graphs from which the next gradient is built."""
    seen = []

    @tf.function(input_signature=[tf.TensorSpec([])], autograph=False)
    def traced(x: tf.Tensor) -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        grown = tf.cond(x > 0, lambda: tf.sin(x), lambda: tf.cos(x))
        y = tf.while_loop(lambda i, _: i < 2, lambda i, value: (i + 1, tf.sin(value) * x), [0, grown])[1]
        before = len(graph.get_operations())
        (gradient,) = tf.gradients(y, x)
        for op in graph.get_operations()[before:]:
            tf_private.use_gradrule_gradients_inside(op)
            bodies = {"StatelessWhile": ["_body_graph", "_cond_graph"], "StatelessIf": ["_true_graph", "_false_graph"]}
            for attribute in bodies.get(op.type, ()):
                inner = getattr(op, attribute).get_operations()
                assert inner
                assert {node.get_attr("_gradient_op_type") for node in inner} == {tf_private.GRADIENT_NAME.encode()}
                seen.append(attribute)
        return gradient

    assert traced(tf.constant(0.5)).shape == []
    assert sorted(seen) == ["_body_graph", "_cond_graph", "_false_graph", "_true_graph"]


def test_ops_that_others_wait_for_have_no_mark() -> None:
    def function(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.control_dependencies([tf.tanh(x)]), tf.control_dependencies(None), tf.control_dependencies([x]):
            return [tf.identity(x)]

    ops = tf_private.trace(function, [tf.TensorSpec([])], is_stateful=False).get_operations()
    assert any(op.type == "Tanh" for op in ops)
    assert not any(tf_private.WAITED_FOR_ATTR in op.node_def.attr for op in ops)


def test_gradients_built_in_another_graph_are_called_with_other_captures() -> None:
    kept = []

    @tf.function(input_signature=[tf.TensorSpec([])], autograph=False)
    def outer(x: tf.Tensor) -> tf.Tensor:
        graph, y = tf.compat.v1.get_default_graph(), x * x

        @tf.function(input_signature=[tf.TensorSpec([])], autograph=False)
        def inner(dy: tf.Tensor) -> list[tf.Tensor]:
            return tf_private.gradients_from(graph, [y], [x], [dy], [], tf.UnconnectedGradients.NONE)

        function = inner.get_concrete_function()
        assert [capture is x for capture in function.captured_inputs] == [True]
        kept.append(function)
        return tf_private.call_with_captures(function, [tf.constant(1.0)], function.captured_inputs)[0]

    assert outer(tf.constant(3.0)).numpy() == 6.0
    (found,) = tf_private.call_with_captures(kept[0], [tf.constant(2.0)], [tf.constant(5.0)])
    assert found.numpy() == 20.0


def test_only_sessions_of_loops_run_a_pass_of_the_graph_optimizer() -> None:
    def chosen(build: Callable[[tf.Tensor], tf.Tensor]) -> rewriter_config_pb2.RewriterConfig:
        rewrites = rewriter_config_pb2.RewriterConfig()
        with tf.Graph().as_default() as graph:
            build(tf.compat.v1.placeholder(tf.float32, [3]))
        tf_private._limit_optimizer(rewrites, graph)
        return rewrites

    plain = chosen(tf.tanh)
    loop = chosen(lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, v * 2.0), (0, x))[1])
    assert plain.disable_meta_optimizer and not plain.optimizers
    assert not loop.disable_meta_optimizer and list(loop.optimizers) == ["dependency"]
