"""A server of `gr.local()` ends with its client, however the client ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import gradrule as gr
from gradrule._rpc import server_supervisor
from gradrule_server.registry.data_folder import FolderLock
from tests.processes import children, has_ended
from tests.service.servers import server_environment
from tests.waiting import wait_until

_CLIENT = """
import os, signal, sys, threading
import gradrule as gr

local, clients = gr.local(), []
starter = threading.Thread(target=lambda: clients.append(local.__enter__()))
starter.start()
starter.join()
if os.fork() == 0:
    local.__exit__(None, None, None)
    print("fork left the block", flush=True)
    signal.pause()
for _ in sys.stdin:
    clients[0].sample_rule("Relu", x=[1.0], dy=[1.0])
    print("the server answers", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_local_server_ends_with_a_client_that_a_signal_ends(tmp_path: Path, number: signal.Signals) -> None:
    """The thread that started the server has ended before, and a process that the client forked ends later."""
    with subprocess.Popen(
        [sys.executable, "-c", _CLIENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=server_environment({"TMPDIR": str(tmp_path)}),
        text=True,
        bufsize=1,
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "fork left the block\n"
        client.stdin.write("call\n")
        assert client.stdout.readline() == "the server answers\n"
        forked = next(pid for pid in children(client.pid) if not children(pid))
        started = _descendants(client.pid) - {forked}
        assert len(started) >= 3, "supervisor, server and engine"
        assert any(tmp_path.iterdir())

        client.send_signal(number)

        wait_until(lambda: all(map(has_ended, started)) or None, "end of the server")
        wait_until(lambda: not any(tmp_path.iterdir()) or None, "removal of the temporary folder")
        assert not has_ended(forked)
        os.kill(forked, signal.SIGKILL)


def test_next_start_removes_what_a_killed_supervisor_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = set(children(os.getpid()))
    with gr.local(device="cpu") as client:
        (supervisor,) = set(children(os.getpid())) - before
        started = _descendants(supervisor)
        (left,) = tmp_path.iterdir()
        os.kill(supervisor, signal.SIGKILL)
        wait_until(lambda: all(map(has_ended, started)) or None, "end of the server")
        assert left.exists()
        client.close()
    other = tmp_path / "gradrule-local-file"
    other.touch()
    with gr.local(device="cpu") as first:
        wait_until(lambda: not left.exists() or None, "removal of the folder")
        (kept,) = (path for path in tmp_path.iterdir() if path != other)
        with gr.local(device="cpu"):
            # The folder of a supervisor that lives stays.
            assert first.list_presets()
            assert (kept / "data").exists()
    assert list(tmp_path.iterdir()) == [other]


def test_folder_of_a_server_that_still_runs_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running, ended = (tmp_path / f"gradrule-local-{name}" for name in ("running", "ended"))
    for folder in (running, ended):
        (folder / "data").mkdir(parents=True)
    lock = FolderLock(running / "data")
    server_supervisor._remove_abandoned_folders()
    assert list(tmp_path.iterdir()) == [running]
    lock.release()
    server_supervisor._remove_abandoned_folders()
    assert list(tmp_path.iterdir()) == []


def test_folder_that_another_supervisor_removes_meanwhile_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = [tmp_path / f"gradrule-local-{name}" for name in ("abandoned", "removed")]
    for folder in folders:
        folder.mkdir()
    with os.scandir(tmp_path) as found:
        entries = sorted(found, key=lambda entry: entry.name, reverse=True)
    folders[1].rmdir()
    monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext(entries))
    server_supervisor._remove_abandoned_folders()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_other_users_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "gradrule-local-foreign").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    server_supervisor._remove_abandoned_folders()
    assert (tmp_path / "gradrule-local-foreign").exists()


def _descendants(pid: int) -> set[int]:
    found = set(children(pid))
    return found.union(*map(_descendants, found))


def test_local_server_without_a_block_ends_with_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    ends: dict[str, Callable[[list[gr.Client]], object]] = {
        "closed": lambda clients: clients[0].close(),
        "dropped": lambda clients: clients.clear(),
    }
    for how, end in ends.items():
        before = _descendants(os.getpid())
        clients = [gr.local(device="cpu")]
        started = _descendants(os.getpid()) - before
        assert len(started) >= 3, "supervisor, server and engine"
        graph = gr.Graph()
        graph.sign(graph.placeholder("x", "float32", [None]), name="y")
        program = clients[0].compile(graph, fetches="y")
        # Repeated calls open a stream, which must not keep the client.
        assert [program(x=[2.0]).outputs["y"].tolist() for _ in range(3)] == [[1.0]] * 3
        del program
        end(clients)
        assert all(map(has_ended, started)), how
        assert not any(tmp_path.iterdir()), how
        if clients:
            clients[0].close()
            with pytest.raises(gr.errors.UnavailableError, match="closed"):
                clients[0].list_presets()


_AIO_CLIENT = """
import asyncio, sys
import gradrule as gr

async def main():
    client = await gr.aio.local(device="cpu")
    sampled = await client.sample_rule("Relu", x=[1.0], dy=[3.0])
    print(sampled.gradients["dx"], flush=True)
    sys.stdin.readline()
    if "close" in sys.argv:
        await client.close()
        print("closed", flush=True)
        sys.stdin.readline()
    return client

kept = asyncio.run(main())
"""


@pytest.mark.parametrize("arguments", [(), ("close",)], ids=["exit", "close"])
def test_awaited_local_server_ends_with_close_or_with_the_interpreter(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", _AIO_CLIENT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=server_environment({"TMPDIR": str(tmp_path)}),
        text=True,
        bufsize=1,
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "[3.]\n"
        started = _descendants(client.pid)
        assert len(started) >= 3, "supervisor, server and engine"
        client.stdin.write("\n")
        if arguments:
            assert client.stdout.readline() == "closed\n"
            assert all(map(has_ended, started))
            assert not any(tmp_path.iterdir())
            client.stdin.write("\n")
        assert client.wait() == 0
        assert all(map(has_ended, started))
        assert not any(tmp_path.iterdir())
