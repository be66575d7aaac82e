"""Loads programs into engines and chooses the engine for each call."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import TypeVar

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, NoMemoryLeft
from gradrule_server.link.engine import Engine
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.request_scheduler import ConnectionLost
from gradrule_server.programs.engine_cache import EngineProgramCache, Load, Loadable, ProgramSizes
from gradrule_server.recovery.crash_history import CrashHistory, OutcomeRecorder
from gradrule_server.recovery.endings import lost_before_start
from gradrule_server.registry.blobs import BlobStore

_log = logging.getLogger(__name__)

# The most that is loaded before a call needs it: programs, nodes of one program, nodes of all programs.
_MAX_WARM_PROGRAMS = 32
_MAX_WARM_NODES = 20_000
_MAX_TOTAL_WARM_NODES = 50_000
_POLL_INTERVAL_S = 0.05

T = TypeVar("T")

# An engine compiles one program at a time. Programs that have waited this long behind another one go to another engine.
_SLOW_COMPILE_S = 2.0
# An engine that was added for such programs stays at least this long.
_EXTRA_ENGINE_S = 30.0


class LoadedPrograms:
    """The programs of all engines.

    Args:
        pool: The engines.
        blobs: The blobs of the server.
        capacity: Most programs of one engine.
        capacity_bytes: Most bytes of the programs of one engine.
        crash_history: What programs have done to engines.
    """

    def __init__(
        self,
        pool: EnginePool,
        blobs: BlobStore,
        capacity: int,
        capacity_bytes: int,
        crash_history: CrashHistory | None = None,
    ) -> None:
        self.pool = pool
        self.crash_history = crash_history or CrashHistory()
        self._blobs = blobs
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._warming: set[asyncio.Task[None]] = set()
        self._caches: dict[Engine, EngineProgramCache] = {}
        self._sizes = ProgramSizes()
        self.unloads: Counter[str] = Counter(dict.fromkeys(("count", "bytes", "memory"), 0))
        """The number of programs that were unloaded, by reason: `count`, `bytes`, `memory`."""
        pool.on_filled.append(self._warm)
        pool.on_removed.append(self._drop_cache)

    def __len__(self) -> int:
        """Returns the number of loaded programs; a program in two engines counts twice."""
        return sum(len(self._engine_cache(engine)) for engine in self.pool.engines)

    @property
    def held_bytes(self) -> int:
        """What all loaded programs take in their engines, bytes."""
        return sum(self._engine_cache(engine).held_bytes for engine in self.pool.engines)

    @contextlib.contextmanager
    def hold(
        self,
        program: Loadable,
        engine: Engine | None = None,
        ends_at: float = 0.0,
        recorder: OutcomeRecorder | None = None,
    ) -> Iterator[Load]:
        """Loads a program unless it is loaded, and prevents its removal within this context.

        Args:
            program: The program.
            engine: The engine; None: the best one.
            ends_at: Loop time of the deadline; 0: none.
            recorder: Records what loading does to the engine.

        Raises:
            EngineLost: The tenant has no engine.
            GradruleError: BLOB_NOT_FOUND, ENGINE_UNAVAILABLE.
        """
        engine, since = engine or self._best(program), asyncio.get_running_loop().time()
        with engine.held(), self._engine_cache(engine).hold(program, ends_at, recorder) as load:
            try:
                yield load
            except NoMemoryLeft as full:
                self.make_room(load, full, since)
                raise

    @contextlib.asynccontextmanager
    async def hold_with_blobs(
        self,
        program: Loadable,
        engine: Engine | None = None,
        ends_at: float = 0.0,
        recorder: OutcomeRecorder | None = None,
    ) -> AsyncIterator[Load]:
        """Loads a program as `hold` does; fetches its blobs first if they are no longer on the disk."""
        with contextlib.ExitStack() as stack:
            try:
                load = stack.enter_context(self.hold(program, engine, ends_at, recorder))
            except GradruleError as cause:
                if cause.reason != errors_pb2.ERROR_REASON_BLOB_NOT_FOUND:
                    raise
                async with (program.store or self._blobs).acquired(program.blobs):
                    load = stack.enter_context(self.hold(program, engine, ends_at, recorder))
            yield load

    def find_loaded(self, program: Loadable) -> Load | None:
        """Returns the program in the best engine, if that has loaded it."""
        try:
            load = self._engine_cache(self._best(program)).get(program.key)
        except GradruleError:
            return None
        return load if load is not None and load.is_available else None

    def mark_used(self, load: Load) -> None:
        """Marks a loaded program as used, so that others are dropped before it."""
        self._engine_cache(load.engine).mark_used(load)

    async def wait(self, load: Load, *, may_move: bool = False) -> bytes:
        """Waits until a held program is loaded, and returns the engine's answer. Raises `EngineLost`.

        `may_move`: Raises `EngineLost` also if another engine need not wait for a slow program.
        """
        while may_move and not load.is_done:
            await asyncio.wait([load.work.answer], timeout=_SLOW_COMPILE_S)
            waits = load.work.connection.is_waiting(load.work)
            if waits and load.engine.has_compiled_for(_SLOW_COMPILE_S) and self._has_alternative(load.engine):
                raise lost_before_start()
        try:
            # Several callers may wait for one load; one that is cancelled must not cancel the load.
            answer = load.work.answer.result() if load.is_done else await asyncio.shield(load.work.answer)
        except ConnectionLost as gone:
            raise await load.engine.loss_error(load.work, gone) from None
        load.check()
        return answer

    def make_room(self, load: Load, full: NoMemoryLeft, since: float) -> None:
        """Frees the memory of an engine that has none left for a program; completes the error.

        `since`: Loop time at which the call began.
        """
        cache = self._engine_cache(load.engine)
        full.is_alone = cache.is_only(load)
        if not full.holds_nothing:
            cache.make_room(load, since)

    def unload_idle(self, engine: Engine) -> bool:
        """Unloads all programs that no call uses from an engine without memory. Returns whether there were any."""
        return self._engine_cache(engine).unload_idle()

    def forget(self, load: Load) -> None:
        """Removes a program that the engine does not have."""
        self._engine_cache(load.engine).forget(load)

    def _engine_cache(self, engine: Engine) -> EngineProgramCache:
        cache = self._caches.get(engine)
        if cache is None:
            cache = EngineProgramCache(
                engine,
                self._blobs,
                self._capacity,
                self._capacity_bytes,
                self.pool.memory_limit,
                self._sizes,
                self.unloads,
            )
            # The pool reports the removal of an engine once: what is added later would never be removed.
            if not engine.is_removed:
                self._caches[engine] = cache
        return cache

    def _drop_cache(self, engine: Engine) -> None:
        self._caches.pop(engine, None)

    def _best(self, program: Loadable) -> Engine:
        """Returns the least busy engine that has the program, or a less busy one if all that have it are busy.

        Raises `EngineLost` if the tenant has no engine, so that the call waits for one.
        """
        ready = [engine for engine in self.pool.engines_for(program.owner) if engine.is_ready]
        if not ready:
            raise lost_before_start()
        if len(ready) == 1 == self.pool.per_tenant:
            return ready[0]
        holders = [engine for engine in ready if self._has(engine, program.key)]
        best = min(holders, key=lambda engine: (engine.is_extra, engine.load), default=None)
        if best is not None and best.has_room:
            return best
        # Prefer an engine where a new program that crashes would not end forward handles.
        other = min(ready, key=_cost)
        if _is_free(other):
            return other
        another = self.pool.claim_another(program.owner)
        if another is not None:
            return another
        return other if best is None or other.has_room else best

    def _has(self, engine: Engine, key: str) -> bool:
        """Returns whether an engine has a program or will have it soon, without waiting for a slow program."""
        cache = self._engine_cache(engine)
        return cache.has(key) and not (cache.is_waiting(key) and engine.has_compiled_for(_SLOW_COMPILE_S))

    def _has_alternative(self, engine: Engine) -> bool:
        """Returns whether another engine can load what waits for this one; adds an engine if a spare is ready."""
        owner = engine.owner or ""
        for other in self.pool.engines_for(owner):
            if other is not engine and other.is_ready and not other.has_compiled_for(_SLOW_COMPILE_S):
                return True
        extra = self.pool.borrow(owner)
        if extra is None:
            return False
        _log.info("engine %d was added, because another engine of the tenant compiles a slow program", extra.pid)
        self._retire_later(extra)
        return True

    def _retire_later(self, extra: Engine) -> None:
        asyncio.get_running_loop().call_later(_EXTRA_ENGINE_S, self._retire, extra)

    def _retire(self, extra: Engine) -> None:
        """Ends an added engine once no call uses it."""
        if extra.is_ready:
            own = self.pool.engines_for(extra.owner or "")
            slow = any(engine.has_compiled_for(_SLOW_COMPILE_S) for engine in own)
            if slow or not extra.is_idle:
                self._retire_later(extra)
                return
        self.pool.release(extra)

    def _warm(self, engine: Engine) -> None:
        """Loads the programs of an engine's last process into its new one, except those that may have ended it."""
        left = self._engine_cache(engine).reset_if_replaced()
        if left:
            task = asyncio.create_task(self._load_again(engine, left), name="warm")
            self._warming.add(task)
            task.add_done_callback(self._warming.discard)

    async def _load_again(self, engine: Engine, loads: Sequence[Load]) -> None:
        generation = engine.generation
        if await engine.ended_for_memory():
            # The programs would fill the new process again, before the call that needed more.
            return
        for recorder, program in select_to_load((load.work.recorder, load.program) for load in loads):
            # Calls come first: an engine compiles one program at a time.
            while engine.is_compiling:
                await asyncio.sleep(_POLL_INTERVAL_S)
            # A compilation prolongs the turn of the engine's tenant.
            if engine.generation != generation or self.pool.waiting_tenants:
                return
            try:
                # No call needs it yet, so its blobs must not prevent uploads.
                with self._engine_cache(engine).hold(program, 0.0, recorder, keeps_blobs=False) as load:
                    await self.wait(load)
            except GradruleError as cause:
                _log.debug("a program was not loaded into the new process: %s", cause)


def select_to_load(programs: Iterable[tuple[T, Loadable]]) -> Iterator[tuple[T, Loadable]]:
    """Returns those of the programs that may be loaded before a call needs them: neither too many nor too large."""
    nodes_left = _MAX_TOTAL_WARM_NODES
    for item, program in itertools.islice(programs, _MAX_WARM_PROGRAMS):
        if program.nodes <= min(_MAX_WARM_NODES, nodes_left):
            nodes_left -= program.nodes
            yield item, program


def _is_free(engine: Engine) -> bool:
    """Returns whether a new program neither waits there nor endangers a forward handle."""
    return not any(_cost(engine)[:-1])


def _cost(engine: Engine) -> tuple[bool, bool, bool, bool, bool, int]:
    """Returns a key: the engine with the smallest one is the best for a new program."""
    is_slow = engine.has_compiled_for(_SLOW_COMPILE_S)
    return is_slow, not engine.has_room, engine.is_extra, engine.kept > 0, engine.is_compiling, engine.load
