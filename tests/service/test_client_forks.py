"""Clients in forked processes: calls work with gRPC's support for forks, and are refused without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.service.servers import RunningServer, server_environment

_FORKS = """
import os, sys
import gradrule as gr

def square(client):
    try:
        g = gr.Graph()
        g.op("Square", g.placeholder("x", "float32", []), name="y")
        return client.evaluate(g, {"x": 3.0}, "y").outputs["y"].item()
    except gr.GradruleError as refusal:
        return refusal

def connects():
    try:
        with gr.connect(sys.argv[1]) as client:
            return square(client)
    except gr.GradruleError as refusal:
        return refusal

with gr.connect(sys.argv[1]) as client:
    for _ in range(6):
        # After some calls, the client has opened a stream.
        square(client)
    child = os.fork()
    if child == 0:
        print("its client:", square(client), flush=True)
        print("again:", square(client), flush=True)
        print("a new client:", connects(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print("the parent:", square(client), flush=True)
"""

_CONNECTS_LATER = """
import os, sys
import gradrule as gr

child = os.fork()
if child == 0:
    print(gr.connect(sys.argv[1]).list_programs(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("support", ["0", "1"])
def test_calls_in_forked_processes(server: RunningServer, support: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, server.target],
        env=server_environment({"GRPC_ENABLE_FORK_SUPPORT": support}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert found["the parent"] == "9.0"
    for name in ("its client", "again", "a new client"):
        if support == "1":
            assert found[name] == "9.0"
        else:
            assert found[name].startswith("UNSUPPORTED: this process was forked")
            assert "GRPC_ENABLE_FORK_SUPPORT=1" in found[name]


def test_processes_that_fork_before_they_connect_are_served(server: RunningServer) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CONNECTS_LATER, server.target],
        env=server_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("[")
