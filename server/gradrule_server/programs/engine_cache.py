"""Tracks the programs that one engine has loaded; drops the least recently used ones if there are too many."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from gradrule.v1 import evaluate_pb2
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import compile_payload, unload_payload
from gradrule_server.link.request_scheduler import EngineRequest
from gradrule_server.operations.request_record import record_cache_lookup
from gradrule_server.recovery.crash_history import OutcomeRecorder, Workload
from gradrule_server.recovery.endings import lost_before_start
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.kept_values import KeptFile

# Programs are unloaded while the engine uses more than this share of its memory limit. The rest is for building.
_MAX_SHARE = 0.75
# Programs that all together take less than this share stay: unloading them would not help an engine that is full of
# forward handles or of what calls compute.
_LEAST_SHARE = 0.02
# While it is built, a program takes up to this many times what it takes later.
_BUILD_FACTOR = 2
# Number of graphs whose size in engines is remembered.
_MAX_REMEMBERED = 1024

LONGEST_LOAD_S = 120.0
"""For which a program may be compiled and loaded without a call that waits for it, seconds.

An engine is ended if a load takes longer than this and continues after the deadline of the first call for it.
"""

# The first run of a program takes about as long as loading it. Less than the factor from which on a first run counts as
# a crash: see `CrashHistory.record_overrun`.
_FIRST_RUN_FACTOR = 2.0


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

    @property
    def file_sizes(self) -> dict[str, int]:
        """The bytes of each file."""
        return {file.name: file.size for file in self.files}

    @property
    def workload(self) -> Workload:
        """What is blamed if the program ends engines."""
        return Workload(self.owner, self.graph, self.derivative)


@dataclass(slots=True, eq=False)
class Load:
    """A program that an engine has loaded, or is going to load."""

    program: Loadable
    engine: Engine
    generation: int
    engine_key: str
    work: EngineRequest
    ends_at: float
    """Loop time until which loading may take; see `LONGEST_LOAD_S`."""
    holders: int = 0
    has_run: bool = False
    """Whether a run of it has completed."""
    loading_s: float = 0.0
    """How long the engine took to load it, seconds."""
    is_forgotten: bool = False
    """Whether the engine has unloaded the program, or will soon."""

    @property
    def is_available(self) -> bool:
        """Whether calls can use the program now."""
        is_current = self.generation == self.engine.generation and not self.engine.is_given_away
        return is_current and not self.is_forgotten and self.is_loaded

    @property
    def least_run_s(self) -> float:
        """Seconds that a run may take although its deadline passes: the first one optimizes what was loaded."""
        return 0.0 if self.has_run else min(_FIRST_RUN_FACTOR * self.loading_s, LONGEST_LOAD_S)

    @property
    def is_done(self) -> bool:
        """Whether loading has ended, successfully or not."""
        return self.work.answer.done()

    @property
    def is_loaded(self) -> bool:
        """Whether loading has succeeded."""
        answer = self.work.answer
        return answer.done() and not answer.cancelled() and answer.exception() is None

    def check(self) -> None:
        """Raises `EngineLost` if the process that loaded the program has ended."""
        if self.generation != self.engine.generation:
            raise lost_before_start()


class ProgramSizes:
    """Remembers what programs of a graph take in an engine, bytes. All tenants have different graphs."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[tuple[str, str], int] = OrderedDict()

    def get(self, program: Loadable) -> int:
        """Returns what the last program of the same graph took; 0: not known."""
        return self._sizes.get((program.owner, program.graph), 0)

    def put(self, program: Loadable, size: int) -> None:
        """Adds what a program takes."""
        self._sizes[program.owner, program.graph] = size
        self._sizes.move_to_end((program.owner, program.graph))
        if len(self._sizes) > _MAX_REMEMBERED:
            self._sizes.popitem(last=False)


class EngineProgramCache:
    """The programs of an engine's current process.

    Args:
        engine: The engine.
        blobs: The blobs of the server.
        capacity: Most programs.
        capacity_bytes: Most bytes of programs.
        memory_limit: Memory limit of the engine, bytes; 0: none.
        sizes: What programs of known graphs take.
        unloads: Counts the programs that are unloaded, by reason: `count`, `bytes`, `memory`.
    """

    def __init__(
        self,
        engine: Engine,
        blobs: BlobStore,
        capacity: int,
        capacity_bytes: int,
        memory_limit: int,
        sizes: ProgramSizes,
        unloads: Counter[str],
    ) -> None:
        self._engine = engine
        self._blobs = blobs
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._memory_limit = memory_limit
        self._sizes = sizes
        self._unloads = unloads
        self._generation = 0
        self._loads: OrderedDict[str, Load] = OrderedDict()
        self._last_number = 0
        self._emptied_at = 0.0
        """Loop time when idle programs were unloaded last, because no memory was left."""
        self._started = 0
        """Loads that the current process started."""

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def held_bytes(self) -> int:
        """What all programs take in the engine, bytes."""
        return self._engine.memory.programs

    def has(self, key: str) -> bool:
        """Returns whether the program is loaded, or going to be."""
        return self._generation == self._engine.generation and key in self._loads

    def is_waiting(self, key: str) -> bool:
        """Returns whether the engine has not started to load the program."""
        load = self._loads.get(key)
        return load is not None and load.work.connection.is_waiting(load.work)

    def get(self, key: str) -> Load | None:
        """Returns the program if it is loaded, or going to be."""
        return self._loads.get(key) if self._generation == self._engine.generation else None

    def reset_if_replaced(self) -> list[Load]:
        """Empties the cache if the engine has another process.

        Returns the programs that the last process had loaded and that no call used when it ended, most recently used
        first.
        """
        if self._generation == self._engine.generation:
            return []
        self._generation = self._engine.generation
        self._started = 0
        # A program that was used or being loaded may have ended the process; calls load it again.
        left = [load for load in reversed(self._loads.values()) if load.is_loaded and not load.holders]
        self._loads.clear()
        return left

    @contextlib.contextmanager
    def hold(
        self, program: Loadable, ends_at: float, recorder: OutcomeRecorder | None, *, keeps_blobs: bool = True
    ) -> Iterator[Load]:
        """Loads a program unless it is loaded, and prevents its removal within this context. Raises BLOB_NOT_FOUND.

        `keeps_blobs`: whether its blobs are pinned until it is loaded; if not, loading may fail. A load that has
        started goes on if no call waits for it any more, so that the next call finds it; see `LONGEST_LOAD_S`.
        """
        self.reset_if_replaced()
        load = self._loads.get(program.key)
        record_cache_lookup("loaded", is_hit=load is not None)
        if load is None:
            load = self._start(program, ends_at, recorder, keeps_blobs=keeps_blobs)
        else:
            self._loads.move_to_end(program.key)
        load.holders += 1
        if load.holders == 1:
            self._engine.limit_run(load.work, load.ends_at, LONGEST_LOAD_S)
        try:
            self._drop_surplus()
            yield load
        finally:
            load.holders -= 1
            if not load.holders:
                self._engine.abandon(load.work, ends_at)
                if load.work.answer.cancelled():
                    self.forget(load)

    def mark_used(self, load: Load) -> None:
        """Marks a loaded program as used, so that others are dropped before it."""
        self._loads.move_to_end(load.program.key)

    def forget(self, load: Load) -> None:
        """Removes a program that the engine does not have."""
        load.is_forgotten = True
        self._engine.memory.forget(load.engine_key)
        if self._loads.get(load.program.key) is load:
            del self._loads[load.program.key]
            self._update_count()

    def is_only(self, load: Load) -> bool:
        """Returns whether the engine's process has loaded nothing else, runs nothing else and keeps nothing."""
        is_used = self._engine.load or self._engine.kept
        return self._started == 1 and load.generation == self._engine.generation and not is_used

    def make_room(self, load: Load, since: float) -> None:
        """Frees the engine's memory, in which there is none left for a program.

        Unloads all idle programs. If there are none, the engine gets a new process if possible. Does nothing if another
        call has unloaded programs after `since` (loop time), when this call began: it may have enough memory now.
        """
        if load.generation != self._engine.generation or since < self._emptied_at:
            return
        if not self.unload_idle() and self._engine.recycle():
            # Loading all again would fill the new process again.
            self._loads.clear()

    def unload_idle(self) -> bool:
        """Unloads all programs that no call uses, for lack of memory. Returns whether there were any."""
        idle = list(self._idle())
        for load in idle:
            self._unload(load, "memory")
        if idle:
            self._emptied_at = asyncio.get_running_loop().time()
        return bool(idle)

    def _start(self, program: Loadable, ends_at: float, recorder: OutcomeRecorder | None, *, keeps_blobs: bool) -> Load:
        # Engines handle messages concurrently: with a new key, the UNLOAD of an older load cannot remove this one.
        self._drop_surplus(self._sizes.get(program))
        self._last_number += 1
        self._started += 1
        engine_key = f"{program.key}/{self._last_number}"
        store, blobs = program.store or self._blobs, program.blobs if keeps_blobs else ()
        store.pin(blobs)
        try:
            work = self._engine.submit(Kind.COMPILE, compile_payload(program.request, engine_key), recorder)
        except BaseException:
            store.unpin(blobs)
            raise
        work.answer.add_done_callback(lambda _: store.unpin(blobs))
        self._engine.memory.add(engine_key)
        load = self._loads[program.key] = Load(
            program, self._engine, self._engine.generation, engine_key, work, ends_at
        )
        self._update_count()
        work.answer.add_done_callback(lambda answer: self._complete(load, answer))
        return load

    def _complete(self, load: Load, answer: asyncio.Future[bytes]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            self.forget(load)
            return
        if load.work.started_at is not None:
            load.loading_s = asyncio.get_running_loop().time() - load.work.started_at
        if load.is_available:
            self._remember_size(load)
            self._drop_surplus()

    def _remember_size(self, load: Load) -> None:
        self._sizes.put(load.program, self._engine.memory.size(load.engine_key))

    def _idle(self) -> Iterator[Load]:
        """Yields the programs that can be unloaded, least recently used first."""
        return (load for load in self._loads.values() if load.is_done and not load.holders)

    def _surplus(self, coming: int) -> str | None:
        """Returns why a program has to be unloaded; None: there is no reason. `coming`: bytes of one that is loaded."""
        if len(self._loads) > self._capacity:
            return "count"
        memory = self._engine.memory
        if memory.programs > self._capacity_bytes:
            return "bytes"
        limit = self._memory_limit
        most = limit - max(_BUILD_FACTOR * coming, (1 - _MAX_SHARE) * limit)
        return "memory" if limit and memory.used > most and memory.programs > _LEAST_SHARE * limit else None

    def _drop_surplus(self, coming: int = 0) -> None:
        while (reason := self._surplus(coming)) is not None:
            oldest = next(self._idle(), None)
            if oldest is None:
                return
            self._unload(oldest, reason)

    def _unload(self, load: Load, reason: str) -> None:
        self._remember_size(load)
        self._unloads[reason] += 1
        self.forget(load)
        self._engine.notify(Kind.UNLOAD, unload_payload(load.engine_key))

    def _update_count(self) -> None:
        if self._generation == self._engine.generation:
            self._engine.programs = len(self._loads)
