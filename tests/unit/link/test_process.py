"""How a process's end is judged, with processes that do nothing."""

from __future__ import annotations

import asyncio

import pytest

from gradrule_server.link.endings import Reason
from gradrule_server.link.process import EngineProcess
from gradrule_server.link.stderr import LastWords
from tests.unit.link.fake_engine import connected


@pytest.mark.parametrize(
    ("limit", "resident", "reason"),
    [(1000, 899, Reason.KILLED), (1000, 901, Reason.MEMORY), (0, 901, Reason.KILLED)],
)
async def test_who_is_killed_close_to_its_limit_took_too_much_memory(limit: int, resident: int, reason: Reason) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    connection, _ = connected(1)
    said = asyncio.create_task(asyncio.sleep(0))
    engine = EngineProcess(process, connection, said, LastWords(), None, memory_limit=limit, resident_bytes=resident)
    assert not engine.has_ended
    process.kill()
    assert (await engine.ending()).reason is reason
    assert engine.has_ended
