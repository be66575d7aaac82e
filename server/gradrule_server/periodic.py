"""Runs checks at intervals on a background thread, and repeats warnings while a problem lasts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Self

_log = logging.getLogger(__name__)

_REPEAT_S = 60.0


class PeriodicChecks:
    """Context manager that calls `checks` in turn every `every_s` seconds on a daemon thread."""

    def __init__(self, every_s: float, *checks: Callable[[], object]) -> None:
        self._every_s = every_s
        self._checks = checks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="periodic-checks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            for check in self._checks:
                try:
                    check()
                except Exception:
                    # One failure must not stop the other checks, nor later runs of this one.
                    _log.exception("a periodic check failed")


class RepeatedWarning:
    """Logs a problem when it appears or changes, and once a minute while it lasts."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._reported = ""
        self._reported_at = 0.0

    def report(self, problem: str | None) -> None:
        """Logs the current problem unless that was done within the last minute; None means that there is none."""
        now = time.monotonic()
        if problem and (problem != self._reported or now - self._reported_at >= _REPEAT_S):
            self._log.warning("%s", problem)
            self._reported_at = now
        self._reported = problem or ""
