"""Compile workers: processes that read the graphs of one tenant each, one task at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from gradrule_server.link.engine import Engine, Use
from gradrule_server.link.spares import Spares

# Index of compile workers, which are not among the engines of metrics.
_WORKER = -2
_PER_TENANT = 2
# A tenant gets a second worker once its first one has been at one task for so long.
_SLOW_S = 0.25
# A task whose caller is gone may end within this time; ending the process costs more than most tasks.
_GRACE_S = 0.25
_IDLE_S = 15.0
# Memory that a process took for its tasks does not come back. One that took more than this is replaced.
_MOST_KEPT_BYTES = 256 * 1024 * 1024


@dataclass(eq=False)
class _Waiting:
    """A task that waits for a worker."""

    owner: str
    worker: asyncio.Future[Engine] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CompileWorkers:
    """Gives each task a process for itself: at most two per tenant, `most` of all tenants together.

    A worker belongs to one tenant as long as it lives, ends when it was idle for 15 s, and is ended soon after the
    caller of its task gave up. Tenants that have no worker come first, then who waits longest. Belongs to one asyncio
    loop.
    """

    def __init__(self, spares: Spares, most: Callable[[], int]) -> None:
        self._spares = spares
        self._most = most
        self._waiting: list[_Waiting] = []
        self._busy: dict[Engine, float] = {}
        self._first_bytes: dict[Engine, int] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self.workers: list[Engine] = []
        """Those of all tenants, busy and idle."""

    @property
    def count(self) -> int:
        """Returns how many workers there are."""
        return len(self.workers)

    @property
    def resident_bytes(self) -> int:
        """Returns the memory of all workers when it was last looked at."""
        return sum(worker.resident_bytes for worker in self.workers)

    @property
    def waiting(self) -> int:
        """Returns how many tasks wait for a worker."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """Returns how many workers are at a task, or are being ended because its caller gave up."""
        return len(self._busy)

    @contextlib.asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[Engine]:
        """Gives a tenant's task a worker. What still runs when the context is left is ended within 0.25 s."""
        worker = await self._take(owner)
        try:
            # A process that comes may be gone by then.
            while not worker.is_ready:
                await worker.fill()
            self._first_bytes.setdefault(worker, worker.resident_bytes)
            yield worker
        finally:
            self._release(worker)

    async def stop(self) -> None:
        """Ends all."""
        self._is_stopped = True
        for waiting in self._waiting:
            waiting.worker.cancel()
        workers, self.workers = self.workers, []
        await asyncio.gather(*(worker.stop() for worker in workers), *self._closing)

    def end(self, worker: Engine) -> None:
        """Ends a worker, whatever it does."""
        if worker in self.workers:
            self._forget(worker)
            self._serve()

    def _forget(self, worker: Engine) -> None:
        self.workers.remove(worker)
        self._busy.pop(worker, None)
        self._first_bytes.pop(worker, None)
        process = worker.remove()
        if process is not None:
            closing = asyncio.create_task(process.stop(), name="worker-stop")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _take(self, owner: str) -> Engine:
        waiting = _Waiting(owner)
        self._waiting.append(waiting)
        try:
            self._serve()
            while not waiting.worker.done():
                await asyncio.wait([waiting.worker], timeout=_SLOW_S)
                self._serve()
            return waiting.worker.result()
        except asyncio.CancelledError:
            if waiting.worker.done() and not waiting.worker.cancelled():
                self._release(waiting.worker.result())
            raise
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def _serve(self) -> None:
        """Gives workers to tasks that wait, as long as there are some of either."""
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
        slow = asyncio.get_running_loop().time() - _SLOW_S
        if len(own) >= _PER_TENANT or any(self._busy[worker] > slow for worker in own):
            return None
        if len(self.workers) >= self._most():
            others = [worker for worker in self.workers if worker not in self._busy]
            if not others:
                return None
            self._forget(min(others, key=lambda worker: worker.used_at))
        worker = Engine(_WORKER, self._spares, self._changed, owner=owner, use=Use.COMPILE)
        self.workers.append(worker)
        return worker

    def _release(self, worker: Engine) -> None:
        """The caller of a worker's task is gone."""
        if worker not in self.workers:
            return
        loop = asyncio.get_running_loop()
        if worker.load:
            loop.call_later(_GRACE_S, self._settle, worker)
        else:
            self._settle(worker)

    def _settle(self, worker: Engine) -> None:
        """Ends a worker that is still at a task whose caller is gone; else it waits for the next task."""
        if worker not in self.workers:
            return
        grown = worker.resident_bytes - self._first_bytes.get(worker, 0)
        if worker.load or not worker.is_ready or grown > _MOST_KEPT_BYTES:
            self.end(worker)
            return
        loop = asyncio.get_running_loop()
        self._busy.pop(worker, None)
        worker.used_at = loop.time()
        loop.call_later(_IDLE_S, self._end_idle, worker, worker.used_at)
        self._serve()

    def _end_idle(self, worker: Engine, used_at: float) -> None:
        if worker not in self._busy and worker.used_at == used_at:
            self.end(worker)

    def _changed(self, worker: Engine) -> None:
        """A worker's process is gone, or came."""
        if worker.generation and not worker.is_ready and worker not in self._busy:
            self.end(worker)
