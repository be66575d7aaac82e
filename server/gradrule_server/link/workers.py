"""Gives tasks to compile workers: processes that read the graphs of one tenant each, one task at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

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
    task gives up. Tasks of tenants without a busy worker come first, then the task that waits longest. Belongs to one
    asyncio loop.
    """

    def __init__(self, spares: Spares, most: Callable[[], int], times: EngineTimes = DEFAULT_TIMES) -> None:
        self._times = times
        self._spares = spares
        self._most = most
        self._waiting: dict[asyncio.Future[Engine], str] = {}
        """The tasks that wait for a worker, and their tenants."""
        self._busy: set[Engine] = set()
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
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """The number of workers that work on a task."""
        return len(self._busy)

    @property
    def idle(self) -> list[Engine]:
        """The workers without a task."""
        return [worker for worker in self.workers if worker not in self._busy]

    def is_kept_waiting_by(self, owner: str) -> bool:
        """Returns whether other tenants wait for a worker, and a tenant has one while all are busy."""
        is_full = len(self._busy) >= self._most() and any(worker.owner == owner for worker in self._busy)
        return is_full and any(waiting != owner for waiting in self._waiting.values())

    @contextlib.asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[Engine]:
        """Provides a worker for a task of a tenant, and ends it if the task still runs after the context."""
        given: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        self._waiting[given] = owner
        self._assign()
        try:
            worker = await given
            # A process may end before the task starts.
            while not worker.is_ready:
                await worker.fill()
            yield worker
        finally:
            self._waiting.pop(given, None)
            if given.done() and not given.cancelled():
                self._take_back(given.result())

    async def stop(self) -> None:
        """Stops all workers."""
        for given in self._waiting:
            given.cancel()
        workers, self.workers = self.workers, []
        await asyncio.gather(*(worker.stop() for worker in workers))

    def end(self, worker: Engine, reason: EndReason = EndReason.OVERRUN) -> None:
        """Ends a worker, even if it is busy; then for `reason`."""
        if worker in self.workers:
            self.workers.remove(worker)
            self._busy.discard(worker)
            worker.remove(reason)
            self._assign()

    def _assign(self) -> None:
        """Gives workers to waiting tasks, as long as there are any."""
        busy = {worker.owner for worker in self._busy}
        for given, owner in sorted(self._waiting.items(), key=lambda item: item[1] in busy):
            worker = None if given.done() else self._worker_for(owner)
            if worker is not None:
                self._busy.add(worker)
                given.set_result(worker)
                del self._waiting[given]

    def _worker_for(self, owner: str) -> Engine | None:
        """Returns an idle worker of a tenant, or a new one if the tenant may have one more."""
        own = [worker for worker in self.workers if worker.owner == owner]
        idle = next((worker for worker in own if worker not in self._busy), None)
        if idle is not None:
            return idle
        if len(own) >= _PER_TENANT or (len(self.workers) >= self._most() and not self.idle):
            return None
        if len(self.workers) >= self._most():
            oldest = min(self.idle, key=lambda worker: worker.used_at)
            self.workers.remove(oldest)
            oldest.remove()
        worker = Engine(
            _WORKER,
            self._spares,
            self._changed,
            owner=owner,
            use=Use.COMPILE,
            ended=self.ended,
            times=self._times,
        )
        self.workers.append(worker)
        return worker

    def _take_back(self, worker: Engine) -> None:
        """Keeps a worker for the next task; ends it if it still works on the last one, or has grown too much."""
        if worker not in self.workers:
            return
        if worker.load or not worker.is_ready or worker.own_bytes > _MAX_KEPT_BYTES:
            self.end(worker)
            return
        loop = asyncio.get_running_loop()
        self._busy.discard(worker)
        worker.used_at = loop.time()
        loop.call_later(self._times.worker_idle_s, self._end_idle, worker, worker.used_at)
        self._assign()

    def _end_idle(self, worker: Engine, used_at: float) -> None:
        if worker not in self._busy and worker.used_at == used_at:
            self.end(worker)

    def _changed(self, worker: Engine) -> None:
        """Ends an idle worker whose process has ended."""
        if worker.generation and not worker.is_ready and worker not in self._busy:
            self.end(worker)
