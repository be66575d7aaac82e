"""Processes of the bench: servers that gradrule is measured against, and drivers. Each is ended by its process id."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 120.0
_STOP_SECONDS = 5.0
_LOG_CHARACTERS = 2000


class PeerFailed(Exception):
    """A process did not start, or could not answer; holds what it wrote. name: of the contender or the server."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name} {what}")
        self.name = name


@dataclass(frozen=True)
class Server:
    """A server and where it listens."""

    target: str
    pid: int


class Driver:
    """A process that holds one contender."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self._process, self._name = process, name
        self.pid = process.pid

    def latency(self, calls: int) -> dict[str, float]:
        """Makes calls one after the other; returns p50, p99 and maximum in microseconds."""
        return self._ask({"calls": calls})

    def rate(self, calls: int, in_flight: int) -> float:
        """Returns requests per second."""
        return self._ask({"calls": calls, "in_flight": in_flight})["per_s"]

    def _ask(self, question: dict[str, int]) -> dict[str, float]:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self, timeout_s: float | None = None) -> Any:
        """Returns the driver's next line."""
        line = _line(self._process, timeout_s)
        if not line:
            raise PeerFailed(self._name, f"ended with code {self._process.poll()}")
        found = json.loads(line)
        if "failure" in found:
            raise PeerFailed(self._name, f"failed: {found['failure']}")
        return found


@contextmanager
def driver(
    name: str,
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    start_s: float = _START_SECONDS,
) -> Iterator[Driver]:
    """Starts a driver and waits until its contender is ready."""
    with _process(command, log, environment) as process:
        started = Driver(process, name)
        try:
            started.answer(start_s)
        except PeerFailed as failure:
            raise PeerFailed(name, f"did not start:\n{log.read_text()[-_LOG_CHARACTERS:]}") from failure
        yield started


@contextmanager
def server(
    name: str,
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    start_s: float = _START_SECONDS,
) -> Iterator[Server]:
    """Starts a server whose first line ends with its port or its address."""
    with _process(command, log, environment) as process:
        address = _line(process, start_s).strip().rpartition(" ")[2]
        if not address:
            raise PeerFailed(name, f"did not serve:\n{log.read_text()[-_LOG_CHARACTERS:]}")
        yield Server(f"127.0.0.1:{address}" if address.isdecimal() else address, process.pid)


def module(name: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Returns the command that runs a module of the benchmarks."""
    return [python, "-m", f"tests.benchmarks.{name}", *arguments]


def driver_command(settings: Mapping[str, str], python: str = sys.executable) -> list[str]:
    """Returns the command of a driver for one of gradrule's contenders."""
    return module("driver", json.dumps(settings), python=python)


@contextmanager
def _process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | dict(environment),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # A driver of a peer has started that peer's server.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _line(process: subprocess.Popen[str], timeout_s: float | None) -> str:
    """Returns a line of the process's output; empty where it has ended or says nothing in time."""
    assert process.stdout is not None
    ends = None if timeout_s is None else time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if selector.select(None if ends is None else max(0.0, ends - time.monotonic())):
            return process.stdout.readline()
    return ""
