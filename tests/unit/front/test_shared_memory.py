"""The server side of shared memory: keys, hand-over, use by calls, release."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from gradrule.common.memory_regions import Memory
from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.front import shared_memory
from gradrule_server.front.calls import Caller
from gradrule_server.front.shared_memory import SharedMemoryServer
from gradrule_server.quotas import Quota
from tests.processes import count_descriptors
from tests.waiting import wait_for_condition

_MEBIBYTE = 1 << 20


class Counters:
    """Fake tenants that record what is counted."""

    def __init__(self) -> None:
        self.entered = 0

    def retain(self, tenant: Any) -> None:
        self.entered += 1

    def release(self, tenant: Any) -> None:
        self.entered -= 1


def caller_of(name: str) -> Caller:
    quotas = {"shared_bytes": Quota(1 << 30, "bytes of shared memory", "--tenant-shared-bytes")}
    return cast(Caller, SimpleNamespace(tenant=SimpleNamespace(name=name, quotas=quotas)))


@asynccontextmanager
async def sharing(around: Counters, max_bytes: int = 1 << 30) -> AsyncIterator[SharedMemoryServer]:
    memories = SharedMemoryServer(around, max_bytes)
    memories.start()
    try:
        yield memories
    finally:
        await memories.close()


async def handed_over(memories: SharedMemoryServer, caller: Caller, memory: Memory) -> tuple[socket.socket, bytes]:
    """The connection, and what the server answers at the end."""
    loop, offer = asyncio.get_running_loop(), memories.issue_keys(caller)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    await loop.sock_connect(connection, b"\0" + offer.address.encode())
    await loop.sock_sendall(connection, offer.client_key)
    assert await loop.sock_recv(connection, 100) == offer.server_key
    socket.send_fds(connection, [b"\0"], [memory.fd])
    return connection, await loop.sock_recv(connection, 4096)


def test_no_memory_is_accepted_if_disabled() -> None:
    async def run() -> None:
        async with sharing(Counters(), 0) as memories:
            with pytest.raises(GradruleError) as caught:
                memories.issue_keys(caller_of("a"))
        assert caught.value.reason == errors_pb2.ERROR_REASON_UNSUPPORTED

    asyncio.run(run())


def test_memory_counts_until_closed() -> None:
    async def run() -> None:
        around, caller = Counters(), caller_of("a")
        async with sharing(around) as memories:
            connection, answer = await handed_over(memories, caller, Memory(4 * _MEBIBYTE))
            use = evaluate_pb2.SharedMemoryUse(memory=answer[1:], request_bytes=10, answer_bytes=5)
            with memories.use(use, caller) as used:
                memory = used.memory
                assert (memory.size, used.size) == (4 * _MEBIBYTE, 15)
            assert caller.tenant.quotas["shared_bytes"].used == 64 * _MEBIBYTE
            with pytest.raises(GradruleError), memories.use(use, caller_of("b")):
                pass
            connection.close()
            async with asyncio.timeout(60):
                while around.entered:
                    await asyncio.sleep(0)
            assert memory.is_closed
            with pytest.raises(GradruleError) as caught, memories.use(use, caller):
                pass
            assert caught.value.reason == errors_pb2.ERROR_REASON_SHARED_MEMORY_LOST
            assert (caller.tenant.quotas["shared_bytes"].used, around.entered) == (0, 0)

    asyncio.run(run())


def test_cancelled_call_closes_its_memory() -> None:
    """An engine may still write into it."""

    async def run() -> None:
        around, caller = Counters(), caller_of("a")
        async with sharing(around) as memories:
            connection, answer = await handed_over(memories, caller, Memory(4 * _MEBIBYTE))
            use = evaluate_pb2.SharedMemoryUse(memory=answer[1:])
            with pytest.raises(asyncio.CancelledError), memories.use(use, caller) as used:
                raise asyncio.CancelledError
            assert used.memory.is_closed
            assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
            connection.close()

    asyncio.run(run())


def test_two_calls_at_once_never_write_their_answers_into_one_region() -> None:
    """gRPC sends a call again while its first attempt may still run."""

    async def run() -> None:
        around, caller = Counters(), caller_of("a")
        async with sharing(around) as memories:
            connection, answer = await handed_over(memories, caller, Memory(4 * _MEBIBYTE))
            first = evaluate_pb2.SharedMemoryUse(memory=answer[1:], answer_bytes=100)
            second = evaluate_pb2.SharedMemoryUse(memory=answer[1:], answer_offset=100, answer_bytes=100)
            with memories.use(first, caller), memories.use(second, caller):
                pass
            with memories.use(first, caller):
                pass
            again = evaluate_pb2.SharedMemoryUse(memory=answer[1:], answer_offset=99, answer_bytes=2)
            with memories.use(first, caller) as used:
                with pytest.raises(GradruleError) as caught, memories.use(again, caller):
                    pass
                assert caught.value.reason == errors_pb2.ERROR_REASON_SHARED_MEMORY_LOST
                # The first attempt may write until it ends, so its memory is not used any more.
                assert used.memory.is_closed
            connection.close()

    asyncio.run(run())


def test_keys_of_a_tenant_are_limited_and_closing_leaves_nothing() -> None:
    async def run() -> None:
        around, caller = Counters(), caller_of("a")
        before = count_descriptors()
        async with sharing(around) as memories:
            for _ in range(40):
                memories.issue_keys(caller)
            assert len(memories._keys) == 16
            connection, _ = await handed_over(memories, caller, Memory(4 * _MEBIBYTE))
            connection.close()
        assert around.entered == 0
        assert count_descriptors() == before

    asyncio.run(run())


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@contextmanager
def slow_to_close() -> Iterator[socket.socket]:
    """A TCP socket whose last close blocks, since the sent bytes are never read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sender = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
        sender.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 16))
        sender.setblocking(True)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3))
        with sender, peer:
            # Closing the peer ends the wait of a blocked close.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            yield sender


@pytest.mark.parametrize("is_read", [True, False])
def test_slow_closing_descriptors_do_not_block_the_loop(is_read: bool) -> None:
    """Neither where they come with a wrong key, nor where they come when memory has been taken."""

    async def run() -> None:
        caller = caller_of("a")
        with slow_to_close() as slow:
            async with sharing(Counters()) as memories:
                if is_read:
                    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    connection.connect("\0" + memories.address)
                else:
                    connection, _ = await handed_over(memories, caller, Memory(4 * _MEBIBYTE))
                # A kernel that can refuses it.
                with suppress(PermissionError):
                    socket.send_fds(connection, [b"x"], [slow.fileno()])
                slow.close()
                connection.close()
                longest, last = 0.0, time.monotonic()
                until = last + 0.5
                while last < until:
                    await asyncio.sleep(0.001)
                    now = time.monotonic()
                    longest, last = max(longest, now - last), now
                # Closing the descriptor takes three seconds.
                assert longest < 2
                # Others are served meanwhile.
                other, answer = await handed_over(memories, caller, Memory(4 * _MEBIBYTE))
                assert answer[:1] == b"\0"
                other.close()

    asyncio.run(run())


def test_accepting_pauses_when_no_descriptor_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Mock(side_effect=OSError(errno.EMFILE, "too many"))

    async def run() -> None:
        async with sharing(Counters()) as memories:
            with monkeypatch.context() as patched:
                patched.setattr(shared_memory, "_RETRY_S", 0.01)
                patched.setattr(SharedMemoryServer, "_serve_next", failing)
                # The thread waits for a connection before it sees the patch.
                with connected(memories):
                    await _until(lambda: failing.call_count > 1)
            connection, answer = await handed_over(memories, caller_of("a"), Memory(4 * _MEBIBYTE))
            assert answer[:1] == b"\0"
            connection.close()
        assert caplog.text.count("too many") == 1

    asyncio.run(run())


def connected(memories: SharedMemoryServer) -> socket.socket:
    """A connection that has sent nothing."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    connection.connect("\0" + memories.address)
    return connection


async def connect_idle(memories: SharedMemoryServer, count: int, *, shows_keys: bool = False) -> list[socket.socket]:
    """Connections that send nothing, or nothing after the keys of a tenant."""
    idle, caller = [], caller_of("idle")
    for _ in range(count):
        accepted = len(memories._connections)
        idle.append(connected(memories))
        await _until(lambda accepted=accepted: len(memories._connections) > accepted)  # type: ignore[misc]
        if shows_keys:
            offer = memories.issue_keys(caller)
            idle[-1].send(offer.client_key)
            assert await asyncio.get_running_loop().sock_recv(idle[-1], 100) == offer.server_key
    return idle


@pytest.mark.parametrize("shows_keys", [False, True])
def test_idle_connections_do_not_delay_the_handshakes_of_others(
    monkeypatch: pytest.MonkeyPatch, shows_keys: bool
) -> None:
    monkeypatch.setattr(shared_memory, "_MESSAGE_S", 3600.0)

    async def run() -> None:
        around = Counters()
        before = count_descriptors()
        async with sharing(around) as memories:
            idle = await connect_idle(memories, 200, shows_keys=shows_keys)
            async with asyncio.timeout(60):
                connection, answer = await handed_over(memories, caller_of("a"), Memory(4 * _MEBIBYTE))
            assert answer[:1] == b"\0"
        for each in (connection, *idle):
            each.close()
        assert around.entered == 0
        assert count_descriptors() == before

    asyncio.run(run())


def test_idle_connections_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MESSAGE_S", 0.05)

    async def run() -> None:
        async with sharing(Counters()) as memories:
            with connected(memories) as connection:
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1), 60) == b""
                await _until(lambda: not memories._connections)

    asyncio.run(run())


def test_full_server_ends_the_oldest_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MESSAGE_S", 3600.0)
    monkeypatch.setattr(shared_memory, "_MAX_HANDSHAKES", 5)

    async def run() -> None:
        async with sharing(Counters()) as memories:
            with ExitStack() as idle:
                connections = []
                for _ in range(7):
                    connections.append(idle.enter_context(connected(memories)))
                    await _until(lambda: len(memories._connections) == min(len(connections), 5))
                ended = [await asyncio.get_running_loop().sock_recv(connections[number], 1) for number in (0, 1)]
                assert ended == [b"", b""]
                await _until(lambda: len(memories._connections) == 5)

    asyncio.run(run())


def test_keys_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_KEYS_LAST_S", 0.0)

    async def run() -> None:
        async with sharing(Counters()) as memories:
            offer = memories.issue_keys(caller_of("a"))
            with connected(memories) as connection:
                connection.send(offer.client_key)
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1), 60) == b""

    asyncio.run(run())


@contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Within this context the system lets no thread start."""
    start = Mock(side_effect=RuntimeError("can't start new thread"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        yield start


def test_connections_end_while_no_thread_can_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        loop, caller = asyncio.get_running_loop(), caller_of("a")
        monkeypatch.setattr(shared_memory, "_RETRY_S", 0.01)
        before = count_descriptors()
        async with sharing(Counters()) as memories:
            # The thread that accepts connections has started.
            with no_threads(monkeypatch), connected(memories) as connection:
                assert await asyncio.wait_for(loop.sock_recv(connection, 1), 60) == b""
            await wait_for_condition(lambda: "can't start new thread" in caplog.text)
            later, answer = await handed_over(memories, caller, Memory(4 * _MEBIBYTE))
            assert answer[:1] == b"\0"
            later.close()
        assert count_descriptors() == before

    asyncio.run(run())
