"""Tests the sandbox with a process that enters it and tries forbidden actions."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradrule_server.engine import sandbox, seccomp
from tests.unit.engine import confined

_MEASURES = ["limits", "writing", "privileges", "files", "calls"]
_STAYS = {"read a blob", "start a thread", "signal oneself", "read a library", "random bytes", "one's own processors"}
# The table of aarch64 is the generic one, which every Linux installs.
_HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}

needs_landlock = pytest.mark.skipif(sandbox.landlock_version() == 0, reason="this kernel has no Landlock")


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def _tried(mode: str, folder: Path, listener: socket.socket) -> Any:
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "blob").write_bytes(b"blob")
    (folder / "registry.db").write_bytes(b"secret")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        mailbox.bind(str(folder / "mailbox"))
        # One attempt sends a signal to the whole process group, so the process gets its own group.
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
def test_sandbox_refuses_what_an_engine_does_not_need(tmp_path: Path, listener: socket.socket) -> None:
    tried = _tried("on", tmp_path, listener)
    assert tried["held"] == _MEASURES
    assert tried["missing"] == []
    assert tried["core"] == [0, 0]
    done = {name for name, outcome in tried["outcomes"].items() if outcome == "done"}
    assert done == _STAYS
    assert set(tried["outcomes"].values()) == {"done", "EACCES", "EPERM"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blobs", "mailbox", "registry.db"]
    assert (tmp_path / "registry.db").read_bytes() == b"secret"


def test_everything_is_possible_without_the_sandbox(tmp_path: Path, listener: socket.socket) -> None:
    """Checks the test above: without the sandbox all attempts succeed."""
    signal.signal(signal.SIGURG, signal.SIG_DFL)
    tried = _tried("off", tmp_path, listener)
    assert tried["held"] == ["limits"]
    assert tried["core"] == [0, 0]
    assert {name: outcome for name, outcome in tried["outcomes"].items() if outcome != "done"} == {}


@needs_landlock
def test_data_folder_inside_libraries_is_reported(tmp_path: Path, listener: socket.socket) -> None:
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


def test_missing_measure_is_reported_and_an_error_in_mode_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitates a kernel without Landlock and a machine with unknown calls; changes nothing in this process."""
    for name in ("set_limits", "forbid_writing", "drop_privileges"):
        monkeypatch.setattr(sandbox, name, lambda: None)
    monkeypatch.setattr(sandbox, "landlock_version", lambda: 0)
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    entered = sandbox.enter_sandbox("auto", None)
    assert entered.held == ["limits", "writing", "privileges"]
    assert entered.missing == ["files (no Landlock in this kernel)", "calls (system calls of this machine unknown)"]
    with pytest.raises(sandbox.SandboxRefused, match=r"lacks files .*, calls .*--sandbox auto"):
        sandbox.enter_sandbox("on", None)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_of_each_machine_allows_and_refuses_calls(machine: str) -> None:
    """Runs the filter in a small interpreter, so that no machine of that kind is needed."""
    known = seccomp._MACHINES[machine]
    code = seccomp._filter(known, pid=77)
    refused = {numbers[known.column] for numbers in seccomp._REFUSED.values()} - {None}
    on_process = {name: numbers[known.column] for name, numbers in seccomp._ON_PROCESS.items()}
    not_second = {name: numbers[known.column] for name, (numbers, _) in seccomp._NOT_SECOND.items()}
    clone, clone3 = seccomp._CLONE[known.column], seccomp._CLONE3[known.column]
    special = {clone, clone3, *on_process.values(), *not_second.values()}
    assert not refused & special
    for number in set(range(500)) - special:
        assert _decide(code, known.audit, number) == ("EPERM" if number in refused else "allow"), number
    assert _decide(code, known.audit ^ 1, 0) == "EPERM"
    assert _decide(code, known.audit, 0x40000000) == "EPERM"
    assert _decide(code, known.audit, clone3) == "ENOSYS"
    assert _decide(code, known.audit, clone, 0x3D0F00) == "allow"
    assert _decide(code, known.audit, clone, 0x11) == "EPERM"
    for name, number in on_process.items():
        assert _decide(code, known.audit, number, 77, 78) == "allow", name
        assert _decide(code, known.audit, number, 78, 77) == "EPERM", name
        # For signals 0 is the process group, for the other calls the process itself.
        assert _decide(code, known.audit, number, 0) == ("EPERM" if name in ("kill", "tgkill") else "allow"), name
    for name, (_, denied) in seccomp._NOT_SECOND.items():
        assert _decide(code, known.audit, not_second[name], denied[0], 1) == "allow", name
        for value in denied:
            assert _decide(code, known.audit, not_second[name], 3, value) == "EPERM", name
            # The kernel reads only 32 bits of the argument.
            assert _decide(code, known.audit, not_second[name], 3, value | 1 << 32) == "EPERM", name


def _decide(code: bytes, audit: int, number: int, first: int = 0, second: int = 0) -> str:
    data = struct.pack("<iIQ6Q", number, audit, 0, first, second, 0, 0, 0, 0)
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


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_numbers_of_system_calls_match_the_kernel(machine: str) -> None:
    if not _HEADERS[machine].exists():
        pytest.skip("the kernel's headers are not installed")
    text = _HEADERS[machine].read_text()
    defined = {name: int(number) for name, number in re.findall(r"define __NR(?:3264)?_(\w+) (\d+)", text)}
    ours: dict[str, tuple[int | None, int | None]] = {
        "clone": seccomp._CLONE,
        "clone3": seccomp._CLONE3,
        **seccomp._REFUSED,
        **seccomp._ON_PROCESS,
        **{name: numbers for name, (numbers, _) in seccomp._NOT_SECOND.items()},
    }
    found = {name: numbers[seccomp._MACHINES[machine].column] for name, numbers in ours.items()}
    # The headers lack calls that are newer than they are.
    known = {name: number for name, number in found.items() if name in defined}
    assert known == {name: defined[name] for name in known}
    assert len(known) > 0.8 * len([number for number in found.values() if number is not None])
    assert not [name for name, number in found.items() if number is None and name in defined]
