"""How much memory an engine may take where nobody said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradrule_server.link import memory
from gradrule_server.link.memory import share_of_memory

_GIB = 1024**3


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB; the folder of its control groups, in which `cgroup` says which are ours."""
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * _GIB // 4096}[name])
    monkeypatch.setattr(memory, "_UNIFIED", tmp_path)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    return tmp_path


def _limit(folder: Path, file: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text + "\n")


def test_a_machine_without_groups(machine: Path) -> None:
    assert share_of_memory(1) == int(64 * _GIB * 0.8)
    assert share_of_memory(4) == int(64 * _GIB * 0.8) // 4


@pytest.mark.parametrize("at", ["a/b", "a", "."])
def test_the_least_of_all_groups_around(machine: Path, at: str) -> None:
    (machine / "cgroup").write_text("0::/a/b\n")
    for folder in ("a/b", "a", "."):
        _limit(machine / folder, "memory.max", str(10 * _GIB) if folder == at else "max")
    assert share_of_memory(1) == 8 * _GIB


def test_groups_of_the_older_kind(machine: Path) -> None:
    (machine / "cgroup").write_text("5:cpu,cpuacct:/c\n4:memory:/docker/x\n")
    _limit(machine / "memory", "memory.limit_in_bytes", str(20 * _GIB))
    assert share_of_memory(2) == 8 * _GIB


def test_never_less_than_an_engine_needs_to_start(machine: Path) -> None:
    assert share_of_memory(1000) == _GIB
