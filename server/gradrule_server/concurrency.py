"""Helpers for threads and tasks: checks at intervals, functions that block, logged failures, locks of tenants."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Self, TypeVar

_log = logging.getLogger(__name__)

_REPEAT_S = 60.0

# A call that waits in vain fails this much before its deadline, so that its caller receives the reason.
_MARGIN_S = 0.5
_MARGIN_SHARE = 0.1

T = TypeVar("T")


def waiting_time(left_s: float) -> float:
    """Returns how long a call may wait for its turn, seconds, if it has `left_s` until its deadline."""
    return left_s - min(_MARGIN_S, _MARGIN_SHARE * left_s)


class PeriodicChecks:
    """Context manager that calls `checks` in turn every `every_s` seconds on a daemon thread.

    Args:
        every_s: Seconds between two calls.
        checks: What is called.
        wait_s: How long the end of the context waits for a check that runs, seconds; None: until it returns.
    """

    def __init__(self, every_s: float, *checks: Callable[[], object], wait_s: float | None = None) -> None:
        self._every_s = every_s
        self._wait_s = wait_s
        self._checks = checks
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="periodic-checks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._wait_s)

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


async def run_in_own_thread(name: str, function: Callable[[], T]) -> T:
    """Returns what a function returns that may block for long: it runs in a daemon thread of its own.

    A process that ends does not wait for the thread. If the caller is cancelled, the function runs on, and its
    result is dropped.

    Raises:
        RuntimeError: The system lets no thread start.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def report(result: T | None, failure: BaseException | None) -> None:
        if done.done():
            return
        if failure is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(failure)

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as cause:
            failure = cause
        # Raised where the loop has ended: nothing is left to report to.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(report, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


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


class TenantSlots:
    """Limits how much work of an event loop runs at a time, of all tenants and of each.

    A free slot goes to the waiting tenant that has the fewest, and then to the one that waits longest.

    Args:
        count: Number of slots.
        per_tenant: Number of slots that one tenant may have.
    """

    def __init__(self, count: int, per_tenant: int) -> None:
        self.count = count
        self._per_tenant = per_tenant
        self._used: Counter[str] = Counter()
        # The tenant that waits longest is first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a slot."""
        return sum(map(len, list(self._waiting.values())))

    def is_kept_waiting_by(self, tenant: str) -> bool:
        """Returns whether other tenants wait for a slot, and a tenant has one while all are used."""
        is_full = self._used.total() >= self.count and self._used[tenant] > 0
        return is_full and any(waiting != tenant for waiting in self._waiting)

    @contextlib.asynccontextmanager
    async def hold(self, tenant: str) -> AsyncIterator[None]:
        """Holds a slot within the context."""
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(slot)
        self._assign()
        try:
            await slot
            yield
        finally:
            self._end(tenant, slot)

    def _end(self, tenant: str, slot: asyncio.Future[None]) -> None:
        # A task that gave up while it waited has no slot.
        if slot.cancelled():
            slots = self._waiting.get(tenant, deque())
            if slot in slots:
                slots.remove(slot)
                if not slots:
                    del self._waiting[tenant]
            return
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]
        self._assign()

    def _assign(self) -> None:
        while self._used.total() < self.count:
            ready = [tenant for tenant in self._waiting if self._used[tenant] < self._per_tenant]
            if not ready:
                break
            tenant = min(ready, key=lambda name: self._used[name])
            slots = self._waiting.pop(tenant)
            slot = slots.popleft()
            if slots:
                self._waiting[tenant] = slots
            if not slot.cancelled():
                self._used[tenant] += 1
                slot.set_result(None)


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
