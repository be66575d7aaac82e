"""A program that is built without a fast path runs the general way, to the same results."""

from __future__ import annotations

from typing import Any

import numpy as np

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, program_pb2
from gradrule_server.engine.build import build
from gradrule_server.engine.graph_call import FunctionCall, SessionCall
from gradrule_server.engine.program import BuiltProgram
from tests.unit.engine.building import prepared


def _built(*disabled: str) -> BuiltProgram:
    """y = relu(x), and its gradient under a rule."""
    g = gr.Graph()
    g.op_output("Relu", g.placeholder("x", "float32", [None]), name="y")
    request = prepared(g, {"Relu": "guided_relu"}, vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request
    return build(request, disabled_fast_paths=frozenset(disabled))


def _ways(built: BuiltProgram) -> tuple[Any, bool, bool]:
    call = evaluate_pb2.EvaluateRequest()
    call.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(np.ones(3, np.float32)))
    return type(built.call), built.feed_plan.arrays(call, [], {}) is not None, built.small


def test_each_fast_path_has_a_switch() -> None:
    assert _ways(_built()) == (SessionCall, True, True)
    assert _ways(_built("sessions")) == (FunctionCall, True, True)
    assert _ways(_built("feed-plans")) == (SessionCall, False, True)
    assert _ways(_built("calling-thread")) == (SessionCall, True, False)


def test_results_are_the_same() -> None:
    x = np.array([-2.0, -0.5, 0.0, 0.5, 2.0], np.float32)
    for found, wanted in zip(_built("sessions", "calling-thread").call([x]), _built().call([x]), strict=True):
        np.testing.assert_array_equal(found, wanted)
