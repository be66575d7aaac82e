"""The default memory limit of engines, and the kernel's count of processes killed for lack of memory."""

from __future__ import annotations

import asyncio
import os
import resource
from pathlib import Path

import pytest

from gradrule_server.link import operating_system
from gradrule_server.link.operating_system import OomKills, memory_share, most_threads
from tests.waiting import wait_for_condition

_GIB = 1024**3


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB; the folder of its control groups, in which `cgroup` says which are ours."""
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * _GIB // 4096}[name])
    monkeypatch.setattr(operating_system, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(operating_system, "_OWN_CGROUPS", tmp_path / "cgroup")
    return tmp_path


def _limit(folder: Path, file: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text + "\n")


def test_a_machine_without_groups(machine: Path) -> None:
    assert memory_share(1) == int(64 * _GIB * 0.6)
    assert memory_share(4) == int(64 * _GIB * 0.6) // 4


@pytest.mark.parametrize("at", ["a/b", "a", "."])
def test_the_least_of_all_groups_around(machine: Path, at: str) -> None:
    (machine / "cgroup").write_text("0::/a/b\n")
    for folder in ("a/b", "a", "."):
        _limit(machine / folder, "memory.max", str(20 * _GIB) if folder == at else "max")
    assert memory_share(1) == 12 * _GIB


def test_groups_of_the_older_kind(machine: Path) -> None:
    (machine / "cgroup").write_text("5:cpu,cpuacct:/c\n4:memory:/docker/x\n")
    _limit(machine / "memory", "memory.limit_in_bytes", str(20 * _GIB))
    assert memory_share(2) == 6 * _GIB


def test_never_less_than_an_engine_needs_to_start(machine: Path) -> None:
    assert memory_share(1000) == _GIB


def test_threads_are_those_of_the_user_or_of_the_container(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = [resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (own[0], resource.RLIM_INFINITY))
    assert most_threads() is None
    (machine / "cgroup").write_text("3:pids:/x\n0::/a\n")
    _limit(machine / "a", "pids.max", "max")
    assert most_threads() is None
    _limit(machine / "pids/x", "pids.max", "4096")
    assert most_threads() == 4096
    _limit(machine / "a", "pids.max", "2048")
    assert most_threads() == 2048
    own[0] = 1000
    assert most_threads() == 1000


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The counters of the container and of the machine; neither exists yet."""
    files = tmp_path / "memory.events", tmp_path / "vmstat"
    monkeypatch.setattr(operating_system, "_KILL_COUNTERS", files)
    monkeypatch.setattr(operating_system, "_SAMPLE_PERIOD_S", 0.01)
    return files


async def test_a_kill_is_reported_for_a_while(counters: tuple[Path, Path]) -> None:
    container, machine = counters
    machine.write_text("nr_free_pages 1\noom_kill 7\noom_killers 1\n")
    kills = OomKills()
    assert not kills.has_grown
    sampling = asyncio.create_task(kills.run())
    await asyncio.sleep(0.02)
    assert not kills.has_grown
    machine.write_text("nr_free_pages 1\noom_kill 8\n")
    assert kills.has_grown
    await wait_for_condition(lambda: not kills.has_grown)
    # A container counts its own.
    container.write_text("low 0\noom 3\noom_kill 0\noom_group_kill 0\n")
    await wait_for_condition(lambda: set(kills._samples) == {0})
    machine.write_text("oom_kill 9\n")
    assert not kills.has_grown
    container.write_text("oom_kill 1\n")
    assert kills.has_grown
    sampling.cancel()
    await asyncio.wait([sampling])


async def test_without_counters_nothing_was_killed(counters: tuple[Path, Path]) -> None:
    kills = OomKills()
    sampling = asyncio.create_task(kills.run())
    await asyncio.sleep(0.02)
    assert not kills.has_grown
    sampling.cancel()
    await asyncio.wait([sampling])
