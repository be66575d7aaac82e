"""A server of `gr.local()` ends with its client, however the client ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


def _descendants(pid: int) -> set[int]:
    found = set(children(pid))
    return found.union(*map(_descendants, found))
