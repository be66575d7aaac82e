"""Compiles programs: a compile worker prepares them, an engine loads and describes them.

A `RunnableProgram` is the result: what the front end needs to run the program.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2, rule_pb2
from gradrule_server.concurrency import TenantLocks
from gradrule_server.errors import error
from gradrule_server.link.engine import Engine
from gradrule_server.link.messages import CallShape, describe_only
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits, NodeLimits
from gradrule_server.programs.loaded import Loadable, LoadedPrograms
from gradrule_server.programs.preparer import Prepared, Preparer, RegistryLookup
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.rules.params import ParamTable

_LARGE_BYTES = 8 << 20
# Suffix of the key of a program that an engine describes and does not keep.
_DESCRIBED = "?describe"


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A compiled program.

    Attributes:
        key: The program's digest.
        program: Bytes of the `Program` message; with a name only if it is a stored program.
        tail: Bytes that end each answer to a call that holds the program.
        digests_tail: Bytes that end all answers: the digests.
        params: The params that calls may set.
        placeholders: Canonical names of the graph's placeholders. Feeding these never needs another program.
        used_rules: Indices of the rules that nodes have; the params of others have no effect.
    """

    key: str
    program: bytes
    tail: bytes
    digests_tail: bytes
    params: ParamTable
    placeholders: frozenset[str]
    used_rules: frozenset[int]

    @property
    def message(self) -> program_pb2.Program:
        """The description that clients receive."""
        return program_pb2.Program.FromString(self.program)

    def param_settings(self, params: Mapping[str, evaluate_pb2.ParamValues]) -> list[link_pb2.ParamSetting]:
        """Returns the settings for the params of one call. Raises `GradruleError` for invalid ones."""
        values: dict[str, Mapping[str, rule_pb2.ParamValue]] = {label: item.values for label, item in params.items()}
        return self.params.call_settings(values, self.used_rules)


@dataclass(frozen=True, slots=True)
class RunnableProgram:
    """A compiled program, and what an engine needs to load it again."""

    compiled: CompiledProgram
    loadable: Loadable

    @property
    def size(self) -> int:
        """Its approximate size in the front end, bytes."""
        return len(self.loadable.request) + len(self.compiled.program) + len(self.compiled.tail)


class Compiler:
    """Compiles programs of one tenant; caches nothing."""

    def __init__(
        self, loaded: LoadedPrograms, preparer: Preparer, limits: Limits, blobs: BlobStore, owner: str
    ) -> None:
        self._loaded = loaded
        self._preparer = preparer
        self._limits = limits
        self._blobs = blobs
        self._owner = owner
        self._large = TenantLocks()

    async def compile(
        self,
        spec: bytes,
        rules: RegistryLookup,
        call: CallShape,
        recovery: CallRecovery[Engine],
        *,
        is_kept: bool = False,
        describes: bool = False,
    ) -> tuple[RunnableProgram, link_pb2.PreparedProgram]:
        """Compiles a program; returns it, and the answer of the compile worker. Raises `GradruleError`: all findings.

        Args:
            spec: Bytes of a `ProgramSpec`.
            rules: The registry's rules.
            call: The shape of its calls.
            recovery: Runs the load again if its engine ends.
            is_kept: Whether the worker's answer holds what the registry stores.
            describes: Whether only the description is needed. If no engine holds the program, an engine builds only
                what that needs, and keeps nothing.
        """

        async def prepare() -> Prepared:
            return await self._preparer.program(spec, call, rules, recovery.ends_at, is_kept=is_kept)

        async with self._prepared(len(spec), prepare) as answer:
            return await self._load(answer, recovery, describes=describes), answer.message

    async def compile_stored(
        self, graph_bytes: int, read: Callable[[], tuple[bytes, bytes]], call: CallShape, recovery: CallRecovery[Engine]
    ) -> RunnableProgram:
        """Compiles a stored program for calls of one shape. A tenant's large graphs are read one at a time.

        Args:
            graph_bytes: Size of its graph, bytes.
            read: Returns the spec and the snapshot of its rules; called in a thread.
            call: The shape of the calls.
            recovery: Runs the load again if its engine ends.
        """

        async def prepare() -> Prepared:
            spec, snapshot = await asyncio.to_thread(read)
            return await self._preparer.program(spec, call, snapshot, recovery.ends_at)

        async with self._prepared(graph_bytes, prepare) as answer:
            return await self._load(answer, recovery)

    @contextlib.asynccontextmanager
    async def _prepared(self, graph_bytes: int, prepare: Callable[[], Awaitable[Prepared]]) -> AsyncIterator[Prepared]:
        """Prepares a program; while this process holds a large one, other large ones of the tenant wait.

        Its bytes wait here for an engine. Few bytes can become a large graph: such a program is prepared again when its
        turn comes.
        """
        answer = None
        if graph_bytes < _LARGE_BYTES:
            answer = await prepare()
            if len(answer.compile_request) < _LARGE_BYTES:
                yield answer
                return
            if self._large.is_held(self._owner):
                answer = None
        async with self._large.hold(self._owner):
            yield answer or await prepare()

    def _loadable(self, answer: Prepared) -> Loadable:
        """Returns what an engine needs to load a prepared program."""
        prepared = answer.message
        blobs, folder = tuple(prepared.blobs), self._blobs.folder_name
        return Loadable(
            # Tenants do not share programs: the speed of a call would tell what other tenants run.
            f"{prepared.key}@{folder}" if folder else prepared.key,
            answer.compile_request,
            blobs,
            prepared.nodes,
            prepared.likeness,
            prepared.derivative,
            self._blobs,
            self._owner,
            answer.files,
            prepared.is_batched,
        )

    async def _load(
        self, answer: Prepared, recovery: CallRecovery[Engine], *, describes: bool = False
    ) -> RunnableProgram:
        """Loads a prepared program into an engine.

        `describes`: If no engine holds the program, an engine describes it and does not keep it.
        """
        prepared = answer.message
        loadable = self._loadable(answer)
        describes = describes and self._loaded.find_loaded(loadable) is None
        if describes:
            loadable = replace(
                loadable,
                key=f"{loadable.key}{_DESCRIBED}",
                request=describe_only(loadable.request),
            )

        async def load(engine: Engine | None) -> bytes:
            async with self._loaded.hold_with_blobs(
                loadable, engine, recovery.ends_at, self._loaded.crash_history.recorder(loadable.workload)
            ) as held:
                if describes:
                    held.work.answer.add_done_callback(lambda _: self._loaded.forget(held))
                return await self._loaded.wait(held, may_move=engine is None)

        recovery.is_building = True
        described = await recovery.run(loadable.workload, load)
        try:
            reply = link_pb2.CompileReply.FromString(described)
        except DecodeError as cause:
            message = "the engine's description of the program is damaged"
            raise error(errors_pb2.ERROR_REASON_ENGINE_CRASHED, message) from cause
        return RunnableProgram(_join_compiled(prepared, reply, self._limits), loadable)


def _join_compiled(
    prepared: link_pb2.PreparedProgram, reply: link_pb2.CompileReply, bounds: NodeLimits
) -> CompiledProgram:
    """Joins the answers of a compile worker and an engine. Concatenating messages merges them."""
    digests = program_pb2.Digests(graph=prepared.graph_digest, program=prepared.key)
    return CompiledProgram(
        key=prepared.key,
        program=reply.program + prepared.program,
        tail=reply.tail + prepared.tail,
        digests_tail=evaluate_pb2.EvaluateResponse(digests=digests).SerializeToString(),
        params=ParamTable.read(prepared.params, bounds),
        placeholders=frozenset(prepared.placeholders),
        used_rules=frozenset(prepared.params.used),
    )
