"""The engines' fork server forks real engines and is restarted after it ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gradrule_server.link import fork_server as module
from gradrule_server.link.fork_server import ForkedProcess, ForkServer, ForkServerEnded
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import ProcessOptions
from tests.processes import engines, open_descriptors
from tests.service.shared_fork_server import SharedForkServer
from tests.waiting import wait_for_condition

pytestmark = pytest.mark.asyncio(loop_scope="module")

_FLAGS = ("--device", "cpu", "--threads", "1", "--sandbox", "off")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[ForkServer]:
    """Returns a fork server for tests that do not change it."""
    server = SharedForkServer()
    yield server
    await server.end()


@pytest_asyncio.fixture(loop_scope="module")
async def fork_server() -> AsyncIterator[ForkServer]:
    """Returns a fork server for one test."""
    server = ForkServer()
    yield server
    await server.stop()


async def _fork(fork_server: ForkServer, *flags: str) -> tuple[ForkedProcess, socket.socket]:
    """Returns an engine process and the socket whose closing ends it."""
    ours, theirs = socket.socketpair()
    try:
        with theirs, open(os.devnull, "wb") as stderr:
            return await fork_server.fork(flags, [theirs.fileno(), stderr.fileno()]), ours
    except BaseException:
        ours.close()
        raise


async def _end(process: ForkedProcess, link: socket.socket) -> None:
    """Closes the socket and checks that the engine exits with 0."""
    link.shutdown(socket.SHUT_WR)
    assert await process.wait() == 0
    link.close()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_engine_is_a_child_of_the_front_end_and_ends_with_its_socket(shared: ForkServer) -> None:
    process, link = await _fork(shared, *_FLAGS)
    assert _parent(process.pid) == os.getpid()
    # The new process sets its name itself.
    await wait_for_condition(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "gradrule-engine\n")
    await _end(process, link)


async def test_engine_inherits_no_descriptors(shared: ForkServer) -> None:
    first, first_link = await _fork(shared, *_FLAGS)
    second, second_link = await _fork(shared, *_FLAGS)

    def named() -> list[str]:
        kinds = open_descriptors(second.pid)
        own = ("urandom", "eventpoll", f"/proc/{second.pid}/status")
        return sorted(kind.partition(":")[0] for kind in kinds if not any(name in kind for name in own))

    # The three standard streams are /dev/null, and the link is the only socket. At its start, the engine closes those
    # of the fork server, and opens files of /proc to set its OOM score and to measure its memory.
    await wait_for_condition(lambda: named() == [os.devnull] * 3 + ["socket"])
    await _end(first, first_link)
    await _end(second, second_link)


async def test_exit_code_reports_a_signal(shared: ForkServer) -> None:
    process, link = await _fork(shared, *_FLAGS)
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    link.close()


async def test_killed_fork_server_is_started_again(fork_server: ForkServer) -> None:
    first, first_link = await _fork(fork_server, *_FLAGS)
    running = fork_server._running
    assert running is not None
    running.process.kill()
    await running.process.wait()
    second, second_link = await _fork(fork_server, *_FLAGS)
    assert first.returncode is None, "engines live on without the fork server"
    await _end(first, first_link)
    await _end(second, second_link)


async def test_killed_fork_server_is_started_again_at_once(fork_server: ForkServer) -> None:
    """Engines must not wait for the import of TensorFlow when they need it next."""
    process, link = await _fork(fork_server, *_FLAGS)
    first = fork_server._running
    assert first is not None
    first.process.kill()
    await wait_for_condition(lambda: fork_server._running not in (None, first))
    assert fork_server.ended == {"killed": 1}
    second = fork_server._running
    assert second is not None
    # One that ends before it is needed is noticed too.
    second.process.kill()
    await wait_for_condition(lambda: fork_server._running not in (None, second))
    assert fork_server.ended == {"killed": 2}
    await _end(process, link)
    process, link = await _fork(fork_server, *_FLAGS)
    await _end(process, link)


async def test_only_the_front_end_ends_engines(shared: ForkServer) -> None:
    process, link = await _fork(shared, *_FLAGS)
    running = shared._running
    assert running is not None
    for pid in (process.pid, running.process.pid):
        os.kill(pid, signal.SIGTERM)
    await _end(process, link)
    another, link = await _fork(shared, *_FLAGS)
    assert shared._running is running
    await _end(another, link)


async def test_failed_start_is_reported_with_its_exit_code(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ForkServerEnded, match="exit code 1"):
        await _fork(fork_server, *_FLAGS)


async def test_unresponsive_fork_server_is_killed(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ANSWER_TIMEOUT_S", 0.05)
    with pytest.raises(ForkServerEnded, match="did not answer"):
        await _fork(fork_server, *_FLAGS)


async def test_cancelled_request_does_not_affect_the_next(shared: ForkServer) -> None:
    asking = asyncio.create_task(_fork(shared, *_FLAGS))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    process, link = await _fork(shared, *_FLAGS)
    await _end(process, link)


async def test_killed_engine_is_replaced_without_a_spare() -> None:
    pool = EnginePool(ProcessOptions("cpu", 1), spares=0, heartbeat_s=0)
    await pool.start()
    engine = pool.engines[0]
    killed = engine.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await wait_for_condition(lambda: engine.is_ready and engine.pid != killed)
    await pool.stop()


async def test_stop_during_a_fork_starts_no_other_fork_server(fork_server: ForkServer) -> None:
    forking = asyncio.create_task(_fork(fork_server, *_FLAGS))
    await wait_for_condition(fork_server._lock.locked)
    await fork_server.stop()
    assert fork_server._running is None
    await _end(*await forking)


async def test_stop_waits_for_all_processes() -> None:
    """One engine serves while its spare is starting."""
    before = engines(os.getpid())
    pool = EnginePool(ProcessOptions("cpu", 1), spares=1, heartbeat_s=0)
    await pool.start()
    assert engines(os.getpid()) != before
    await pool.stop()
    assert engines(os.getpid()) == before
