"""All engines: as many places as are asked for, filled from the same spares, watched, and told of as one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from gradrule_server.link.engine import Engine, EngineRefused, EngineStatus, unavailable
from gradrule_server.link.oom import OOM_KILLS
from gradrule_server.link.owner import OWNER
from gradrule_server.link.process import ProcessOptions
from gradrule_server.link.spares import Spares
from gradrule_server.link.turns import Turns
from gradrule_server.link.v1 import link_pb2
from gradrule_server.link.watch import Watch

__all__ = ["EnginePool", "EngineRefused", "EngineStatus"]

_log = logging.getLogger(__name__)

# A process starts in a few seconds, and whoever calls meanwhile gets an answer a little later rather than none.
_PATIENCE_S = 10.0
# Of the engine that runs one call alone, to find out what that call does.
_TRIAL = -1


class EnginePool:
    """Engines that take work side by side. Everything happens on one asyncio loop.

    `on_change`: whether there is at least one engine that takes work.
    """

    def __init__(
        self,
        options: ProcessOptions,
        *,
        engines: int = 1,
        spares: int = 1,
        heartbeat_s: float = 1.0,
        on_change: Callable[[bool], None] = lambda ready: None,
    ) -> None:
        self._spares = Spares(options, spares)
        self.engines = [Engine(index, self._spares, self._changed) for index in range(engines)]
        self._places = engines
        self.on_filled: list[Callable[[Engine], None]] = []
        """Called with each engine that got another process."""
        self._on_change = on_change
        self._was_ready = False
        self._ready = asyncio.Event()
        self._device = options.device
        self._watch = Watch(lambda: self._spares.processes, heartbeat_s, options.memory_limit)
        self._watching: asyncio.Task[None] | None = None
        self._counting: asyncio.Task[None] | None = None
        self._filling: list[asyncio.Task[None]] = []
        self.memory_limit = options.memory_limit
        """Bytes that an engine may take; 0: any."""
        self.trials = Turns()
        """Held by who uses `alone`: one at a time, and owners in turn."""

    @property
    def greeting(self) -> link_pb2.Greeting:
        """What the last process said of itself."""
        return self._spares.greeting

    @property
    def is_ready(self) -> bool:
        """Whether at least one engine takes work."""
        return any(engine.is_ready for engine in self.engines)

    @property
    def spares_ready(self) -> int:
        """Processes that wait to take the place of one that dies."""
        return self._spares.ready

    def status(self) -> list[EngineStatus]:
        """All engines as they are now."""
        device = self.greeting.device or self._device
        return [engine.status(device) for engine in self.engines]

    async def start(self) -> None:
        """Starts all, and waits for the first. `EngineRefused` where it cannot run as asked."""
        self._watching = asyncio.create_task(self._watch.run(), name="engine-watch")
        self._watching.add_done_callback(_report_failure)
        self._counting = asyncio.create_task(OOM_KILLS.run(), name="oom-kills")
        self._filling = [asyncio.create_task(engine.fill(), name="engine-fill") for engine in self.engines]
        done, _ = await asyncio.wait(self._filling, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task

    async def stop(self) -> None:
        """Ends all."""
        tasks = [task for task in (*self._filling, self._watching, self._counting) if task is not None]
        for task in tasks:
            task.cancel()
        # Whatever one of them died of before, the engines are to be stopped.
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in self.engines))
        await self._spares.stop()

    async def wait_ready(self, patience_s: float = 0.0) -> None:
        """Waits a while, or longer, until an engine takes work; ENGINE_UNAVAILABLE where that takes too long."""
        if self.is_ready:
            return
        try:
            await asyncio.wait_for(self._ready.wait(), max(_PATIENCE_S, patience_s))
        except TimeoutError:
            raise unavailable() from None

    async def least_kept(self) -> Engine:
        """The engine that holds the fewest sessions and forward handles, for one more. ENGINE_UNAVAILABLE."""
        await self.wait_ready()
        ready = (engine for engine in self.engines if engine.is_ready)
        return min(ready, key=lambda engine: (engine.is_extra, engine.kept))

    def borrow(self) -> Engine | None:
        """One more engine in the place of a spare, until `give_back`; None where there is no spare.

        There are as many as there are places, and one for an owner, or slow programs of one would take all memory.
        """
        owner = OWNER.get()
        extras = [engine for engine in self.engines if engine.is_extra]
        if len(extras) >= self._places or any(engine.borrower == owner for engine in extras):
            return None
        process = self._spares.take_now()
        if process is None:
            return None
        index = 1 + max(engine.index for engine in self.engines)
        engine = Engine(index, None, self._changed)
        engine.borrower = owner
        self.engines.append(engine)
        engine.install(process)
        return engine

    def give_back(self, engine: Engine) -> None:
        """Ends what `borrow` began."""
        self.engines.remove(engine)
        process = engine.remove()
        if process is not None:
            self._spares.give_back(process)

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[Engine]:
        """An engine that runs nothing else; whatever is done to it, nobody is hurt."""
        engine = Engine(_TRIAL, None)
        engine.install(await self._spares.take())
        try:
            yield engine
        finally:
            process = engine.remove()
            if process is not None:
                self._spares.give_back(process)

    def _changed(self, engine: Engine) -> None:
        is_ready = self.is_ready
        if is_ready:
            self._ready.set()
        else:
            self._ready.clear()
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            self._on_change(is_ready)
        if engine.is_ready:
            for listener in self.on_filled:
                listener(engine)


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (cause := task.exception()) is not None:
        _log.critical("engines are not watched any more", exc_info=cause)
