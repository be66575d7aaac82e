"""Many requests on one stream: order of answers, errors, cancellation, drain."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tensorflow as tf

from gradrule.v1 import evaluate_pb2
from tests.processes import processor_s, resident_bytes
from tests.service import loop_graphs, raw
from tests.service.graph_defs import build_graph_def
from tests.service.health import wait_for_another_engine
from tests.service.servers import RunningServer, running_server
from tests.service.streams import RawStream, error_reason, open_stream
from tests.waiting import wait_until


@pytest.fixture
def stream(channel: grpc.Channel) -> Iterator[RawStream]:
    with open_stream(channel) as stream:
        yield stream


def sign_of(value: float) -> evaluate_pb2.EvaluateRequest:
    return raw.request(raw.sign_graph(), {"x": raw.tensor([value])})


def endless_request() -> evaluate_pb2.EvaluateRequest:
    return raw.request(loop_graphs.endless().SerializeToString(), {"x": raw.tensor(loop_graphs.ENDLESS)})


def wait_until_idle(server: RunningServer) -> None:
    """Waits until neither the server nor its engine uses processor time."""

    def probe() -> bool | None:
        pids = {server.process.pid, server.wait_for_engine()}
        before = sum(processor_s(pid) for pid in pids)
        time.sleep(0.5)
        return sum(processor_s(pid) for pid in pids) - before < 0.05 or None

    wait_until(probe, "rest")


def output(answer: evaluate_pb2.StreamEvaluateResponse) -> float:
    assert error_reason(answer) == ""
    content = answer.evaluate.outputs[0].value.inline_tensor.tensor_content
    return float(np.frombuffer(content, np.float32)[0])


def test_concurrent_requests_each_get_their_answer(stream: RawStream) -> None:
    values = {number: (-1.0) ** number * number for number in range(200)}
    for number, value in values.items():
        stream.send(number, evaluate=sign_of(value))
    answers = {answer.request_id: output(answer) for answer in (stream.receive() for _ in values)}
    assert answers == {number: float(np.sign(value)) for number, value in values.items()}


def test_half_closed_stream_gets_all_answers_and_ends_with_ok(stream: RawStream) -> None:
    for number in range(5):
        stream.send(number, evaluate=sign_of(number))
    stream.end()
    assert {stream.receive().request_id for _ in range(5)} == set(range(5))
    with pytest.raises(StopIteration):
        stream.receive()
    assert stream.call.code() is grpc.StatusCode.OK


def test_answer_equals_that_of_a_unary_call(stream: RawStream, channel: grpc.Channel) -> None:
    request = raw.request(raw.sign_graph(), {"x": raw.tensor([-2.0, 0.5, 3.0])}, vjp=raw.vjp())
    expected = raw.evaluate(channel, request)
    stream.send(1, evaluate=request)
    got = stream.receive().evaluate
    for answer in (expected, got):
        answer.ClearField("timings")
    assert got == expected


def test_failed_request_does_not_end_the_stream(stream: RawStream) -> None:
    stream.send(1, evaluate=evaluate_pb2.EvaluateRequest(program="programs/none"))
    assert error_reason(stream.receive()) == "PROGRAM_NOT_FOUND"
    stream.send(2, evaluate=sign_of(3.0))
    assert output(stream.receive()) == 1.0


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (b"\xff\xff\xff", 0),
        (b"", 0),
        (evaluate_pb2.StreamEvaluateRequest(request_id=7).SerializeToString(), 7),
        # Field 2 (evaluate) contains an invalid EvaluateRequest.
        (b"\x08\x09\x12\x02\xff\xff", 9),
    ],
)
def test_malformed_message_is_reported_and_does_not_end_the_stream(stream: RawStream, data: bytes, number: int) -> None:
    stream.send_bytes(data)
    answer = stream.receive()
    assert (answer.request_id, error_reason(answer)) == (number, "MALFORMED_REQUEST")
    stream.send(1, evaluate=sign_of(3.0))
    assert output(stream.receive()) == 1.0


def test_id_in_use_is_refused(stream: RawStream) -> None:
    stream.send(5, evaluate=endless_request())
    stream.send(5, evaluate=sign_of(1.0))
    assert error_reason(stream.receive()) == "MALFORMED_REQUEST"
    stream.send(0, cancel=evaluate_pb2.CancelRequest(request_id=5))
    assert error_reason(stream.receive()) == "CANCELLED"
    stream.send(5, evaluate=sign_of(1.0))
    assert output(stream.receive()) == 1.0


def test_slow_request_delays_no_other_and_can_be_cancelled(stream: RawStream) -> None:
    stream.send(1, evaluate=endless_request())
    stream.send(2, evaluate=sign_of(-4.0))
    answer = stream.receive()
    assert (answer.request_id, output(answer)) == (2, -1.0)
    stream.send(0, cancel=evaluate_pb2.CancelRequest(request_id=1))
    answer = stream.receive()
    assert (answer.request_id, error_reason(answer)) == (1, "CANCELLED")
    stream.send(0, cancel=evaluate_pb2.CancelRequest(request_id=99))
    stream.send(3, evaluate=sign_of(4.0))
    assert output(stream.receive()) == 1.0


def test_each_request_has_its_own_deadline(stream: RawStream) -> None:
    request = evaluate_pb2.StreamEvaluateRequest(request_id=1, evaluate=endless_request())
    request.timeout.FromMilliseconds(300)
    stream.send_bytes(request.SerializeToString())
    assert error_reason(stream.receive()) == "DEADLINE_EXCEEDED"


def test_unread_answers_do_not_accumulate(tmp_path: Path) -> None:
    """Each has 4 MB: after some of them the server stops reading the stream until they are read."""
    count = 300
    graph = build_graph_def(lambda: tf.negative(tf.ones([1_000_000]), name="y")).SerializeToString()
    with (
        running_server(tmp_path) as server,
        grpc.insecure_channel(server.target) as channel,
        open_stream(channel) as stream,
    ):
        request = raw.request(graph, {})
        stream.send(0, evaluate=request)
        stream.receive()
        for number in range(1, count):
            stream.send(number, evaluate=request)
        wait_until_idle(server)
        assert resident_bytes(server.process.pid) < 500e6
        assert {stream.receive().request_id for _ in range(1, count)} == set(range(1, count))


def test_stopping_server_finishes_requests_and_ends_streams(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, ("--drain-s", "200")) as server,
        grpc.insecure_channel(server.target) as channel,
        open_stream(channel) as stream,
    ):
        stream.send(1, evaluate=sign_of(2.0))
        assert output(stream.receive()) == 1.0
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.RpcError) as failure:
            stream.receive()
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(150) == 0
        # An idle stream must not use up the 200 s that requests have to finish.
        assert time.monotonic() - started < 150


def test_client_that_disconnects_leaves_nothing_running(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, grpc.insecure_channel(server.target) as channel:
        before = server.wait_for_engine()
        with open_stream(channel) as stream:
            stream.send(1, evaluate=endless_request())
            stream.send(2, evaluate=sign_of(1.0))
            assert output(stream.receive()) == 1.0
        # Only the end of the engine stops an endless loop.
        wait_for_another_engine(server, before)
        raw.assert_healthy(channel)
