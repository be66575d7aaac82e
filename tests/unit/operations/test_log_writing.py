"""Tests that writing logs never blocks requests, and that dropped lines are reported."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradrule_server.operations import audit, logs
from gradrule_server.operations.audit import AuditLog
from gradrule_server.operations.log_writing import BackgroundWriter, LineHandler
from gradrule_server.operations.logs import JsonFormatter
from gradrule_server.operations.operations import Operations
from tests.unit.operations.records import make, refusal
from tests.unit.operations.states import sources

PIPE_BYTES = 4096


class Pipe:
    """A log that is read when the test says so."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.stream = os.fdopen(write, "w")
        self._text = b""
        self._reader = threading.Thread(target=self._read_all)

    def read(self) -> None:
        """From now on somebody reads."""
        self._reader.start()

    def leave(self) -> None:
        """Nobody ever reads."""
        os.close(self._read)

    def wait_for(self, count: int) -> None:
        """Until so many lines were read."""
        ends_at = time.monotonic() + 10
        while self._text.count(b"\n") < count and time.monotonic() < ends_at:
            time.sleep(0.01)

    def lines(self) -> list[dict[str, Any]]:
        """All that was written until now, and no more after that."""
        self.stream.close()
        self._reader.join(10)
        return [json.loads(line) for line in self._text.splitlines()]

    def _read_all(self) -> None:
        while found := os.read(self._read, 65536):
            self._text += found
        os.close(self._read)


@pytest.fixture
def loggers() -> Iterator[None]:
    """The root logger and the audit log's as they were, afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    audit.configure("")


def logger_to(pipe: Pipe) -> logging.Logger:
    logger = logging.Logger("test")
    handler = LineHandler(pipe.stream)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    return logger


def flood(logger: logging.Logger, count: int) -> None:
    """Logs so many lines; fails where that waits for somebody."""

    def log() -> None:
        for number in range(count):
            logger.info("line %d", number)

    flooding = threading.Thread(target=log, daemon=True)
    flooding.start()
    flooding.join(20)
    assert not flooding.is_alive(), "who logs waits for who reads"


def test_unread_pipe_blocks_no_request_and_dropped_lines_are_counted() -> None:
    pipe = Pipe()
    logger = logger_to(pipe)
    background = BackgroundWriter(logger, capacity=100)
    background.start()
    flood(logger, 1000)
    assert not background.can_write
    assert not background.drain(0.1)
    pipe.read()
    assert background.drain(10)
    assert background.can_write
    logger.info("and on")
    assert background.drain(10)
    lost = background.take_dropped()
    *reported, last = [line["message"] for line in pipe.lines()]
    numbers = [int(line.removeprefix("line ")) for line in reported]
    assert numbers == sorted(set(numbers))
    assert (len(numbers), last) == (1000 - lost, "and on")
    assert 100 <= len(numbers) < 1000
    assert background.take_dropped() == 0


def test_lines_written_in_the_background_name_the_current_request() -> None:
    pipe = Pipe()
    pipe.read()
    logger = logger_to(pipe)
    background = BackgroundWriter(logger)
    background.start()

    def fails(_: object) -> None:
        try:
            raise ValueError("so it was")
        except ValueError:
            logger.exception("failed %s", "here")

    make(tenant="ada", metadata=(("x-request-id", "r1"),), within=fails)
    assert background.drain(10)
    (line,) = pipe.lines()
    assert (line["request_id"], line["tenant"], line["message"]) == ("r1", "ada", "failed here")
    assert (line["logger"], line["level"]) == ("test", "error")
    assert "so it was" in line["exception"]


def test_closed_pipe_costs_lines_only() -> None:
    pipe = Pipe()
    logger = logger_to(pipe)
    background = BackgroundWriter(logger)
    background.start()
    pipe.leave()
    flood(logger, 3)
    assert background.drain(10)
    assert (background.can_write, background.take_dropped()) == (False, 3)
    pipe.stream.close()


@pytest.mark.usefixtures("loggers")
def test_audit_log_drops_no_lines_in_normal_operation(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit.configure(str(path))
    background = BackgroundWriter(audit.LOGGER)
    background.start()
    log = AuditLog()
    for number in range(5000):
        make(log, fails=refusal("QUOTA_EXCEEDED"), tenant=f"t{number % 100}")
    assert background.drain(20)
    assert (len(path.read_text().splitlines()), background.take_dropped()) == (5000, 0)


@pytest.mark.usefixtures("loggers")
def test_audit_log_continues_once_its_missing_folder_is_back(tmp_path: Path) -> None:
    folder, away = tmp_path / "logs", tmp_path / "away"
    folder.mkdir()
    audit.configure(str(folder / "audit.jsonl"))
    background = BackgroundWriter(audit.LOGGER)
    background.start()
    log = AuditLog()

    def report() -> None:
        log.log_dropped(background.take_dropped(), may_write=background.can_write)
        assert background.drain(10)

    folder.rename(away)
    for _ in range(3):
        log.log_quarantine("unheard")
    assert background.drain(10)
    report()
    assert log.dropped == 3
    assert not folder.exists()
    folder.mkdir()
    log.log_quarantine("heard")
    assert background.drain(10)
    report()
    reported = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    assert [(line["event"], line.get("count")) for line in reported] == [("quarantine", None), ("left_out", 3)]


@pytest.mark.usefixtures("loggers")
def test_stopping_server_writes_all_lines_and_reports_dropped_ones(tmp_path: Path) -> None:
    pipe = Pipe()
    logs.configure("info", "json", pipe.stream)
    sent = 30_000

    async def serve() -> None:
        operations = Operations("1", audit_log=str(tmp_path / "audit.jsonl"))
        await operations.start(sources(), lambda: True)
        try:
            flood(logging.getLogger(), sent)
            pipe.read()
            # A busy machine may take longer than a server that stops waits.
            pipe.wait_for(10_000)
        finally:
            await operations.stop()

    asyncio.run(serve())
    *reported, last = [line["message"] for line in pipe.lines()]
    lost = sent - len(reported)
    assert lost > 0
    assert last == f"{lost} lines of the log were left out"


@pytest.mark.usefixtures("loggers")
def test_stopping_server_does_not_wait_for_a_blocked_log(tmp_path: Path) -> None:
    pipe = Pipe()
    logs.configure("info", "json", pipe.stream)

    async def serve() -> float:
        operations = Operations("1")
        await operations.start(sources(), lambda: True)
        flood(logging.getLogger(), 1000)
        began = time.monotonic()
        await operations.stop()
        return time.monotonic() - began

    assert asyncio.run(serve()) < 10
    pipe.read()
    pipe.wait_for(1000)
    assert [line["message"] for line in pipe.lines()] == [f"line {number}" for number in range(1000)]


def test_process_exits_although_its_log_is_blocked() -> None:
    script = """
import logging
from gradrule_server.operations import logs
from gradrule_server.operations.log_writing import BackgroundWriter
logs.configure("info", "json")
BackgroundWriter(logging.getLogger()).start()
for number in range(1000):
    logging.info("x" * 1000)
print("done", flush=True)
"""
    # As most processes are: with buffers, and their locks.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered
    ) as process:
        try:
            assert process.wait(20) == 0
            assert process.stdout is not None
            assert process.stdout.read() == b"done\n"
        finally:
            process.kill()
