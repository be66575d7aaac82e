"""Tests that calls of a server that goes away are sent again, also if many fail at once or their feeds are large."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from gradrule._builder import blob_values
from gradrule._messages import rpc_calls
from gradrule._messages.request_encoding import EncodedRequest
from gradrule._rpc import call_routes
from tests.unit.client.answering import MIB, PROGRAM, Answering
from tests.waiting import wait_until

CALLS = 16


class GoingAway(Answering):
    """Refuses the first attempts, all at once when `count` have come, as a server does that is killed."""

    def __init__(self, count: int) -> None:
        self._all_came = threading.Barrier(count)
        super().__init__()

    def _evaluate(self, raw: bytes, context: Any) -> bytes:
        if "grpc-previous-rpc-attempts" not in dict(context.invocation_metadata()):
            self._all_came.wait(30)
            context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        return super()._evaluate(raw, context)


@pytest.fixture
def answering(request: pytest.FixtureRequest) -> Iterator[Answering]:
    made = GoingAway(request.param)
    yield made
    made.stop()


@pytest.mark.parametrize(("answering", "size"), [(CALLS, 2), (1, MIB)], indirect=["answering"])
def test_calls_of_a_server_that_goes_away_are_sent_again(answering: Answering, size: int) -> None:
    x = np.arange(size, dtype=np.float32)
    with gr.connect(answering.target, stream=False) as client, ThreadPoolExecutor(CALLS) as threads:
        program = client.program(PROGRAM)
        count = CALLS if size == 2 else 1
        results = list(threads.map(lambda _: program.evaluate({"x": x}), range(count)))
    assert [np.array_equal(result.gradients["x"], x) for result in results] == [True] * count
    assert answering.alone == count


class LosingAnswers(Answering):
    """Breaks off each second answer after its headers, after which gRPC does not retry a call."""

    status = (grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")

    def _evaluate(self, raw: bytes, context: Any) -> bytes:
        answer = super()._evaluate(raw, context)
        if self.alone % 2:
            context.send_initial_metadata(())
            context.abort(*self.status)
        return answer


@pytest.fixture
def losing() -> Iterator[LosingAnswers]:
    made = LosingAnswers()
    yield made
    made.stop()


# The second is what a call gets that arrives while a server stops.
@pytest.mark.parametrize("status", [LosingAnswers.status, (grpc.StatusCode.CANCELLED, "CANCELLED")])
def test_call_whose_answer_is_lost_is_sent_again(losing: LosingAnswers, status: Any) -> None:
    losing.status = status
    with gr.connect(losing.target, stream=False) as client:
        program = client.program(PROGRAM)
        assert program.evaluate({"x": [1.0, 2.0]}).gradients["x"].tolist() == [1.0, 2.0]
        assert losing.alone == 2
        assert [result.gradients["x"].tolist() for result in program.map([{"x": [3.0]}])] == [[3.0]]
    assert losing.alone == 4


def test_call_whose_answer_is_lost_is_sent_again_by_the_async_client(losing: LosingAnswers) -> None:
    async def body() -> None:
        async with gr.aio.connect(losing.target, stream=False) as client:
            program = await client.program(PROGRAM)
            assert (await program.evaluate({"x": [1.0, 2.0]})).gradients["x"].tolist() == [1.0, 2.0]

    asyncio.run(body())
    assert losing.alone == 2


def test_call_whose_answer_is_always_lost_fails(losing: LosingAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_routes, "_RESEND_S", 0.3)

    def lose(raw: bytes, context: Any) -> bytes:
        losing.alone = 0
        return LosingAnswers._evaluate(losing, raw, context)

    monkeypatch.setattr(losing, "_evaluate", lose)
    with gr.connect(losing.target, stream=False) as client:
        program = client.program(PROGRAM)
        with pytest.raises(gr.errors.UnavailableError, match="reset by peer"):
            program.evaluate({"x": [1.0]})


def test_no_call_is_sent_again_after_its_timeout() -> None:
    for is_lost in (False, True):
        resends = call_routes.Resends(call_routes.Routes(use_stream=True), time.monotonic() + 0.04, call_routes.TRIES)
        with pytest.raises(gr.errors.UnavailableError, match="no server"):
            resends.pause_after(gr.errors.UnavailableError("no server"), is_lost=is_lost)


class Proxy(Answering):
    """Has lost its server, and gets another one after a number of attempts."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        super().__init__()
        self.on_stream = self._refuse

    def _refuse(self, *arguments: Any) -> bytes:
        if self.refusals:
            self.refusals -= 1
            arguments[-1].abort(grpc.StatusCode.UNAVAILABLE, "no healthy upstream")
        return b""

    def _evaluate(self, raw: bytes, context: Any) -> bytes:
        self._refuse(context)
        return super()._evaluate(raw, context)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """Returns a proxy that refuses more attempts than gRPC makes."""
    made = Proxy(18)
    yield made
    made.stop()


def test_call_goes_on_until_a_proxy_has_another_server(proxy: Proxy) -> None:
    with gr.connect(proxy.target, stream=False) as client:
        program = client.program(PROGRAM)
        assert program.evaluate({"x": [1.0]}).gradients["x"].tolist() == [1.0]
        proxy.refusals = 18
        assert [result.gradients["x"].tolist() for result in program.map([{"x": [3.0]}])] == [[3.0]]
    assert (proxy.alone, proxy.refusals) == (2, 0)


def test_call_of_the_async_client_goes_on_until_a_proxy_has_another_server(proxy: Proxy) -> None:
    async def body() -> None:
        async with gr.aio.connect(proxy.target, stream=False) as client:
            program = await client.program(PROGRAM)
            assert (await program.evaluate({"x": [1.0]})).gradients["x"].tolist() == [1.0]

    asyncio.run(body())
    assert (proxy.alone, proxy.refusals) == (1, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_call_in_chunks_goes_on_until_a_proxy_has_another_server(
    proxy: Proxy, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_routes, "MAX_WHOLE_BYTES", 2 * MIB)
    proxy.refusals = 6
    x = np.arange(MIB, dtype=np.float32)

    async def body() -> Any:
        async with gr.aio.connect(proxy.target) as client:
            return await (await client.program(PROGRAM)).evaluate({"x": x})

    if is_async:
        result = asyncio.run(body())
    else:
        with gr.connect(proxy.target) as client:
            result = client.program(PROGRAM).evaluate({"x": x})
    np.testing.assert_array_equal(result.gradients["x"], x)
    assert (proxy.streams, proxy.alone, proxy.refusals) == (7, 0, 0)


def test_call_ends_with_its_timeout_if_a_proxy_gets_no_server(proxy: Proxy) -> None:
    proxy.refusals = 1 << 30
    with gr.connect(proxy.target, stream=False) as client:
        program = client.program(PROGRAM)
        with pytest.raises((gr.errors.UnavailableError, gr.errors.DeadlineExceededError)):
            program.evaluate({"x": [1.0]}, timeout=2.0)


@pytest.mark.parametrize("is_long", [False, True])
def test_call_ends_when_its_client_is_closed(proxy: Proxy, is_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_routes, "_RESEND_S", 3600.0)
    monkeypatch.setattr(call_routes, "_LONGEST_RESEND_S", 0.1)
    monkeypatch.setattr(call_routes, "MAX_WHOLE_BYTES", 4 if is_long else MIB)
    proxy.refusals = 1 << 30
    client = gr.connect(proxy.target, timeout=3600.0)
    program = client.program(PROGRAM)
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(program.evaluate, {"x": [1.0]})
        wait_until(lambda: proxy.refusals < (1 << 30) - 8 or None, "attempts")
        client.close()
        assert isinstance(call.exception(60), gr.errors.UnavailableError | gr.errors.CancelledError)


def test_call_in_progress_goes_on_with_the_server_that_returns() -> None:
    """The call fails twice in different ways: its connection breaks, then nothing listens."""
    came = threading.Event()
    server = Answering(address="127.0.0.1:0")

    def hang(raw: bytes, context: Any) -> bytes:
        came.set()
        threading.Event().wait(60)
        raise AssertionError

    server._evaluate = hang  # type: ignore[method-assign]
    with gr.connect(server.target, stream=False) as client, ThreadPoolExecutor(1) as threads:
        program = client.program(PROGRAM)
        call = threads.submit(program.evaluate, {"x": [1.0]}, timeout=60.0)
        came.wait(30)
        stopped = threading.Thread(target=server.stop)
        stopped.start()
        # gRPC's own attempts end after 0.4 s.
        time.sleep(1.5)
        other = Answering(address=server.target)
        try:
            assert call.result(60).gradients["x"].tolist() == [1.0]
        finally:
            other.stop()


def test_call_that_reaches_no_server_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address may be wrong."""
    monkeypatch.setattr(call_routes, "_RESEND_S", 3600.0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        says = pytest.raises(gr.errors.UnavailableError, match=f"no server listens at {target}; start one")
        with gr.connect(target, timeout=3600.0) as client, says:
            client.list_programs()


def test_uploads_to_servers_that_share_no_blobs_end_with_advice() -> None:
    """Each upload reaches another server than the call that needs it."""
    blobs: dict[str, Any] = {"0" * 64: b"weights"}
    request = EncodedRequest(b"", [], blobs)
    steps = rpc_calls.call_steps(rpc_calls.evaluate_call(request, lambda answer: answer))
    refusal = gr.errors.BlobNotFoundError("the server does not have the blob")
    refusal.request_id = "r1"
    next(steps)
    for _ in range(3):
        steps.throw(refusal)
        upload = steps.send(list(blobs))
        assert upload == blob_values.Upload("0" * 64, b"weights")
        steps.send(None)
    with pytest.raises(gr.errors.BlobNotFoundError, match=r"does not have the blob.*--blobs") as raised:
        steps.throw(refusal)
    assert raised.value.request_id == "r1"


class NameServer:
    """Answers each DNS query for IPv4 addresses with `addresses`."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._answer_all)
        self._thread.start()

    def _answer_all(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(512)
            if not query:
                return
            name_end = query.index(0, 12)
            (query_type,) = struct.unpack_from(">H", query, name_end + 1)
            found = [socket.inet_aton(address) for address in self.addresses] if query_type == 1 else []
            # The name is that of the question, the type A, the class IN, and nobody may keep it.
            answers = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + address for address in found)
            head = query[:2] + struct.pack(">HHHHH", 0x8400, 1, len(found), 0, 0)
            self._socket.sendto(head + query[12 : name_end + 5] + answers, sender)

    def close(self) -> None:
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()


def test_servers_that_got_new_addresses_are_found_at_once() -> None:
    """As after an update on Kubernetes; by default, gRPC would look the name up every 30 s."""
    names = NameServer("127.0.0.1")
    server = Answering()
    port = server.target.rpartition(":")[2]
    try:
        with gr.connect(f"dns://{names.target}/servers.test:{port}", stream=False) as client:
            program = client.program(PROGRAM)
            for address in ("127.0.0.2", "127.0.0.3"):
                program.evaluate({"x": [1.0]})
                names.addresses = (address,)
                server.stop()
                server = Answering(address=f"{address}:{port}")
                wait_until(lambda: answers(program) or None, "the server at its new address")
    finally:
        server.stop()
        names.close()


def answers(program: Any) -> bool:
    try:
        program.evaluate({"x": [1.0]})
    except gr.errors.UnavailableError:
        return False
    return True


def test_server_that_returns_after_an_outage_is_found_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, gRPC waits longer after each attempt to connect: about 9 s after an outage of 17 s."""
    monkeypatch.setattr(call_routes, "_RESTART_S", 0.0)
    server = Answering(address="127.0.0.1:0")
    try:
        with gr.connect(server.target, stream=False) as client:
            program = client.program(PROGRAM)
            server.stop()
            time.sleep(17)
            assert not answers(program)
            server = Answering(address=server.target)
            wait_until(lambda: answers(program) or None, "the server that returned", 7)
    finally:
        server.stop()
