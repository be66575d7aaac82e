"""Manages the engines of all tenants: gives them out, makes room for new ones, and ends idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import TenantLocks, start_logged_task
from gradrule_server.errors import error
from gradrule_server.link.engine import Engine, Use
from gradrule_server.link.monitor import EngineMonitor, EngineStatus
from gradrule_server.link.operating_system import OOM_KILLS
from gradrule_server.link.process import DEFAULT_TIMES, EngineTimes, ProcessOptions, Spares
from gradrule_server.link.v1 import link_pb2
from gradrule_server.link.workers import CompileWorkers
from gradrule_server.recovery.endings import engine_unavailable

_log = logging.getLogger(__name__)

_FULL_RETRY_S = 1.0
# Index of engines that run one call alone, to find out whether it crashes them.
_TRIAL = -1


class EnginePool:
    """The engines of all tenants. An engine has one owner as long as its process lives. Belongs to one asyncio loop.

    A tenant gets engines when it needs them: up to `engines` for programs, and one for sessions.

    Args:
        options: How processes are started.
        engines: Engines for programs per tenant. This number is started at once, before any tenant needs them.
        spares: Number of processes that are kept ready.
        max_engines: Engines of all tenants together, without trials and spares.
        max_gpu_engines: The same if engines run on a GPU; None: `max_engines`.
        heartbeat_s: Engine health-check interval, seconds; 0 disables.
        on_change: Called with whether any engine takes work, whenever that changes.
        times: How long it waits for engines.
    """

    def __init__(
        self,
        options: ProcessOptions,
        *,
        engines: int = 1,
        spares: int = 1,
        max_engines: int = 32,
        max_gpu_engines: int | None = None,
        heartbeat_s: float = 1.0,
        on_change: Callable[[bool], None] = lambda ready: None,
        times: EngineTimes = DEFAULT_TIMES,
    ) -> None:
        self._times = times
        self._spares = Spares(options, spares, times)
        self._max_engines = max_engines
        self._max_gpu_engines = max_engines if max_gpu_engines is None else max_gpu_engines
        self._ended: dict[int, Counter[str]] = {}
        self.per_tenant = engines
        """Most engines for programs that a tenant may have."""
        self.engines: list[Engine] = []
        """The engines of all tenants, and engines without an owner yet; without trials."""
        for _ in range(engines):
            self._add(None, Use.PROGRAMS)
        self.on_filled: list[Callable[[Engine], None]] = []
        """Called with each engine that got a new process."""
        self.on_removed: list[Callable[[Engine], None]] = []
        """Called with each engine that is removed, trials included."""
        self._on_change = on_change
        self._was_ready = False
        self._change = asyncio.Event()
        self._device = options.device
        self._monitor = EngineMonitor(lambda: self._spares.processes, heartbeat_s, options.memory_limit, times)
        self._tasks: list[asyncio.Task[None]] = []
        self.workers = CompileWorkers(self._spares, lambda: self.max_engines, times)
        """Processes that read graphs: at most as many as there may be engines, in addition to those."""
        self._closing: set[asyncio.Task[None]] = set()
        self.memory_limit = options.memory_limit
        """Memory limit of an engine, bytes; 0: none."""
        self.trials = TenantLocks()
        """Held while `alone` is used: a tenant's trials run one at a time."""

    @property
    def greeting(self) -> link_pb2.Greeting:
        """The greeting of the last process that started."""
        return self._spares.greeting

    @property
    def is_ready(self) -> bool:
        """Whether at least one engine accepts work."""
        return any(engine.is_ready for engine in self.engines)

    @property
    def spares_ready(self) -> int:
        """The number of processes that are ready to become an engine."""
        return self._spares.ready

    @property
    def max_engines(self) -> int:
        """Most engines of all tenants together."""
        return self._max_gpu_engines if self.greeting.device.startswith("GPU") else self._max_engines

    @property
    def ended(self) -> Mapping[int, Mapping[str, int]]:
        """The number of processes that ended, by the index of the engine and the reason."""
        return self._ended

    def status(self) -> list[EngineStatus]:
        """Returns snapshots of all engines, by index."""
        device = self.greeting.device or self._device
        return [engine.status(device) for engine in sorted(self.engines, key=lambda engine: engine.index)]

    async def start(self) -> None:
        """Starts the first engines, and waits for one. Raises `EngineRefused` if it cannot run as configured."""
        failure = "a background task of the engine pool failed"
        watching = start_logged_task(self._monitor.run(), "engine-monitor", _log.critical, failure)
        idling = start_logged_task(self._end_idle(), "engine-idle", _log.critical, failure)
        filling = [asyncio.create_task(engine.fill(), name="engine-fill") for engine in self.engines]
        self._tasks = [watching, idling, asyncio.create_task(OOM_KILLS.run(), name="oom-kills"), *filling]
        done, _ = await asyncio.wait(filling, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task

    async def stop(self) -> None:
        """Stops all engines, compile workers and spares."""
        for task in self._tasks:
            task.cancel()
        # The engines must be stopped even if one of these tasks failed.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self.workers.stop(), *(engine.stop() for engine in self.engines), *self._closing)
        await self._spares.stop()

    def engines_for(self, owner: str) -> list[Engine]:
        """Returns the engines that run a tenant's programs, including extra ones."""
        return [engine for engine in self.engines if engine.owner == owner and engine.use is not Use.SESSIONS]

    def serves(self, owner: str) -> bool:
        """Returns whether a tenant has an engine for programs that accepts work."""
        return any(
            engine.is_ready and engine.owner == owner and engine.use is not Use.SESSIONS for engine in self.engines
        )

    async def provide(self, owner: str, patience_s: float = 0.0) -> None:
        """Gives a tenant an engine for programs if it has none, and waits until the engine accepts work.

        Raises OVERLOADED if all engines are in use; ENGINE_UNAVAILABLE if none is ready within 10 s or `patience_s`.
        """
        async with _within(max(self._times.provide_s, patience_s)):
            while not self.serves(owner):
                if any(engine.use is Use.PROGRAMS for engine in self.engines_for(owner)):
                    await self._change.wait()
                else:
                    self._claim(owner)

    async def session_engine(self, owner: str) -> Engine:
        """Returns the engine for a new session of a tenant. Raises the same errors as `provide`.

        An engine that will be ended soon gets no new session.
        """
        async with _within(self._times.provide_s):
            while True:
                own = [engine for engine in self.engines if engine.owner == owner and engine.use is Use.SESSIONS]
                engine = next((engine for engine in own if not engine.is_doomed), None)
                if engine is None:
                    self._make_room(owner)
                    self._add(owner, Use.SESSIONS).start()
                elif engine.is_ready:
                    for other in own:
                        # Another engine was started because this one was to be ended; then its request ended in time.
                        if other is not engine and other.is_idle:
                            self._remove(other)
                    return engine
                else:
                    await self._change.wait()

    def claim_another(self, owner: str) -> Engine | None:
        """Returns one more engine for a tenant's programs; None if it may have no more, or none is ready."""
        own = [engine for engine in self.engines_for(owner) if engine.use is Use.PROGRAMS]
        if len(own) >= self.per_tenant or not all(engine.is_ready for engine in own):
            return None
        unclaimed = any(engine.owner is None for engine in self.engines)
        if not unclaimed and len(self.engines) >= self.max_engines:
            return None
        engine = self._claim(owner)
        return engine if engine.is_ready else None

    def borrow(self, owner: str) -> Engine | None:
        """Returns an extra engine for a tenant until `release`; None if it has one, or no process is ready."""
        if any(engine.is_extra for engine in self.engines_for(owner)) or len(self.engines) >= self.max_engines:
            return None
        process = self._spares.take_now()
        if process is None:
            return None
        engine = self._add(owner, Use.EXTRA)
        engine.install(process)
        return engine

    def release(self, engine: Engine) -> None:
        """Ends an extra engine, unless it was ended already to make room."""
        if engine in self.engines:
            self._remove(engine)

    @contextlib.asynccontextmanager
    async def alone(self, owner: str) -> AsyncIterator[Engine]:
        """Provides an engine that runs one call of a tenant alone, and is ended afterwards."""
        engine = Engine(_TRIAL, None, owner=owner, use=Use.TRIAL, times=self._times)
        engine.install(await self._spares.take())
        try:
            yield engine
        finally:
            self._end(engine)

    def _claim(self, owner: str) -> Engine:
        """Gives a tenant one more engine for programs: one without an owner, or a new one. Raises OVERLOADED."""
        unclaimed = [engine for engine in self.engines if engine.owner is None]
        if unclaimed:
            engine = max(unclaimed, key=lambda engine: engine.is_ready)
            engine.owner = owner
            return engine
        self._make_room(owner)
        engine = self._add(owner, Use.PROGRAMS)
        engine.start()
        return engine

    def _add(self, owner: str | None, use: Use) -> Engine:
        used = {engine.index for engine in self.engines}
        index = next(index for index in range(len(used) + 1) if index not in used)
        ended = self._ended.setdefault(index, Counter())
        engine = Engine(index, self._spares, self._changed, owner=owner, use=use, ended=ended, times=self._times)
        self.engines.append(engine)
        return engine

    def _make_room(self, owner: str) -> None:
        """Ends the least recently used idle engine if there is no room for another. Raises OVERLOADED if none is idle.

        Ends the tenant's own engine only if all others are in use.
        """
        if len(self.engines) < self.max_engines:
            return
        idle = [engine for engine in self.engines if engine.is_idle]
        if not idle:
            raise error(
                errors_pb2.ERROR_REASON_OVERLOADED,
                f"all {self.max_engines} engines (--max-engines) are in use by requests, sessions or forward handles; "
                "send the request again a little later",
                retry_after_s=_FULL_RETRY_S,
            )
        self._remove(min(idle, key=lambda engine: (engine.owner == owner, engine.used_at)))

    async def _end_idle(self) -> None:
        """Ends engines that were idle for long. The number for programs never falls below that at the start."""
        while True:
            await asyncio.sleep(self._times.idle_period_s)
            since = asyncio.get_running_loop().time() - self._times.idle_s
            idle = [engine for engine in self.engines if engine.is_idle and engine.used_at < since]
            surplus = sum(engine.use is Use.PROGRAMS for engine in self.engines) - self.per_tenant
            for engine in sorted(idle, key=lambda engine: engine.used_at):
                if engine.use is Use.SESSIONS:
                    self._remove(engine)
                elif engine.use is Use.PROGRAMS and surplus > 0:
                    surplus -= 1
                    self._remove(engine)

    def _remove(self, engine: Engine) -> None:
        """Ends an engine that is not in use."""
        self.engines.remove(engine)
        self._end(engine)
        self._changed(engine)

    def _end(self, engine: Engine) -> None:
        """Ends an engine's process. It has run one tenant's work, so no other tenant may get it."""
        process = engine.remove()
        self._report_removed(engine)
        if process is not None:
            closing = asyncio.create_task(process.stop(), name="engine-stop")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _report_removed(self, engine: Engine) -> None:
        for listener in self.on_removed:
            listener(engine)

    def _changed(self, engine: Engine) -> None:
        if engine.use is Use.SESSIONS and not engine.is_ready and engine in self.engines and engine.generation:
            # Its sessions are lost; the next session gets a new engine.
            self.engines.remove(engine)
            engine.is_removed = True
            self._report_removed(engine)
        self._change.set()
        self._change = asyncio.Event()
        is_ready = self.is_ready
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            self._on_change(is_ready)
        if engine.is_ready:
            for listener in self.on_filled:
                listener(engine)


@contextlib.asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    """Raises ENGINE_UNAVAILABLE if the context takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise engine_unavailable() from None
