"""Counts the functions of the front end that a repeated call runs through."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import gradrule as gr
from gradrule.common.fast_paths import VARIABLE, disabled_paths
from tests.service.servers import RunningServer, running_server
from tests.waiting import wait_until

CALLS = 50
MOST_FILES = 25
MOST_CALLS = 75


@pytest.mark.skipif(
    not {"known-calls", "streams"}.isdisjoint(disabled_paths(os.environ.get(VARIABLE, ""))),
    reason="calls take another path",
)
def test_a_warm_call_runs_through_few_functions(tmp_path: Path) -> None:
    """A call of the Python client over its stream, from the bytes that gRPC has received to those that it sends."""
    file = tmp_path / "calls"
    environment = {"TRACED_CALLS": str(file)}
    program = ("-m", "tests.service.traced_server")
    with (
        running_server(tmp_path / "data", environment=environment, program=program) as server,
        gr.connect(server.target, stream=True) as client,
    ):
        g = gr.Graph()
        g.op_output("Tanh", g.placeholder("x", "float32", [2]), name="y")
        compiled = client.compile(g, ys="y", xs="x", fetches=["y"])
        for _ in range(3):
            compiled(x=[1.0, 2.0])
        _signal(server, file)
        for _ in range(CALLS):
            compiled(x=[1.0, 2.0])
        found = _signal(server, file)
    # Each call runs through all of these; timers run less often.
    each = {(path, name): count // CALLS for path, name, count in found if count >= CALLS}
    for (path, name), count in sorted(each.items()):
        print(f"{count:3} {Path(path).parent.name}/{Path(path).name} {name}")
    files = {path for path, _ in each}
    print(f"{len(files)} files, {sum(each.values())} calls of functions")
    assert len(files) <= MOST_FILES
    assert sum(each.values()) <= MOST_CALLS


def _signal(server: RunningServer, file: Path) -> list[tuple[str, str, int]]:
    """Starts or ends the counting; returns what was counted."""
    file.unlink(missing_ok=True)
    server.process.send_signal(signal.SIGUSR2)
    wait_until(lambda: file.exists() or None, "the counts")
    found: list[tuple[str, str, int]] = json.loads(file.read_text())
    return found
