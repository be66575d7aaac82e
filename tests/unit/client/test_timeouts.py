"""Tests that a call ends within its timeout although it takes several requests: the timeout does not start again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

import gradrule as gr
from gradrule._rpc import stream_messages
from gradrule.v1 import blob_pb2, evaluate_pb2, session_pb2
from tests.unit.client.answering import PROGRAM, UNAVAILABLE, Answering, answer_to, failure

# Long enough for busy machines: what a request is given decides, not when it ends. gRPC rounds from 10 s on to seconds.
TIMEOUT_S = 9.0
SLOW_S = 0.8
FEEDS = {"x": np.float32([1.0, 2.0])}
EXPIRED = failure("HANDLE_EXPIRED", code_pb2.NOT_FOUND)


class SlowServer(Answering):
    """Answers some requests late and not as wanted. Records how many seconds its clients gave each request."""

    def __init__(self) -> None:
        super().__init__()
        self.given_s: list[tuple[str, float]] = []
        """Name and seconds of each request."""
        self.failures = 0
        """Number of the next calls of Evaluate and requests of streams that fail after a while."""
        self.status = (grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")
        self.details: tuple[tuple[str, bytes], ...] = ()
        self.answers_sessions = True
        self.session_bytes = 0
        self.is_over = threading.Event()

    def stop(self) -> None:
        self.is_over.set()
        super().stop()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        if name == "FindMissingBlobs":
            return grpc.unary_unary_rpc_method_handler(self._find)
        if name == "UploadBlob":
            return grpc.stream_unary_rpc_method_handler(self._upload)
        if name == "RunSession":
            return grpc.stream_stream_rpc_method_handler(self._session)
        return super().service(details)

    def seconds_of(self, name: str) -> list[float]:
        return [seconds for found, seconds in self.given_s if found == name]

    def _fails(self) -> bool:
        self.failures -= 1
        return self.failures >= 0 and not self.is_over.wait(SLOW_S)

    def _evaluate(self, raw: bytes, context: Any) -> bytes:
        self.given_s.append(("evaluate", context.time_remaining()))
        if self._fails():
            # gRPC does not send a call again whose answer has begun.
            context.send_initial_metadata(())
            context.set_trailing_metadata(self.details)
            context.abort(*self.status)
        return super()._evaluate(raw, context)

    def _find(self, raw: bytes, context: Any) -> bytes:
        self.given_s.append(("find", context.time_remaining()))
        missing = blob_pb2.FindMissingBlobsRequest.FromString(raw).sha256
        return blob_pb2.FindMissingBlobsResponse(missing=missing).SerializeToString()

    def _upload(self, pieces: Iterator[bytes], context: Any) -> bytes:
        self.given_s.append(("upload", context.time_remaining()))
        for _ in pieces:
            pass
        self.is_over.wait(SLOW_S)
        return b""

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for raw in requests:
            message = evaluate_pb2.StreamEvaluateRequest.FromString(raw)
            kind = message.WhichOneof("request")
            if kind not in ("evaluate", "forward", "pull_back"):
                continue
            self.given_s.append((kind, message.timeout.ToNanoseconds() / 1e9))
            answer = evaluate_pb2.StreamEvaluateResponse(request_id=message.request_id)
            if kind != "forward" and self._fails():
                answer.status.ParseFromString(UNAVAILABLE if kind == "evaluate" else EXPIRED)
            elif kind == "evaluate":
                answer.evaluate.ParseFromString(answer_to(message.evaluate, "stream"))
            elif kind == "forward":
                answer.forward.handle = "h"
                answer.forward.evaluate.SetInParent()
            else:
                answer.pull_back.SetInParent()
            yield answer.SerializeToString()

    def _session(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        for raw in requests:
            message = session_pb2.RunSessionRequest.FromString(raw)
            kind = message.WhichOneof("request")
            self.given_s.append((str(kind), message.timeout.ToNanoseconds() / 1e9))
            if not self.answers_sessions:
                # Longer than the client may wait.
                self.is_over.wait(60)
                return
            answer = session_pb2.RunSessionResponse()
            if kind == "start":
                answer.started.size_bytes = self.session_bytes
            else:
                answer.assign.SetInParent()
            yield answer.SerializeToString()


@pytest.fixture
def server() -> Iterator[SlowServer]:
    made = SlowServer()
    yield made
    made.stop()


def missing_blob() -> tuple[tuple[str, bytes], ...]:
    status = status_pb2.Status(code=code_pb2.NOT_FOUND, message="the server does not have the blob")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="BLOB_NOT_FOUND", domain="gradrule"))
    return (("grpc-status-details-bin", status.SerializeToString()),)


@pytest.mark.parametrize("over_stream", [False, True])
def test_call_of_map_that_is_repeated_gets_the_rest_of_its_timeout(server: SlowServer, over_stream: bool) -> None:
    with gr.connect(server.target, stream=over_stream) as client:
        program = client.program(PROGRAM)
        for _ in range(4 if over_stream else 0):
            program.evaluate(FEEDS)
        server.given_s.clear()
        server.failures = 1
        assert len(list(program.map([FEEDS], timeout=TIMEOUT_S))) == 1
    first_s, second_s = server.seconds_of("evaluate")
    assert second_s < first_s - SLOW_S + 0.1


def test_time_between_results_of_map_does_not_count(server: SlowServer) -> None:
    """The second call fails while the caller works on the first result, for longer than the timeout."""
    timeout_s = 5.0
    with gr.connect(server.target, stream=False) as client:
        results = client.program(PROGRAM).map([FEEDS, FEEDS], timeout=timeout_s)
        server.failures = 2
        next(results)
        time.sleep(timeout_s)
        assert next(results).gradients["x"].tolist() == [1.0, 2.0]
    assert len(server.seconds_of("evaluate")) == 4


def test_call_that_uploads_blobs_gets_the_rest_of_its_timeout(server: SlowServer) -> None:
    server.status, server.details = (grpc.StatusCode.NOT_FOUND, "no blob"), missing_blob()
    server.failures = 1
    blob = gr.Blob(np.zeros(1 << 16, np.float32))
    upload_s = 0.25
    with gr.connect(server.target, stream=False) as client:
        client.program(PROGRAM).evaluate({"x": blob}, timeout=TIMEOUT_S)
    left_s = TIMEOUT_S - SLOW_S + 0.1
    (find_s,), (upload_given_s,) = server.seconds_of("find"), server.seconds_of("upload")
    assert [find_s < left_s, upload_given_s < left_s + upload_s] == [True, True]
    assert server.seconds_of("evaluate")[1] < left_s - SLOW_S + upload_s


def test_vjp_that_repeats_the_forward_pass_gets_the_rest_of_its_timeout(server: SlowServer) -> None:
    with gr.connect(server.target) as client:
        handle = client.program(PROGRAM).forward(FEEDS, timeout=TIMEOUT_S)
        server.failures = 1
        handle.vjp()
    first_s, second_s = server.seconds_of("forward")
    left_s = first_s - SLOW_S + 0.1
    assert [second_s < left_s, server.seconds_of("pull_back")[1] < left_s] == [True, True]


def test_async_vjp_that_repeats_the_forward_pass_gets_the_rest_of_its_timeout(server: SlowServer) -> None:
    async def body() -> None:
        async with gr.aio.connect(server.target) as client:
            handle = await (await client.program(PROGRAM)).forward(FEEDS, timeout=TIMEOUT_S)
            server.failures = 1
            await handle.vjp()

    asyncio.run(body())
    assert server.seconds_of("forward")[1] < TIMEOUT_S - SLOW_S + 0.1


def graph() -> gr.Graph:
    g = gr.Graph()
    g.op("Identity", g.placeholder("x", "float32", [None]), name="y")
    return g


def test_session_that_uploads_blobs_starts_within_its_timeout(server: SlowServer) -> None:
    """The upload takes longer than it adds to the timeout."""
    g = graph()
    w = gr.Blob(np.ones(1 << 16, np.float32))
    with (
        gr.connect(server.target, timeout=TIMEOUT_S, compile_timeout=0.0) as client,
        client.session(g, variables={"w": w}),
    ):
        pass
    assert server.seconds_of("start")[0] < TIMEOUT_S - SLOW_S + 0.25 + 0.1


def test_call_of_a_session_ends_although_the_server_does_not(
    server: SlowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_messages, "GRACE_S", 0.0)
    with gr.connect(server.target) as client, client.session(graph()) as session:
        session.assign({})
        server.answers_sessions = False
        started = time.monotonic()
        with pytest.raises(gr.errors.DeadlineExceededError, match="the session is closed"):
            session.assign({}, timeout=0.5)
        assert time.monotonic() - started < 30
        with pytest.raises(gr.errors.UnavailableError, match="not open"):
            session.assign({})


def test_call_of_a_session_has_time_to_transfer_its_variables(
    server: SlowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_messages, "GRACE_S", 0.0)
    server.session_bytes = 2 << 20
    with gr.connect(server.target) as client, client.session(graph()) as session:
        server.answers_sessions = False
        started = time.monotonic()
        with pytest.raises(gr.errors.DeadlineExceededError):
            session.assign({}, timeout=0.5)
        assert time.monotonic() - started > 2.4


def test_call_of_an_async_session_ends_although_the_server_does_not(
    server: SlowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_messages, "GRACE_S", 0.0)

    async def body() -> None:
        async with gr.aio.connect(server.target) as client, client.session(graph()) as session:
            await session.assign({})
            server.answers_sessions = False
            started = time.monotonic()
            with pytest.raises(gr.errors.DeadlineExceededError, match="the session is closed"):
                await session.assign({}, timeout=0.5)
            assert time.monotonic() - started < 30
            with pytest.raises(gr.errors.UnavailableError, match="not open"):
                await session.assign({})

    asyncio.run(body())
