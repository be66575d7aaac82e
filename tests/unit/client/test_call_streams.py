"""Calls that are repeated share a stream; whatever happens to it, they are answered as calls that travel alone are."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule._rpc import stream_messages, sync_streams
from gradrule.v1 import evaluate_pb2
from tests.service import blocking
from tests.service.test_client_faults import interrupt_after
from tests.unit.client.answering import MIB, NO_PROGRAM, PROGRAM, UNAVAILABLE, Answering
from tests.unit.client.plain_requests import translated

X = np.float32([1, 2])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for what a client does after a while."""
    monkeypatch.setattr("gradrule._rpc.stream_messages.GRACE_S", 0.1)
    monkeypatch.setattr("gradrule._rpc.sync_streams._CHECK_S", 0.05)


@pytest.fixture
def answering() -> Iterator[Answering]:
    made = Answering()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def loop() -> Iterator[blocking.LoopThread]:
    made = blocking.LoopThread()
    yield made
    made.close()


@pytest.fixture(params=["sync", "async"])
def program(request: pytest.FixtureRequest, answering: Answering, loop: blocking.LoopThread) -> Iterator[Any]:
    """A program of either client."""
    if request.param == "sync":
        with gr.connect(answering.target, token="t") as client:
            yield client.program(PROGRAM)
    else:
        connected: Any = blocking.connect(answering.target, loop, token="t")
        yield connected.program(PROGRAM)
        connected.close()


def way(program: Any, **more: Any) -> str:
    """Returns how a call was sent."""
    result = program.evaluate({"x": X}, **more)
    assert result.gradients["x"].tolist() == [1.0, 2.0]
    return str(result.device)


def streaming(program: Any) -> None:
    """Has the program's client open its stream."""
    assert [way(program) for _ in range(4)] == ["alone", "alone", "alone", "stream"]


def test_repeated_calls_share_one_stream(program: Any, answering: Answering) -> None:
    streaming(program)
    assert {way(program) for _ in range(10)} == {"stream"}
    assert (answering.alone, answering.streams) == (3, 1)
    assert answering.tokens == ["Bearer t"]


def test_without_the_stream_each_call_is_sent_alone(answering: Answering, loop: blocking.LoopThread) -> None:
    with gr.connect(answering.target, stream=False) as client:
        assert {way(client.program(PROGRAM)) for _ in range(8)} == {"alone"}
    connected: Any = blocking.connect(answering.target, loop, stream=False)
    assert {way(connected.program(PROGRAM)) for _ in range(8)} == {"alone"}
    connected.close()
    assert answering.streams == 0


def test_a_failure_on_the_stream_is_that_of_the_call(program: Any, answering: Answering) -> None:
    streaming(program)
    answering.on_stream = lambda number, request, context: NO_PROGRAM
    with pytest.raises(gr.errors.ProgramNotFoundError, match="it is PROGRAM_NOT_FOUND") as refusal:
        way(program)
    assert (refusal.value.code, refusal.value.request_id) == (grpc.StatusCode.NOT_FOUND, "7f-1/2")
    assert answering.alone == 3


def test_a_call_that_is_unavailable_on_the_stream_is_sent_alone(program: Any, answering: Answering) -> None:
    streaming(program)
    answering.on_stream = lambda number, request, context: UNAVAILABLE
    assert way(program) == "alone"


def test_a_call_whose_stream_is_lost_is_sent_again(
    program: Any, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming(program)

    def lose_the_first(number: int, request: Any, context: Any) -> bytes:
        if number == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        return b""

    answering.on_stream = lose_the_first
    # The next stream is not opened at once.
    assert [way(program), way(program)] == ["alone", "alone"]
    monkeypatch.setattr("gradrule._rpc.call_routes._FIRST_PAUSE_S", 0.0)
    client: Any = getattr(program, "target", program)._client
    client._sender._routes._not_before = 0.0
    assert way(program) == "stream"
    assert answering.streams == 2


def test_calls_of_a_server_without_streams_are_sent_alone(program: Any, answering: Answering) -> None:
    answering.on_stream = lambda number, request, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "no")
    assert {way(program) for _ in range(8)} == {"alone"}
    assert answering.streams == 1


def test_the_deadline_of_a_call_that_is_not_answered(program: Any, answering: Answering) -> None:
    streaming(program)
    answering.on_stream = lambda number, request, context: None
    with pytest.raises(gr.errors.DeadlineExceededError, match=r"within 0\.2 s"):
        way(program, timeout=0.2)
    answering.on_stream = lambda number, request, context: b""
    assert way(program) in ("alone", "stream")


def test_a_stream_that_does_not_answer_is_left(program: Any, answering: Answering) -> None:
    streaming(program)
    answering.on_stream = lambda number, request, context: None if number == 1 else b""
    with pytest.raises(gr.errors.DeadlineExceededError):
        way(program, timeout=0.2)
    # Other calls need not find out too that the server hangs.
    assert way(program, timeout=5.0) == "stream"
    assert answering.streams == 2


def test_a_long_call_is_attempted_as_often_as_others(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradrule._rpc.call_routes.MAX_WHOLE_BYTES", 4)
    monkeypatch.setattr("gradrule._rpc.call_routes._RESEND_S", 0.0)
    answering.on_stream = lambda number, request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
    with gr.connect(answering.target) as client, pytest.raises(gr.errors.UnavailableError):
        way(client.program(PROGRAM))
    assert answering.streams == 4


def test_a_forward_run_whose_stream_is_lost_is_repeated(program: Any, answering: Answering) -> None:
    streaming(program)

    def lose_the_first(number: int, request: Any, context: Any) -> bytes:
        if number == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        answer = evaluate_pb2.StreamEvaluateResponse(request_id=request.request_id)
        answer.forward.handle = "h"
        return answer.SerializeToString()

    answering.on_stream = lose_the_first
    program.forward({"x": X})
    assert answering.streams == 2


def test_threads_share_a_stream(answering: Answering) -> None:
    with gr.connect(answering.target) as client, futures.ThreadPoolExecutor(8) as threads:
        program = client.program(PROGRAM)
        streaming(program)

        def calls(thread: int) -> None:
            for number in range(40):
                x = np.full(1 + number % 3, 100 * thread + number, np.float32)
                result = program(x=x)
                assert (result.gradients["x"].tolist(), result.device) == (x.tolist(), "stream")

        list(threads.map(calls, range(8)))
    assert answering.streams == 1


def test_other_callers_are_answered_if_the_reading_caller_gives_up(answering: Answering) -> None:
    """The one that is given up reads the stream for the others."""
    release = threading.Event()

    def slow(number: int, request: Any, context: Any) -> bytes | None:
        if translated(request.evaluate).feeds[0].value.inline_tensor.tensor_shape.dim[0].size == 3:
            return None
        release.wait(5)
        return b""

    with gr.connect(answering.target) as client, futures.ThreadPoolExecutor(4) as threads:
        program = client.program(PROGRAM)
        streaming(program)
        answering.on_stream = slow
        silent = threads.submit(program.evaluate, {"x": np.ones(3, np.float32)}, timeout=0.2)
        others = [threads.submit(way, program) for _ in range(3)]
        assert isinstance(silent.exception(10), gr.errors.DeadlineExceededError)
        release.set()
        assert {other.result(10) for other in others} <= {"alone", "stream"}


def test_the_client_works_after_an_interrupt(answering: Answering) -> None:
    with gr.connect(answering.target) as client:
        program = client.program(PROGRAM)
        streaming(program)
        answering.on_stream = lambda number, request, context: None
        with pytest.raises(KeyboardInterrupt), interrupt_after(0.2):
            way(program)
        answering.on_stream = lambda number, request, context: b""
        assert way(program) in ("alone", "stream")


def test_the_client_works_after_an_interrupt_before_reading(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(connection: Any, pending: Any) -> None:
        raise KeyboardInterrupt

    with gr.connect(answering.target) as client:
        program = client.program(PROGRAM)
        streaming(program)
        with monkeypatch.context() as patched:
            patched.setattr(sync_streams.Connection, "_read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                way(program)
        assert way(program, timeout=5.0) == "stream"


def test_another_caller_reads_if_the_woken_one_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would sleep until somebody looks after the stream."""
    monkeypatch.setattr("gradrule._rpc.sync_streams._CHECK_S", 60.0)
    answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    class Calling:
        """A stream whose answers are put into a queue."""

        def __next__(self) -> bytes:
            return answers.get()

        def cancel(self) -> None:
            """Nothing ends."""

    connection = sync_streams.Connection(lambda messages, **options: Calling(), (), "")
    first, woken, sleeping = (connection.send("evaluate", (b"",), 0, 60.0) for _ in range(3))
    connection._reader = first
    with futures.ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(connection.wait, sleeping)
        while sleeping.wake is None:
            time.sleep(0.01)
        # Its caller has not come so far as to sleep.
        woken.wake = threading.Lock()
        woken.wake.acquire()
        answers.put(_answer(first.number))
        connection._read(first)
        connection.cancel(woken)
        answers.put(_answer(sleeping.number))
        try:
            assert waiting.result(10) == ("evaluate", b"")
        finally:
            connection._end(gr.errors.UnavailableError("the test is over"))


def _answer(number: int) -> bytes:
    response = evaluate_pb2.StreamEvaluateResponse(request_id=number)
    response.evaluate.SetInParent()
    return response.SerializeToString()


def test_unknown_fields_of_newer_servers_are_ignored() -> None:
    """The API changes by addition only."""
    answer = stream_messages.received(_answer(7))
    assert stream_messages.received(_answer(7) + b"\xa2\x06\x03new") == answer == (7, "evaluate", b"")


def test_a_stream_that_is_idle_is_closed(program: Any, answering: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    streaming(program)
    monkeypatch.setattr("gradrule._rpc.call_routes.REPEATED_WITHIN_S", 0.1)
    client: Any = getattr(program, "target", program)._client
    # The async client has set its timer by now.
    if (check := getattr(client._sender._stream._connection, "_check_idle", None)) is not None:
        client._sender._stream._connection._loop.call_soon_threadsafe(check)
    assert answering.ended.acquire(timeout=10)
    monkeypatch.undo()
    client._sender._routes._called_at -= 61.0
    streaming(program)
    assert answering.streams == 2


def test_map_goes_over_the_stream(program: Any, answering: Answering) -> None:
    streaming(program)
    feeds = [{"x": np.float32([number])} for number in range(100)]
    found = list(program.map(iter(feeds), in_flight=40))
    assert [result.gradients["x"][0] for result in found] == list(range(100))
    assert [result.device for result in found].count("stream") > 50


def test_map_copies_feeds_that_the_caller_changes_later(program: Any, answering: Answering) -> None:
    """It sends what the array held when it was given, also where it is sent a second time."""
    streaming(program)
    x = np.zeros(30_000, np.float32)

    def feeds() -> Iterator[dict[str, Any]]:
        for number in range(8):
            x[:] = number
            yield {"x": x}

    assert [result.gradients["x"][0] for result in program.map(feeds(), in_flight=4)] == list(range(8))
    answering.on_stream = lambda number, request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
    assert [result.gradients["x"][0] for result in program.map(feeds(), in_flight=4)] == list(range(8))


def test_map_sends_in_chunks_what_is_too_long_for_its_server() -> None:
    answering = Answering(max_message_bytes=2 * MIB)
    try:
        with gr.connect(answering.target) as client:
            feeds = [{"x": np.full(MIB, number, np.float32)} for number in range(3)]
            results = client.program(PROGRAM).map(feeds)
            assert [result.gradients["x"][0] for result in results] == [0, 1, 2]
    finally:
        answering.stop()


def test_calls_of_map_that_are_unavailable_on_the_stream_are_sent_alone(program: Any, answering: Answering) -> None:
    streaming(program)
    answering.on_stream = lambda number, request, context: UNAVAILABLE
    results = program.map([{"x": X}] * 3)
    assert [result.device for result in results] == ["alone"] * 3


def test_answers_without_a_waiting_caller_are_read(answering: Answering) -> None:
    """Servers end streams of clients that do not read."""
    with gr.connect(answering.target) as client:
        program = client.program(PROGRAM)
        streaming(program)
        results = program.map({"x": np.float32([number])} for number in range(8))
        next(results)
        stream: Any = client._sender._stream
        deadline = time.monotonic() + 10
        while stream.pending_count and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stream.pending_count == 0
        assert [result.gradients["x"].tolist() for result in results] == [[float(number)] for number in range(1, 8)]


def test_long_requests_and_answers_go_in_chunks(
    program: Any, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradrule._rpc.call_routes.Routes.must_chunk", lambda self, size: size > MIB)
    for _ in range(2):
        x = np.arange(MIB, dtype=np.float32)
        result = program(x=x)
        np.testing.assert_array_equal(result.gradients["x"], x)
    assert (answering.chunks, answering.alone) == (10, 0)


def test_a_call_in_chunks_whose_stream_is_lost_is_sent_again(
    program: Any, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradrule._rpc.call_routes.Routes.must_chunk", lambda self, size: size > MIB)

    def lose_the_first(number: int, request: Any, context: Any) -> bytes:
        if number == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        return b""

    answering.on_stream = lose_the_first
    assert program(x=np.ones(MIB, np.float32)).gradients["x"].sum() == MIB
    assert answering.streams == 2
    answering.on_stream = lambda number, request, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "no streams")
    with pytest.raises(gr.errors.UnsupportedError, match="no streams"):
        program(x=np.ones(MIB, np.float32))


def test_a_client_learns_how_long_messages_may_be() -> None:
    answering = Answering(max_message_bytes=2 * MIB)
    try:
        with gr.connect(answering.target) as client:
            program = client.program(PROGRAM)
            x = np.ones(MIB, np.float32)
            for _ in range(2):
                assert program(x=x).gradients["x"].sum() == MIB
            assert client._sender._routes.must_chunk(5 * MIB)
            assert not client._sender._routes.must_chunk(2 * MIB)
        assert (answering.chunks, answering.alone) == (10, 0)
    finally:
        answering.stop()
