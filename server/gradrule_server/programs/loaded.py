"""Which programs the engine holds: loaded once, dropped when it holds too many, loaded again in a new engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.prepare import Prepared


@dataclass(frozen=True, slots=True)
class _Load:
    engine_key: str
    graph_bytes: int
    reply: asyncio.Task[link_pb2.CompileReply]


class LoadedPrograms:
    """The programs of the running engine, least recently used first."""

    def __init__(self, engine: Engine, capacity: int, capacity_bytes: int) -> None:
        self._engine = engine
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._generation = 0
        self._loads: OrderedDict[str, _Load] = OrderedDict()
        self._in_use: Counter[str] = Counter()
        self._serial = 0

    async def load(self, prepared: Prepared, ends_at: float) -> link_pb2.CompileReply:
        """What the engine says of the program; compiles it unless it is loaded."""
        _, reply = await self._load(prepared, ends_at)
        return reply

    async def key_of(self, prepared: Prepared, ends_at: float) -> tuple[str, bool]:
        """The engine's key for the program, and whether it had to be compiled first."""
        known = self._current(prepared.key)
        ready = known is not None and known.reply.done()
        engine_key, _ = await self._load(prepared, ends_at)
        return engine_key, not ready

    @contextlib.contextmanager
    def in_use(self, key: str) -> Iterator[None]:
        """Within this context the program is not dropped."""
        self._in_use[key] += 1
        try:
            yield
        finally:
            self._in_use[key] -= 1
            if not self._in_use[key]:
                del self._in_use[key]

    async def _load(self, prepared: Prepared, ends_at: float) -> tuple[str, link_pb2.CompileReply]:
        load = self._current(prepared.key)
        if load is None:
            # An engine handles messages side by side: with its own key, a new load never meets an old one's UNLOAD.
            self._serial += 1
            engine_key = f"{prepared.key}/{self._serial}"
            load = _Load(
                engine_key,
                len(prepared.request.graph),
                asyncio.create_task(self._compile(prepared, engine_key, ends_at)),
            )
            self._loads[prepared.key] = load
            load.reply.add_done_callback(lambda done: self._forget_failed(prepared.key, load))
            self._drop_surplus()
        else:
            self._loads.move_to_end(prepared.key)
        # Several callers may wait for one load; one that gives up must not take it from the others.
        return load.engine_key, await asyncio.shield(load.reply)

    async def _compile(self, prepared: Prepared, engine_key: str, ends_at: float) -> link_pb2.CompileReply:
        request = link_pb2.CompileRequest()
        request.CopyFrom(prepared.request)
        request.key = engine_key
        left = max(0.001, ends_at - asyncio.get_running_loop().time())
        return link_pb2.CompileReply.FromString(
            await self._engine.call(Kind.COMPILE, request.SerializeToString(), left)
        )

    def _current(self, key: str) -> _Load | None:
        if self._generation != self._engine.generation:
            self._generation = self._engine.generation
            self._loads.clear()
        return self._loads.get(key)

    def _forget_failed(self, key: str, load: _Load) -> None:
        if (load.reply.cancelled() or load.reply.exception() is not None) and self._loads.get(key) is load:
            del self._loads[key]

    def _drop_surplus(self) -> None:
        held = sum(load.graph_bytes for load in self._loads.values())
        for key in list(self._loads):
            if len(self._loads) <= self._capacity and held <= self._capacity_bytes:
                return
            load = self._loads[key]
            if load.reply.done() and not self._in_use[key]:
                del self._loads[key]
                held -= load.graph_bytes
                self._engine.tell(Kind.UNLOAD, link_pb2.UnloadRequest(key=load.engine_key).SerializeToString())
