"""Who looks after processes: the heartbeat and the bound on memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from gradrule_server.link import watch as watch_module
from gradrule_server.link.endings import Reason
from gradrule_server.link.framing import Kind, pack_header
from gradrule_server.link.process import EngineProcess
from gradrule_server.link.watch import Watch, resident_bytes
from tests.unit.link.fake_engine import FakeProcess, Transport, connected

_BEAT_S = 0.02

Watched = Callable[..., tuple[FakeProcess, Transport]]


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    """A process that is watched, and has greeted; all within a hundredth of the time."""
    monkeypatch.setattr(watch_module, "_SILENCE_IDLE_S", 0.2)
    monkeypatch.setattr(watch_module, "_SILENCE_RUNNING_S", 0.6)
    monkeypatch.setattr(watch_module, "_MEMORY_PERIOD_S", 0.02)
    tasks: list[asyncio.Task[None]] = []

    def watch(*, greeted: bool = True, heartbeat_s: float = _BEAT_S, memory: int = 0) -> tuple[FakeProcess, Transport]:
        connection, transport = connected(4)
        process = FakeProcess(connection)
        if greeted:
            connection.data_received(pack_header(Kind.GREETING, 0, 0))
        # It has all that is asked of a process here.
        found = [cast(EngineProcess, process)]
        tasks.append(asyncio.create_task(Watch(lambda: found, heartbeat_s, memory).run()))
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


async def test_one_that_does_not_is_ended(watched: Watched) -> None:
    process, _ = watched()
    assert await _within(3, lambda: process.is_killed)
    assert process.ended_with is not None
    assert process.ended_with.reason is Reason.HEARTBEAT


async def test_one_that_runs_something_is_given_longer(watched: Watched) -> None:
    process, _ = watched()
    process.connection.submit(Kind.RUN, b"long")
    assert not await _within(0.4, lambda: process.is_killed)
    assert await _within(3, lambda: process.is_killed)


async def test_one_that_compiles_has_until_the_deadline(watched: Watched) -> None:
    process, _ = watched()
    process.connection.submit(Kind.COMPILE, b"long")
    assert not await _within(1.0, lambda: process.is_killed)


async def test_one_that_has_not_greeted_has_until_it_has(watched: Watched) -> None:
    process, transport = watched(greeted=False)
    assert not await _within(0.5, lambda: process.is_killed)
    assert not transport.sent


async def test_a_loop_that_was_busy_blames_nobody(watched: Watched) -> None:
    process, _ = watched()
    await asyncio.sleep(0.05)
    # Nothing is read meanwhile, whatever was sent.
    time.sleep(0.5)
    await asyncio.sleep(0.03)
    assert not process.is_killed


async def test_no_heartbeat_ends_nobody(watched: Watched) -> None:
    process, transport = watched(heartbeat_s=0)
    assert not await _within(0.6, lambda: process.is_killed)
    assert not transport.sent


async def test_one_that_takes_too_much_is_ended(watched: Watched) -> None:
    process, _ = watched(memory=1)
    process.pid = os.getpid()
    assert await _within(3, lambda: process.is_killed)
    assert process.ended_with is not None
    assert process.ended_with.reason is Reason.MEMORY


async def test_what_it_takes_is_known_without_a_limit(watched: Watched) -> None:
    process, _ = watched()
    process.pid = os.getpid()
    assert await _within(3, lambda: process.resident_bytes)
    assert not process.is_killed


def test_resident_bytes_are_those_of_the_process() -> None:
    code = "import sys; kept = b'a' * 200_000_000; print('there', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 200_000_000 <= resident_bytes(child.pid) < 240_000_000
    assert resident_bytes(child.pid) == 0
