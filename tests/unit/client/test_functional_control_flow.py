"""Control flow of version 1 in forms that TensorFlow does not write; tests/service has those that it writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from gradrule._builder.functional_control_flow import with_functions


def plain(x: Any) -> Any:
    return tf.sin(x, name="Merge")


def index_of_the_branch(x: Any) -> Any:
    no, yes = tf.raw_ops.Switch(data=x, pred=x > 0.0)
    merged = tf.raw_ops.Merge(inputs=[tf.sin(no), yes])
    return merged.output + tf.cast(merged.value_index, tf.float32)


def one_condition_for_both_inputs(x: Any) -> Any:
    no, _ = tf.raw_ops.Switch(data=x, pred=x > 0.0)
    return tf.raw_ops.Merge(inputs=[tf.sin(no), tf.cos(no)]).output


def loop_without_a_condition(x: Any) -> Any:
    entered = tf.raw_ops.Enter(data=x, frame_name="frame")
    return tf.raw_ops.Merge(inputs=[entered, tf.raw_ops.NextIteration(data=entered)]).output


def merge_that_waits_for_one_node_of_no_branch(x: Any) -> Any:
    no, yes = tf.raw_ops.Switch(data=x, pred=x > 0.0)
    both = tf.raw_ops.AddV2(x=no, y=yes)
    with tf.control_dependencies([both]):
        return tf.raw_ops.Merge(inputs=[tf.sin(no), yes]).output


OTHER_FORMS = [
    plain,
    index_of_the_branch,
    one_condition_for_both_inputs,
    loop_without_a_condition,
    merge_that_waits_for_one_node_of_no_branch,
]


@pytest.mark.parametrize("build", OTHER_FORMS)
def test_other_graphs_stay_as_they_are(build: Callable[[Any], Any]) -> None:
    with tf.Graph().as_default() as graph:
        build(tf.compat.v1.placeholder(tf.float32, [], name="x"))
    data = graph.as_graph_def().SerializeToString()
    assert with_functions(data) == data


@pytest.mark.timeout(20)
def test_a_condition_that_depends_on_itself_stays_as_it_is() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        no, yes = tf.raw_ops.Switch(data=x, pred=tf.identity(tf.identity(x > 0.0, name="a"), name="b"))
        tf.raw_ops.Merge(inputs=[tf.sin(no), yes])
    definition = graph.as_graph_def()
    next(node for node in definition.node if node.name == "a").input[0] = "b"
    data = definition.SerializeToString()
    assert with_functions(data) == data


def test_many_conditionals_in_a_row_take_little_time() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [], name="x")
        for _ in range(160):
            no, yes = tf.raw_ops.Switch(data=x, pred=x > 0.0)
            x = tf.raw_ops.Merge(inputs=[tf.sin(no), tf.cos(yes)]).output
    data = graph.as_graph_def().SerializeToString()
    started = time.process_time()
    converted = tf.compat.v1.GraphDef.FromString(with_functions(data))
    assert time.process_time() - started < 6.0
    assert [node.op for node in converted.node].count("If") == 160
