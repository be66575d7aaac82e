"""Tests how the engine runs the calls of sessions. `tests/service/test_sessions.py` tests what they compute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, program_pb2, tensor_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.arguments import ArgumentReader
from gradrule_server.engine.build import build
from gradrule_server.engine.program import BuiltProgram, FunctionCall, SessionCall
from gradrule_server.engine.run import ForwardRuns
from gradrule_server.engine.sessions import Sessions
from gradrule_server.engine.tensor_sources import BlobReader, VariableCache
from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.link.messages import CallShape, ReceivedRequest
from gradrule_server.link.v1 import link_pb2
from tests.call_payloads import call_values
from tests.unit.engine.building import prepared

X = np.arange(6, dtype=np.float32).reshape(2, 3)
W = np.ones((3, 2), np.float32)


def linear() -> gr.Graph:
    """Makes y = mean((x·w)²)."""
    g = gr.Graph()
    product = g.op("MatMul", g.placeholder("x", "float32", [None, 3]), g.variable("w", W))
    g.op("Mean", g.op("Square", product), g.constant([0, 1]), name="y")
    return g


class Engine:
    """The sessions of an engine with one program."""

    def __init__(self, built: BuiltProgram) -> None:
        reader = ArgumentReader(BlobReader(None))
        forward_runs = ForwardRuns(reader)
        self.sessions = Sessions(reader, VariableCache(BlobReader(None)), lambda _: built, forward_runs)
        shape = tensor_codec.shape_message(W.shape)
        value = link_pb2.BoundVariable(spec=tensor_pb2.TensorSpec(name="w", dtype=tensor_pb2.DT_FLOAT, shape=shape))
        value.value.inline_tensor.CopyFrom(tensor_codec.to_message(W))
        self.send(link_pb2.SessionRequest(assign=link_pb2.SessionAssign(variables=[value], opens=True)))

    def send(self, request: link_pb2.SessionRequest, values: bytes = b"") -> link_pb2.SessionReply:
        request.session, request.max_bytes = "s", 1 << 20
        request.deadline_ns = time.monotonic_ns() + 60 * 10**9
        return self.sessions.handle(request, ReceivedRequest(b"", 0, values))

    def step(self, x: np.ndarray = X) -> float:
        """Runs one step; returns its loss."""
        call = evaluate_pb2.EvaluateRequest()
        call.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(x))
        run = link_pb2.SessionRun(run=link_pb2.RunRequest(), loss="y")
        run.optimizer.CopyFrom(gr.optimizers.SGD(0.01).message())
        reply = self.send(link_pb2.SessionRequest(run=run), call_values(call))
        (output,) = evaluate_pb2.EvaluateResponse.FromString(reply.response).outputs
        return float(tensor_codec.to_numpy(output.value.inline_tensor))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The calls of graphs, by their class."""
    made: list[type] = []
    for kind in (SessionCall, FunctionCall):
        run: Any = kind.on_device

        def recorded(call: Any, arguments: Sequence[Any], run: Any = run) -> Any:
            made.append(type(call))
            return run(call, arguments)

        monkeypatch.setattr(kind, "on_device", recorded)
    return made


def test_a_step_is_one_run_of_a_session_and_one_function(calls: list[type]) -> None:
    vjp = program_pb2.Vjp(ys=["y"], xs=["w"])
    shape = CallShape(feeds=frozenset({"x"}), derivative=evaluate_pb2.DERIVATIVE_VJP, session=True)
    built = build(prepared(linear(), call=shape, vjp=vjp).request)
    engine = Engine(built)
    w = W.astype(np.float64)
    for _ in range(3):
        calls.clear()
        loss = engine.step()
        assert calls == [SessionCall, FunctionCall]
        assert loss == pytest.approx(np.mean((X @ w) ** 2), rel=1e-5)
        w -= 0.01 * X.T @ (2 * (X @ w) / 4)
    # The session's variables are arguments as they are.
    state = {"w": tf.constant(W)}
    call = evaluate_pb2.EvaluateRequest()
    call.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(X))
    found = ArgumentReader(BlobReader(None)).read(built, link_pb2.RunRequest(), call_values(call), state)
    assert any(value is state["w"] for value in found.values)


def test_results_of_a_session_become_tensors_without_a_copy() -> None:
    x = tf.constant(np.ones(1000, np.float32))
    array = tf_private.shared_array(x)
    assert np.shares_memory(array, tf_private.shared_array(tf_private.shared_tensor(array)))
    for value in (np.float32(2.5), b"text", np.array([b"a", b"bc"], object), np.ones(3, bool)):
        assert np.array_equal(tf_private.shared_tensor(value).numpy(), value)


def test_a_failure_in_a_session_names_its_node() -> None:
    """The executor of small programs names no node, so the program runs again."""
    g = gr.Graph()
    product = g.op("MatMul", g.placeholder("x", "float32", [None, None]), g.variable("w", W), name="product")
    g.op("Mean", g.op("Square", product), g.constant([0, 1]), name="y")
    shape = CallShape(feeds=frozenset({"x"}), derivative=evaluate_pb2.DERIVATIVE_VJP, session=True)
    built = build(prepared(g, call=shape, vjp=program_pb2.Vjp(ys=["y"], xs=["w"])).request)
    assert built.small
    engine = Engine(built)
    with pytest.raises(GradruleError, match="product") as refused:
        engine.step(np.ones((2, 5), np.float32))
    assert reason_name(refused.value.reason) == "EXECUTION_FAILED"
    assert engine.step() == pytest.approx(np.mean((X @ W) ** 2))
