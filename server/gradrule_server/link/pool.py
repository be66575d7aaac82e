"""All engines: each runs the work of one tenant, and all are filled from the same spares and watched."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

from gradrule.v1 import errors_pb2
from gradrule_server.errors import error
from gradrule_server.link.engine import Engine, EngineRefused, EngineStatus, Use
from gradrule_server.link.monitor import EngineMonitor
from gradrule_server.link.process import ProcessOptions
from gradrule_server.link.spares import Spares
from gradrule_server.link.system_memory import OOM_KILLS
from gradrule_server.link.v1 import link_pb2
from gradrule_server.link.workers import CompileWorkers
from gradrule_server.recovery.endings import engine_unavailable
from gradrule_server.tenant_locks import TenantLocks

__all__ = ["EnginePool", "EngineRefused", "EngineStatus"]

_log = logging.getLogger(__name__)

# A process starts within a second, and who calls meanwhile gets an answer a little later rather than none.
_PATIENCE_S = 10.0
_FULL_RETRY_S = 1.0
# Engines that did nothing for so long are ended; their programs are compiled again when their tenant comes back.
_IDLE_S = 600.0
_IDLE_PERIOD_S = 15.0
# Index of engines that run one call alone, to find out what that call does.
_TRIAL = -1


class EnginePool:
    """The engines of all tenants. An engine has one owner as long as its process lives. Belongs to one asyncio loop.

    A tenant gets engines when it needs them: `engines` for programs, one for sessions.

    Args:
        options: How processes are started.
        engines: Engines for programs per tenant. So many are started at once, before any tenant needs them.
        spares: Processes that are kept ready.
        max_engines: Engines of all tenants together. Trials and spares come on top.
        max_gpu_engines: The same where they run on a GPU; None: `max_engines`.
        heartbeat_s: Engine health-check interval, seconds; 0 disables.
        on_change: Called with whether any engine takes work, whenever that changes.
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
    ) -> None:
        self._spares = Spares(options, spares)
        self._max_engines = max_engines
        self._max_gpu_engines = max_engines if max_gpu_engines is None else max_gpu_engines
        self._ended: dict[int, Counter[str]] = {}
        self.per_tenant = engines
        """Engines for programs that a tenant may have."""
        self.engines: list[Engine] = []
        """Those of all tenants, and those that have no owner yet; trials are not among them."""
        for _ in range(engines):
            self._add(None, Use.PROGRAMS)
        self.on_filled: list[Callable[[Engine], None]] = []
        """Called with each engine that got another process."""
        self.on_removed: list[Callable[[Engine], None]] = []
        """Called with each engine that is given up for good, trials included."""
        self._on_change = on_change
        self._was_ready = False
        self._change = asyncio.Event()
        self._device = options.device
        self._watch = EngineMonitor(lambda: self._spares.processes, heartbeat_s, options.memory_limit)
        self._tasks: list[asyncio.Task[None]] = []
        self.workers = CompileWorkers(self._spares, lambda: self.max_engines)
        """Processes that read graphs. They come on top of the engines, and are at most as many."""
        self._closing: set[asyncio.Task[None]] = set()
        self.memory_limit = options.memory_limit
        """Bytes that an engine may take; 0: any."""
        self.trials = TenantLocks()
        """Held by who uses `alone`: a tenant's trials run one at a time."""

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
        """Processes that wait to become an engine."""
        return self._spares.ready

    @property
    def max_engines(self) -> int:
        """Engines of all tenants together."""
        return self._max_gpu_engines if self.greeting.device.startswith("GPU") else self._max_engines

    @property
    def ended(self) -> Mapping[int, Mapping[str, int]]:
        """How many processes ended, by the engine's index and the reason."""
        return self._ended

    def status(self) -> list[EngineStatus]:
        """All engines as they are now."""
        device = self.greeting.device or self._device
        return [engine.status(device) for engine in sorted(self.engines, key=lambda engine: engine.index)]

    async def start(self) -> None:
        """Starts the first engines, and waits for one. `EngineRefused` where it cannot run as asked."""
        watching = asyncio.create_task(self._watch.run(), name="engine-watch")
        watching.add_done_callback(_report_failure)
        idling = asyncio.create_task(self._end_idle(), name="engine-idle")
        idling.add_done_callback(_report_failure)
        filling = [asyncio.create_task(engine.fill(), name="engine-fill") for engine in self.engines]
        self._tasks = [watching, idling, asyncio.create_task(OOM_KILLS.run(), name="oom-kills"), *filling]
        done, _ = await asyncio.wait(filling, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task

    async def stop(self) -> None:
        """Ends all."""
        for task in self._tasks:
            task.cancel()
        # Whatever one of them died of before, the engines are to be stopped.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self.workers.stop(), *(engine.stop() for engine in self.engines), *self._closing)
        await self._spares.stop()

    def engines_of(self, owner: str) -> list[Engine]:
        """Returns the engines that run a tenant's programs, extra ones too."""
        return [engine for engine in self.engines if engine.owner == owner and engine.use is not Use.SESSIONS]

    def serves(self, owner: str) -> bool:
        """Returns whether a tenant has an engine for programs that takes work."""
        return any(
            engine.is_ready and engine.owner == owner and engine.use is not Use.SESSIONS for engine in self.engines
        )

    async def provide(self, owner: str, patience_s: float = 0.0) -> None:
        """Gives a tenant an engine for programs where it has none, and waits until it takes work.

        OVERLOADED where all engines are in use; ENGINE_UNAVAILABLE where none is ready within 10 s, or `patience_s`.
        """
        async with _within(max(_PATIENCE_S, patience_s)):
            while not self.serves(owner):
                if any(engine.use is Use.PROGRAMS for engine in self.engines_of(owner)):
                    await self._change.wait()
                else:
                    self._claim(owner)

    async def for_session(self, owner: str) -> Engine:
        """Returns the engine that holds a tenant's sessions, for one more.

        An engine that is about to be ended takes no new session. Raises as `provide` does.
        """
        async with _within(_PATIENCE_S):
            while True:
                own = [engine for engine in self.engines if engine.owner == owner and engine.use is Use.SESSIONS]
                engine = next((engine for engine in own if not engine.is_doomed), None)
                if engine is None:
                    self._make_room(owner)
                    self._add(owner, Use.SESSIONS).start()
                elif engine.is_ready:
                    for other in own:
                        # It was about to be ended, so another was started; then its request ended in time.
                        if other is not engine and other.is_idle:
                            self._remove(other)
                    return engine
                else:
                    await self._change.wait()

    def another(self, owner: str) -> Engine | None:
        """Returns one more engine for a tenant's programs, if it may have one and one is ready."""
        own = [engine for engine in self.engines_of(owner) if engine.use is Use.PROGRAMS]
        if len(own) >= self.per_tenant or not all(engine.is_ready for engine in own):
            return None
        unclaimed = any(engine.owner is None for engine in self.engines)
        if not unclaimed and len(self.engines) >= self.max_engines:
            return None
        engine = self._claim(owner)
        return engine if engine.is_ready else None

    def borrow(self, owner: str) -> Engine | None:
        """Returns an extra engine for a tenant, until `give_back`; None where it has one, or there is no spare."""
        if any(engine.is_extra for engine in self.engines_of(owner)) or len(self.engines) >= self.max_engines:
            return None
        process = self._spares.take_now()
        if process is None:
            return None
        engine = self._add(owner, Use.EXTRA)
        engine.install(process)
        return engine

    def give_back(self, engine: Engine) -> None:
        """Ends what `borrow` began, unless it had to make room already."""
        if engine in self.engines:
            self._remove(engine)

    @contextlib.asynccontextmanager
    async def alone(self, owner: str) -> AsyncIterator[Engine]:
        """An engine that runs one call of a tenant and nothing else; it is ended afterwards."""
        engine = Engine(_TRIAL, None, owner=owner, use=Use.TRIAL)
        engine.install(await self._spares.take())
        try:
            yield engine
        finally:
            self._end(engine)

    def _claim(self, owner: str) -> Engine:
        """Gives a tenant one more engine for programs: one that has no owner, or a new one. OVERLOADED."""
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
        taken = {engine.index for engine in self.engines}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        ended = self._ended.setdefault(index, Counter())
        engine = Engine(index, self._spares, self._changed, owner=owner, use=use, ended=ended)
        self.engines.append(engine)
        return engine

    def _make_room(self, owner: str) -> None:
        """Ends an idle engine where there are as many as there may be. OVERLOADED where none is idle.

        The one that was used least recently; one of the tenant's own only where all others are in use.
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
        """Ends engines whose tenants have not called for long; as many for programs stay as were started at first."""
        while True:
            await asyncio.sleep(_IDLE_PERIOD_S)
            since = asyncio.get_running_loop().time() - _IDLE_S
            idle = [engine for engine in self.engines if engine.is_idle and engine.used_at < since]
            surplus = sum(engine.use is Use.PROGRAMS for engine in self.engines) - self.per_tenant
            for engine in sorted(idle, key=lambda engine: engine.used_at):
                if engine.use is Use.SESSIONS:
                    self._remove(engine)
                elif engine.use is Use.PROGRAMS and surplus > 0:
                    surplus -= 1
                    self._remove(engine)

    def _remove(self, engine: Engine) -> None:
        """Ends an engine that is in use by nobody."""
        self.engines.remove(engine)
        self._end(engine)
        self._changed(engine)

    def _end(self, engine: Engine) -> None:
        """Ends an engine's process: it has seen one tenant's work, so no other tenant gets it."""
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
            # Its sessions are gone; the next session gets an engine of its own.
            self.engines.remove(engine)
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
    """ENGINE_UNAVAILABLE where the context takes longer."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise engine_unavailable() from None


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (cause := task.exception()) is not None:
        _log.critical("engines are not watched any more", exc_info=cause)
