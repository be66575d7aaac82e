"""Health checks of engines, and their memory limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest

from gradrule_server.link import monitor
from gradrule_server.link.arena import Arenas
from gradrule_server.link.framing import Kind, pack_header
from gradrule_server.link.monitor import EngineMonitor, resident_sizes
from gradrule_server.link.process import EngineProcess, EngineTimes
from gradrule_server.link.shared_memory import ClientMemory, MemoryChannel
from gradrule_server.recovery.endings import EndReason
from tests.unit.link.fake_engine import FakeProcess, Transport, connected

_BEAT_S = 0.02

Watched = Callable[..., tuple[FakeProcess, Transport]]


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    """A process that is watched, and has greeted; all within a hundredth of the time."""
    times = EngineTimes(silence_idle_s=0.2, silence_running_s=0.6, memory_period_s=0.02)
    tasks: list[asyncio.Task[None]] = []

    def watch(*, greeted: bool = True, heartbeat_s: float = _BEAT_S, memory: int = 0) -> tuple[FakeProcess, Transport]:
        connection, transport = connected(4)
        process = FakeProcess(connection)
        if greeted:
            connection.data_received(pack_header(Kind.GREETING, 0, 0))
        # It has all that is asked of a process here.
        found = [cast(EngineProcess, process)]
        tasks.append(asyncio.create_task(EngineMonitor(lambda: found, heartbeat_s, memory, times).run()))
        return process, transport

    yield watch
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _within(seconds: float, condition: Callable[[], Any]) -> bool:
    ends_at = asyncio.get_running_loop().time() + seconds
    while not condition() and asyncio.get_running_loop().time() < ends_at:
        await asyncio.sleep(0.005)
    return bool(condition())


async def test_an_engine_that_answers_lives(watched: Watched) -> None:
    process, transport = watched()
    for _ in range(30):
        await asyncio.sleep(0.02)
        process.connection.data_received(pack_header(Kind.PONG, 0, 0))
    assert not process.is_killed
    assert len([kind for kind, _, _ in transport.sent if kind is Kind.PING]) > 5


async def test_an_engine_that_does_not_answer_is_ended(watched: Watched) -> None:
    process, _ = watched()
    assert await _within(3, lambda: process.is_killed)
    assert process.ended_with is not None
    assert process.ended_with.reason is EndReason.HEARTBEAT


async def test_a_busy_engine_may_be_silent_for_longer(watched: Watched) -> None:
    process, _ = watched()
    process.connection.submit(Kind.RUN, b"long")
    assert not await _within(0.4, lambda: process.is_killed)
    assert await _within(3, lambda: process.is_killed)


async def test_a_compiling_engine_may_be_silent_until_the_deadline(watched: Watched) -> None:
    process, _ = watched()
    process.connection.submit(Kind.COMPILE, b"long")
    assert not await _within(1.0, lambda: process.is_killed)


async def test_an_engine_that_has_not_greeted_is_not_checked(watched: Watched) -> None:
    process, transport = watched(greeted=False)
    assert not await _within(0.5, lambda: process.is_killed)
    assert not transport.sent


async def test_time_in_which_the_loop_was_busy_does_not_count_as_silence(watched: Watched) -> None:
    process, _ = watched()
    await asyncio.sleep(0.05)
    # Nothing is read meanwhile, whatever was sent.
    time.sleep(0.5)
    await asyncio.sleep(0.03)
    assert not process.is_killed


async def test_without_a_heartbeat_no_engine_is_ended(watched: Watched) -> None:
    process, transport = watched(heartbeat_s=0)
    assert not await _within(0.6, lambda: process.is_killed)
    assert not transport.sent


async def test_an_engine_over_its_memory_limit_is_ended(watched: Watched) -> None:
    process, _ = watched(memory=1)
    process.pid = os.getpid()
    assert await _within(3, lambda: process.is_killed)
    assert process.ended_with is not None
    assert process.ended_with.reason is EndReason.MEMORY


async def test_memory_is_measured_without_a_limit(watched: Watched) -> None:
    process, _ = watched()
    process.pid = os.getpid()
    assert await _within(3, lambda: process.resident_bytes)
    assert not process.is_killed


@contextlib.contextmanager
def _child(code: str, *shared: int) -> Iterator[int]:
    """The number of a process that has run it."""
    code += "; print('there', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, *map(str, shared)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=shared) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid


@pytest.mark.parametrize(
    "code",
    [
        "import sys; kept = b'a' * 200_000_000",
        "import mmap, sys; kept = mmap.mmap(-1, 200_000_000); kept.write(b'a' * 200_000_000)",
    ],
    ids=["its own", "shared"],
)
def test_resident_sizes_are_those_of_the_process(code: str) -> None:
    with _child(code) as pid:
        assert 200_000_000 <= sum(resident_sizes(pid)) < 240_000_000
    assert resident_sizes(pid) == (0, 0)


async def test_memory_that_a_fork_shares_is_not_its_own_until_it_writes_to_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_OWN_PERIOD_S", 0.0)
    code = (
        "import os, sys; kept = bytearray(b'a' * 100_000_000); parent = os.getpid(); pid = os.fork();"
        "print(pid, flush=True) if pid else (sys.stdin.readline(), kept.__setitem__(slice(None), b'b' * 100_000_000),"
        "sys.stdin.read());"
    )
    command = [sys.executable, "-c", code + "os.waitpid(pid, 0) if pid else None"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        process, _ = watched(heartbeat_s=0)
        process.pid = int(child.stdout.readline())
        assert await _within(5, lambda: process.own_bytes)
        assert process.resident_bytes >= 100_000_000
        assert process.own_bytes < 40_000_000
        child.stdin.write(b"\n")
        child.stdin.flush()
        assert await _within(5, lambda: process.own_bytes >= 100_000_000)


async def test_arenas_do_not_count_and_other_shared_memory_does(watched: Watched) -> None:
    arenas, shared = Arenas.make()
    fill = "import mmap, sys; kept = mmap.mmap(int(sys.argv[1]), 100_000_000); kept.write(b'a' * 100_000_000)"
    with _child(fill, *shared) as pid:
        assert 100_000_000 <= arenas.held_bytes < 110_000_000
        process, _ = watched(heartbeat_s=0, memory=60_000_000)
        process.pid, process.arenas = pid, arenas
        assert not await _within(0.3, lambda: process.is_killed)
        assert 0 < process.resident_bytes < 40_000_000
    arenas.outgoing.trim()
    with _child(fill.replace("int(sys.argv[1])", "-1")) as pid:
        process.pid = pid
        assert await _within(3, lambda: process.is_killed)
    arenas.close()
    assert arenas.held_bytes == 0


def _client_memory(size: int) -> ClientMemory:
    fd = os.memfd_create("client")
    os.ftruncate(fd, size)
    return ClientMemory(b"m" * 16, fd, size)


@pytest.fixture
def channel() -> Iterator[MemoryChannel]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield MemoryChannel(ours, lambda name: None)
    ours.close()
    theirs.close()


async def test_detached_memory_that_a_call_still_maps_is_not_charged_to_the_engine(
    watched: Watched, channel: MemoryChannel
) -> None:
    memory = _client_memory(100_000_000)
    channel.attach(memory)
    fill = "import mmap, sys; kept = mmap.mmap(int(sys.argv[1]), 100_000_000); kept.write(b'a' * 100_000_000)"
    with _child(fill, memory.fd) as pid:
        memory.close()
        os.close(memory.fd)
        process, _ = watched(heartbeat_s=0, memory=60_000_000)
        process.connection.memories = channel
        process.pid = pid
        assert await _within(3, lambda: process.resident_bytes)
        assert not await _within(0.2, lambda: process.is_killed)
        assert process.resident_bytes < 40_000_000


@pytest.mark.parametrize("kib", [100_000, 10])
async def test_memory_is_estimated_where_no_thread_can_start(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, kib: int
) -> None:
    async def no_thread(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "to_thread", no_thread)
    with _child(f"import mmap, sys; kept = mmap.mmap(-1, {kib << 10}); kept.write(b'a' * {kib << 10})") as pid:
        process, _ = watched(heartbeat_s=0, memory=60_000_000)
        process.pid = pid
        assert await _within(3, lambda: process.resident_bytes)
        assert await _within(3 if kib > 1000 else 0.2, lambda: process.is_killed) is (kib > 1000)
