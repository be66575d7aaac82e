"""Compile workers parse graphs in processes that can be killed, separate for each tenant; the front end parses none."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import evaluate_pb2, graph_pb2
from tests.processes import has_ended, peak_bytes, processor_s, reset_peak, resident_bytes, workers
from tests.service import raw
from tests.service.answers import refused_raw
from tests.service.expensive_requests import chain, nested_calls, slow_to_select, tiny_fields
from tests.service.guarded import Guarded
from tests.service.servers import RunningServer, running_server
from tests.waiting import wait_until

_FLOAT = graph_pb2.AttrValue(type=raw.DT_FLOAT)
_LARGE_BYTES = 32 << 20
_RULES = 20
_numbers = itertools.count()


class Caller:
    """Sends a tenant's messages as bytes."""

    def __init__(self, guarded: Guarded, tenant: str) -> None:
        credentials = grpc.ssl_channel_credentials(guarded.authority.file.read_bytes())
        self._channel = grpc.secure_channel(guarded.running.target, credentials)
        self._metadata = (("authorization", f"Bearer {guarded.web_token(tenant)}"),)

    def start(self, method: str, data: bytes, timeout_s: float) -> Any:
        """Starts a call."""
        call: Any = self._channel.unary_unary(f"/gradrule.v1.{method}")
        return call.future(data, timeout=timeout_s, metadata=self._metadata, compression=grpc.Compression.Gzip)

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def attacker(guarded: Guarded) -> Iterator[Caller]:
    # A new tenant, because an idle worker of the last test would be reused.
    caller = Caller(guarded, f"mallory-{next(_numbers)}")
    yield caller
    caller.close()


@pytest.fixture(scope="module")
def bystander(guarded: Guarded) -> Iterator[gr.Client]:
    with guarded.connect("bystander") as client:
        yield client


def compile_new_program(client: gr.Client, number: int) -> float:
    """Compiles and runs a new program; returns the seconds it took."""
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.op("Mul", x, g.constant(np.float32(number)), name="y")
    started = time.monotonic()
    r = client.evaluate(
        g, {"x": [1.0]}, fetches=["y"], ys=["y"], xs=["x"], overrides={"Mul": gr.Rule("(2 * dy, None)")}
    )
    assert r.gradients["x"].tolist() == [2.0]
    return time.monotonic() - started


def test_slow_selectors_of_one_tenant_delay_neither_others_nor_the_front_end(
    guarded: Guarded, attacker: Caller, bystander: gr.Client
) -> None:
    """Finding S2."""
    pid = guarded.running.process.pid
    compile_new_program(bystander, 1)
    data = evaluate_pb2.EvaluateRequest(spec=slow_to_select()).SerializeToString()
    calls = [attacker.start("GradientService/Evaluate", data, 300) for _ in range(8)]
    own = wait_until(lambda: workers(pid) or None, "a compile worker")
    before, started = processor_s(pid), time.monotonic()
    took = [compile_new_program(bystander, 2 + index) for index in range(3)]
    time.sleep(max(0.0, 2 - (time.monotonic() - started)))
    share = (processor_s(pid) - before) / (time.monotonic() - started)
    assert not any(call.done() for call in calls)
    assert max(took) < 60
    # Eight such calls used to occupy all threads of the front end.
    assert share < 0.5
    own = workers(pid)
    for call in calls:
        call.cancel()
    # The workers of these calls end; the bystander's worker may stay.
    wait_until(lambda: len(workers(pid) & own) <= 1 or None, "end of the workers")
    assert compile_new_program(bystander, 9) < 60


def test_compilation_goes_on_after_the_deadline_and_ends_with_the_server(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, grpc.insecure_channel(server.target) as channel:
        pid = server.process.pid
        with refused_raw("DEADLINE_EXCEEDED") as refusal:
            raw.evaluate(channel, evaluate_pb2.EvaluateRequest(spec=slow_to_select()), 6.0)
        refusal.says("goes on")
        (worker,) = workers(pid)
        # Workers whose callers have given up used to be ended this soon.
        time.sleep(1.0)
        assert worker in workers(pid)
        assert server.terminate() == 0
        assert has_ended(worker)


def test_functions_that_call_each_other_take_no_memory_of_the_front_end(guarded: Guarded, attacker: Caller) -> None:
    """Finding S3."""
    pid = guarded.running.process.pid
    data = evaluate_pb2.EvaluateRequest(spec=nested_calls()).SerializeToString()
    assert len(data) < 100_000
    reset_peak(pid)
    before, used = peak_bytes(pid), processor_s(pid)
    calls = [attacker.start("GradientService/Evaluate", data, 60) for _ in range(4)]
    codes = {call.code() for call in calls}
    assert codes <= {
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    assert peak_bytes(pid) - before < 400 << 20
    assert processor_s(pid) - used < 5


def test_messages_of_many_tiny_fields_occupy_one_thread_of_the_front_end(
    guarded: Guarded, attacker: Caller, bystander: gr.Client
) -> None:
    """Finding S5: four million fields, a few kilobytes when compressed."""
    compile_new_program(bystander, 20)
    calls = [attacker.start("GradientService/Evaluate", tiny_fields(), 120) for _ in range(8)]
    took = [compile_new_program(bystander, 21 + index) for index in range(3)]
    assert max(took) < 60
    for call in calls:
        call.cancel()


def test_calls_with_one_large_graph_load_it_one_after_the_other(
    server: RunningServer, client: gr.Client, channel: grpc.Channel
) -> None:
    """Finding S11."""
    graph = chain(2)
    weights = graph.node.add(name="w", op="Const", attr={"dtype": _FLOAT})
    weights.attr["value"].tensor.dtype = raw.DT_FLOAT
    weights.attr["value"].tensor.tensor_shape.dim.add(size=_LARGE_BYTES // 4)
    weights.attr["value"].tensor.tensor_content = os.urandom(_LARGE_BYTES)
    graph.node.add(name="shape", op="Shape", input=["w"], attr={"T": _FLOAT})
    data = graph.SerializeToString()
    client.upload(data)
    pid = server.process.pid
    reset_peak(pid)
    before = peak_bytes(pid)
    evaluate: Any = channel.unary_unary("/gradrule.v1.GradientService/Evaluate")
    request = evaluate_pb2.EvaluateRequest()
    request.spec.graph.blob_sha256 = hashlib.sha256(data).hexdigest()
    request.spec.fetches.append("shape")
    calls = [evaluate.future(request.SerializeToString(), timeout=120) for _ in range(12)]
    assert {call.code() for call in calls} == {grpc.StatusCode.OK}
    assert peak_bytes(pid) - before < 6 * len(data)


def test_rule_by_graph_is_stored_as_bytes(server: RunningServer, client: gr.Client) -> None:
    """Finding S17."""
    graph = graph_pb2.Graph()
    for name in ("x", "dy"):
        graph.node.add(name=name, op="Placeholder", attr={"dtype": _FLOAT})
    last = "dy"
    for index in range(7000):
        graph.node.add(name=f"node_{index}", op="Mul", input=[last, "x"], attr={"T": _FLOAT})
        last = f"node_{index}"
    graph.node.add(name="dx", op="Identity", input=[last], attr={"T": _FLOAT})
    data = graph.SerializeToString()
    pid = server.process.pid
    before = resident_bytes(pid)
    for index in range(_RULES):
        client.create_rule(f"Kept{index}", graph=data)
    try:
        assert resident_bytes(pid) - before < _RULES * 4 * len(data)
    finally:
        for index in range(_RULES):
            client.delete_rule(f"Kept{index}")
