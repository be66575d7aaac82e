"""Helpers for threads and tasks: checks at intervals, repeated warnings, tasks that log failures, locks of tenants."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self

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


def start_logged_task(
    coroutine: Coroutine[Any, Any, None], name: str, log: Callable[..., None], failure: str
) -> asyncio.Task[None]:
    """Starts a task of the running loop. If it fails, calls `log` with `failure` and the exception."""

    def report(ended: asyncio.Task[None]) -> None:
        if not ended.cancelled() and (cause := ended.exception()) is not None:
            log(failure, exc_info=cause)

    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(report)
    return task


class TenantLocks:
    """Locks by owner, first come first served. A lock exists only while somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    def waiting(self, owner: str) -> int:
        """Returns how many tasks wait for the owner's lock."""
        return max(0, self._users[owner] - 1)

    def is_held(self, owner: str) -> bool:
        """Returns whether a task holds the owner's lock, or waits for it."""
        return self._users[owner] > 0

    @contextlib.asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[None]:
        """Holds the owner's lock within the context."""
        self._users[owner] += 1
        try:
            async with self._locks.setdefault(owner, asyncio.Lock()):
                yield
        finally:
            self._users[owner] -= 1
            if not self._users[owner]:
                del self._users[owner], self._locks[owner]
