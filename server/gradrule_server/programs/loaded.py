"""Which programs the engine holds: loaded once, dropped when it holds too many, loaded again in a new engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from gradrule_server.link.connection import EngineGone, Work
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request import note_lookup
from gradrule_server.registry.blobs import BlobStore

# A compilation that runs and that nobody waits for any more ends by itself, and whoever asks again finds its result.
# To end the engine instead would cost everybody all that is loaded.
_PATIENCE_S = 30.0

# What a node takes in the engine with its gradient, in TensorFlow's graphs before and after optimising: from 25 KiB
# (large models of Keras's) to 80 KiB (chains of elementwise ops under rules) were measured.
_NODE_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class Loadable:
    """What an engine needs to load a program: its digest, the bytes of its `CompileRequest`, and the blobs it reads.

    nodes: of its graph.
    """

    key: str
    request: bytes
    blobs: tuple[str, ...] = ()
    nodes: int = 0

    @property
    def loaded_size(self) -> int:
        """Roughly the bytes that it takes in an engine."""
        return len(self.request) + _NODE_BYTES * self.nodes


@dataclass(slots=True, eq=False)
class Load:
    """A program on its way into the engine, or there."""

    key: str
    engine_key: str
    size: int
    work: Work
    holders: int = 0

    @property
    def is_ready(self) -> bool:
        return self.work.answer.done()


class LoadedPrograms:
    """The programs of the running engine, least recently used first."""

    def __init__(self, engine: Engine, blobs: BlobStore, capacity: int, capacity_bytes: int) -> None:
        self._engine = engine
        self._blobs = blobs
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._generation = 0
        self._loads: OrderedDict[str, Load] = OrderedDict()
        self._bytes = 0
        self._serial = 0

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def held_bytes(self) -> int:
        """Roughly the bytes of all programs."""
        return self._bytes

    @contextlib.contextmanager
    def held(self, program: Loadable) -> Iterator[Load]:
        """Sees to it that the program gets loaded; within this context it is not dropped. BLOB_NOT_FOUND."""
        load = self._current(program.key)
        note_lookup("loaded", is_hit=load is not None)
        if load is None:
            load = self._start(program)
        else:
            self._loads.move_to_end(program.key)
        load.holders += 1
        if load.holders == 1:
            load.work.watch(None)
        try:
            self._drop_surplus()
            yield load
        finally:
            load.holders -= 1
            if not load.holders:
                self._engine.abandon(load.work, _PATIENCE_S)
                if load.work.answer.cancelled():
                    self.forget(load)

    async def ready(self, load: Load) -> link_pb2.CompileReply:
        """What the engine says of a program that is held; waits until it is loaded."""
        return link_pb2.CompileReply.FromString(await self.wait(load))

    async def wait(self, load: Load) -> bytes:
        """Waits until a program that is held is loaded."""
        try:
            # Several callers may wait for one load; one that gives up must not take it from the others.
            return load.work.answer.result() if load.is_ready else await asyncio.shield(load.work.answer)
        except EngineGone as gone:
            raise self._engine.lost(load.work.connection, gone) from None

    def forget(self, load: Load) -> None:
        """The engine does not have it after all."""
        if self._loads.get(load.key) is load:
            del self._loads[load.key]
            self._bytes -= load.size

    def _start(self, program: Loadable) -> Load:
        # An engine handles messages side by side: with its own key, a new load never meets an old one's UNLOAD.
        self._serial += 1
        engine_key = f"{program.key}/{self._serial}"
        # Concatenating messages merges them: the last key counts.
        own_key = link_pb2.CompileRequest(key=engine_key).SerializeToString()
        self._blobs.hold(program.blobs)
        try:
            work = self._engine.submit(Kind.COMPILE, program.request + own_key)
        except BaseException:
            self._blobs.let_go(program.blobs)
            raise
        work.answer.add_done_callback(lambda _: self._blobs.let_go(program.blobs))
        load = self._loads[program.key] = Load(program.key, engine_key, program.loaded_size, work)
        self._bytes += load.size
        work.answer.add_done_callback(lambda answer: self._forget_failed(load, answer))
        return load

    def _current(self, key: str) -> Load | None:
        if self._generation != self._engine.generation:
            self._generation = self._engine.generation
            self._loads.clear()
            self._bytes = 0
        return self._loads.get(key)

    def _forget_failed(self, load: Load, answer: asyncio.Future[bytes]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            self.forget(load)

    def _drop_surplus(self) -> None:
        if len(self._loads) <= self._capacity and self._bytes <= self._capacity_bytes:
            return
        for load in list(self._loads.values()):
            if load.is_ready and not load.holders:
                self.forget(load)
                self._engine.tell(Kind.UNLOAD, link_pb2.UnloadRequest(key=load.engine_key).SerializeToString())
                if len(self._loads) <= self._capacity and self._bytes <= self._capacity_bytes:
                    return
