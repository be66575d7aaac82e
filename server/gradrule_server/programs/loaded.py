"""Which programs which engines hold, and which engine a call goes to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from gradrule_server.errors import GradruleError
from gradrule_server.link.engine import Engine, engine_unavailable, lost_before_start
from gradrule_server.link.engine_request import ConnectionLost
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.engine_cache import EngineProgramCache, Load, Loadable
from gradrule_server.recovery.crash_history import CrashHistory, OutcomeRecorder
from gradrule_server.registry.blobs import BlobStore

__all__ = ["Load", "Loadable", "LoadedPrograms"]

_log = logging.getLogger(__name__)

# What is loaded before a call needs it: programs, nodes of one, and nodes of all.
_WARM_PROGRAMS = 32
_WARM_NODES = 20_000
_WARM_NODES_TOGETHER = 50_000
_WARM_POLL_S = 0.05

T = TypeVar("T")

# An engine compiles one program at a time. Others wait so long behind one before they go elsewhere, and an engine that
# was added for them stays at least so long.
_SLOW_COMPILE_S = 2.0
_EXTRA_S = 30.0


class LoadedPrograms:
    """The programs of all engines of a pool, bounded per engine. `crash_history`: what is known of them."""

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
        pool.on_filled.append(self._warm)

    def __len__(self) -> int:
        """How many programs engines hold; one that several hold counts as often."""
        return sum(len(self._cache_of(engine)) for engine in self.pool.engines)

    @property
    def held_bytes(self) -> int:
        """Roughly the bytes of them."""
        return sum(self._cache_of(engine).held_bytes for engine in self.pool.engines)

    @contextlib.contextmanager
    def held(
        self,
        program: Loadable,
        engine: Engine | None = None,
        ends_at: float = 0.0,
        recorder: OutcomeRecorder | None = None,
    ) -> Iterator[Load]:
        """Sees to it that the program gets loaded, into `engine` or the best one; in this context it is not dropped.

        BLOB_NOT_FOUND, ENGINE_UNAVAILABLE. `ends_at`: loop time after which nobody needs it, as far as is known.
        """
        with self._cache_of(engine or self._best(program)).held(program, ends_at, recorder) as load:
            yield load

    def find_loaded(self, program: Loadable) -> Load | None:
        """The program in the best engine, if it is loaded there."""
        try:
            load = self._cache_of(self._best(program)).get(program.key)
        except GradruleError:
            return None
        return load if load is not None and load.is_available else None

    def used(self, load: Load) -> None:
        """Notes that a program that is at hand is used: others are dropped before it."""
        self._cache_of(load.engine).used(load)

    async def ready(self, load: Load, *, may_move: bool = False) -> link_pb2.CompileReply:
        """What the engine says of a program that is held; waits until it is loaded."""
        return link_pb2.CompileReply.FromString(await self.wait(load, may_move=may_move))

    async def wait(self, load: Load, *, may_move: bool = False) -> bytes:
        """Waits until a program that is held is loaded; `EngineLost` where it cannot be there.

        `may_move`: also where it waits behind a program that takes long, and need not.
        """
        while may_move and not load.is_over:
            await asyncio.wait([load.work.answer], timeout=_SLOW_COMPILE_S)
            waits = load.work.connection.is_waiting(load.work)
            if waits and load.engine.has_compiled_for(_SLOW_COMPILE_S) and self._has_way_around(load.engine):
                raise lost_before_start()
        try:
            # Several callers may wait for one load; one that gives up must not take it from the others.
            answer = load.work.answer.result() if load.is_over else await asyncio.shield(load.work.answer)
        except ConnectionLost as gone:
            raise await load.engine.lost(load.work, gone) from None
        load.check()
        return answer

    def forget(self, load: Load) -> None:
        """The engine does not have it after all."""
        self._cache_of(load.engine).forget(load)

    def _cache_of(self, engine: Engine) -> EngineProgramCache:
        # It lies with the engine, for it knows the engine: in a table of engines neither would ever go.
        if not isinstance(engine.shelf, EngineProgramCache):
            engine.shelf = EngineProgramCache(engine, self._blobs, self._capacity, self._capacity_bytes)
        return engine.shelf

    def _best(self, program: Loadable) -> Engine:
        """The least busy one that has the program; another where all that have it are busy, and one is not.

        ENGINE_UNAVAILABLE where its tenant has none.
        """
        engines = self.pool.engines_of(program.owner)
        if len(engines) == 1 == self.pool.per_tenant:
            return engines[0]
        ready = [engine for engine in engines if engine.is_ready]
        if not ready:
            raise engine_unavailable()
        having = [engine for engine in ready if self._has(engine, program.key)]
        best = min(having, key=lambda engine: (engine.is_extra, engine.load), default=None)
        if best is not None and best.has_room:
            return best
        # What is new goes where it can cost nobody a session or a forward handle, if there is such a place.
        other = min(ready, key=_cost)
        if _is_free(other):
            return other
        another = self.pool.another(program.owner)
        if another is not None:
            return another
        return other if best is None or other.has_room else best

    def _has(self, engine: Engine, key: str) -> bool:
        """Whether an engine has a program, or will soon: not where it waits there behind one that takes long."""
        cache = self._cache_of(engine)
        return cache.has(key) and not (cache.waits(key) and engine.has_compiled_for(_SLOW_COMPILE_S))

    def _has_way_around(self, engine: Engine) -> bool:
        """Whether another engine could take what waits there; one is added where there is a spare."""
        owner = engine.owner or ""
        for other in self.pool.engines_of(owner):
            if other is not engine and other.is_ready and not other.has_compiled_for(_SLOW_COMPILE_S):
                return True
        extra = self.pool.borrow(owner)
        if extra is None:
            return False
        _log.info("engine %d takes the programs that would wait behind one that takes long", extra.pid)
        self._retire_later(extra)
        return True

    def _retire_later(self, extra: Engine) -> None:
        asyncio.get_running_loop().call_later(_EXTRA_S, self._retire, extra)

    def _retire(self, extra: Engine) -> None:
        """An engine that was added goes as soon as nobody loses anything by it."""
        if extra.is_ready:
            own = self.pool.engines_of(extra.owner or "")
            slow = any(engine.has_compiled_for(_SLOW_COMPILE_S) for engine in own)
            if slow or extra.load or extra.kept or self._cache_of(extra).is_in_use:
                self._retire_later(extra)
                return
        self.pool.give_back(extra)

    def _warm(self, engine: Engine) -> None:
        """An engine got another process: it is given what the last one held, as far as that was no part of its end."""
        left = self._cache_of(engine).reset_if_replaced()
        if left:
            task = asyncio.create_task(self._load_again(engine, left), name="warm")
            self._warming.add(task)
            task.add_done_callback(self._warming.discard)

    async def _load_again(self, engine: Engine, loads: Sequence[Load]) -> None:
        generation = engine.generation
        for recorder, program in select_to_load((load.work.recorder, load.program) for load in loads):
            # Calls come first: an engine compiles one program at a time.
            while engine.is_compiling:
                await asyncio.sleep(_WARM_POLL_S)
            if engine.generation != generation:
                return
            try:
                # Nobody has asked for it yet, so it must not keep others from uploading.
                with self._cache_of(engine).held(program, 0.0, recorder, keeps_blobs=False) as load:
                    await self.wait(load)
            except GradruleError as cause:
                _log.debug("a program was not loaded again: %s", cause)


def select_to_load(programs: Iterable[tuple[T, Loadable]]) -> Iterator[tuple[T, Loadable]]:
    """Returns those of the programs that may be loaded before a call needs them: neither too many nor too large."""
    nodes_left = _WARM_NODES_TOGETHER
    for item, program in itertools.islice(programs, _WARM_PROGRAMS):
        if program.nodes <= min(_WARM_NODES, nodes_left):
            nodes_left -= program.nodes
            yield item, program


def _is_free(engine: Engine) -> bool:
    """Whether a program that is new neither waits there nor can cost anybody a forward handle."""
    return not any(_cost(engine)[:-1])


def _cost(engine: Engine) -> tuple[bool, bool, bool, bool, bool, int]:
    """The engine where this is least is the best for a program that is new."""
    is_slow = engine.has_compiled_for(_SLOW_COMPILE_S)
    return is_slow, not engine.has_room, engine.is_extra, engine.kept > 0, engine.is_compiling, engine.load
