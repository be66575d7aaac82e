"""The programs that one engine holds: loaded once, dropped when it holds too many, least recently used first."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from gradrule.v1 import evaluate_pb2
from gradrule_server.link.engine import Engine, lost_before_start
from gradrule_server.link.engine_request import EngineRequest
from gradrule_server.link.framing import Kind
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_cache_lookup
from gradrule_server.recovery.crash_history import OutcomeRecorder, Workload
from gradrule_server.registry.blobs import BlobStore

# What a node takes in the engine with its gradient, in TensorFlow's graphs before and after optimising: from 25 KiB
# (large models of Keras's) to 80 KiB (chains of elementwise ops under rules) were measured.
_NODE_BYTES = 32 * 1024

# A program that takes longer to load than this, and than whoever asked for it first would wait, ends its engine.
_LOAD_S = 60.0


@dataclass(frozen=True, slots=True)
class Loadable:
    """What an engine needs to load a program: its digest, the bytes of its `CompileRequest`, and the blobs it reads.

    nodes: of its graph. blob_bytes: of each blob. graph: digest of its graph, however that was written. derivative:
    what is computed of it. store: where its blobs are, unless it is the common one. owner: the tenant.
    """

    key: str
    request: bytes
    blobs: tuple[str, ...] = ()
    nodes: int = 0
    blob_bytes: tuple[int, ...] = ()
    graph: str = ""
    derivative: evaluate_pb2.Derivative.ValueType = evaluate_pb2.DERIVATIVE_UNSPECIFIED
    store: BlobStore | None = None
    owner: str = ""

    @property
    def workload(self) -> Workload:
        """What is blamed if the program ends engines."""
        return Workload(self.owner, self.graph, self.derivative)

    @property
    def loaded_size(self) -> int:
        """Roughly the bytes that it takes in an engine, without its blobs."""
        return len(self.request) + _NODE_BYTES * self.nodes


@dataclass(slots=True, eq=False)
class Load:
    """A program on its way into an engine, or there."""

    program: Loadable
    engine: Engine
    generation: int
    engine_key: str
    work: EngineRequest
    ends_at: float
    """Loop time until which it may take; see `_LOAD_S`."""
    holders: int = 0
    is_forgotten: bool = False
    """The engine does not have it any more, or will not soon."""

    @property
    def is_available(self) -> bool:
        """Whether the engine has it, and will still have it when a call comes."""
        return not self.is_forgotten and self.generation == self.engine.generation and self.is_loaded

    @property
    def is_over(self) -> bool:
        """Whether the engine has it, or will not."""
        return self.work.answer.done()

    @property
    def is_loaded(self) -> bool:
        """Whether the engine has it."""
        answer = self.work.answer
        return answer.done() and not answer.cancelled() and answer.exception() is None

    def check(self) -> None:
        """`EngineLost` where the engine that had it is gone."""
        if self.generation != self.engine.generation:
            raise lost_before_start()


@dataclass(slots=True)
class _Weights:
    """Blobs that loaded programs hold, each counted once."""

    holders: Counter[str] = field(default_factory=Counter)
    bytes: int = 0

    def add(self, program: Loadable) -> None:
        for blob, size in zip(program.blobs, program.blob_bytes, strict=True):
            self.bytes += 0 if self.holders[blob] else size
            self.holders[blob] += 1

    def remove(self, program: Loadable) -> None:
        for blob, size in zip(program.blobs, program.blob_bytes, strict=True):
            self.holders[blob] -= 1
            if not self.holders[blob]:
                del self.holders[blob]
                self.bytes -= size


class EngineProgramCache:
    """The programs of the process that runs in an engine's place now."""

    def __init__(self, engine: Engine, blobs: BlobStore, capacity: int, capacity_bytes: int) -> None:
        self._engine = engine
        self._blobs = blobs
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._generation = 0
        self._loads: OrderedDict[str, Load] = OrderedDict()
        self._weights = _Weights()
        self._bytes = 0
        self._serial = 0

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def held_bytes(self) -> int:
        """Roughly the bytes of all programs, with their blobs."""
        return self._bytes + self._weights.bytes

    def has(self, key: str) -> bool:
        """Whether the program is there, or on its way."""
        return self._generation == self._engine.generation and key in self._loads

    @property
    def is_in_use(self) -> bool:
        """Whether anybody holds one of the programs now."""
        return any(load.holders for load in self._loads.values())

    def waits(self, key: str) -> bool:
        """Whether the program is to be loaded, and the engine has not begun."""
        load = self._loads.get(key)
        return load is not None and load.work.connection.is_waiting(load.work)

    def get(self, key: str) -> Load | None:
        """The program, if it is there or on its way."""
        return self._loads.get(key) if self._generation == self._engine.generation else None

    def reset_if_replaced(self) -> list[Load]:
        """Begins anew where the process is another; returns what nobody used when the last one ended, but had been
        loaded, used last first."""
        if self._generation == self._engine.generation:
            return []
        self._generation = self._engine.generation
        # What was being used, or loaded, may be what ended the process; whoever wants it asks for it again.
        left = [load for load in reversed(self._loads.values()) if load.is_loaded and not load.holders]
        self._loads.clear()
        self._weights = _Weights()
        self._bytes = 0
        return left

    @contextlib.contextmanager
    def held(
        self, program: Loadable, ends_at: float, recorder: OutcomeRecorder | None, *, keeps_blobs: bool = True
    ) -> Iterator[Load]:
        """Sees to it that the program gets loaded; within this context it is not dropped. BLOB_NOT_FOUND.

        A load that nobody waits for any more is treated as a call is: see `Engine.abandon`. `keeps_blobs`: whether its
        blobs stay while it is loaded; where they do not, the load may fail.
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
            self._engine.limit(load.work, load.ends_at, _LOAD_S)
        try:
            self._drop_surplus()
            yield load
        finally:
            load.holders -= 1
            if not load.holders:
                self._engine.abandon(load.work, ends_at)
                if load.work.answer.cancelled():
                    self.forget(load)

    def used(self, load: Load) -> None:
        """Notes that a program that is at hand is used: others are dropped before it."""
        self._loads.move_to_end(load.program.key)

    def forget(self, load: Load) -> None:
        """The engine does not have it after all."""
        load.is_forgotten = True
        if self._loads.get(load.program.key) is load:
            del self._loads[load.program.key]
            self._bytes -= load.program.loaded_size
            self._weights.remove(load.program)
            self._count()

    def _start(self, program: Loadable, ends_at: float, recorder: OutcomeRecorder | None, *, keeps_blobs: bool) -> Load:
        # An engine handles messages side by side: with its own key, a new load never meets an old one's UNLOAD.
        self._serial += 1
        engine_key = f"{program.key}/{self._serial}"
        # Concatenating messages merges them: the last key counts.
        own_key = link_pb2.CompileRequest(key=engine_key).SerializeToString()
        store, blobs = program.store or self._blobs, program.blobs if keeps_blobs else ()
        store.pin(blobs)
        try:
            work = self._engine.submit(Kind.COMPILE, program.request + own_key, recorder)
        except BaseException:
            store.unpin(blobs)
            raise
        work.answer.add_done_callback(lambda _: store.unpin(blobs))
        load = self._loads[program.key] = Load(
            program, self._engine, self._engine.generation, engine_key, work, ends_at
        )
        self._bytes += program.loaded_size
        self._weights.add(program)
        self._count()
        work.answer.add_done_callback(lambda answer: self._forget_failed(load, answer))
        return load

    def _forget_failed(self, load: Load, answer: asyncio.Future[bytes]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            self.forget(load)

    @property
    def _is_too_full(self) -> bool:
        return len(self._loads) > self._capacity or self.held_bytes > self._capacity_bytes

    def _drop_surplus(self) -> None:
        if not self._is_too_full:
            return
        for load in list(self._loads.values()):
            if load.is_over and not load.holders:
                self._unload(load)
                if not self._is_too_full:
                    return

    def _unload(self, load: Load) -> None:
        self.forget(load)
        self._engine.tell(Kind.UNLOAD, link_pb2.UnloadRequest(key=load.engine_key).SerializeToString())

    def _count(self) -> None:
        if self._generation == self._engine.generation:
            self._engine.programs = len(self._loads)
