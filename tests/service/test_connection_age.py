"""`--max-connection-age-s`: streams of evaluations move to new connections, and sessions keep theirs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc

import gradrule as gr
from gradrule.v1 import evaluate_pb2, evaluate_pb2_grpc
from tests.service.servers import running_server

AGE_FLAGS = ("--max-connection-age-s", "1", "--max-connection-age-grace-s", "600")


def test_streams_end_with_the_age_and_sessions_go_on(tmp_path: Path) -> None:
    graph = gr.Graph()
    graph.reduce_sum(graph.op("Square", graph.variable("w", [1.0])), name="loss")
    graph.op("Neg", graph.placeholder("x", "float32", []), name="y")
    is_over = threading.Event()

    def no_requests() -> Iterator[evaluate_pb2.StreamEvaluateRequest]:
        is_over.wait()
        yield from ()

    with (
        running_server(tmp_path, AGE_FLAGS) as server,
        gr.connect(server.target) as client,
        client.session(graph) as session,
        grpc.insecure_channel(server.target) as channel,
    ):
        # Three streams, one after the other, are ended by the server.
        for number in range(1, 4):
            stream = evaluate_pb2_grpc.GradientServiceStub(channel).StreamEvaluate(no_requests(), timeout=60)
            assert stream.code() == grpc.StatusCode.UNAVAILABLE
            assert "maximum age" in stream.details()
            assert client.evaluate(graph, {"x": float(number)}, fetches=["y"]).outputs["y"] == -number
            assert session.step({}, "loss", gr.optimizers.SGD(0.1)).step == number
        is_over.set()
