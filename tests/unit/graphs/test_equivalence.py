"""Tests that an expanded graph computes the same as the uploaded graph, with functions, loops and branches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1.graph_pb2 import Graph
from tests.unit.graphs.helpers import assert_same_outputs, expand, run, traced

VECTOR = tf.TensorSpec([None], tf.float32, name="x")
X = np.array([-2.0, 0.5, 3.0], np.float32)


@tf.function(autograph=False)
def twice(x: tf.Tensor) -> tf.Tensor:
    return x * 2.0


@tf.function(autograph=False)
def parts(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    low, high = tf.split(tf.concat([twice(x), x], 0), 2)
    return low, high, tf.shape(x)


def nested_calls(x: tf.Tensor) -> Any:
    low, high, shape = parts(twice(x))
    return low + high, shape, twice(high)


def called_twice(x: tf.Tensor) -> Any:
    return twice(twice(x)) - twice(x)


def loop(x: tf.Tensor) -> Any:
    def step(i: tf.Tensor, v: tf.Tensor) -> Any:
        return i + 1, twice(v) - parts(v)[0] + tf.sign(v)

    return tf.while_loop(lambda i, v: tf.logical_and(i < 4, tf.reduce_sum(twice(v)) < 100.0), step, [0, x + 9.0])


def nested_loops(x: tf.Tensor) -> Any:
    def outer(i: tf.Tensor, v: tf.Tensor) -> Any:
        inner = tf.while_loop(lambda j, w: j < i, lambda j, w: (j + 1, twice(w)), [0, v])
        return i + 1, inner[1] + 1.0

    return tf.while_loop(lambda i, v: i < 3, outer, [0, x])[1]


def branches(x: tf.Tensor) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: twice(x), lambda: loop(x)[1])


def switch(x: tf.Tensor) -> Any:
    index = tf.cast(tf.reduce_max(x), tf.int32)
    return tf.switch_case(index - 2, [lambda: x, lambda: branches(x), lambda: twice(x) * 3.0])


def mapped(x: tf.Tensor) -> Any:
    return tf.map_fn(lambda v: parts(tf.reshape(v, [1]))[0] * tf.nn.silu(v), x)


def controlled(x: tf.Tensor) -> Any:
    with tf.control_dependencies([tf.debugging.assert_less(x, 9.0)]):
        y = twice(x)
    with tf.control_dependencies([y]):
        return tf.identity(x) + y


def accumulated(x: tf.Tensor) -> Any:
    array = tf.TensorArray(tf.float32, size=3, element_shape=[])
    for i in range(3):
        array = array.write(i, twice(x[i]))
    return array.stack()


def strings(x: tf.Tensor) -> Any:
    return tf.strings.join([tf.strings.as_string(twice(x)), tf.constant(["a", "b", "c"])], separator="-")


def foreign_gradient(x: tf.Tensor) -> Any:
    return tf.nn.silu(x) + twice(tf.nn.silu(x))


PROGRAMS = [
    nested_calls,
    called_twice,
    loop,
    nested_loops,
    branches,
    switch,
    mapped,
    controlled,
    accumulated,
    strings,
    foreign_gradient,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_outputs_are_the_same(program: Callable[..., Any]) -> None:
    graph, inputs, outputs = traced(program, VECTOR)
    expanded = assert_same_outputs(graph, outputs, {inputs[0]: X})
    made = Graph.FromString(expanded.graph_bytes)
    every = [*made.node, *(node for function in made.library.function for node in function.node_def)]
    assert not {"PartitionedCall", "StatefulPartitionedCall"} & {node.op for node in every}
    assert {function.signature.name for function in made.library.function} == set(expanded.scopes)
    notes = {key for node in every for key in node.attr if key.startswith("_")}
    assert notes <= {"_gradient_op_type", "_gradrule_mark", "_num_original_outputs", "_lower_using_switch_merge"}
    assert {node.attr["_gradient_op_type"].s for node in every if "_gradient_op_type" in node.attr} == {b"gradrule"}
    assert not any(node.device for node in every)
    assert made.versions.producer == graph.versions.producer


@pytest.mark.parametrize("program", [loop, nested_loops, branches, switch, mapped], ids=lambda p: p.__name__)
def test_each_use_of_a_body_gets_its_own_function(program: Callable[..., Any]) -> None:
    @tf.function(autograph=False)
    def once(x: tf.Tensor) -> Any:
        return tf.nest.flatten(program(x))[-1]

    graph, inputs, outputs = traced(lambda x: once(x) + once(once(x) * 0.25), VECTOR)
    expanded = assert_same_outputs(graph, outputs, {inputs[0]: X})
    used = []
    made = Graph.FromString(expanded.graph_bytes)
    for node in [*made.node, *(node for function in made.library.function for node in function.node_def)]:
        for value in node.attr.values():
            used += [value.func.name] if value.HasField("func") else [item.name for item in value.list.func]
    assert len(used) == len(set(used)) == len(made.library.function)


def test_functions_called_by_their_name_as_op() -> None:
    def by_name(x: tf.Tensor) -> Any:
        return parts(twice(x))[0]

    graph, inputs, outputs = traced(by_name, VECTOR)
    for node in graph.node:
        if node.op in ("PartitionedCall", "StatefulPartitionedCall"):
            node.op = node.attr["f"].func.name
            node.ClearField("attr")
    expanded = expand(graph, outputs)
    np.testing.assert_array_equal(
        run(expanded.graph_bytes, [expanded.tensor_names[outputs[0]]], {inputs[0]: X})[0], 4 * X
    )


def test_functions_with_attributes_are_instantiated_for_each_call() -> None:
    with tf.Graph().as_default() as made:
        from tensorflow.python.framework import function as legacy

        @legacy.Defun(func_name="double")
        def double(x: Any) -> Any:
            return x + x

        double(tf.compat.v1.placeholder(tf.float32, [], name="a"))
        graph = Graph.FromString(made.as_graph_def().SerializeToString())
    function = graph.library.function[0]
    function.signature.attr.add(name="T", type="type")
    for arg in (function.signature.input_arg[0], function.signature.output_arg[0]):
        arg.ClearField("type")
        arg.type_attr = "T"
    for node in function.node_def:
        node.attr["T"].placeholder = "T"
    name = function.signature.name
    del graph.node[:]
    for number, dtype in enumerate((1, 2, 3)):
        source = graph.node.add(name=f"x{number}", op="Placeholder")
        source.attr["dtype"].type = dtype  # type: ignore[assignment]
        graph.node.add(name=f"y{number}", op=name, input=[source.name])
    expanded = expand(graph, ["y0", "y1", "y2"])
    got = run(expanded.graph_bytes, list(expanded.tensor_names.values()), {"x0": 1.5, "x1": 2.5, "x2": 3})
    assert [value.dtype for value in got] == [np.float32, np.float64, np.int32]
    assert got == [3.0, 5.0, 6]
