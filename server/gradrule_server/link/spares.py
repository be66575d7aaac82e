"""Starts engine processes, and keeps some ready."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from gradrule_server.link.fork_server import ForkServer
from gradrule_server.link.process import EngineProcess, EngineRefused, ProcessOptions, start_process
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import EndReason

_log = logging.getLogger(__name__)

_RETRY_DELAY_S = 0.5


class Spares:
    """Starts processes on request, and keeps `count` ready once the first one is up. Belongs to one asyncio loop.

    A process that was taken never comes back, because it has run a tenant's work.
    """

    def __init__(self, options: ProcessOptions, count: int) -> None:
        self._options = options
        self._fork_server = ForkServer()
        self._count = count
        self._ready: deque[EngineProcess] = deque()
        self._requests: deque[asyncio.Future[EngineProcess]] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._all: set[EngineProcess] = set()
        self._has_first = False
        self._is_stopped = False
        self.greeting = link_pb2.Greeting()

    @property
    def ready(self) -> int:
        """The number of processes that are ready."""
        return len(self._ready)

    @property
    def processes(self) -> list[EngineProcess]:
        """All processes that are connected, whether ready or taken."""
        self._forget_ended()
        return [process for process in self._all if not process.connection.is_closed]

    def take_now(self) -> EngineProcess | None:
        """Returns a ready process and starts another in its place; None if none is ready."""
        if not self._ready:
            return None
        process = self._ready.popleft()
        process.connection.on_lost = None
        self._fill()
        return process

    async def take(self) -> EngineProcess:
        """Waits for a ready process. Raises `EngineRefused` if the very first process cannot start."""
        process = self.take_now()
        if process is not None:
            return process
        requested: asyncio.Future[EngineProcess] = asyncio.get_running_loop().create_future()
        self._requests.append(requested)
        self._fill()
        try:
            return await requested
        except asyncio.CancelledError:
            if requested.done() and not requested.cancelled() and requested.exception() is None:
                self._offer(requested.result())
            raise
        finally:
            if requested in self._requests:
                self._requests.remove(requested)

    def _offer(self, process: EngineProcess) -> None:
        """Gives an unused process to the first task that waits, or keeps it ready."""
        if self._is_stopped or process.connection.is_closed:
            process.kill()
            return
        while self._requests:
            requested = self._requests.popleft()
            if not requested.done():
                requested.set_result(process)
                return
        if len(self._ready) >= self._count:
            process.connection.close()
            return
        self._ready.append(process)
        process.connection.on_lost = self._on_spare_lost(process)

    async def stop(self) -> None:
        """Ends all processes and the fork server."""
        self._is_stopped = True
        for requested in self._requests:
            requested.cancel()
        for task in self._starting:
            task.cancel()
        if self._starting:
            await asyncio.wait(self._starting)
        ready, self._ready = list(self._ready), deque()
        await asyncio.gather(*(process.stop() for process in ready))
        left = list(self._all)
        for process in left:
            process.end(EndReason.STOPPED)
        await asyncio.gather(*(process.wait_ended() for process in left))
        await self._fork_server.stop()

    def _on_spare_lost(self, process: EngineProcess) -> Callable[[], None]:
        def lost() -> None:
            if process in self._ready:
                self._ready.remove(process)
            process.kill()
            self._fill()

        return lost

    def _forget_ended(self) -> None:
        self._all = {process for process in self._all if not process.has_ended}

    def _fill(self) -> None:
        """Starts all requested processes at once, and spare ones one at a time once the first process is up."""
        if self._is_stopped:
            return
        requested = sum(not item.done() for item in self._requests)
        reserve = min(1, max(0, self._count - len(self._ready))) if self._has_first else 0
        while len(self._starting) < (requested or reserve):
            task = asyncio.create_task(self._start(), name="engine-start")
            self._starting.add(task)
            task.add_done_callback(self._started)

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        self._fill()

    async def _start(self) -> None:
        try:
            process = await start_process(self._options, self._fork_server)
            self._forget_ended()
            self._all.add(process)
            try:
                greeting = await process.greet()
            except BaseException:
                process.kill()
                process.connection.close()
                raise
        except Exception as cause:
            if not self._has_first:
                # No process ever ran: the start of the server fails with this error.
                for requested in self._requests:
                    if not requested.done():
                        requested.set_exception(cause)
                return
            # Whatever the cause (no memory, no file descriptors), a server without engines must keep trying.
            _log.error("an engine cannot be started: %s", cause, exc_info=not isinstance(cause, EngineRefused))
            await asyncio.sleep(_RETRY_DELAY_S)
            return
        _log.info("engine %d is ready", process.pid)
        self.greeting = greeting
        self._has_first = True
        self._offer(process)
