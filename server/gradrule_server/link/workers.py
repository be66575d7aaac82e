"""Gives tasks to compile workers: processes that read the graphs of one tenant each, one task at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from gradrule_server.link.engine import Engine, Use
from gradrule_server.link.process import DEFAULT_TIMES, EngineTimes, Spares
from gradrule_server.recovery.endings import EndReason

# Metrics leave out engines with this index.
_WORKER = -2
_PER_TENANT = 2
# A process does not return the memory of its tasks. A worker that grew by more than this is replaced.
_MAX_KEPT_BYTES = 256 * 1024 * 1024


@dataclass(eq=False)
class _Waiting:
    """A task that waits for a worker."""

    owner: str
    worker: asyncio.Future[Engine] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CompileWorkers:
    """Gives each task a worker of its own: at most two per tenant, and `most` of all tenants together.

    A worker belongs to one tenant as long as it lives. It ends after 15 s without a task, and soon after the caller of
    its task gave up. Tasks of tenants without a busy worker come first, then the task that waits longest. Belongs to
    one asyncio loop.
    """

    def __init__(self, spares: Spares, most: Callable[[], int], times: EngineTimes = DEFAULT_TIMES) -> None:
        self._times = times
        self._spares = spares
        self._most = most
        self._waiting: list[_Waiting] = []
        self._busy: dict[Engine, float] = {}
        self._first_bytes: dict[Engine, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_stopped = False
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
        """The number of workers that work on a task, or that are being ended because its caller gave up."""
        return len(self._busy)

    @property
    def idle(self) -> list[Engine]:
        """The workers without a task."""
        return [worker for worker in self.workers if worker not in self._busy]

    def is_kept_waiting_by(self, owner: str) -> bool:
        """Returns whether other tenants wait for a worker, and a tenant has one while all are busy."""
        is_full = len(self._busy) >= self._most() and any(worker.owner == owner for worker in self._busy)
        return is_full and any(waiting.owner != owner for waiting in self._waiting)

    @contextlib.asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[Engine]:
        """Provides a worker for a task of a tenant. A task that still runs after the context ends within 0.25 s."""
        worker = await self._take(owner)
        try:
            # A process may end before the task starts.
            while not worker.is_ready:
                await worker.fill()
            self._first_bytes.setdefault(worker, worker.resident_bytes)
            yield worker
        finally:
            self._release(worker)

    async def stop(self) -> None:
        """Stops all workers."""
        self._is_stopped = True
        for waiting in self._waiting:
            waiting.worker.cancel()
        workers, self.workers = self.workers, []
        await asyncio.gather(*(worker.stop() for worker in workers), *self._closing)

    def end(self, worker: Engine, reason: EndReason = EndReason.OVERRUN) -> None:
        """Ends a worker, even if it is busy; then for `reason`."""
        if worker in self.workers:
            self._forget(worker, reason)
            self._assign()

    def _forget(self, worker: Engine, reason: EndReason = EndReason.OVERRUN) -> None:
        self.workers.remove(worker)
        self._busy.pop(worker, None)
        self._first_bytes.pop(worker, None)
        process = worker.remove(reason)
        if process is not None:
            closing = asyncio.create_task(process.stop(), name="worker-stop")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _take(self, owner: str) -> Engine:
        waiting = _Waiting(owner)
        self._waiting.append(waiting)
        try:
            self._assign()
            while not waiting.worker.done():
                await asyncio.wait([waiting.worker], timeout=self._times.worker_slow_s)
                self._assign()
            return waiting.worker.result()
        except asyncio.CancelledError:
            if waiting.worker.done() and not waiting.worker.cancelled():
                self._release(waiting.worker.result())
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def _assign(self) -> None:
        """Gives workers to waiting tasks, as long as there are any."""
        if self._is_stopped:
            return
        busy = {worker.owner for worker in self._busy}
        first = [waiting for waiting in self._waiting if waiting.owner not in busy]
        others = [waiting for waiting in self._waiting if waiting.owner in busy]
        for waiting in itertools.chain(first, others):
            worker = None if waiting.worker.done() else self._worker_for(waiting.owner)
            if worker is not None:
                self._busy[worker] = asyncio.get_running_loop().time()
                waiting.worker.set_result(worker)
                self._waiting.remove(waiting)

    def _worker_for(self, owner: str) -> Engine | None:
        """Returns an idle worker of a tenant, or a new one if the tenant may have one more."""
        own = [worker for worker in self.workers if worker.owner == owner]
        idle = next((worker for worker in own if worker not in self._busy), None)
        if idle is not None:
            return idle
        slow = asyncio.get_running_loop().time() - self._times.worker_slow_s
        if len(own) >= _PER_TENANT or any(self._busy[worker] > slow for worker in own):
            return None
        if len(self.workers) >= self._most():
            if not self.idle:
                return None
            self._forget(min(self.idle, key=lambda worker: worker.used_at))
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

    def _release(self, worker: Engine) -> None:
        """Takes a worker back whose task has ended or was given up."""
        if worker not in self.workers:
            return
        loop = asyncio.get_running_loop()
        if worker.load:
            loop.call_later(self._times.worker_grace_s, self._settle, worker)
        else:
            self._settle(worker)

    def _settle(self, worker: Engine) -> None:
        """Keeps a worker for the next task; ends it if it still works on the last one, or has grown too much."""
        if worker not in self.workers:
            return
        grown = worker.resident_bytes - self._first_bytes.get(worker, 0)
        if worker.load or not worker.is_ready or grown > _MAX_KEPT_BYTES:
            self.end(worker)
            return
        loop = asyncio.get_running_loop()
        self._busy.pop(worker, None)
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
