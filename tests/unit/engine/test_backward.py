"""Tests that the forward and backward parts of a program give the results of the whole program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.v1 import errors_pb2, program_pb2
from gradrule_server.engine.build import build
from gradrule_server.engine.checks import failed_check
from gradrule_server.engine.derivatives import DENSE, NOT_DIFFERENTIABLE, SPARSE, UNCONNECTED
from gradrule_server.errors import GradruleError
from tests.service.answers import assert_close
from tests.service.derivative_cases import CASES, FEEDS, RTOL, VX, LocalDerivatives, X, graph_for_function
from tests.service.graph_defs import build_graph, placeholder
from tests.unit.engine.building import arguments, prepared, run_forward, split

XW = program_pb2.Vjp(ys=["y"], xs=["x", "w"])


@pytest.mark.parametrize("name", sorted(CASES))
def test_one_forward_serves_many_pull_backs(name: str) -> None:
    program = prepared(graph_for_function(CASES[name]), vjp=XW)
    built = split(program)
    assert built.two_parts is not None
    outputs, saved = run_forward(built, arguments(program, built, FEEDS))
    local = LocalDerivatives(CASES[name])
    assert_close(outputs[0].numpy(), CASES[name](tf.constant(X), tf.constant(FEEDS["w"])).numpy(), rtol=RTOL)
    assert built.two_parts.layout == built.layout == [(("x",), DENSE), (("w",), DENSE)]
    for grad_y in (VX, -2 * VX):
        found = built.two_parts.backward(saved, {0: tf.constant(grad_y)})
        for got, wanted in zip(found, local.gradients(grad_y), strict=True):
            assert_close(got.numpy(), wanted, rtol=RTOL)
    for got, wanted in zip(built.two_parts.backward(saved, {}), local.gradients(np.ones_like(X)), strict=True):
        assert_close(got.numpy(), wanted, rtol=RTOL)
    by_x, _ = built.two_parts.backward(saved, {0: tf.stack([VX, -VX, VX])}, stacked=True)
    assert_close(by_x.numpy(), np.stack([s * local.gradients(VX)[0] for s in (1, -1, 1)]), rtol=RTOL)


@pytest.mark.parametrize(("op_type", "rule"), [("Sigmoid", "deeplift_rescale"), ("MatMul", "lrp_epsilon")])
def test_code_rules_and_their_params(op_type: str, rule: str) -> None:
    """Uses a rule that runs the graph a second time, and one that repeats single ops."""
    graph = graph_for_function(lambda x, w: tf.matmul(tf.sigmoid(tf.matmul(x, w)), w))
    program = prepared(graph, {op_type: rule}, vjp=XW)
    built, whole = split(program), build(program.request)
    given = arguments(program, built, FEEDS)
    assert built.two_parts is not None
    assert built.params
    assert built.statuses == whole.statuses
    _, saved = run_forward(built, given)
    _, *wanted = whole.function(*given)
    found = built.two_parts.backward(saved, {})
    for got, gradient in zip(found, wanted, strict=True):
        assert_close(got.numpy(), gradient.numpy(), rtol=RTOL)


def test_forms_of_gradients_and_ys_without_grad_y() -> None:
    def build() -> None:
        table, ids, x = placeholder("table", shape=(5, 2)), placeholder("ids", tf.int32), placeholder("x")
        tf.square(tf.gather(table, ids), name="y")
        tf.square(x, name="z")
        tf.argmax(x, name="i")

    graph = build_graph(build)
    program = prepared(graph, vjp=program_pb2.Vjp(ys=["i", "y"], xs=["table", "ids", "x"]))
    built = split(program)
    assert built.two_parts is not None
    assert [form for _, form in built.two_parts.layout] == [SPARSE, NOT_DIFFERENTIABLE, UNCONNECTED]
    assert [form for _, form in built.two_parts.stacked_layout] == [DENSE, NOT_DIFFERENTIABLE, UNCONNECTED]
    table = np.arange(10, dtype=np.float32).reshape(5, 2)
    feeds: dict[str, Any] = {"table": table, "ids": [1, 3, 1], "x": [1.0]}
    _, saved = run_forward(built, arguments(program, built, feeds))
    values, indices, shape = built.two_parts.backward(saved, {1: tf.fill([3, 2], 0.5)})
    assert_close(values.numpy(), table[[1, 3, 1]])
    assert (indices.numpy().tolist(), shape.numpy().tolist()) == ([1, 3, 1], [5, 2])
    (stacked,) = built.two_parts.backward(saved, {1: tf.fill([2, 3, 2], 0.5)}, stacked=True)
    assert_close(stacked.numpy(), np.stack([table * np.array([[0], [2], [0], [1], [0]], np.float32)] * 2))


def test_pull_backs_may_give_some_of_the_grad_ys() -> None:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.square(x, name="y")
    g.sin(x, name="z")
    program = prepared(g, vjp=program_pb2.Vjp(ys=["y", "z"], xs=["x"]))
    built = split(program)
    assert built.two_parts is not None
    value = np.float32([0.3, -2.0])
    _, saved = run_forward(built, arguments(program, built, {"x": value}))
    for by_y, by_z in ((None, None), (3.0, None), (None, 5.0), (3.0, 5.0)):
        given = {i: tf.fill([2], scale) for i, scale in enumerate((by_y, by_z)) if scale is not None}
        (found,) = built.two_parts.backward(saved, given)
        assert_close(found.numpy(), (by_y or 1.0) * 2 * value + (by_z or 1.0) * np.cos(value))
        if given:
            rows = {index: tf.stack([grad_y, 2 * grad_y]) for index, grad_y in given.items()}
            (found,) = built.two_parts.backward(saved, rows, stacked=True)
            scales = [[by_y or 1.0, by_z or 1.0], [2 * by_y if by_y else 1.0, 2 * by_z if by_z else 1.0]]
            assert_close(found.numpy(), np.float32([a * 2 * value + b * np.cos(value) for a, b in scales]))


def test_invalid_pull_backs_are_refused() -> None:
    program = prepared(graph_for_function(CASES["plain"]), vjp=XW)
    built = split(program)
    assert built.two_parts is not None
    _, saved = run_forward(built, arguments(program, built, FEEDS))
    with pytest.raises(GradruleError) as refusal:
        built.two_parts.backward(saved, {}, stacked=True)
    assert refusal.value.reason == errors_pb2.ERROR_REASON_INVALID_DERIVATIVE
    with pytest.raises(tf.errors.InvalidArgumentError) as failure:
        built.two_parts.backward(saved, {0: tf.ones([2, 2])})
    found = failed_check(failure.value.message)
    assert found is not None
    assert found.reason == errors_pb2.ERROR_REASON_FEED_SHAPE
    assert "(2, 2), must have (2, 3)" in found.message
    # Later pull-backs still work.
    assert len(built.two_parts.backward(saved, {0: tf.ones([2, 3])})) == 2


def test_forward_run_keeps_no_y_only_for_its_shape() -> None:
    g = gr.Graph()
    g.op("Neg", g.placeholder("x", "float32", [None]), name="y")
    program = prepared(g, vjp=program_pb2.Vjp(ys=["y"], xs=["x"]))
    built = split(program)
    assert built.two_parts is not None
    _, saved = run_forward(built, arguments(program, built, {"x": np.ones(1000, np.float32)}))
    assert max(int(tf.size(tensor)) for tensor in saved) == 1
