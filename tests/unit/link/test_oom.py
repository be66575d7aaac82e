"""Whether the kernel killed for want of memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gradrule_server.link import oom
from gradrule_server.link.oom import OomKills


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The container's and the machine's; neither is there yet."""
    files = tmp_path / "memory.events", tmp_path / "vmstat"
    monkeypatch.setattr(oom, "_COUNTERS", files)
    monkeypatch.setattr(oom, "_PERIOD_S", 0.01)
    return files


async def test_a_kill_is_news_for_a_while(counters: tuple[Path, Path]) -> None:
    container, machine = counters
    machine.write_text("nr_free_pages 1\noom_kill 7\noom_killers 1\n")
    kills = OomKills()
    assert not kills.grew
    looking = asyncio.create_task(kills.run())
    await asyncio.sleep(0.02)
    assert not kills.grew
    machine.write_text("nr_free_pages 1\noom_kill 8\n")
    assert kills.grew
    await asyncio.sleep(0.1)
    assert not kills.grew
    # A container counts its own.
    container.write_text("low 0\noom 3\noom_kill 0\noom_group_kill 0\n")
    await asyncio.sleep(0.1)
    machine.write_text("oom_kill 9\n")
    assert not kills.grew
    container.write_text("oom_kill 1\n")
    assert kills.grew
    looking.cancel()
    await asyncio.wait([looking])


async def test_where_nothing_counts_nothing_was_killed(counters: tuple[Path, Path]) -> None:
    kills = OomKills()
    looking = asyncio.create_task(kills.run())
    await asyncio.sleep(0.02)
    assert not kills.grew
    looking.cancel()
    await asyncio.wait([looking])
