"""Loads programs into engines, chooses the engine for each call, and unloads what was not used for longest."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError, NoMemoryLeft
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import compile_payload, unload_payload
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.request_scheduler import ConnectionLost, EngineRequest
from gradrule_server.operations.request_record import record_cache_lookup
from gradrule_server.recovery.crash_history import CrashHistory, OutcomeRecorder, Workload
from gradrule_server.recovery.endings import lost_before_start
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.kept_values import KeptFile

# Programs are unloaded while the engine uses more than this share of its memory limit. The rest is for building.
_MAX_SHARE = 0.75
# Programs that all together take less than this share stay: unloading them would not help an engine that is full of
# forward handles or of what calls compute.
_LEAST_SHARE = 0.02

LONGEST_LOAD_S = 120.0
"""For which a program may be compiled and loaded without a call that waits for it, seconds.

An engine is ended if a load takes longer than this and continues after the deadline of the first call for it.
"""

# The first run of a program takes about as long as loading it. Less than the factor from which on a run counts as a
# crash: see `OutcomeRecorder.record_overrun`.
_FIRST_RUN_FACTOR = 2.0
# An engine compiles one program at a time. Programs that have waited this long behind another one go to another engine.
_SLOW_COMPILE_S = 2.0


@dataclass(frozen=True, slots=True)
class Loadable:
    """What an engine needs to load a program.

    Attributes:
        key: The program's digest, with the tenant's blob folder.
        request: Bytes of its `CompileRequest`.
        blobs: The blobs that the engine reads.
        nodes: The number of nodes of its graph.
        graph: Digest of the graph, equal for all encodings of equal graphs.
        derivative: The derivative that it computes.
        store: The blobs of the tenant; None: those of the server.
        owner: The tenant.
        files: The files of values that the engine maps; they exist as long as a program refers to them.
        is_batched: Whether its calls may run together.
    """

    key: str
    request: bytes
    blobs: tuple[str, ...] = ()
    nodes: int = 0
    graph: str = ""
    derivative: evaluate_pb2.Derivative.ValueType = evaluate_pb2.DERIVATIVE_UNSPECIFIED
    store: BlobStore | None = None
    owner: str = ""
    files: tuple[KeptFile, ...] = ()
    is_batched: bool = False

    @property
    def workload(self) -> Workload:
        """What is blamed if the program ends engines."""
        return Workload(self.owner, self.graph, self.derivative)


@dataclass(slots=True, eq=False)
class Load:
    """A program that an engine has loaded, or is going to load."""

    program: Loadable
    engine: Engine
    loads: OrderedDict[str, Load]
    """The programs of its process by key, least recently used first."""
    generation: int
    engine_key: str
    work: EngineRequest
    holders: int = 0
    has_run: bool = False
    """Whether a run of it has completed."""
    loading_s: float = 0.0
    """How long the engine took to load it, seconds."""
    is_loaded: bool = False
    """Whether loading has succeeded, and the engine was not told to unload the program."""

    @property
    def is_available(self) -> bool:
        """Whether calls can use the program now."""
        return self.is_loaded and self.generation == self.engine.generation and not self.engine.is_given_away

    def mark_used(self) -> None:
        """Marks it as used, so that others are unloaded before it; it is available, or being loaded."""
        self.loads.move_to_end(self.program.key)

    @property
    def first_run_s(self) -> float:
        """Seconds that the first run may take although its deadline passes: it optimizes what was loaded."""
        return min(_FIRST_RUN_FACTOR * self.loading_s, LONGEST_LOAD_S)

    @property
    def is_done(self) -> bool:
        """Whether loading has ended, successfully or not."""
        return self.work.answer.done()

    @property
    def waits_long(self) -> bool:
        """Whether it waits until its engine has compiled a program that takes long."""
        return self.work.connection.is_waiting(self.work) and self.engine.has_compiled_for(_SLOW_COMPILE_S)


@dataclass(slots=True, eq=False)
class _EngineLoads:
    """The programs of one process of an engine.

    Attributes:
        generation: Of the engine; see `Engine.generation`.
        loads: By the key of the program, least recently used first.
        started: The number of loads that the process started.
        emptied_at: Loop time when idle programs were unloaded last, because no memory was left.
    """

    generation: int
    loads: OrderedDict[str, Load] = field(default_factory=OrderedDict)
    started: int = 0
    emptied_at: float = 0.0


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
        self._by_engine: dict[Engine, _EngineLoads] = {}
        self._numbers = itertools.count(1)
        self.unloads: Counter[str] = Counter(dict.fromkeys(("count", "bytes", "memory"), 0))
        """The number of programs that were unloaded, by reason: `count`, `bytes`, `memory`."""
        pool.on_removed.append(self._drop)

    def __len__(self) -> int:
        """Returns the number of loaded programs; a program in two engines counts twice."""
        return sum(len(self._of(engine).loads) for engine in self.pool.engines)

    @property
    def held_bytes(self) -> int:
        """What all loaded programs take in their engines, bytes."""
        return sum(engine.memory.programs for engine in self.pool.engines)

    @contextlib.contextmanager
    def hold(
        self,
        program: Loadable,
        engine: Engine | None = None,
        ends_at: float = 0.0,
        recorder: OutcomeRecorder | None = None,
    ) -> Iterator[Load]:
        """Loads a program unless it is loaded, and prevents its removal within this context.

        A load that has started goes on if no call waits for it any more, so that the next call finds it; see
        `LONGEST_LOAD_S`.

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
        load = self._of(engine).loads.get(program.key)
        record_cache_lookup("loaded", is_hit=load is not None)
        if load is None:
            load = self._start(engine, program, ends_at, recorder)
        else:
            load.mark_used()
        load.holders += 1
        # It has a caller again, if it was abandoned.
        load.work.is_given_up = False
        with engine.held():
            try:
                self._drop_surplus(engine)
                yield load
            except NoMemoryLeft as full:
                self.make_room(load, full, since)
                raise
            finally:
                load.holders -= 1
                if not load.holders:
                    engine.abandon(load.work, ends_at)
                    if load.work.answer.cancelled():
                        self.forget(load)

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
            load = self._of(self._best(program)).loads.get(program.key)
        except GradruleError:
            return None
        return load if load is not None and load.is_available else None

    async def wait(self, load: Load, *, may_move: bool = False) -> bytes:
        """Waits until a held program is loaded, and returns the engine's answer. Raises `EngineLost`.

        `may_move`: Raises `EngineLost` also if another engine need not wait for a slow program.
        """
        while may_move and not load.is_done:
            await asyncio.wait([load.work.answer], timeout=_SLOW_COMPILE_S)
            if load.waits_long and self._has_alternative(load.engine):
                raise lost_before_start()
        try:
            # Several callers may wait for one load; one that is cancelled must not cancel the load.
            answer = load.work.answer.result() if load.is_done else await asyncio.shield(load.work.answer)
        except ConnectionLost as gone:
            raise await load.engine.loss_error(load.work, gone) from None
        if load.generation != load.engine.generation:
            raise lost_before_start()
        return answer

    def make_room(self, load: Load, full: NoMemoryLeft, since: float) -> None:
        """Frees the memory of an engine that has none left for a program; completes the error.

        Unloads all idle programs. If there are none, the engine gets a new process if possible. Does nothing if another
        call has unloaded programs after `since` (loop time), when this call began: it may have enough memory now.
        """
        engine = load.engine
        found = self._of(engine)
        is_current = load.generation == engine.generation
        full.is_alone = is_current and found.started == 1 and not (engine.load or engine.kept)
        if is_current and since >= found.emptied_at and not full.holds_nothing and not self.unload_idle(engine):
            engine.recycle()

    def unload_idle(self, engine: Engine) -> bool:
        """Unloads all programs that no call uses from an engine without memory. Returns whether there were any."""
        idle = list(self._idle(engine))
        for load in idle:
            self._unload(load, "memory")
        if idle:
            self._of(engine).emptied_at = asyncio.get_running_loop().time()
        return bool(idle)

    def forget(self, load: Load) -> None:
        """Removes a program that the engine does not have."""
        load.is_loaded = False
        load.engine.memory.forget(load.engine_key)
        if load.loads.get(load.program.key) is load:
            del load.loads[load.program.key]
            if load.generation == load.engine.generation:
                load.engine.programs = len(load.loads)

    def _of(self, engine: Engine) -> _EngineLoads:
        """Returns the programs of an engine's current process."""
        found = self._by_engine.get(engine)
        if found is None or found.generation != engine.generation:
            found = _EngineLoads(engine.generation)
            # The pool reports the removal of an engine once: what is added later would never be removed.
            if not engine.is_removed:
                self._by_engine[engine] = found
        return found

    def _drop(self, engine: Engine) -> None:
        self._by_engine.pop(engine, None)

    def _start(self, engine: Engine, program: Loadable, ends_at: float, recorder: OutcomeRecorder | None) -> Load:
        # Engines handle messages concurrently: with a new key, the UNLOAD of an older load cannot remove this one.
        engine_key = f"{program.key}/{next(self._numbers)}"
        store = program.store or self._blobs
        store.pin(program.blobs)
        try:
            work = engine.submit(Kind.COMPILE, compile_payload(program.request, engine_key), recorder)
        except BaseException:
            store.unpin(program.blobs)
            raise
        work.answer.add_done_callback(lambda _: store.unpin(program.blobs))
        engine.memory.add(engine_key)
        found = self._of(engine)
        found.started += 1
        load = found.loads[program.key] = Load(program, engine, found.loads, engine.generation, engine_key, work)
        engine.programs = len(found.loads)
        engine.limit_run(work, ends_at, LONGEST_LOAD_S)
        work.answer.add_done_callback(lambda _: self._complete(load))
        return load

    def _complete(self, load: Load) -> None:
        answer = load.work.answer
        if answer.cancelled() or answer.exception() is not None:
            self.forget(load)
            return
        load.is_loaded = True
        if load.work.started_at is not None:
            load.loading_s = asyncio.get_running_loop().time() - load.work.started_at
        if load.is_available:
            self._drop_surplus(load.engine)

    def _idle(self, engine: Engine) -> Iterator[Load]:
        """Yields the programs that can be unloaded, least recently used first."""
        return (load for load in self._of(engine).loads.values() if load.is_done and not load.holders)

    def _surplus(self, engine: Engine) -> str | None:
        """Returns why a program has to be unloaded from an engine; None: there is no reason."""
        if len(self._of(engine).loads) > self._capacity:
            return "count"
        memory, limit = engine.memory, self.pool.memory_limit
        if memory.programs > self._capacity_bytes:
            return "bytes"
        is_short = memory.used > _MAX_SHARE * limit and memory.programs > _LEAST_SHARE * limit
        return "memory" if limit and is_short else None

    def _drop_surplus(self, engine: Engine) -> None:
        while (reason := self._surplus(engine)) is not None:
            oldest = next(self._idle(engine), None)
            if oldest is None:
                return
            self._unload(oldest, reason)

    def _unload(self, load: Load, reason: str) -> None:
        self.unloads[reason] += 1
        self.forget(load)
        load.engine.notify(Kind.UNLOAD, unload_payload(load.engine_key))

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
        best = min(holders, key=lambda engine: engine.load, default=None)
        if best is not None and best.has_room:
            return best
        # Prefer an engine where a new program that crashes would not end forward handles.
        other = min(ready, key=_cost)
        if not any(_cost(other)[:-1]):
            return other
        another = self.pool.claim_another(program.owner)
        if another is not None:
            return another
        return other if best is None or other.has_room else best

    def _has(self, engine: Engine, key: str) -> bool:
        """Returns whether an engine has a program or will have it soon, without waiting for a slow program."""
        load = self._of(engine).loads.get(key)
        return load is not None and not load.waits_long

    def _has_alternative(self, engine: Engine) -> bool:
        """Returns whether another engine can load what waits for this one; adds one that is ended once it is idle."""
        owner = engine.owner or ""
        return any(
            other is not engine and other.is_ready and not other.has_compiled_for(_SLOW_COMPILE_S)
            for other in self.pool.engines_for(owner)
        ) or (self.pool.claim_another(owner, surplus=1) is not None)


def _cost(engine: Engine) -> tuple[bool, bool, bool, bool, int]:
    """Returns a key: the engine with the smallest one is the best for a new program."""
    is_slow = engine.has_compiled_for(_SLOW_COMPILE_S)
    return is_slow, not engine.has_room, engine.kept > 0, engine.is_compiling, engine.load
