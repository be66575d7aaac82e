"""Faults around the client's streams: interrupts, cancelled tasks, missing blobs, closed clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from gradrule._rpc import call_routes, channels
from tests.processes import workers
from tests.service import loop_graphs
from tests.service.answers import assert_close, refused
from tests.service.servers import RunningServer, running_server
from tests.waiting import wait_for_condition

X = np.float32([[1, 2, 3], [4, 5, 6]])
W = np.ones((3, 2), np.float32)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Returns a server whose processes these tests may stop."""
    with running_server(tmp_path_factory.mktemp("standing")) as running:
        yield running


def linear() -> gr.Graph:
    g = gr.Graph()
    x = g.placeholder("x", "float32", [None, 3])
    y = g.op("MatMul", x, g.variable("w", W), name="y")
    g.op("Sum", y, g.constant([0, 1]), name="loss")
    return g


def squares(scale: float = 1.0) -> gr.Graph:
    g = gr.Graph()
    g.op("Mul", g.op("Square", g.placeholder("x", "float32", [None])), g.constant(np.float32(scale)), name="y")
    return g


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stops a process by SIGSTOP during the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Sends Ctrl-C after a delay."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(seconds, signal.pthread_kill, (main, signal.SIGINT))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, previous)


def run_in_loop(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a coroutine; asserts that no failure stays unread."""
    lost: list[Any] = []

    def keep(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # gRPC has one queue of events for all loops: a call of an earlier loop, which is closed, may end in this one.
        is_earlier = str(context.get("exception")) == "Event loop is closed"
        if not (is_earlier and "PollerCompletionQueue._handle_events" in context["message"]):
            lost.append(context)

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(keep)
        await body()
        gc.collect()
        await asyncio.sleep(0)

    # What earlier tests left to the garbage collector is not this test's.
    gc.collect()
    asyncio.run(watched())
    assert lost == []


def test_interrupt_closes_the_session(own_server: RunningServer) -> None:
    """Otherwise the next request would get the answer of the interrupted one."""
    with gr.connect(own_server.target) as client:
        with client.session(linear()) as s:
            s.evaluate({"x": X}, fetches=["loss"])
            with stopped(own_server.session_engine_pid()), pytest.raises(KeyboardInterrupt), interrupt_after(1.0):
                s.evaluate({"x": X}, fetches=["loss"])
            with refused("UNAVAILABLE") as refusal:
                s.evaluate({"x": 2 * X}, fetches=["loss"])
            refusal.says("not open")
        with client.session(linear()) as s:
            assert_close(s.evaluate({"x": 2 * X}, fetches=["loss"]).outputs["loss"], np.float32(84))


def test_cancelled_task_closes_its_session(own_server: RunningServer) -> None:
    async def body() -> None:
        async with gr.aio.connect(own_server.target) as client, client.session(linear()) as s:
            await s.evaluate({"x": X}, fetches=["loss"])
            with stopped(own_server.session_engine_pid()):
                task = asyncio.ensure_future(s.evaluate({"x": X}, fetches=["loss"]))
                await asyncio.sleep(0.2)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            with refused("UNAVAILABLE") as refusal:
                await s.evaluate({"x": 2 * X}, fetches=["loss"])
            refusal.says("not open")

    run_in_loop(body)


def test_task_cancelled_while_writing_affects_no_other_call(own_server: RunningServer) -> None:
    big = np.zeros(6_000_000, np.float32)

    async def body() -> None:
        async with gr.aio.connect(own_server.target) as client:
            program = await client.compile(squares(), fetches=["y"], ys=["y"], xs=["x"])
            async with await program.forward({"x": [3.0]}) as handle:
                name = handle._handle
                connection: Any = client._sender._stream._connection
                with stopped(own_server.process.pid):
                    other = asyncio.ensure_future(handle.vjp())
                    await wait_for_condition(lambda: len(connection.waiting) == 1)
                    # More than the connection takes before the server reads.
                    writing = asyncio.ensure_future(program.forward({"x": big}))
                    queued = asyncio.ensure_future(program.forward({"x": [1.0]}))
                    await wait_for_condition(lambda: connection._long)
                    writing.cancel()
                    queued.cancel()
                    await asyncio.wait({writing, queued})
                    assert writing.cancelled()
                    assert queued.cancelled()
                    assert not other.done()
                    assert len(connection.waiting) == 1
                assert_close((await other)["x"], np.float32([6]))
                assert_close((await handle.vjp())["x"], np.float32([6]))
                # The stream was not opened again.
                assert handle._handle == name
                assert client._sender._stream._connection is connection

    run_in_loop(body)


def test_deadline_includes_the_time_of_writing(own_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradrule._rpc.stream_messages.GRACE_S", 0.1)
    big = np.zeros(6_000_000, np.float32)

    async def body() -> None:
        async with gr.aio.connect(own_server.target) as client:
            program = await client.compile(squares(), fetches=["y"], ys=["y"], xs=["x"])
            with stopped(own_server.process.pid), refused("DEADLINE_EXCEEDED"):
                await program.forward({"x": big}, timeout=0.3)
            async with await program.forward({"x": [3.0]}) as handle:
                assert_close(handle.outputs["y"], np.float32([9]))

    run_in_loop(body)


def test_session_uses_blobs(either: Any) -> None:
    rng = np.random.default_rng(1)
    w, x, dy = (rng.normal(size=size).astype(np.float32) for size in ((3, 2), (4, 3), (4, 2)))
    with either.session(linear(), variables={"w": gr.Blob(w)}) as s:
        assert_close(s.read()["w"], w)
        fed = gr.Blob(x)
        result = s.evaluate({"x": fed}, fetches=["y"], ys=["y"], xs=["w"], grad_ys={"y": gr.Blob(dy)})
        assert_close(result.outputs["y"], x @ w, rtol=1e-4)
        assert_close(result.gradients["w"], x.T @ dy, rtol=1e-4)
        for number in (1, 2):
            assert s.step({"x": fed}, "loss", gr.optimizers.SGD(0.1)).step == number
        s.assign({"w": gr.Blob(2 * w)})
        assert_close(s.read()["w"], 2 * w)


def test_session_uploads_evicted_blobs_again(either: Any) -> None:
    """Even if the session has uploaded them before."""
    rng = np.random.default_rng(2)
    w, x, other = (gr.Blob(rng.normal(size=size).astype(np.float32)) for size in ((3, 2), (4, 3), (3, 2)))
    session = either.session(linear(), variables={"w": w})
    uploaded: set[str] = getattr(session, "target", session)._uploaded
    uploaded.update(blob.sha256 for blob in (w, x, other))
    with session as s:
        assert s.step({"x": x}, "loss", gr.optimizers.SGD(0.1)).step == 1
        s.assign({"w": other})
        assert_close(s.read()["w"], np.frombuffer(other.data, np.float32).reshape(3, 2))


def test_blob_that_nobody_has_is_refused_after_one_retry(client: gr.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = gr.Blob(np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32))
    with client.session(linear()) as s:
        sent: list[list[str]] = []

        def send(blobs: dict[str, gr.Blob], timeout: float, *, ends_at: float) -> float:
            sent.append(list(blobs))
            return 0.0

        monkeypatch.setattr(client, "_send_blobs", send)
        with refused("BLOB_NOT_FOUND"):
            s.evaluate({"x": blob}, fetches=["y"])
        assert sent == [[blob.sha256]] * 2
        assert_close(s.evaluate({"x": X}, fetches=["loss"]).outputs["loss"], np.float32(42))


def test_forward_of_a_closed_client_is_refused(server: RunningServer) -> None:
    client = gr.connect(server.target)
    program = client.compile(squares(), fetches=["y"], ys=["y"], xs=["x"])
    handle = program.forward({"x": [3.0]})
    client.close()
    for use in (lambda: program.forward({"x": [3.0]}), handle.vjp):
        with refused("UNAVAILABLE") as refusal:
            use()
        refusal.says("is closed", server.target)
    handle.close()


def test_forward_of_a_closed_async_client_is_refused(server: RunningServer) -> None:
    async def body() -> None:
        client = gr.aio.connect(server.target)
        program = await client.compile(squares(), fetches=["y"], ys=["y"], xs=["x"])
        handle = await program.forward({"x": [3.0]})
        session = client.session(linear())
        await session.__aenter__()
        await session.read()
        await client.close()
        for use in (lambda: program.forward({"x": [3.0]}), handle.vjp):
            with refused("UNAVAILABLE") as refusal:
                await use()
            refusal.says("is closed", server.target)
        for _ in range(2):
            with refused("UNAVAILABLE"):
                await session.read()
        await handle.close()

    run_in_loop(body)


def test_async_session_reports_a_lost_server(tmp_path: Path) -> None:
    async def body() -> None:
        with running_server(tmp_path) as server:
            async with gr.aio.connect(server.target) as client, client.session(linear()) as s:
                await s.read()
                server.kill()
                await asyncio.sleep(0.3)
                for _ in range(3):
                    with refused("SESSION_LOST"):
                        await s.read()

    run_in_loop(body)


@contextlib.contextmanager
def silent_target() -> Iterator[str]:
    """Gives an address where connections are accepted and nothing is read or written."""
    with socket.create_server(("localhost", 0)) as listening:
        yield f"localhost:{listening.getsockname()[1]}"


def test_calls_end_within_their_timeouts_although_the_server_stands_still(own_server: RunningServer) -> None:
    big = {"x": np.zeros(6_000_000, np.float32)}
    with (
        contextlib.ExitStack() as open_sessions,
        gr.connect(own_server.target) as client,
        gr.connect(own_server.target, stream=False, shared_memory=False) as other,
        futures.ThreadPoolExecutor(16) as pool,
    ):
        program = client.compile(squares(), fetches=["y"], ys=["y"], xs=["x"])
        without_stream = other.program(program.name)
        handle = program.forward({"x": [3.0]})
        for _ in range(4):
            program.evaluate({"x": [3.0]})
        program.evaluate(big)
        sessions = [open_sessions.enter_context(client.session(linear())) for _ in range(3)]

        def seconds_of(call: Callable[[], object]) -> float:
            started = time.monotonic()
            with pytest.raises(gr.errors.GradruleError):
                call()
            return time.monotonic() - started

        calls: list[Callable[[], object]] = [
            lambda: program.evaluate({"x": [3.0]}, timeout=1),
            lambda: program.evaluate(big, timeout=1),
            lambda: program.evaluate({"x": gr.Blob([4.0])}, timeout=1),
            lambda: list(program.map([{"x": [3.0]}] * 3, timeout=1)),
            lambda: list(without_stream.map([{"x": [3.0]}] * 3, timeout=1)),
            lambda: without_stream.evaluate({"x": [3.0]}, timeout=1),
            lambda: handle.vjp(timeout=1),
            lambda: client.compile(linear(), ys=["y"], xs=["x"], timeout=1),
            lambda: client.upload(np.ones(1000), timeout=1),
            lambda: client.wait_ready(1),
            lambda: client.server_status(timeout=1),
            lambda: sessions[0].evaluate({"x": X}, fetches=["loss"], timeout=1),
            lambda: sessions[1].assign({"w": gr.Blob(2 * W)}, timeout=1),
            lambda: sessions[2].read(timeout=1),
        ]
        with stopped(own_server.process.pid):
            taken_s = list(pool.map(seconds_of, calls))
        # Streams wait 2 s longer, and look at the clock each second; the rest is for busy machines.
        assert [seconds for seconds in taken_s if seconds > 60] == []


def test_sessions_start_within_their_timeouts_although_nothing_answers() -> None:
    async def start(target: str) -> None:
        async with gr.aio.connect(target, timeout=1, compile_timeout=0) as client, client.session(linear()):
            pass

    with silent_target() as target:
        starts: list[Callable[[], None]] = [lambda: asyncio.run(start(target)), lambda: start_sync(target)]
        for start_session in starts:
            started = time.monotonic()
            with refused("DEADLINE_EXCEEDED"):
                start_session()
            assert time.monotonic() - started < 60


def start_sync(target: str) -> None:
    with gr.connect(target, timeout=1, compile_timeout=0) as client, client.session(linear()):
        pass


@contextlib.contextmanager
def stopped_workers(server: RunningServer) -> Iterator[None]:
    """Stops all compile workers of a server during the block, also those that start meanwhile."""
    is_over, pids = threading.Event(), set[int]()

    def stop_all() -> None:
        for pid in workers(server.process.pid) - pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                pids.add(pid)

    def keep_stopping() -> None:
        while not is_over.wait(0.01):
            stop_all()

    stop_all()
    stopping = threading.Thread(target=keep_stopping)
    stopping.start()
    try:
        yield
    finally:
        is_over.set()
        stopping.join()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def start_both_workers(server: RunningServer, client: gr.Client) -> None:
    """Makes the only tenant of a server have both compile workers that it may have."""
    with futures.ThreadPoolExecutor() as pool:
        for scale in itertools.count(2, 3):
            client.compile(squares(scale), fetches="y")
            found = workers(server.process.pid)
            if len(found) == 2:
                return
            with stopped(*found):
                calls = [pool.submit(client.compile, squares(scale + other), fetches="y") for other in (1, 2)]
                futures.wait(calls, return_when=futures.FIRST_COMPLETED)
            for call in calls:
                call.result()


def test_time_for_compiling_is_not_time_for_running(own_server: RunningServer) -> None:
    """Compile workers stand still for longer than calls may run; then a program runs for too long.

    The first run of a program compiles too, so only the deadline of the whole call ends it.
    """
    connection = gr.connect(own_server.target, timeout=2.0, compile_timeout=60.0)
    with connection as client, futures.ThreadPoolExecutor() as pool:
        program = client.compile(linear(), ys="y", xs="x")
        with client.session(linear()) as s:
            start_both_workers(own_server, client)
            with stopped_workers(own_server):
                calls: list[futures.Future[Any]] = [
                    pool.submit(client.evaluate, squares(), {"x": [3.0]}, "y"),
                    pool.submit(client.compile, squares(), fetches="y"),
                    pool.submit(program.jacobian, {"x": X}),
                    pool.submit(s.jacobian, {"x": X}, ys="y", xs="w"),
                    pool.submit(program.evaluate, {"x": X, "w": 2 * W}),
                    pool.submit(lambda: list(program.map([{"x": X}], grad_ys=[{"y": np.ones((2, 2))}]))),
                ]
                done, _ = futures.wait(calls, timeout=2.5)
            # Only the value of a variable needs no other program.
            assert done <= {calls[4]}
            assert calls[0].result().outputs["y"] == 9
            assert calls[2].result()["y"]["x"].shape == (2, 2, 2, 3)
            assert calls[3].result()["y"]["w"].shape == (2, 2, 3, 2)
            calls[1].result()
            np.testing.assert_array_equal(calls[4].result().gradients["x"], np.full((2, 3), 4))
            np.testing.assert_array_equal(calls[5].result()[0].gradients["x"], np.full((2, 3), 2))
        loop = loop_graphs.endless()
        assert client.evaluate(loop, {"x": loop_graphs.ENDS}, "y").outputs["y"] == loop_graphs.ENDS
        started = time.monotonic()
        with refused("DEADLINE_EXCEEDED") as refusal:
            client.evaluate(loop, {"x": loop_graphs.ENDLESS}, "y")
        refusal.says("2 s", "run_timeout")
        assert time.monotonic() - started < 60
    with gr.connect(own_server.target, timeout=1.0, compile_timeout=2.0) as client:
        started = time.monotonic()
        with refused("DEADLINE_EXCEEDED"):
            client.evaluate(loop_graphs.counted(2_000_000_000), {"x": np.float32(1)}, "y")
        assert 2.5 < time.monotonic() - started < 60


@pytest.mark.parametrize("answered", [0, 2])
def test_server_that_answers_no_more_pings_is_abandoned(answered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gives up long before the deadline, though TCP still accepts what it sends. Also in a long call."""
    monkeypatch.setattr(call_routes, "_RESEND_S", 0.0)
    changes = {"grpc.keepalive_time_ms": 500, "grpc.http2.ping_timeout_ms": 1500, "grpc.enable_retries": 0}
    monkeypatch.setattr(channels, "OPTIONS", [(name, changes.get(name, value)) for name, value in channels.OPTIONS])
    with socket.create_server(("127.0.0.1", 0)) as listener, futures.ThreadPoolExecutor() as threads:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threads.submit(answer_pings, listener.accept()[0], answered)

        greeting = threads.submit(greet)
        try:
            with gr.connect(f"127.0.0.1:{listener.getsockname()[1]}") as client, refused("UNAVAILABLE") as refusal:
                client.get_rule("ste", timeout=30)
            refusal.says("ping timeout")
        finally:
            # Wake up the accept loop. It ends before the pool, which then takes no more connections.
            listener.shutdown(socket.SHUT_RDWR)
            greeting.result()


def answer_pings(connection: socket.socket, count: int) -> None:
    """Sends SETTINGS, acknowledges the client's, and answers that many pings until the client closes the connection."""
    with contextlib.suppress(OSError), connection, connection.makefile("rb") as frames:
        connection.sendall(b"\0\0\0\4\0\0\0\0\0\0\0\0\4\1\0\0\0\0")
        frames.read(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        while len(head := frames.read(9)) == 9:
            payload = frames.read(int.from_bytes(head[:3], "big"))
            if head[3:5] == b"\6\0" and count:
                count -= 1
                connection.sendall(b"\0\0\x08\6\1\0\0\0\0" + payload)
