"""Tests periodic checks and repeated warnings."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from gradrule_server.periodic import PeriodicChecks, RepeatedWarning


def test_failing_check_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Semaphore(0)
    threads: set[str] = set()

    def fail() -> None:
        raise ValueError("not now")

    def check() -> None:
        threads.add(threading.current_thread().name)
        done.release()

    with PeriodicChecks(0.01, fail, check):
        assert done.acquire(timeout=20)
        assert done.acquire(timeout=20)
    assert threads == {"periodic-checks"}
    assert "not now" in caplog.text
    while done.acquire(blocking=False):
        pass
    assert not any(thread.name == "periodic-checks" for thread in threading.enumerate())


def test_warning_is_logged_when_it_changes_and_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    warning = RepeatedWarning(logging.getLogger("here"))
    for problem in (None, "one", "one", "two", "two", None, "two"):
        warning.report(problem)
    assert caplog.messages == ["one", "two", "two"]
    clock[0] += 59
    warning.report("two")
    assert len(caplog.messages) == 3
    clock[0] += 2
    warning.report("two")
    assert caplog.messages[3:] == ["two"]
