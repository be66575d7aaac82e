"""Control flow of version 1 in forms that TensorFlow does not write; tests/service has those that it writes."""

from __future__ import annotations

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


@pytest.mark.parametrize("build", [plain, index_of_the_branch, one_condition_for_both_inputs, loop_without_a_condition])
def test_other_graphs_stay_as_they_are(build: Callable[[Any], Any]) -> None:
    with tf.Graph().as_default() as graph:
        build(tf.compat.v1.placeholder(tf.float32, [], name="x"))
    data = graph.as_graph_def().SerializeToString()
    assert with_functions(data) == data
