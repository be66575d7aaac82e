"""Starts real servers for tests, as a user would, on a free port and with their own data folder."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gradrule as gr
from gradrule.common.fast_paths import VARIABLE
from tests.processes import engines
from tests.waiting import wait_until

START_TIMEOUT_S = 200.0
STOP_TIMEOUT_S = 120.0

_READY = re.compile(r"^gradrule: listening on (\S+)$", re.MULTILINE)


PROGRAM = ("-m", "gradrule_server")


def free_port() -> int:
    """Returns a port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def serve_command(*flags: str, program: Sequence[str] = PROGRAM) -> list[str]:
    """Returns the command that starts a server."""
    return [sys.executable, *program, "serve", *flags]


def server_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns this process's environment without server settings, except the disabled fast paths."""
    kept = {name: value for name, value in os.environ.items() if name == VARIABLE or not name.startswith("GRADRULE_")}
    return kept | dict(extra or {})


@dataclass
class RunningServer:
    """Controls one server process."""

    process: subprocess.Popen[bytes]
    target: str
    data_dir: Path
    log: Path
    is_stuck: bool = False
    """Whether it did not stop when it was told to."""

    def engine_pid(self) -> int | None:
        """Returns the process id of the oldest engine; None while there is none."""
        return next(iter(engines(self.process.pid)), None)

    def session_engine_pid(self) -> int:
        """Returns the process that holds sessions, on a server without credentials."""

        def probe() -> int | None:
            # There are two while one ends.
            pids = [engine.pid for engine in client.server_status().engines if engine.holds_sessions]
            return pids[0] if len(pids) == 1 else None

        with gr.connect(self.target) as client:
            return wait_until(probe, "only engine for sessions")

    def wait_for_running_calls(self, count: int) -> None:
        """Waits until engines run that many calls, on a server without credentials."""
        with gr.connect(self.target) as client:
            wait_until(
                lambda: sum(engine.running for engine in client.server_status().engines) == count or None,
                f"{count} running calls",
            )

    def wait_for_engine(self, other_than: int | None = None) -> int:
        """Waits for an engine process other than `other_than` and returns its id."""
        return wait_until(lambda: found if (found := self.engine_pid()) != other_than else None, "an engine process")

    def kill_engines(self) -> None:
        """Kills all engines that there are now by SIGKILL."""
        for engine in engines(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)

    def terminate(self) -> int:
        """Sends SIGTERM and returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kills the server and its engine by SIGKILL, like a power failure."""
        engine = self.engine_pid()
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        if engine is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)


@contextlib.contextmanager
def running_server(
    data_dir: Path,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
) -> Iterator[RunningServer]:
    """Starts a server and asserts that it stops properly; without spares, unless `flags` set them.

    `program`: the module arguments for Python.
    """
    with started_server(data_dir, flags, environment, program) as running:
        yield running
    code = running.process.returncode
    # Tests may kill servers.
    if running.is_stuck or code not in (0, -signal.SIGKILL):
        how = f"did not stop within {STOP_TIMEOUT_S:g} s" if running.is_stuck else f"ended with {code}"
        raise AssertionError(f"the server {how}:\n{running.log.read_text()[-4000:]}")


@contextlib.contextmanager
def started_server(
    data_dir: Path,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = PROGRAM,
) -> Iterator[RunningServer]:
    """Starts a server and stops it in any way: kills it if it does not stop."""
    if "--spares" not in flags:
        flags = (*flags, "--spares", "0")
    data_dir.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in data_dir.glob("*.stdout"))
    stdout, log = data_dir / f"{number}.stdout", data_dir / f"{number}.stderr"
    with stdout.open("wb") as out, log.open("wb") as err:
        process = subprocess.Popen(
            serve_command("--port", "0", "--data-dir", str(data_dir / "registry"), *flags, program=program),
            stdout=out,
            stderr=err,
            env=server_environment(environment),
        )
    running = RunningServer(process, "", data_dir, log)
    try:
        running.target = _wait_for_target(process, stdout, log)
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                running.is_stuck = True
                process.kill()
                process.wait()


def _wait_for_target(process: subprocess.Popen[bytes], stdout: Path, log: Path) -> str:
    def probe() -> str | None:
        match = _READY.search(stdout.read_text())
        if match is not None:
            return match[1]
        if process.poll() is not None:
            raise AssertionError(f"the server ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        return None

    return wait_until(probe, f"server (log: {log})", START_TIMEOUT_S)
