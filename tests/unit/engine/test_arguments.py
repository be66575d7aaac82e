"""Tests the reading of arguments from a call."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, program_pb2
from gradrule_server.engine.arguments import ArgumentReader
from gradrule_server.engine.build import build
from gradrule_server.engine.tensor_sources import BlobReader
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.graphs import Limits
from gradrule_server.link.messages import CallShape
from tests.service.graph_defs import build_graph
from tests.unit.engine.building import prepared


def doubled() -> gr.Graph:
    """Returns a graph in which y is twice x, of any shape."""
    return build_graph(lambda: tf.add(*[tf.compat.v1.placeholder(tf.float32, None, "x")] * 2, name="y"))


@pytest.mark.parametrize("most", [2, 9])
@pytest.mark.parametrize("deep", ["x", "y"])
def test_rank_of_fed_tensors_is_limited(most: int, deep: str) -> None:
    program = prepared(
        doubled(),
        limits=Limits(rank=most),
        call=CallShape(grad_ys=frozenset({"y"})),
        vjp=program_pb2.Vjp(ys=["y"], xs=["x"]),
    )
    built = build(program.request)
    reader = ArgumentReader(BlobReader(None))

    def arguments(rank: int) -> list[tf.Tensor]:
        call = evaluate_pb2.EvaluateRequest()
        for name, given in (("x", call.feeds), ("y", call.grad_ys)):
            value = np.ones([1] * (rank if name == deep else 1), np.float32)
            given.add(name=name).value.inline_tensor.CopyFrom(tensor_codec.to_message(value))
        return reader.arguments(built, call, [])

    assert max(argument.shape.rank for argument in arguments(most)) == most
    with pytest.raises(GradruleError) as caught:
        arguments(most + 1)
    assert reason_name(caught.value.reason) == "LIMIT_EXCEEDED"
    assert f"has rank {most + 1}; {most} is the most (--max-rank)" in caught.value.message


def test_a_tensor_of_unknown_rank_is_refused() -> None:
    """Refuses it although its bytes would fit."""
    built = build(prepared(doubled()).request)
    call = evaluate_pb2.EvaluateRequest()
    tensor = call.feeds.add(name="x").value.inline_tensor
    tensor.CopyFrom(tensor_codec.to_message(np.float32(1)))
    tensor.tensor_shape.unknown_rank = True
    with pytest.raises(GradruleError, match="shape must be known"):
        ArgumentReader(BlobReader(None)).arrays(built, call, [])


def test_forward_runs_use_the_plan_and_do_not_copy_variables() -> None:
    g = gr.Graph()
    w = tf.ones([3, 2])
    g.op("MatMul", g.placeholder("x", "float32", [None, 3]), g.variable("w", w.numpy()), name="y")
    request = prepared(g, vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request
    request.split = True
    # As if the caller had sent the variable's value with the program.
    request.variables.add(spec=next(item for item in request.inputs if item.name == "w"))
    del request.inputs[[item.name for item in request.inputs].index("w")]
    built = build(request, [w])
    call = evaluate_pb2.EvaluateRequest()
    call.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(np.ones((2, 3), np.float32)))
    plan = built.feed_plan.arrays(call, [], {})
    assert plan is not None
    x, found = ArgumentReader(BlobReader(None)).arguments(built, call, [])
    assert found is w
    # The message's memory may be freed after the call.
    assert not np.shares_memory(plan[0], x.numpy())


def test_unusual_calls_know_the_values_of_variables_without_comparing_them() -> None:
    """Calls that do not feed a variable may run together, and the bytes of its value are not compared."""
    g = gr.Graph()
    w = tf.ones([3, 2])
    g.op("MatMul", g.placeholder("x", "float32", [None, 3]), g.variable("w", w.numpy()), name="y")
    request = prepared(g).request
    request.variables.add(spec=next(item for item in request.inputs if item.name == "w"))
    del request.inputs[[item.name for item in request.inputs].index("w")]
    built = build(request, [w])
    call = evaluate_pb2.EvaluateRequest()
    # Numbers in place of bytes: the plan leaves such a call to the general reader.
    call.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(np.ones((2, 3), np.float32)))
    tensor = call.feeds[0].value.inline_tensor
    tensor.ClearField("tensor_content")
    tensor.float_val.extend([1.0] * 6)
    assert built.feed_plan.arrays(call, [], {}) is None
    arguments = ArgumentReader(BlobReader(None)).arrays(built, call, [])
    assert [built.feed_plan.is_default(index, value) for index, value in enumerate(arguments)] == [False, True]
