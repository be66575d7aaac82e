"""Processes that have greeted and wait for work, and the starting of new ones."""

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
    """As many processes as are to be kept ready, once the first process of all is up, and those that are asked for.

    A process belongs to whoever took it, and never comes back: it has run a tenant's work. Belongs to one asyncio loop.
    """

    def __init__(self, options: ProcessOptions, count: int) -> None:
        self._options = options
        self._fork_server = ForkServer()
        self._count = count
        self._ready: deque[EngineProcess] = deque()
        self._asking: deque[asyncio.Future[EngineProcess]] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._all: set[EngineProcess] = set()
        self._has_first = False
        self._is_stopped = False
        self.greeting = link_pb2.Greeting()

    @property
    def ready(self) -> int:
        """How many wait for work."""
        return len(self._ready)

    @property
    def processes(self) -> list[EngineProcess]:
        """All that live, whoever has them."""
        self._forget_ended()
        return [process for process in self._all if not process.connection.is_closed]

    def take_now(self) -> EngineProcess | None:
        """One that is ready, if there is one; another is started in its place."""
        if not self._ready:
            return None
        process = self._ready.popleft()
        process.connection.on_lost = None
        self._fill()
        return process

    async def take(self) -> EngineProcess:
        """One that is ready, as soon as there is one. `EngineRefused` where the first of all cannot start."""
        process = self.take_now()
        if process is not None:
            return process
        asked: asyncio.Future[EngineProcess] = asyncio.get_running_loop().create_future()
        self._asking.append(asked)
        self._fill()
        try:
            return await asked
        except asyncio.CancelledError:
            if asked.done() and not asked.cancelled() and asked.exception() is None:
                self._offer(asked.result())
            raise
        finally:
            if asked in self._asking:
                self._asking.remove(asked)

    def _offer(self, process: EngineProcess) -> None:
        """Gives a process that has run nothing yet to the first who asks, or keeps it ready."""
        if self._is_stopped or process.connection.is_closed:
            process.kill()
            return
        while self._asking:
            asked = self._asking.popleft()
            if not asked.done():
                asked.set_result(process)
                return
        if len(self._ready) >= self._count:
            process.connection.close()
            return
        self._ready.append(process)
        process.connection.on_lost = self._loser(process)

    async def stop(self) -> None:
        """Ends them all."""
        self._is_stopped = True
        for asked in self._asking:
            asked.cancel()
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

    def _loser(self, process: EngineProcess) -> Callable[[], None]:
        def lost() -> None:
            if process in self._ready:
                self._ready.remove(process)
            process.kill()
            self._fill()

        return lost

    def _forget_ended(self) -> None:
        self._all = {process for process in self._all if not process.has_ended}

    def _fill(self) -> None:
        """Starts as many as are asked for at once, and those in reserve one at a time, once something runs."""
        if self._is_stopped:
            return
        asked = sum(not item.done() for item in self._asking)
        reserve = min(1, max(0, self._count - len(self._ready))) if self._has_first else 0
        while len(self._starting) < (asked or reserve):
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
                # Nothing ever ran: it is told to whoever starts the server, and not tried again.
                for asked in self._asking:
                    if not asked.done():
                        asked.set_exception(cause)
                return
            # Whatever it is (no memory, no file descriptors), a server without an engine must go on trying.
            _log.error("an engine cannot be started: %s", cause, exc_info=not isinstance(cause, EngineRefused))
            await asyncio.sleep(_RETRY_DELAY_S)
            return
        _log.info("engine %d is ready", process.pid)
        self.greeting = greeting
        self._has_first = True
        self._offer(process)
