"""Manages the engines of all tenants: gives them out, makes room for new ones, and ends idle ones."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import TenantLocks, start_logged_task, waiting_time
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.engine import Engine, Use
from gradrule_server.link.monitor import EngineMonitor
from gradrule_server.link.operating_system import OOM_KILLS
from gradrule_server.link.process import DEFAULT_TIMES, EngineTimes, ProcessOptions, Spares
from gradrule_server.link.v1 import link_pb2
from gradrule_server.link.workers import CompileWorkers
from gradrule_server.recovery.endings import EndReason, engine_unavailable

_log = logging.getLogger(__name__)

_FULL_RETRY_S = 1.0
# Index of engines that run one call alone, to find out whether it crashes them.
_TRIAL = -1
# Memory of an engine that only starts, if no other engine says what an engine takes. Measured: 8 MiB, 26 MiB with a
# small program.
_NEW_ENGINE_BYTES = 32 << 20


class Need(enum.Enum):
    """What a tenant waits for."""

    PROGRAMS = enum.auto()
    """An engine for programs."""
    SESSION = enum.auto()
    """An engine for sessions."""
    HANDLE = enum.auto()
    """That an engine for programs may keep forward handles."""


@dataclass(eq=False, slots=True)
class _WaitingTenant:
    """A tenant that waits. All its calls with the same need wait together; `calls`: their number."""

    owner: str
    need: Need
    calls: int = 0
    served: asyncio.Event = field(default_factory=asyncio.Event)


class EnginePool:
    """The engines of all tenants. An engine has one owner as long as its process lives. Belongs to one asyncio loop.

    A tenant gets engines when it needs them: up to `engines` for programs, and one for sessions. If there are as many
    engines as may be, tenants wait in the order in which they came. The next one gets the place of an engine that is
    idle. A tenant that uses its engine without a break loses it after its turn, once its running calls have ended.
    Sessions and forward handles hold engines, but never the last one, so that calls of all tenants get their turn.

    The processes of all tenants together may take `memory_share`. No further engine is added if it would exceed that,
    except one that can run calls of all tenants. If processes grow beyond it, some end; see `_order_of_eviction`.

    Args:
        options: How processes are started.
        engines: Engines for programs per tenant. This number is started at once, before any tenant needs them.
        spares: Number of processes that are kept ready.
        max_engines: Engines of all tenants together, without trials and spares.
        max_gpu_engines: The same if engines run on a GPU; None: `max_engines`.
        memory_share: Memory that all processes together may take, bytes; 0: no limit.
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
        memory_share: int = 0,
        heartbeat_s: float = 1.0,
        on_change: Callable[[bool], None] = lambda ready: None,
        times: EngineTimes = DEFAULT_TIMES,
    ) -> None:
        self._times = times
        self._spares = Spares(options, spares, times)
        self._max_engines = max_engines
        self._max_gpu_engines = max_engines if max_gpu_engines is None else max_gpu_engines
        self.memory_share = memory_share
        """Memory that all processes together may take, bytes; 0: no limit."""
        self.evictions: Counter[str] = Counter()
        """How many engines were taken from tenants, by reason: `turn`, `memory` or `idle`."""
        self._evicted_at: float | None = None
        self._evicted: dict[str, tuple[float, int]] = {}
        """When a tenant lost an engine in use because it took the most memory, and the bytes that it took."""
        self._ended: dict[int, Counter[str]] = {}
        self._unbatched: dict[str, set[str]] = {}
        self.per_tenant = engines
        """Most engines for programs that a tenant may have."""
        self.engines: list[Engine] = []
        """The engines of all tenants, and engines without an owner yet; without trials."""
        for _ in range(engines):
            self._add(None, Use.PROGRAMS)
        self.on_removed: list[Callable[[Engine], None]] = []
        """Called with each engine that is removed, trials included."""
        self._on_change = on_change
        self._was_ready = False
        self._change = asyncio.Event()
        self._waiting: dict[tuple[str, Need], _WaitingTenant] = {}
        self._assigning: asyncio.Handle | None = None
        self._turn_timer: asyncio.TimerHandle | None = None
        self._device = options.device
        self._monitor = EngineMonitor(
            lambda: self._spares.processes, heartbeat_s, options.memory_limit, times, self._check_memory
        )
        self._trials: set[Engine] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self.workers = CompileWorkers(self._spares, lambda: self.max_engines, times)
        """Processes that read graphs: at most as many as there may be engines, in addition to those."""
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
        """Whether at least one engine accepts calls without a session, so that each tenant can get its turn."""
        return any(engine.is_ready and engine.use is not Use.SESSIONS for engine in self.engines)

    @property
    def spares_ready(self) -> int:
        """The number of processes that are ready to become an engine."""
        return self._spares.ready

    @property
    def max_engines(self) -> int:
        """Most engines of all tenants together."""
        return self._max_gpu_engines if self.greeting.device.startswith("GPU") else self._max_engines

    @property
    def max_held(self) -> int:
        """Most engines that sessions and forward handles of all tenants may hold."""
        return max(1, self.max_engines - 1)

    @property
    def held(self) -> int:
        """The number of engines that sessions and forward handles hold."""
        return sum(engine.use is Use.SESSIONS or engine.kept > 0 for engine in self.engines)

    @property
    def waiting_tenants(self) -> int:
        """The number of tenants that wait for an engine."""
        return len({waiting.owner for waiting in self._waiting.values()})

    @property
    def used_bytes(self) -> int:
        """The memory of all processes that are not ending. What they share with the fork server counts once."""
        processes = [process for process in self._spares.processes if not process.is_ending]
        shared = max((process.resident_bytes - process.own_bytes for process in processes), default=0)
        return shared + sum(process.own_bytes for process in processes)

    @property
    def last_eviction_s(self) -> float | None:
        """Seconds since an engine in demand was taken from its tenant, for `turn` or `memory`; None: never."""
        return None if self._evicted_at is None else asyncio.get_running_loop().time() - self._evicted_at

    @property
    def ended(self) -> Mapping[int, Mapping[str, int]]:
        """The number of processes that ended, by the index of the engine and the reason."""
        return self._ended

    @property
    def helper_ends(self) -> Mapping[str, Mapping[str, int]]:
        """The number of helper processes that ended unexpectedly, by helper and reason."""
        return {"fork_server": self._spares.fork_server_ends, "worker": self.workers.ended}

    @property
    def device(self) -> str:
        """The device of all engines, as TensorFlow names it; as the setting does before an engine has started."""
        return self.greeting.device or self._device

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
        for timer in (self._assigning, self._turn_timer):
            if timer is not None:
                timer.cancel()
        # The engines must be stopped even if one of these tasks failed.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in (*self.engines, *self.workers.workers):
            engine.remove(EndReason.STOPPED)
        await self._spares.stop()

    def engines_for(self, owner: str) -> list[Engine]:
        """Returns the engines that run a tenant's programs and take calls."""
        return [
            engine
            for engine in self.engines
            if engine.owner == owner and engine.use is not Use.SESSIONS and not engine.is_given_away
        ]

    def serves(self, owner: str) -> bool:
        """Returns whether a tenant has an engine for programs that accepts work."""
        return any(
            engine.is_ready and engine.owner == owner and engine.use is not Use.SESSIONS and not engine.is_given_away
            for engine in self.engines
        )

    def is_kept_waiting_by(self, owner: str) -> bool:
        """Returns whether other tenants wait for an engine of a tenant whose turn is over, or for its worker."""
        given_away = any(engine.owner == owner and engine.is_given_away for engine in self.engines)
        return given_away or self.workers.is_kept_waiting_by(owner)

    async def provide(self, owner: str, ends_at: float = 0.0, patience_s: float = 0.0) -> None:
        """Gives a tenant an engine for programs if it has none, and waits until the engine accepts work.

        Args:
            owner: The tenant.
            ends_at: Loop time of the deadline; 0: it waits 10 s for its turn.
            patience_s: How long it waits for the process of the engine, at least 10 s.

        Raises:
            GradruleError: OVERLOADED if others use all engines until shortly before the deadline; ENGINE_UNAVAILABLE if
                no process is ready in time.
        """
        while not self.serves(owner):
            if self._has_place(owner):
                await self._wait_until(
                    lambda: self.serves(owner) or not self._has_place(owner), max(self._times.provide_s, patience_s)
                )
            else:
                await self._wait_for_turn(owner, Need.PROGRAMS, ends_at)

    async def session_engine(self, owner: str, ends_at: float = 0.0) -> Engine:
        """Returns the engine for a new session of a tenant. Arguments and errors are those of `provide`.

        An engine that will be ended soon gets no new session.
        """
        while True:
            own = [engine for engine in self.engines if engine.owner == owner and engine.use is Use.SESSIONS]
            engine = next((engine for engine in own if not engine.is_doomed), None)
            if engine is None:
                await self._wait_for_turn(owner, Need.SESSION, ends_at)
            elif engine.is_ready:
                for other in own:
                    # Another engine was started because this one was to be ended; then its request ended in time.
                    if other is not engine and other.is_idle:
                        self._remove(other)
                return engine
            else:
                await self._wait_until(functools.partial(self._is_settled, engine), self._times.provide_s)

    async def wait_to_keep(self, owner: str, ends_at: float) -> None:
        """Waits until an engine for a tenant's programs may keep forward handles. Raises OVERLOADED."""
        if not self._may_keep(owner):
            await self._wait_for_turn(owner, Need.HANDLE, ends_at)

    def check_may_keep(self, engine: Engine) -> None:
        """Raises OVERLOADED if a forward handle would make an engine one more than sessions and handles may hold."""
        if not engine.kept and engine.use is not Use.SESSIONS and self.held >= self.max_held:
            raise self._full(engine.owner or "", Need.HANDLE, 0.0)

    def claim_another(self, owner: str, *, surplus: int = 0) -> Engine | None:
        """Returns one more engine for a tenant's programs; None if it may have no more, or none is ready.

        `surplus`: How many more engines than usual the tenant may have, until none of them compiles.
        """
        own = self.engines_for(owner)
        if len(own) >= self.per_tenant + surplus or not all(engine.is_ready for engine in own):
            return None
        engine = self._claim(owner)
        if engine is None:
            if self._waiting or self.is_full():
                return None
            engine = self._add(owner, Use.PROGRAMS)
            engine.start()
        return engine if engine.is_ready else None

    @contextlib.asynccontextmanager
    async def alone(self, owner: str) -> AsyncIterator[Engine]:
        """Provides an engine that runs one call of a tenant alone, and is ended afterwards."""
        engine = Engine(_TRIAL, None, owner=owner, use=Use.TRIAL, times=self._times)
        engine.install(await self._spares.take())
        self._trials.add(engine)
        try:
            yield engine
        finally:
            self._trials.discard(engine)
            self._end(engine)

    def _claim(self, owner: str) -> Engine | None:
        """Gives a tenant an engine for programs that has no owner; returns None if all have one."""
        unclaimed = [engine for engine in self.engines if engine.owner is None]
        if not unclaimed:
            return None
        engine = max(unclaimed, key=lambda engine: engine.is_ready)
        engine.owner, engine.turn_started = owner, asyncio.get_running_loop().time()
        return engine

    def _add(self, owner: str | None, use: Use) -> Engine:
        used = {engine.index for engine in self.engines}
        index = next(index for index in range(len(used) + 1) if index not in used)
        ended = self._ended.setdefault(index, Counter())
        engine = Engine(
            index,
            self._spares,
            self._changed,
            on_idle=self._handle_idle,
            owner=owner,
            use=use,
            ended=ended,
            times=self._times,
            unbatched=self._unbatched,
        )
        self.engines.append(engine)
        return engine

    def _has_place(self, owner: str) -> bool:
        """Returns whether a tenant has an engine for programs, even if its process is only starting."""
        return bool(self.engines_for(owner))

    def _is_settled(self, engine: Engine) -> bool:
        """Returns whether a starting engine is ready, or has ended."""
        return engine.is_ready or engine not in self.engines

    def _may_keep(self, owner: str) -> bool:
        """Returns whether an engine for a tenant's programs may keep forward handles."""
        return self.held < self.max_held or any(engine.kept for engine in self.engines_for(owner))

    async def _wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Waits until a condition holds after a change of engines. Raises ENGINE_UNAVAILABLE after some time."""
        try:
            async with asyncio.timeout(seconds) as limit:
                while not condition():
                    await self._change.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            raise engine_unavailable() from None

    async def _wait_for_turn(self, owner: str, need: Need, ends_at: float) -> None:
        """Waits until a tenant gets what it needs, in the order of tenants. Raises OVERLOADED before the deadline."""
        started = asyncio.get_running_loop().time()
        left_s = ends_at - started if ends_at else self._times.provide_s
        key = owner, need
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = _WaitingTenant(owner, need)
            self._assign()
        waiting.calls += 1
        try:
            async with asyncio.timeout(waiting_time(left_s)) as limit:
                await waiting.served.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            if not waiting.served.is_set():
                raise self._full(owner, need, asyncio.get_running_loop().time() - started) from None
        finally:
            waiting.calls -= 1
            if not waiting.calls and self._waiting.get(key) is waiting:
                del self._waiting[key]
                self._schedule_assignment(is_left=True)

    def _full(self, owner: str, need: Need, waited_s: float) -> GradruleError:
        sessions = sum(engine.use is Use.SESSIONS for engine in self.engines)
        held = f"sessions hold {sessions}, forward handles {self.held - sessions}"
        if need is Need.PROGRAMS or self.held < self.max_held:
            limit = "--max-engines" if len(self.engines) >= self.max_engines else "no memory is left for more"
            if size := self._evicted_bytes(owner):
                limit = f"no memory is left for another one of {size >> 20} MiB, as this tenant's last one"
            full = f"all {len(self.engines)} engines ({limit}) are in use: {held}, calls of tenants the others"
        else:
            full = f"{held} engines, which are all that they may hold of {self.max_engines} (--max-engines)"
        return error(
            errors_pb2.ERROR_REASON_OVERLOADED,
            f"{full}; the call waited {waited_s:.1f} s for its turn; send the request again later",
            retry_after_s=_FULL_RETRY_S,
        )

    def _handle_idle(self, engine: Engine) -> None:
        """Assigns places again for tenants that wait, because an engine has nothing to do, or what it holds changed."""
        if len(self.engines) > self.per_tenant:
            self._end_surplus(engine.owner)
        if not self._waiting or (engine.kept and not engine.is_given_away):
            return
        # Engines are idle often during their turns, when calls gain nothing by that.
        if self._is_turn_over(engine) or any(need is not Need.PROGRAMS for _, need in self._waiting):
            self._schedule_assignment()

    def _end_surplus(self, owner: str | None) -> None:
        """Ends the engine that a tenant had in addition while it compiled a slow program, once it compiles no more."""
        own = [engine for engine in self.engines if engine.owner == owner and engine.use is Use.PROGRAMS]
        if owner is None or len(own) <= self.per_tenant or any(engine.is_compiling for engine in own):
            return
        idle = [engine for engine in own if engine.is_idle]
        if idle:
            self._remove(min(idle, key=lambda engine: engine.programs))

    def _schedule_assignment(self, *, is_left: bool = False) -> None:
        """Gives places to waiting tenants soon. `is_left`: A tenant waits no longer."""
        if (self._waiting or is_left) and self._assigning is None:
            # Tasks that an engine's change has woken come first: they may use the engine.
            self._assigning = asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        """Gives tenants that wait what they need, in the order in which they came."""
        if self._assigning is not None:
            self._assigning.cancel()
            self._assigning = None
        for engine in self.engines:
            if engine.is_given_away and engine.kept:
                # A call that was running has left a forward handle.
                self._take_back(engine)
        without_place: list[_WaitingTenant] = []
        is_full = False
        for key, waiting in list(self._waiting.items()):
            if waiting.served.is_set():
                continue
            needs_much = self._evicted_bytes(waiting.owner) > 0
            if waiting.need is Need.PROGRAMS and is_full and not needs_much:
                # A place that the tenant before could not get is not there for this one either.
                without_place.append(waiting)
                continue
            own = next((item for item in self.engines if item.owner == waiting.owner and item.is_given_away), None)
            if own is not None and waiting.need is Need.PROGRAMS and not without_place:
                # Nobody else waits for its engine any more.
                self._take_back(own)
            elif self._serve(waiting):
                del self._waiting[key]
                waiting.served.set()
            elif needs_much:
                # It waits for room, and takes no place from tenants that use less.
                continue
            elif waiting.need is Need.PROGRAMS or (waiting.need is Need.SESSION and self.held < self.max_held):
                without_place.append(waiting)
                is_full = True
        self._give_away(without_place)
        self._set_turn_timer()

    def _take_back(self, engine: Engine) -> None:
        """Lets the owner of an engine that was given away keep it."""
        engine.is_given_away, engine.turn_started = False, asyncio.get_running_loop().time()
        waiting = self._waiting.pop((engine.owner or "", Need.PROGRAMS), None)
        if waiting is not None:
            waiting.served.set()
        self._wake()

    def _serve(self, waiting: _WaitingTenant) -> bool:
        """Gives a tenant what it needs, if that is possible now."""
        owner, need, size = waiting.owner, waiting.need, self._evicted_bytes(waiting.owner)
        if need is Need.HANDLE and self._may_keep(owner):
            return True
        if need is Need.PROGRAMS and (self._has_place(owner) or (not size and self._claim(owner) is not None)):
            return True
        replaces_session = need is not Need.PROGRAMS and self.held >= self.max_held
        replaced = None
        if replaces_session or self.is_full(need, size):
            free = [
                engine
                for engine in self.engines
                if engine.is_idle
                and self._is_turn_over(engine)
                and (engine.use is Use.SESSIONS or not replaces_session)
                and (not size or self._makes_room(engine, size))
            ]
            if not free:
                return False
            replaced = min(free, key=functools.partial(self._order_of_replacement, owner))
            self._count_eviction(replaced, "turn")
            self._take_out(replaced)
        if need is not Need.HANDLE:
            self._add(owner, Use.PROGRAMS if need is Need.PROGRAMS else Use.SESSIONS).start()
        if replaced is not None:
            self._changed(replaced)
        return True

    def is_full(self, need: Need = Need.PROGRAMS, size: int = 0) -> bool:
        """Returns whether no engine may be added: because of their number, or because of their memory.

        Args:
            need: What the engine would be for.
            size: Bytes that it will take; 0: what engines usually take.
        """
        if len(self.engines) >= self.max_engines:
            return True
        if not self.memory_share or (
            need is Need.PROGRAMS and all(engine.use is Use.SESSIONS or engine.kept for engine in self.engines)
        ):
            return False
        owned = [engine for engine in self.engines if engine.owner is not None]
        known = [engine.own_bytes for engine in owned if engine.own_bytes]
        usual = size or (statistics.median(known) if known else _NEW_ENGINE_BYTES)
        used, coming = self.used_bytes, len(owned) - len(known) + 1
        fair = (self.memory_share - used + sum(known)) / (len({engine.owner for engine in owned}) + 1)
        # An engine that takes no more than the fair share of a tenant is added: another tenant takes more than its own.
        return used + coming * usual > self.memory_share and usual > fair

    def _makes_room(self, engine: Engine, size: int) -> bool:
        """Returns whether an engine is large enough to be replaced by one that takes so many bytes."""
        return 2 * engine.own_bytes >= size and self.used_bytes - engine.own_bytes + size <= self.memory_share

    def _evicted_bytes(self, owner: str) -> int:
        """Returns the bytes that a tenant took when it lately lost an engine in use; 0: it has lost none.

        At most half of what all may take, so that the tenant gets an engine at some time.
        """
        evicted_at, size = self._evicted.get(owner, (0.0, 0))
        is_lately = asyncio.get_running_loop().time() < evicted_at + self._times.scarce_idle_s
        return min(size, self.memory_share // 2) if is_lately else 0

    def _check_memory(self) -> None:
        """Ends processes while all together take more memory than their share; then lets waiting tenants try again."""
        excess = self.used_bytes - self.memory_share if self.memory_share else 0
        while excess > 0:
            found = [*self.engines, *self.workers.workers, *self._trials]
            found = [engine for engine in found if engine.owner is not None and engine.own_bytes]
            taken: Counter[str] = Counter()
            for engine in found:
                taken[engine.owner or ""] += engine.own_bytes
            fair = (taken.total() - excess) / max(1, len(taken))
            chosen = min(found, key=functools.partial(self._order_of_eviction, taken, fair), default=None)
            if chosen is None or (len(taken) == 1 and not self._is_unused(chosen)):
                # A tenant alone is limited by the limit of each engine.
                break
            _log.warning(
                "engines take %d bytes more than their share of the memory; ending engine %d of tenant %s, with %d",
                *(excess, chosen.pid, chosen.owner, chosen.own_bytes),
            )
            excess -= chosen.own_bytes
            if chosen.use is Use.COMPILE:
                self.workers.end(chosen, EndReason.EVICTED)
                continue
            self._count_eviction(chosen, "memory")
            if not self._is_unused(chosen):
                self._note_size(chosen.owner or "", taken)
            if chosen in self._trials:
                self._trials.discard(chosen)
                self._end(chosen, EndReason.EVICTED)
            else:
                self._remove(chosen, EndReason.EVICTED)
        self._schedule_assignment()

    def _note_size(self, owner: str, taken: Mapping[str, int]) -> None:
        """Remembers what a tenant took, so that it gets no engine before there is room for as much."""
        self._evicted = {other: entry for other, entry in self._evicted.items() if self._evicted_bytes(other)}
        size = max(taken[owner], self._evicted.get(owner, (0.0, 0))[1])
        self._evicted[owner] = asyncio.get_running_loop().time(), size

    def _order_of_eviction(self, taken: Mapping[str, int], fair: float, engine: Engine) -> tuple[float, ...]:
        """Returns a key: the engine with the smallest one ends first when memory is short.

        First come idle compile workers, and engines that were idle for long. Then come those of the tenants that take
        more than their fair share, idle or not, the largest tenant first; there is always one unless sessions and
        forward handles take the memory, which are spared as long as their tenant takes less than half of it. Then come
        idle engines, and last what is in use.

        Args:
            taken: The bytes that each tenant takes.
            fair: Bytes that each tenant may take so that all have room.
            engine: The engine.
        """
        is_idle = self._is_unused(engine)
        long_ago = asyncio.get_running_loop().time() - self._times.scarce_idle_s
        size = taken[engine.owner or ""]
        if is_idle and (engine.use is Use.COMPILE or engine.used_at < long_ago):
            return 0, engine.used_at
        if size > (self.memory_share / 2 if engine.kept else fair):
            return 1, -size, not is_idle, -engine.own_bytes
        return (2, engine.used_at) if is_idle else (3, -size)

    def _is_unused(self, engine: Engine) -> bool:
        """Returns whether ending an engine or a compile worker would lose nothing but time."""
        return engine.is_idle and engine.use is not Use.TRIAL

    def _count_eviction(self, engine: Engine, reason: str) -> None:
        if engine.owner is not None:
            self.evictions[reason] += 1
            self._evicted_at = self._evicted_at if reason == "idle" else asyncio.get_running_loop().time()

    def _is_turn_over(self, engine: Engine) -> bool:
        return (
            engine.owner is None
            or engine.is_given_away
            or self._turn_ends_at(engine) <= asyncio.get_running_loop().time()
        )

    def _turn_ends_at(self, engine: Engine) -> float:
        return engine.turn_ends_at(self._times.turn_s, self._times.longest_turn_s)

    def _order_of_replacement(self, owner: str, engine: Engine) -> tuple[bool, bool, int, float]:
        """Returns a key: the engine with the smallest one loses its place first.

        Those that were not used for a turn come first; then those of tenants with several engines, then the one whose
        turn started first. A tenant that waits loses its own other engine last.
        """
        if engine.is_idle and engine.used_at + self._times.turn_s <= asyncio.get_running_loop().time():
            return engine.owner == owner, False, 0, engine.used_at
        return engine.owner == owner, True, -len(self.engines_for(engine.owner or "")), engine.turn_started

    def _give_away(self, waiting: Sequence[_WaitingTenant]) -> None:
        """Lets one engine for each waiting tenant take no further calls, if turns are over; takes others back.

        An engine whose calls go on for longer than a turn does not count, since another one may become free before.
        """
        given = [engine for engine in self.engines if engine.is_given_away]
        now = asyncio.get_running_loop().time()
        slow = sum(self._turn_ends_at(engine) <= now for engine in given) if waiting else 0
        for engine in given[len(waiting) + slow :]:
            self._take_back(engine)
        for item in waiting[max(0, len(given) - slow) :]:
            busy = [
                engine
                for engine in self.engines
                if engine.is_ready
                and engine.use is not Use.SESSIONS
                and engine.owner != item.owner
                and not (engine.kept or engine.is_given_away or engine.is_idle)
                and self._is_turn_over(engine)
            ]
            if not busy:
                return
            min(busy, key=functools.partial(self._order_of_replacement, item.owner)).give_away()

    def _set_turn_timer(self) -> None:
        """Assigns places again when the next turn ends, if a tenant waits."""
        if self._turn_timer is not None:
            self._turn_timer.cancel()
            self._turn_timer = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        ends = [self._turn_ends_at(engine) for engine in self.engines if engine.is_ready and not engine.kept]
        due = min((end for end in ends if end > loop.time()), default=None)
        if due is not None:
            self._turn_timer = loop.call_at(due, self._assign)

    async def _end_idle(self) -> None:
        """Ends engines that were idle for long. The number for programs never falls below that at the start."""
        while True:
            await asyncio.sleep(self._times.idle_period_s)
            since = asyncio.get_running_loop().time() - self._times.idle_s
            idle = [engine for engine in self.engines if engine.is_idle and engine.used_at < since]
            surplus = sum(engine.use is Use.PROGRAMS for engine in self.engines) - self.per_tenant
            for engine in sorted(idle, key=lambda engine: engine.used_at):
                if engine.use is Use.SESSIONS or (engine.use is Use.PROGRAMS and surplus > 0):
                    surplus -= engine.use is Use.PROGRAMS
                    self._count_eviction(engine, "idle")
                    self._remove(engine)

    def _remove(self, engine: Engine, reason: EndReason = EndReason.OVERRUN) -> None:
        """Ends an engine; for `reason` if it is in use."""
        self._take_out(engine, reason)
        self._changed(engine)

    def _take_out(self, engine: Engine, reason: EndReason = EndReason.OVERRUN) -> None:
        self.engines.remove(engine)
        self._end(engine, reason)

    def _end(self, engine: Engine, reason: EndReason = EndReason.OVERRUN) -> None:
        """Ends an engine's process. It has run one tenant's work, so no other tenant may get it."""
        engine.remove(reason)
        self._report_removed(engine)

    def _report_removed(self, engine: Engine) -> None:
        for listener in self.on_removed:
            listener(engine)

    def _changed(self, engine: Engine) -> None:
        is_replaced = engine.use is not Use.SESSIONS and not engine.is_given_away
        if not (is_replaced or engine.is_ready) and engine in self.engines and engine.generation:
            # Its sessions are lost, and the next session gets a new engine; or its place goes to another tenant.
            self.engines.remove(engine)
            engine.is_removed = True
            self._report_removed(engine)
        if len(self.engines) < self.max_engines and all(item.use is Use.SESSIONS for item in self.engines):
            # Memory may be so short that sessions get the places of all others, but calls of all tenants need one.
            self._add(None, Use.PROGRAMS).start()
        self._wake()
        self._schedule_assignment()
        is_ready = self.is_ready
        if is_ready != self._was_ready:
            self._was_ready = is_ready
            self._on_change(is_ready)

    def _wake(self) -> None:
        """Wakes the tasks that wait for a change of engines."""
        self._change.set()
        self._change = asyncio.Event()
