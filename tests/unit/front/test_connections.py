"""Limits on unauthenticated connections and on bytes of unfinished messages."""

from __future__ import annotations

import asyncio
import ipaddress
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from gradrule_server.front.authentication import CallerAuthenticator
from gradrule_server.front.connections import Connection, ConnectionLimits, ConnectionWatch
from gradrule_server.front.open_streams import Stream
from gradrule_server.front.public_services import Reflection
from gradrule_server.front.request_pipeline import CallTimes, RequestPipeline
from gradrule_server.front.server import GrpcServer, channel_options
from gradrule_server.front.shared_memory import SharedMemoryServer
from gradrule_server.front.sockets import Peer, close_connection
from gradrule_server.identity import Authenticator
from gradrule_server.link.operating_system import HeapTrimmer
from gradrule_server.settings import Settings
from tests.battery import wire
from tests.battery.unfinished_messages import send_unfinished
from tests.processes import count_descriptors
from tests.unit.front.pipelines import FakeTenants, create_admission

CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MIB = 1 << 20


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Sockets:
    """Fake sockets, and a record of those that were closed."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.clock = Clock()
        self.watch = ConnectionWatch(limits, self.clock)
        self.closed: list[Peer] = []
        self._open: dict[Peer, FakeSocket] = {}

    def open(self, address: str = "192.0.2.1") -> tuple[Connection, Peer]:
        peer = ipaddress.ip_address(address), 1000 + len(self._open)
        self._open[peer] = FakeSocket(len(self._open), self.closed, peer)
        host = f"ipv4:{address}" if isinstance(peer[0], ipaddress.IPv4Address) else f"ipv6:%5B{address}%5D"
        return self.watch.get(f"{host}:{peer[1]}"), peer

    def receive(self, peer: Peer, size: int) -> None:
        self._open[peer].received += size

    def check(self, seconds: float = 1.0) -> None:
        """Checks the connections after some seconds."""
        self.clock.now += seconds
        self.watch.check(dict(self._open), self.clock.now)
        for peer in self.closed:
            self._open.pop(peer, None)


class FakeSocket:
    def __init__(self, inode: int, closed: list[Peer], peer: Peer) -> None:
        self.inode = inode
        self.sent = self.received = 0
        self._closed, self._peer = closed, peer

    def shut_down(self) -> None:
        self._closed.append(self._peer)


def test_oldest_unauthenticated_connections_are_closed() -> None:
    sockets = Sockets(ConnectionLimits(unauthenticated=3))
    peers = []
    for _ in range(5):
        sockets.clock.now += 1
        peers.append(sockets.open()[1])
    for address in ("192.0.2.2", "2001:db8::1"):
        sockets.open(address)
    for _ in range(5):
        sockets.open()[0].is_authenticated = True
    sockets.check()
    assert sockets.closed == peers[:2]
    sockets.check()
    assert len(sockets.closed) == 2


def test_ipv6_network_counts_as_one_address() -> None:
    sockets = Sockets(ConnectionLimits(unauthenticated=3))
    for number in range(9):
        sockets.open(f"2001:db8::{number + 1:x}")
    sockets.check()
    assert len(sockets.closed) == 6


def test_addresses_may_have_fewer_connections_when_the_server_is_crowded() -> None:
    sockets = Sockets(ConnectionLimits(connections=40, unauthenticated=16))
    for number in range(1, 5):
        for _ in range(10):
            sockets.open(f"192.0.2.{number}")
    sockets.check()
    assert len(sockets.closed) == 4 * 8


def test_unauthenticated_connections_without_a_call_are_closed() -> None:
    sockets = Sockets(ConnectionLimits(unauthenticated_s=60))
    silent = sockets.open()[1]
    watching, _ = sockets.open()
    known, _ = sockets.open()
    known.is_authenticated = True
    with watching.call():
        sockets.check(59)
        assert not sockets.closed
        sockets.check(2)
        assert sockets.closed == [silent]
        sockets.check(1000)
    assert sockets.closed == [silent]


def test_unfinished_messages_are_limited() -> None:
    sockets = Sockets(ConnectionLimits(connection_bytes=10 * MIB, address_bytes=15 * MIB))
    stranger, of_stranger = sockets.open("192.0.2.2")
    large, of_large = sockets.open("192.0.2.3")
    large.is_authenticated = True
    for connection, peer, size in ((stranger, of_stranger, 2 * MIB), (large, of_large, 12 * MIB)):
        connection.reads += 1
        sockets.receive(peer, size)
    several = [sockets.open("192.0.2.4") for _ in range(3)]
    for number, (connection, peer) in enumerate(several):
        connection.is_authenticated = True
        connection.reads += 1
        sockets.receive(peer, (6 + number) * MIB)
    sockets.check()
    assert set(sockets.closed) == {of_stranger, of_large, several[2][1]}


def test_finished_messages_do_not_count() -> None:
    sockets = Sockets(ConnectionLimits(connection_bytes=MIB))
    connection, peer = sockets.open()
    connection.is_authenticated = True
    idle = connection
    idle.reads += 1
    for _ in range(200):
        for _ in range(10):
            connection.reads += 1
            # What comes besides: frames of 9 bytes, TLS records of 29, each 16 KiB.
            sockets.receive(peer, MIB + MIB // 16384 * 38 + 8000)
            connection.finish_read(bytes(MIB))
        sockets.check()
    assert not sockets.closed
    assert connection.unfinished < MIB // 4


def test_bytes_of_ended_calls_do_not_count() -> None:
    sockets = Sockets(ConnectionLimits(connection_bytes=10 * MIB))
    connection, peer = sockets.open()
    connection.is_authenticated = True
    for _ in range(20):
        connection.reads += 1
        sockets.receive(peer, 8 * MIB)
        sockets.check()
        assert connection.unfinished > 7 * MIB
        connection.finish_read(None)
    assert not sockets.closed


def test_connection_with_a_stalled_message_is_closed() -> None:
    sockets = Sockets(ConnectionLimits(stall_s=10))
    stuck, of_stuck = sockets.open()
    going, of_going = sockets.open()
    for connection, peer in ((stuck, of_stuck), (going, of_going)):
        connection.is_authenticated = True
        connection.reads += 1
        sockets.receive(peer, 5 * MIB)
    for _ in range(30):
        going.reads += 1
        sockets.receive(of_going, MIB)
        going.finish_read(bytes(MIB))
        sockets.check()
    assert sockets.closed == [of_stuck]


# Over real connections.


@asynccontextmanager
async def serving(limits: ConnectionLimits, check_every_s: float = 1.0) -> AsyncIterator[str]:
    """A server with a stream that reads and sends nothing."""
    watch = ConnectionWatch(limits, check_every_s=check_every_s)
    server = GrpcServer(
        channel_options(Settings(max_connections=limits.connections, max_connection_streams=100)), watch
    )
    pipeline = RequestPipeline(
        CallerAuthenticator(Authenticator()),
        FakeTenants(streams=100),
        create_admission(9),
        CallTimes(10, 10, 10),
        connections=watch,
    )

    async def swallow(stream: Stream) -> None:
        while await stream.read() is not None:
            pass

    server.add_services(pipeline, SharedMemoryServer(FakeTenants(streams=100), 0), with_reflection=False)
    # The checks of connections must come before the timeout, however slow the machine is.
    server._server.add_generic_rpc_handlers((Reflection((), watch, request_s=250).handler(),))
    server._server.add_generic_rpc_handlers((pipeline.create_service("s", streams={"m": swallow}),))
    port = await server.start("127.0.0.1:0", None)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.drain(0)


async def test_checks_continue_after_a_file_could_not_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be no descriptor left for the file with the memory of the process."""
    again, loop = asyncio.Event(), asyncio.get_running_loop()
    failures = iter([OSError("too many open files")])

    def trim_if_due(trimmer: Any, now: float) -> bool:
        for failure in failures:
            raise failure
        loop.call_soon_threadsafe(again.set)
        return False

    monkeypatch.setattr(HeapTrimmer, "trim_if_due", trim_if_due)
    async with serving(ConnectionLimits(), check_every_s=0.01):
        await asyncio.wait_for(again.wait(), 60)


async def test_unauthenticated_connections_do_not_keep_new_clients_out() -> None:
    async with serving(ConnectionLimits(connections=60, unauthenticated=20)) as target, AsyncExitStack() as stack:
        for _ in range(80):
            _, writer = await stack.enter_async_context(wire.connected(target))
            writer.write(wire.PREFACE + wire.settings())
        client = await stack.enter_async_context(grpc.aio.insecure_channel(target))
        # Without the limit, this call waits until its deadline.
        assert await client.unary_unary(CHECK)(b"", timeout=20, wait_for_ready=True) == b"\x08\x01"


async def test_idle_unauthenticated_connections_are_closed() -> None:
    async with serving(ConnectionLimits(unauthenticated_s=0.2)) as target, wire.connected(target) as (reader, writer):
        writer.write(wire.PREFACE + wire.settings() + wire.call(wire.headers(CHECK), wire.message(b"")))
        assert (await wire.read_answer(reader)).status == 0
        assert await wire.read_until_closed(reader, 20)


@pytest.mark.parametrize("path", [REFLECTION, "/s/m"])
async def test_connection_with_too_many_unfinished_bytes_is_closed(path: str) -> None:
    """How much is sent before the next check depends on the machine, so all of it together is little enough."""
    async with serving(ConnectionLimits(connection_bytes=8 * MIB), check_every_s=0.1) as target:
        sent, has_closed = await send_unfinished(target, path, streams=10, size=4 * MIB, hold_s=250)
        assert has_closed
        assert MIB // 2 < sent < 300 * MIB


async def test_connection_with_an_unfinished_message_is_closed() -> None:
    async with serving(ConnectionLimits(stall_s=3)) as target:
        assert await send_unfinished(target, "/s/m", streams=1, size=MIB, hold_s=250) == (MIB - 1, True)


async def test_health_is_answered_while_others_send_no_message() -> None:
    limits = ConnectionLimits(unauthenticated=100)
    async with serving(limits) as target, AsyncExitStack() as stack:
        # As many as the server reads at a time, and more, on some connections.
        for _ in range(20):
            _, writer = await stack.enter_async_context(wire.connected(target))
            calls = b"".join(
                wire.frame(wire.HEADERS, wire.END_HEADERS, stream, wire.headers(CHECK)) for stream in range(1, 80, 2)
            )
            writer.write(wire.PREFACE + wire.settings() + calls)
        client = await stack.enter_async_context(grpc.aio.insecure_channel(target))
        for _ in range(50):
            assert await client.unary_unary(CHECK)(b"", timeout=20) == b"\x08\x01"


async def test_watchers_of_one_connection_are_limited() -> None:
    async with serving(ConnectionLimits()) as target, AsyncExitStack() as stack:
        client = await stack.enter_async_context(grpc.aio.insecure_channel(target))
        watching: list[Any] = [client.unary_stream("/grpc.health.v1.Health/Watch")(b"") for _ in range(16)]
        for each in watching:
            assert await each.read() == b"\x08\x01"
        with pytest.raises(grpc.RpcError) as caught:
            await client.unary_stream("/grpc.health.v1.Health/Watch")(b"").read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_searching_for_a_connection_leaves_no_descriptors() -> None:
    """Most descriptors of the process are no sockets."""
    with tempfile.TemporaryFile():
        before = count_descriptors()
        assert not close_connection("ipv4:192.0.2.1:1234")
        assert count_descriptors() == before
