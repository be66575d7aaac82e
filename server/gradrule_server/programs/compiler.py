"""From a program's spec to something that runs: prepared in a compile worker, loaded into an engine, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gradrule_server.link.engine import Engine
from gradrule_server.link.shape import CallShape
from gradrule_server.link.turns import TurnsByOwner
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import timing_compilation
from gradrule_server.policy import Limits
from gradrule_server.programs.cache import Runnable
from gradrule_server.programs.compiled import compiled
from gradrule_server.programs.loaded import Loadable, LoadedPrograms
from gradrule_server.programs.preparer import Prepared, Preparer
from gradrule_server.programs.retries import Retries
from gradrule_server.programs.rule_lookup import RegistryLookup
from gradrule_server.registry.blobs import BlobStore

_LARGE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class KeptParts:
    """What a registry keeps of a program. `spec`: bytes of the `ProgramSpec`, a graph inline as bytes."""

    spec: bytes
    rule_names: tuple[str, ...]
    override_values: bytes


class Compiler:
    """Compiles programs of one tenant; keeps nothing."""

    def __init__(
        self, loaded: LoadedPrograms, preparer: Preparer, limits: Limits, blobs: BlobStore, owner: str
    ) -> None:
        self._loaded = loaded
        self._preparer = preparer
        self._limits = limits
        self._blobs = blobs
        self._owner = owner
        self._large = TurnsByOwner()

    async def compile(
        self,
        spec: bytes,
        call: CallShape,
        rules: RegistryLookup | bytes,
        retries: Retries,
    ) -> Runnable:
        """Returns the program for calls of this shape. Raises `GradruleError` with all that is wrong with it.

        `spec`: bytes of a `ProgramSpec`; `rules`: the registry's, or the snapshot of a kept program's.
        """
        _, program = await self._compile(
            self._preparer.graph_bytes(spec),
            retries,
            lambda: self._preparer.program(spec, call, rules, retries.ends_at),
        )
        assert program is not None
        return program

    async def compile_kept(
        self, graph_bytes: int, read: Callable[[], tuple[bytes, bytes]], call: CallShape, retries: Retries
    ) -> Runnable:
        """Returns a kept program for calls of this shape. Large graphs of a tenant are read one after the other.

        Args:
            graph_bytes: Size of its graph.
            read: Returns the spec and the snapshot of its rules; called in a thread.
            call: The structure of calls.
            retries: The chances of the call.
        """

        async def prepare() -> Prepared:
            spec, snapshot = await asyncio.to_thread(read)
            return await self._preparer.program(spec, call, snapshot, retries.ends_at)

        _, program = await self._compile(graph_bytes, retries, prepare)
        assert program is not None
        return program

    async def compile_unless_known(
        self,
        spec: bytes,
        call: CallShape,
        rules: RegistryLookup,
        retries: Retries,
        is_known: Callable[[bytes], bool],
    ) -> Runnable | None:
        """Compiles as `compile` does; returns None where `is_known` of the spec's digest is True."""
        _, program = await self._compile(
            self._preparer.graph_bytes(spec),
            retries,
            lambda: self._preparer.program(spec, call, rules, retries.ends_at, is_known=is_known),
        )
        return program

    async def compile_to_keep(
        self, spec: bytes, call: CallShape, rules: RegistryLookup, retries: Retries
    ) -> tuple[Runnable, KeptParts]:
        """Compiles as `compile` does; returns also what a registry keeps."""
        prepared, program = await self._compile(
            self._preparer.graph_bytes(spec),
            retries,
            lambda: self._preparer.program(spec, call, rules, retries.ends_at, is_kept=True),
        )
        assert program is not None
        return program, KeptParts(prepared.kept_spec, tuple(prepared.rule_names), prepared.override_values)

    async def _compile(
        self, graph_bytes: int, retries: Retries, prepare: Callable[[], Awaitable[Prepared]]
    ) -> tuple[link_pb2.PreparedProgram, Runnable | None]:
        """Prepares a program and has an engine compile it; no program where it is known.

        A tenant has one large graph at a time compiled, since its bytes wait here for an engine. Few bytes can become a
        large graph: such a program is prepared again when its turn comes.
        """
        with timing_compilation():
            answer = None
            if graph_bytes < _LARGE_BYTES:
                answer = await prepare()
                if len(answer.compile_request) < _LARGE_BYTES:
                    return answer.message, await self._load(answer, retries)
                if self._large.is_held(self._owner):
                    answer = None
            async with self._large.hold(self._owner):
                answer = answer or await prepare()
                return answer.message, await self._load(answer, retries)

    async def _load(self, answer: Prepared, retries: Retries) -> Runnable | None:
        """Has an engine compile a prepared program; does nothing where it is known."""
        prepared = answer.message
        if prepared.is_known:
            return None
        blobs, folder = tuple(prepared.blobs), self._blobs.folder_name
        if not self._blobs.are_verified(blobs):
            # Reading them takes long.
            await asyncio.to_thread(self._blobs.verify, blobs)
        loadable = Loadable(
            # Equal programs of two tenants are two programs: nobody learns from another's speed, or end.
            f"{prepared.key}@{folder}" if folder else prepared.key,
            answer.compile_request,
            blobs,
            prepared.nodes,
            tuple(self._blobs.size(name) for name in blobs),
            prepared.likeness,
            prepared.derivative,
            self._blobs,
            self._owner,
        )

        async def load(engine: Engine | None) -> bytes:
            with self._loaded.held(loadable, engine, retries.ends_at, retries.account(loadable)) as held:
                return await self._loaded.wait(held, may_move=engine is None)

        reply = await retries.run(loadable, load, proves=False)
        device = self._loaded.pool.greeting.device
        finished = await self._preparer.finish(prepared.plan, reply, device, prepared.likeness, retries.ends_at)
        return Runnable(compiled(prepared, finished, self._limits), loadable)
