"""Calls of programs over a client's stream and in chunks, against a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule.v1 import evaluate_pb2
from tests.service import raw
from tests.service.answers import refused
from tests.service.servers import RunningServer
from tests.service.streams import error_reason, open_stream

pytestmark = pytest.mark.fast_path("streams")

MIB = 1 << 20


def squares() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None])
    g.square(x, name="y")
    g.reduce_sum(g.tensor("y"), name="loss")
    return g


@pytest.fixture
def program(either: Any) -> Iterator[Any]:
    compiled = either.compile(squares(), ys=["loss"], xs=["x"], fetches=["loss"])
    yield compiled
    compiled.delete()


def stream_of(program: Any) -> Any:
    return getattr(program, "target", program)._client._sender._stream


def test_calls_over_the_stream_get_the_same_answers_as_unary_calls(program: Any, server: RunningServer) -> None:
    with gr.connect(server.target, stream=False) as client:
        alone = client.program(program.name)
        for number in range(8):
            x = np.arange(1 + number % 3, dtype=np.float32)
            found, expected = program(x=x), alone(x=x)
            assert found.gradients["x"].tolist() == expected.gradients["x"].tolist()
            assert (found.outputs["loss"], found.digests) == (expected.outputs["loss"], expected.digests)
            assert (found.device, found.overrides) == (expected.device, expected.overrides)
        assert stream_of(program).is_open
        for call in ({"x": np.ones((2, 2), np.float32)}, {"z": [1.0]}, {}):
            refusals = []
            for each in (program, alone):
                with pytest.raises(gr.errors.GradruleError) as refusal:
                    each(call)
                refusals.append(refusal.value)
            first, second = refusals
            assert type(first) is type(second)
            assert (first.message, first.code, first.details) == (second.message, second.code, second.details)
            assert first.request_id
            assert second.request_id


def test_feed_above_the_message_limit_is_sent_in_chunks(client: gr.Client) -> None:
    program = client.compile(squares(), ys=["loss"], xs=["x"])
    x = np.ones(66 * MIB // 4, np.float32)
    gradient = program.evaluate({"x": x}, timeout=120).gradients["x"]
    assert gradient.shape == x.shape
    assert (gradient == 2).all()
    program.delete()


def test_requests_and_answers_travel_in_chunks(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradrule._rpc.call_routes.Routes.must_chunk", lambda self, size: size > MIB)
    x = np.arange(3 * MIB // 4 + 5, dtype=np.float32) % 100
    for _ in range(2):
        np.testing.assert_array_equal(program(x=x).gradients["x"], 2 * x)
    with refused("FEED_SHAPE"):
        program(x=x.reshape(-1, 1))


def test_forward_runs_in_chunks(program: Any) -> None:
    x = np.arange(3 * MIB // 4, dtype=np.float32) % 100
    handle = program.forward({"x": x})
    np.testing.assert_array_equal(handle.vjp()["x"], 2 * x)
    handle.close()


def test_any_grpc_client_can_send_chunks(channel: grpc.Channel) -> None:
    request = raw.request(raw.sign_graph(), {"x": raw.tensor([-2.0] * 100_000)}, vjp=raw.vjp())
    data = request.SerializeToString()
    with open_stream(channel) as stream:
        for start in range(0, len(data), 100_000):
            stream.send(3, chunk=data[start : start + 100_000])
        message = evaluate_pb2.StreamEvaluateRequest(request_id=3, total_bytes=len(data), answer_chunk_bytes=1)
        message.evaluate.SetInParent()
        stream.send_bytes(message.SerializeToString())
        pieces = []
        while (answer := stream.receive()).WhichOneof("response") == "chunk":
            pieces.append(answer.chunk)
        assert error_reason(answer) == ""
        assert answer.WhichOneof("response") == "evaluate"
    expected = raw.evaluate(channel, request)
    found = evaluate_pb2.EvaluateResponse.FromString(b"".join(pieces))
    for each in (expected, found):
        each.ClearField("timings")
    assert found == expected
    assert max(map(len, pieces)) == 64 << 10
