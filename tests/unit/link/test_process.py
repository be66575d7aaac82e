"""How the end of a process is determined, with processes that do nothing."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from gradrule_server.link import process as process_module
from gradrule_server.link.fork_server import FatalMessage, ForkedProcess
from gradrule_server.link.process import EngineProcess, EngineRefused
from gradrule_server.recovery.endings import EndReason
from tests.unit.link.fake_engine import connected


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes have time to end by themselves, also on a busy machine."""
    monkeypatch.setattr(process_module, "_STDERR_TIMEOUT_S", 30.0)


def _spawned(*command: str) -> ForkedProcess:
    return ForkedProcess(os.posix_spawnp(command[0], command, os.environ))


@pytest.mark.parametrize(
    ("limit", "resident", "reason"),
    [(1000, 899, EndReason.KILLED), (1000, 901, EndReason.MEMORY), (0, 901, EndReason.KILLED)],
)
async def test_a_process_killed_close_to_its_limit_ended_for_memory(
    limit: int, resident: int, reason: EndReason
) -> None:
    process = _spawned("sleep", "60")
    connection, _ = connected(1)
    said = asyncio.create_task(asyncio.sleep(0))
    engine = EngineProcess(process, connection, said, FatalMessage(), None, memory_limit=limit, resident_bytes=resident)
    assert not engine.has_ended
    os.kill(process.pid, signal.SIGKILL)
    assert (await engine.wait_ended()).reason is reason
    assert engine.has_ended


async def _started(*command: str) -> EngineProcess:
    """A process at whose connection nothing is heard."""
    process = _spawned(*command)
    connection, _ = connected(1)
    return EngineProcess(process, connection, asyncio.create_task(asyncio.sleep(0)), FatalMessage(), None)


async def test_a_failed_start_is_reported_with_its_cause() -> None:
    """The socket closes before the operating system reports the end, so the process must not be killed at once."""
    engine = await _started("sh", "-c", "sleep 0.1; exit 3")
    engine.connection.connection_lost(None)
    with pytest.raises(EngineRefused, match="exit code 3"):
        await engine.greet()


async def test_a_start_that_hangs_is_reported() -> None:
    engine = await _started("sleep", "60")
    with pytest.raises(EngineRefused, match="answered nothing"):
        await engine.greet(timeout_s=0.05)
    assert engine.has_ended
