"""Gives tasks to compile workers: processes that read the graphs of one tenant each, one task at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

from gradrule_server.concurrency import TenantSlots
from gradrule_server.link.engine import Engine, Use
from gradrule_server.link.process import DEFAULT_TIMES, EngineTimes, Spares
from gradrule_server.recovery.endings import EndReason

# Metrics leave out engines with this index.
_WORKER = -2
_PER_TENANT = 2
# A process does not return the memory of its tasks. A worker that has more than this for itself is replaced.
_MAX_KEPT_BYTES = 256 * 1024 * 1024


class CompileWorkers:
    """Gives each task a worker of its own: at most two per tenant, and `most` of all tenants together.

    A worker belongs to one tenant as long as it lives. It ends after 15 s without a task, and when the caller of its
    task gives up. Tasks of tenants with fewer busy workers come first, then the tenant that waits longest. Belongs to
    one asyncio loop.
    """

    def __init__(self, spares: Spares, most: Callable[[], int], times: EngineTimes = DEFAULT_TIMES) -> None:
        self._times = times
        self._spares = spares
        self._most = most
        self._slots = TenantSlots(1, _PER_TENANT)
        self.is_kept_waiting_by = self._slots.is_kept_waiting_by
        self.ended: Counter[str] = Counter()
        """The number of workers that ended unexpectedly, by reason."""
        self.workers: list[Engine] = []
        """The workers of all tenants, busy and idle."""

    @property
    def count(self) -> int:
        """The number of workers."""
        return len(self.workers)

    @property
    def resident_bytes(self) -> int:
        """The last measured memory of all workers."""
        return sum(worker.resident_bytes for worker in self.workers)

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a worker."""
        return self._slots.waiting

    @property
    def busy(self) -> int:
        """The number of workers that work on a task."""
        return sum(worker.holders > 0 for worker in self.workers)

    @contextlib.asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[Engine]:
        """Provides a worker for a task of a tenant, and ends it if the task still runs after the context."""
        self._slots.count = self._most()
        async with self._slots.hold(owner):
            worker = self._take(owner)
            try:
                with worker.held():
                    # A process may end before the task starts.
                    while not worker.is_ready:
                        await worker.fill()
                    yield worker
            finally:
                self._take_back(worker)

    def end(self, worker: Engine, reason: EndReason = EndReason.OVERRUN) -> None:
        """Ends a worker, even if it is busy; then for `reason`."""
        if worker in self.workers:
            self.workers.remove(worker)
            worker.remove(reason)

    def _take(self, owner: str) -> Engine:
        """Returns an idle worker of a tenant, or a new one, in the place of an idle one if there are too many."""
        idle = sorted((worker for worker in self.workers if worker.is_idle), key=lambda worker: worker.used_at)
        own = next((worker for worker in idle if worker.owner == owner), None)
        if own is not None:
            return own
        if idle and len(self.workers) >= self._most():
            self.end(idle[0])
        worker = Engine(
            _WORKER, self._spares, self._changed, owner=owner, use=Use.COMPILE, ended=self.ended, times=self._times
        )
        self.workers.append(worker)
        return worker

    def _take_back(self, worker: Engine) -> None:
        """Keeps a worker for the next task; ends it if it still works on the last one, or has grown too much."""
        if not worker.is_idle or worker.own_bytes > _MAX_KEPT_BYTES:
            self.end(worker)
            return
        loop = asyncio.get_running_loop()
        worker.used_at = loop.time()
        loop.call_later(self._times.worker_idle_s, self._end_idle, worker, worker.used_at)

    def _end_idle(self, worker: Engine, used_at: float) -> None:
        if worker.is_idle and worker.used_at == used_at:
            self.end(worker)

    def _changed(self, worker: Engine) -> None:
        """Ends an idle worker whose process has ended."""
        if worker.generation and not (worker.is_ready or worker.holders):
            self.end(worker)
