"""Failures at run time, limits, and a test for every error reason."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest
import tensorflow as tf

import gradrule as gr
from gradrule.v1 import errors_pb2
from gradrule_server.errors import error, reason_name
from gradrule_server.front.calls import status_code, to_status
from tests.processes import engines, has_ended, no_free_descriptors, processor_s
from tests.service import loop_graphs, raw
from tests.service.answers import PROVOKED, keeps_engine, provokes, refused, refused_raw
from tests.service.graph_defs import SIGN_FEEDS, build_graph, placeholder, sign_graph
from tests.service.health import wait_for_another_engine
from tests.service.servers import RunningServer, running_server
from tests.waiting import wait_until

UNIT_LEVEL = {"INTERNAL"}
"""Reasons that nothing from outside can provoke: a fault of the server's own."""


def test_every_reason_has_a_test() -> None:
    for module in (
        "authentication",
        "bad_input",
        "bad_rules",
        "blobs",
        "bombs",
        "client_memory",
        "forward",
        "policy",
        "sessions",
        "supervision",
        "variables",
    ):
        importlib.import_module(f"tests.service.test_{module}")
    reasons = {reason_name(number) for number in errors_pb2.ErrorReason.values() if number}
    assert reasons == set(PROVOKED) | UNIT_LEVEL
    assert not set(PROVOKED) & UNIT_LEVEL


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Returns a server with tight limits that runs one request at a time."""
    flags = ("--max-message-bytes", "1MiB", "--max-concurrent-requests", "1", "--max-nodes", "40", "--max-rules", "3")
    with running_server(tmp_path_factory.mktemp("small"), flags) as running:
        yield running


@pytest.fixture
def small_channel(small: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(small.target) as opened:
        yield opened


@provokes("LIMIT_EXCEEDED")
def test_graph_with_too_many_nodes_is_refused(small_channel: grpc.Channel) -> None:
    chain = [raw.node(f"n{i}", "Neg", f"n{i - 1}" if i else "x") for i in range(50)]
    with refused_raw("LIMIT_EXCEEDED") as refusal:
        raw.evaluate(small_channel, raw.request(raw.graph(raw.placeholder(), *chain), fetches=["n49"]))
    refusal.says("40")
    raw.assert_healthy(small_channel)


# Programs and running.


@provokes("PROGRAM_NOT_FOUND")
@keeps_engine
def test_unknown_program_is_refused(client: Any, channel: grpc.Channel) -> None:
    with refused("PROGRAM_NOT_FOUND") as refusal:
        client.program("programs/nowhere")
    refusal.says("nowhere")
    message = raw.request(raw.sign_graph())
    message.program = "programs/nowhere"
    with refused_raw("PROGRAM_NOT_FOUND"):
        raw.evaluate(channel, message)


@provokes("PROGRAM_EXISTS")
@keeps_engine
def test_program_of_an_existing_name_is_refused(either: Any) -> None:
    first = either.compile(sign_graph(), fetches=["y"], name="taken")
    assert either.compile(sign_graph(), fetches=["y"], name="taken").name == first.name == "programs/taken"
    with refused("PROGRAM_EXISTS") as refusal:
        either.compile(sign_graph(), fetches=["x"], name="taken")
    refusal.says("taken")


@provokes("EXECUTION_FAILED")
@keeps_engine
def test_failing_kernel_is_reported(either: Any) -> None:
    g = gr.Graph()
    g.op("FloorDiv", g.placeholder("x", "int32", []), g.placeholder("by", "int32", []), name="y")
    with refused("EXECUTION_FAILED") as refusal:
        either.evaluate(g, feeds={"x": 1, "by": 0}, fetches=["y"])
    refusal.says("division by zero")


@provokes("DEADLINE_EXCEEDED")
def test_call_past_its_deadline_is_refused(small: RunningServer, small_channel: grpc.Channel) -> None:
    engine = small.wait_for_engine()
    with gr.connect(small.target) as client:
        client.evaluate(loop_graphs.endless(), feeds={"x": loop_graphs.ENDS}, fetches=["y"])
        with refused("DEADLINE_EXCEEDED"):
            client.evaluate(loop_graphs.endless(), feeds={"x": loop_graphs.ENDLESS}, fetches=["y"], timeout=1.0)
    wait_for_another_engine(small, engine)
    raw.assert_healthy(small_channel)


@provokes("MESSAGE_TOO_LARGE")
def test_too_large_message_is_refused(small: RunningServer, small_channel: grpc.Channel) -> None:
    with gr.connect(small.target, shared_memory=False) as client, refused("MESSAGE_TOO_LARGE"):
        client.evaluate(sign_graph(), feeds={"x": np.zeros(600_000, np.float32)}, fetches=["y"])
    raw.assert_healthy(small_channel)


class EndlessCall:
    """Runs an endless call of a compiled program in a thread and keeps its error."""

    def __init__(self, client: Any, timeout: float = 30.0) -> None:
        client.evaluate(loop_graphs.endless(), {"x": loop_graphs.ENDS}, fetches=["y"])
        self.error: gr.errors.GradruleError | None = None
        self._words = {"feeds": {"x": loop_graphs.ENDLESS}, "fetches": ["y"], "timeout": timeout}
        self._client = client
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self.error is None:
            try:
                self._client.evaluate(loop_graphs.endless(), **self._words)
            except gr.errors.OverloadedError:
                continue  # The probe of `wait_until_busy` may have occupied the server's only place.
            except gr.errors.GradruleError as caught:
                self.error = caught

    def join(self) -> gr.errors.GradruleError:
        self._thread.join(40)
        assert self.error is not None
        return self.error


def wait_until_busy(small: RunningServer, small_channel: grpc.Channel) -> None:
    """Waits until the server refuses a request because its engine runs another one."""

    def probe() -> bool | None:
        try:
            raw.assert_healthy(small_channel)
        except grpc.RpcError as failure:
            return True if failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED else None
        return None

    wait_until(probe, "a busy server")
    engine = small.wait_for_engine()
    before = processor_s(engine)
    wait_until(lambda: processor_s(engine) > before + 0.2 or None, "work of the engine")


@provokes("OVERLOADED")
def test_request_beyond_the_limit_is_refused(small: RunningServer, small_channel: grpc.Channel) -> None:
    engine = small.wait_for_engine()
    with gr.connect(small.target) as client:
        background = EndlessCall(client, timeout=9.0)
        wait_until_busy(small, small_channel)
        with refused_raw("OVERLOADED"):
            raw.evaluate(small_channel, raw.request(raw.sign_graph()))
        assert background.join().reason == "DEADLINE_EXCEEDED"
    wait_for_another_engine(small, engine)
    raw.assert_healthy(small_channel)


@provokes("CANCELLED")
def test_cancelled_call_is_reported(small: RunningServer, small_channel: grpc.Channel) -> None:
    engine = small.wait_for_engine()
    client = gr.connect(small.target)
    background = EndlessCall(client, timeout=9.0)
    wait_until_busy(small, small_channel)
    client.close()
    with refused("CANCELLED"):
        raise background.join()
    wait_for_another_engine(small, engine)
    raw.assert_healthy(small_channel)


@provokes("ENGINE_UNAVAILABLE")
def test_call_without_an_engine_is_refused(small: RunningServer, small_channel: grpc.Channel) -> None:
    """The call waits some time for an engine first."""
    # Start a compile worker first: it needs descriptors too.
    raw.assert_healthy(small_channel)
    engine, pid = small.wait_for_engine(), small.process.pid
    with no_free_descriptors(pid):
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: True if "cannot be started" in small.log.read_text() else None, "a failed start")
        with refused_raw("ENGINE_UNAVAILABLE"):
            raw.evaluate(small_channel, raw.request(raw.sign_graph()))
    wait_for_another_engine(small, engine)
    raw.assert_healthy(small_channel)


def test_calls_on_the_engine_of_an_overrunning_call_are_run_again(server: RunningServer, client: Any) -> None:
    """An overrun ends the engine; other calls on it must not fail."""
    p = client.compile(loop_graphs.endless(), fetches=["y"])
    # The first run may take as long as loading, even after its deadline.
    p({"x": loop_graphs.ENDS})
    slow = client.compile(loop_graphs.counted(1_500_000), fetches=["y"])
    wanted = slow({"x": np.float32(3)}).outputs["y"]
    pids = engines(server.process.pid)
    with futures.ThreadPoolExecutor() as pool:
        hangs = pool.submit(p.evaluate, {"x": loop_graphs.ENDLESS}, timeout=1.0)
        time.sleep(0.8)
        beside = [pool.submit(slow.evaluate, {"x": np.float32(3)}, timeout=250.0) for _ in range(3)]
        with refused("DEADLINE_EXCEEDED"):
            hangs.result()
        wait_until(lambda: any(has_ended(pid) for pid in pids) or None, "the end of the engine")
        assert not any(call.done() for call in beside), "one ended before its engine: nothing is shown"
        assert [call.result().outputs["y"] for call in beside] == [wanted] * 3


@provokes("UNAVAILABLE")
def test_unreachable_server_is_reported(tmp_path_factory: pytest.TempPathFactory) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    started = time.monotonic()
    with gr.connect(f"127.0.0.1:{port}") as client, refused("UNAVAILABLE") as refusal:
        client.evaluate(sign_graph(), feeds=SIGN_FEEDS, fetches=["y"], timeout=5.0)
    assert time.monotonic() - started < 60
    assert refusal.error.code is grpc.StatusCode.UNAVAILABLE


@provokes("UNSUPPORTED")
def test_unknown_method_is_reported() -> None:
    other = grpc.server(futures.ThreadPoolExecutor(1))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        with gr.connect(f"127.0.0.1:{port}") as client, refused("UNSUPPORTED"):
            client.get_rule("ste")
    finally:
        other.stop(None).wait()


# Reasons that no client can provoke are tested where they become a status.


@pytest.mark.parametrize("reason", sorted(UNIT_LEVEL))
def test_internal_error_reveals_nothing(reason: str) -> None:
    number = errors_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}")
    status = to_status(error(number, "the server failed"))
    assert status_code(number) is grpc.StatusCode.INTERNAL
    assert (status.code, status.message) == (grpc.StatusCode.INTERNAL.value[0], "the server failed")


def test_rules_and_graphs_still_work_after_all_failures(client: Any, server: RunningServer) -> None:
    """The registry is unchanged, and a TensorFlow graph still gets its gradient."""
    assert {item.name for item in client.list_rules(kind="user")} == set()
    graph = build_graph(lambda: tf.square(placeholder("x"), name="y"))
    r = client.evaluate(graph, feeds={"x": [3.0]}, ys=["y"], xs=["x"])
    assert r.gradients["x"].tolist() == [6.0]
    assert server.process.poll() is None
