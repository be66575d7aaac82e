"""Work that overruns, waits, is cancelled or loses its engine, on an engine with two threads."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from gradrule.v1 import evaluate_pb2_grpc, graph_pb2, tensor_pb2
from tests.processes import no_free_descriptors
from tests.service import loop_graphs, raw
from tests.service.health import wait_for_another_engine
from tests.service.servers import RunningServer, running_server
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Returns a server whose engine has two threads."""
    with running_server(tmp_path_factory.mktemp("narrow"), ("--engine-threads", "2", "--trust", "full")) as running:
        yield running


@pytest.fixture
def narrow_channel(narrow: RunningServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(narrow.target) as opened:
        raw.assert_healthy(opened)
        yield opened


def chain(count: int, op: str = "Neg", prefix: str = "n") -> graph_pb2.Graph:
    """Makes y = op(op(…x))."""
    nodes = [raw.node(f"{prefix}{i}", op, f"{prefix}{i - 1}" if i else "x") for i in range(count)]
    return raw.graph(raw.placeholder(), *nodes, raw.node("y", "Identity", f"{prefix}{count - 1}"))


def endless_calls(server: RunningServer, channel: grpc.Channel, timeout: float) -> list[Any]:
    """Starts two endless calls and returns them when both occupy the engine's threads."""
    request = raw.request(loop_graphs.endless().SerializeToString(), {"x": raw.tensor(loop_graphs.ENDS)})
    raw.evaluate(channel, request)
    request = raw.request(loop_graphs.endless().SerializeToString(), {"x": raw.tensor(loop_graphs.ENDLESS)})
    calls = [evaluate_pb2_grpc.GradientServiceStub(channel).Evaluate.future(request, timeout=timeout) for _ in range(2)]
    server.wait_for_running_calls(2)
    return calls


def code_of(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code: grpc.StatusCode = caught.value.code()
    return code


def test_expired_waiting_call_does_not_end_the_engine(narrow: RunningServer, narrow_channel: grpc.Channel) -> None:
    engine = narrow.wait_for_engine()
    calls = endless_calls(narrow, narrow_channel, timeout=9.0)
    sign = raw.request(raw.sign_graph())
    # An engine is killed half a second after a deadline: by the second deadline, the effect of the first has happened.
    for _ in range(2):
        assert code_of(lambda: raw.evaluate(narrow_channel, sign, timeout=1.0)) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert narrow.engine_pid() == engine
    assert not any(call.done() for call in calls)
    # Overrunning calls end the engine even if they occupy all threads. This call waits and then runs.
    raw.evaluate(narrow_channel, sign, timeout=60.0)
    assert [code_of(call.result) for call in calls] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 2
    wait_for_another_engine(narrow, engine)


def test_cancelled_calls_free_their_threads(narrow: RunningServer, narrow_channel: grpc.Channel) -> None:
    for call in endless_calls(narrow, narrow_channel, timeout=300.0):
        call.cancel()
    started = time.monotonic()
    raw.evaluate(narrow_channel, raw.request(raw.sign_graph()), timeout=60.0)
    assert time.monotonic() - started < 30


def test_call_survives_an_engine_killed_during_compilation(narrow: RunningServer, narrow_channel: grpc.Channel) -> None:
    engine = narrow.wait_for_engine()
    request = raw.request(chain(2500, prefix="killed"), vjp=raw.vjp())
    with futures.ThreadPoolExecutor() as pool:
        call = pool.submit(raw.evaluate, narrow_channel, request, 120.0)
        narrow.wait_for_running_calls(1)
        assert not call.done()
        os.kill(engine, signal.SIGKILL)
        assert call.result().outputs[0].name == "y"
    wait_for_another_engine(narrow, engine)


def test_short_deadline_does_not_abort_compilation_for_other_callers(
    narrow: RunningServer, narrow_channel: grpc.Channel
) -> None:
    engine = narrow.wait_for_engine()
    request = raw.request(chain(6000, prefix="shared"), vjp=raw.vjp())
    ended: list[grpc.StatusCode] = []
    hurried = threading.Thread(
        target=lambda: ended.append(code_of(lambda: raw.evaluate(narrow_channel, request, timeout=1.0)))
    )
    hurried.start()
    time.sleep(0.3)
    assert raw.evaluate(narrow_channel, request, timeout=120.0).outputs[0].name == "y"
    hurried.join()
    assert ended == [grpc.StatusCode.DEADLINE_EXCEEDED]
    assert narrow.engine_pid() == engine


def test_engine_survives_printing_long_lines(narrow: RunningServer, narrow_channel: grpc.Channel) -> None:
    engine = narrow.wait_for_engine()
    text = tensor_pb2.Tensor(dtype=tensor_pb2.DT_STRING, string_val=[b"z" * 100_000])
    printing = raw.graph(
        raw.placeholder(),
        raw.node("text", "Const", dtype=graph_pb2.AttrValue(type=text.dtype), value=graph_pb2.AttrValue(tensor=text)),
        raw.node("print", "PrintV2", "text", output_stream=graph_pb2.AttrValue(s=b"stderr")),
        raw.node("y", "Identity", "x", "^print"),
    )
    for _ in range(6):
        raw.evaluate(narrow_channel, raw.request(printing), timeout=10.0)
    raw.assert_healthy(narrow_channel)
    assert narrow.engine_pid() == engine
    wait_until(lambda: True if "zzz… (" in narrow.log.read_text() else None, "a line in the log")


def test_engine_starts_once_descriptors_are_free_again(narrow: RunningServer, narrow_channel: grpc.Channel) -> None:
    engine, pid = narrow.wait_for_engine(), narrow.process.pid
    with no_free_descriptors(pid):
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: True if "cannot be started" in narrow.log.read_text() else None, "a failed start")
    wait_for_another_engine(narrow, engine)
    with grpc.insecure_channel(narrow.target) as channel:
        raw.assert_healthy(channel)


def test_quantized_fetch_keeps_its_dtype(narrow_channel: grpc.Channel) -> None:
    cast = raw.node(
        "y",
        "Bitcast",
        "x",
        type=graph_pb2.AttrValue(type=tensor_pb2.DT_QINT8),
    )
    x = tensor_pb2.Tensor(
        dtype=tensor_pb2.DT_INT8,
        tensor_content=b"\x01\xfe",
        tensor_shape=tensor_pb2.TensorShape(dim=[tensor_pb2.TensorShape.Dim(size=2)]),
    )
    request = raw.request(raw.graph(raw.placeholder(dtype=tensor_pb2.DT_INT8), cast), {"x": x})
    output = raw.evaluate(narrow_channel, request).outputs[0].value.inline_tensor
    assert (output.dtype, output.tensor_content) == (tensor_pb2.DT_QINT8, b"\x01\xfe")
