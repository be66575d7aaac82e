"""The sandbox as the kernel holds it, tried by a process that enters it."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradrule_server.engine.sandbox import landlock, seccomp
from tests.unit.engine import confined

_MEASURES = ["limits", "writing", "privileges", "files", "calls"]
_STAYS = {"read a blob", "start a thread", "signal oneself", "read a library", "random bytes"}
_HEADERS = {"x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")}

needs_landlock = pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def _tried(mode: str, folder: Path, listener: socket.socket) -> Any:
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "blob").write_bytes(b"blob")
    (folder / "registry.db").write_bytes(b"secret")
    # A group of its own: one of the attempts is at its whole group.
    done = subprocess.run(
        [sys.executable, "-m", confined.__name__, mode, str(folder), str(listener.getsockname()[1])],
        stdout=subprocess.PIPE,
        check=True,
        start_new_session=True,
        cwd=Path(__file__).parents[3],
        timeout=60,
    )
    return json.loads(done.stdout)


@needs_landlock
def test_what_an_engine_does_not_need_is_refused(tmp_path: Path, listener: socket.socket) -> None:
    tried = _tried("on", tmp_path, listener)
    assert tried["held"] == _MEASURES
    assert tried["missing"] == []
    done = {name for name, outcome in tried["outcomes"].items() if outcome == "done"}
    assert done == _STAYS
    assert set(tried["outcomes"].values()) == {"done", "EACCES", "EPERM"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blobs", "registry.db"]
    assert (tmp_path / "registry.db").read_bytes() == b"secret"


def test_all_of_it_is_possible_without(tmp_path: Path, listener: socket.socket) -> None:
    """What is impossible anyway would prove nothing above."""
    signal.signal(signal.SIGURG, signal.SIG_DFL)
    tried = _tried("off", tmp_path, listener)
    assert tried["held"] == ["limits"]
    assert {name: outcome for name, outcome in tried["outcomes"].items() if outcome != "done"} == {}


@needs_landlock
def test_a_data_folder_among_libraries_is_told(tmp_path: Path, listener: socket.socket) -> None:
    environment = dict(os.environ, PYTHONPATH=f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{tmp_path}")
    (tmp_path / "data" / "blobs").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", confined.__name__, "on", str(tmp_path / "data"), str(listener.getsockname()[1])],
        stderr=subprocess.PIPE,
        check=False,
        cwd=Path(__file__).parents[3],
        env=environment,
        timeout=60,
    )
    assert done.returncode == 1
    assert "SandboxRefused" in done.stderr.decode()
    assert f"the data folder lies in {tmp_path.resolve()}, where libraries are" in done.stderr.decode()


def test_what_the_kernel_lacks_is_told_and_with_on_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel without Landlock and a machine whose calls are unknown; nothing of this process changes."""
    from gradrule_server.engine.sandbox import enter as module
    from gradrule_server.engine.sandbox import privileges

    for name in ("set_limits", "forbid_writing", "drop"):
        monkeypatch.setattr(privileges, name, lambda: None)
    monkeypatch.setattr(landlock, "version", lambda: 0)
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    sandbox = module.enter("auto", None)
    assert sandbox.held == ["limits", "writing", "privileges"]
    assert sandbox.missing == ["files (no Landlock in this kernel)", "calls (system calls of this machine unknown)"]
    with pytest.raises(module.SandboxRefused, match=r"lacks files .*, calls .*--sandbox auto"):
        module.enter("on", None)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_each_machine_decides_as_it_should(machine: str) -> None:
    """Run by a small interpreter of the kernel's packet filter: no machine is needed for it."""
    known = seccomp._MACHINES[machine]
    code = seccomp._filter(known, pid=77)
    refused = {numbers[known.column] for numbers in seccomp._REFUSED.values()} - {None}
    special = {table[known.column] for table in (seccomp._CLONE, seccomp._CLONE3, seccomp._KILL, seccomp._TGKILL)}
    special.add(seccomp._PRLIMIT[known.column])
    assert not refused & special
    for number in set(range(500)) - special:
        assert _decide(code, known.audit, number, 0) == ("EPERM" if number in refused else "allow"), number
    assert _decide(code, known.audit ^ 1, 0, 0) == "EPERM"
    assert _decide(code, known.audit, 0x40000000, 0) == "EPERM"
    assert _decide(code, known.audit, seccomp._CLONE3[known.column], 0) == "ENOSYS"
    for table, allowed, denied in (
        (seccomp._CLONE, 0x3D0F00, 0x11),
        (seccomp._KILL, 77, 78),
        (seccomp._TGKILL, 77, 0),
        (seccomp._PRLIMIT, 77, 1),
        (seccomp._PRLIMIT, 0, 76),
    ):
        assert _decide(code, known.audit, table[known.column], allowed) == "allow"
        assert _decide(code, known.audit, table[known.column], denied) == "EPERM"


def _decide(code: bytes, audit: int, number: int, argument: int) -> str:
    data = struct.pack("<iIQ6Q", number, audit, 0, argument, 0, 0, 0, 0, 0)
    steps = list(struct.iter_unpack("<HBBI", code))
    value = position = 0
    while True:
        operation, on_true, on_false, constant = steps[position]
        position += 1
        if operation == 0x20:
            value = struct.unpack_from("<I", data, constant)[0]
        elif operation == 0x06:
            return {0x7FFF0000: "allow", 0x00050001: "EPERM", 0x00050026: "ENOSYS"}[constant]
        else:
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[operation]
            position += on_true if holds else on_false


@pytest.mark.skipif(not _HEADERS["x86_64"].exists(), reason="the kernel's headers are not installed")
def test_the_numbers_of_calls_are_the_kernels() -> None:
    defined = dict(line.split()[1:3] for line in _HEADERS["x86_64"].read_text().splitlines() if "__NR_" in line)
    for name, (number, _) in seccomp._REFUSED.items():
        if f"__NR_{name}" in defined:
            assert int(defined[f"__NR_{name}"]) == number, name
