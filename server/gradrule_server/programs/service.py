"""All programs, as the front calls them: run once, compiled, checked, and kept by name.

Everything here happens on one asyncio loop; what takes long goes to a thread. Whoever calls sets a deadline by
cancelling.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.engine import Engine
from gradrule_server.link.messages import CallShape, canonical
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_run, timing_compilation
from gradrule_server.policy import Limits
from gradrule_server.programs.cache import Inline, ProgramCache, RunnableProgram, SpecDigests, StoredKey
from gradrule_server.programs.call_structure import USES_MEMORY, CallStructure, memory_use, structure_of
from gradrule_server.programs.compiler import Compiler
from gradrule_server.programs.known_calls import KnownCalls
from gradrule_server.programs.loaded import Loadable, LoadedPrograms
from gradrule_server.programs.preparer import Preparer
from gradrule_server.programs.rule_lookup import RegistryLookup
from gradrule_server.programs.run_modes import ProcessRef, RunForward, RunMode, RunOnce, may_batch
from gradrule_server.programs.stored_programs import StoredPrograms
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.recovery.endings import EngineLost, ProgramNotLoaded
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.programs import ProgramRegistry
from gradrule_server.registry.rules import RuleRegistry

MAX_FINDINGS = 100

# An output's number that is written with zeros before it, and would go by another name in the engine.
_PADDED_OUTPUT = re.compile(r"(.*):0+([0-9]+)")


class ProgramService:
    """One tenant's programs: compiles them, keeps those that are to be kept, and runs them on engines.

    loaded: what engines hold, of all tenants. owner: the tenant, whose engines run the programs.
    """

    def __init__(
        self,
        rules: RuleRegistry,
        programs: ProgramRegistry,
        pool: EnginePool,
        loaded: LoadedPrograms,
        limits: Limits,
        blobs: BlobStore,
        *,
        capacity: int,
        capacity_bytes: int,
        owner: str,
        has_known_calls: bool = True,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self._rules = rules
        self._blobs = blobs
        self._loaded = loaded
        self.owner = owner
        self.cache = ProgramCache(capacity, capacity_bytes)
        """What is kept at hand, by calls and sessions."""
        self._spec_digests = SpecDigests()
        self.preparer = Preparer(pool, loaded.crash_history, limits, blobs, owner)
        """Has graphs read in compile workers."""
        self._compiler = Compiler(loaded, self.preparer, limits, blobs, owner)
        self.stored = StoredPrograms(programs, rules, self._compiler, self.cache)
        self._known = KnownCalls(self.cache, loaded)
        self._has_known_calls = has_known_calls

    async def evaluate(
        self,
        raw: bytes,
        read: Callable[[], Awaitable[link_pb2.RawEvaluateRequest]],
        received_ns: int,
        ends_at: float,
        used: Callable[[evaluate_pb2.SharedMemoryUse], AbstractContextManager[MemoryUse]],
    ) -> bytes:
        """Runs once; returns an `EvaluateResponse`'s bytes.

        `raw`: the request's bytes; `read`: parses them; `ends_at`: loop time of the deadline; `used`: within it a call
        uses the memory of a client.
        """
        structure = structure_of(raw) if self._has_known_calls else None
        if structure is not None:
            if USES_MEMORY not in structure:
                return await self._evaluate_once(raw, read, received_ns, ends_at, structure)
            with used(memory_use(raw)) as memory:
                return await self._evaluate_once(raw, read, received_ns, ends_at, structure, memory)
        request = await read()
        call = call_shape(request)
        if not request.HasField("shared_memory"):
            return (
                await self._evaluate(request, raw, call, received_ns, RunOnce(ends_at, may_batch=may_batch(request)))
            )[0]
        with used(request.shared_memory) as memory:
            # What the engine gets of a call with an inline program holds nothing but values.
            how = RunOnce(ends_at, memory=memory, may_batch=may_batch(request))
            return (await self._evaluate(request, raw, call, received_ns, how))[0]

    async def _evaluate_once(
        self,
        raw: bytes,
        read: Callable[[], Awaitable[link_pb2.RawEvaluateRequest]],
        received_ns: int,
        ends_at: float,
        structure: CallStructure,
        memory: MemoryUse | None = None,
    ) -> bytes:
        """`evaluate` for a call whose structure is known without parsing it."""
        done = await self._known.run(structure, raw, received_ns, ends_at, memory)
        if isinstance(done, bytes):
            return done
        request = await read()
        how = RunOnce(ends_at, memory=memory, may_batch=may_batch(request))
        return (await self._evaluate(request, raw, call_shape(request), received_ns, how, structure, done))[0]

    async def forward(
        self, request: link_pb2.RawEvaluateRequest, handle: str, received_ns: int, ends_at: float
    ) -> tuple[bytes, RunForward, ProcessRef, Loadable]:
        """Runs the forward part and has an engine keep what pulling back needs, under the name `handle`.

        Returns an `EvaluateResponse`'s bytes, and where what is kept of which program.
        """
        call = replace(call_shape(request), split=True)
        how = RunForward(ends_at, handle)
        answer, place, program = await self._evaluate(request, request.SerializeToString(), call, received_ns, how)
        return answer, how, place, program

    async def compile_for_session(self, spec: bytes, call: CallShape, how: RunMode) -> RunnableProgram:
        """A program whose variables are a session's, in that session's engine; whoever asks keeps it."""
        lookup = RegistryLookup(self._rules)
        return await self._compiler.compile(spec, replace(call, session=True), lookup, self.recovery(how))

    def recovery(self, how: RunMode | None = None) -> CallRecovery[Engine]:
        """The chances of one call."""
        if how is None:
            return CallRecovery(self.pool, self._loaded.crash_history)
        return CallRecovery(self.pool, self._loaded.crash_history, ends_at=how.ends_at, pinned=how.pinned)

    async def run_inline(self, request: link_pb2.RawEvaluateRequest, received_ns: int, how: RunMode) -> bytes:
        """Runs the program that a request brings along, in some way."""
        return (await self._evaluate(request, b"", call_shape(request), received_ns, how))[0]

    async def run(
        self,
        program: RunnableProgram,
        request: link_pb2.RawEvaluateRequest,
        received_ns: int,
        compile_started_ns: int,
        how: RunMode,
        *,
        payload: bytes | None = None,
        recovery: CallRecovery[Engine] | None = None,
        is_new: bool = False,
        lost: EngineLost | None = None,
        known_as: tuple[CallStructure, StoredKey] | None = None,
    ) -> tuple[bytes, ProcessRef]:
        """Runs a program on the values of a request; an `EvaluateResponse`'s bytes, and where it ran.

        `payload`: bytes of a request with these values, where there are some already. `lost`: how it lost an engine
        before. `known_as`: the structure of such calls, and the program's key, to go the short way next time.
        """
        if payload is None:
            values = evaluate_pb2.EvaluateRequest(
                feeds=request.feeds,
                grad_ys=request.grad_ys,
                tangents=request.tangents,
                vectors=request.vectors,
                batching=request.batching if request.HasField("batching") else None,
                answer_packing=request.answer_packing if request.HasField("answer_packing") else None,
            )
            if request.HasField("shared_memory"):
                values.shared_memory.CopyFrom(request.shared_memory)
            payload = values.SerializeToString()
        run = link_pb2.RunRequest(
            request=payload, params=program.compiled.settings(request.params), blob_folder=self._blobs.folder_name
        )

        recovery = recovery or self.recovery(how)

        async def attempt(engine: Engine | None) -> tuple[bytes, bool, ProcessRef]:
            nonlocal lost
            if lost is not None:
                before, lost = lost, None
                raise before
            return await self._run(program, run, received_ns, compile_started_ns, how, engine, recovery)

        blobs = _blobs(request)
        if not self._blobs.are_verified(blobs):
            # Reading them takes long, and must not stop the event loop.
            await asyncio.to_thread(self._blobs.verify, blobs)
        with self._blobs.pinned(blobs):
            answer, is_loaded_now, place = await recovery.run(program.loadable.workload, attempt, undo=how.undo)
        record_run(answer, run.received_ns)
        if known_as is not None:
            self._known.note(*known_as, program, run, may_batch(request))
        # Concatenating messages merges them, so an answer of any size is not parsed again here.
        tail = evaluate_pb2.EvaluateResponse()
        if is_new or is_loaded_now:
            tail.timings.compile.FromNanoseconds(run.received_ns - received_ns)
        return b"".join([answer, program.compiled.digests_tail, tail.SerializeToString()]), place

    async def _evaluate(
        self,
        request: link_pb2.RawEvaluateRequest,
        raw: bytes,
        call: CallShape,
        received_ns: int,
        how: RunMode,
        structure: CallStructure | None = None,
        lost: EngineLost | None = None,
    ) -> tuple[bytes, ProcessRef, Loadable]:
        """An `EvaluateResponse`'s bytes, where it ran, and what. `structure`: of the call, if that can be known."""
        target = request.WhichOneof("target")
        if target is None:
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the request names no program and holds none", field="target"
            )
        recovery = self.recovery(how)
        compile_started = time.monotonic_ns()
        payload = known_as = None
        if target == "program":
            key, program, is_new = await self.stored.find(request.program, call, recovery)
            payload, known_as = raw, None if structure is None else (structure, key)
        else:
            program, is_new = await self._inline(request.spec, call, recovery)
        answer, place = await self.run(
            program,
            request,
            received_ns,
            compile_started,
            how,
            payload=payload,
            recovery=recovery,
            is_new=is_new,
            lost=lost,
            known_as=known_as,
        )
        return (answer + program.compiled.tail if target == "spec" else answer), place, program.loadable

    async def compile(self, spec: bytes, program_id: str, ends_at: float = 0.0) -> program_pb2.Program:
        """Compiles and keeps a program. `spec`: bytes of a `ProgramSpec`."""
        return await self.stored.create(spec, program_id, self.recovery(RunOnce(ends_at)))

    async def load_stored(self, name: str, call: CallShape) -> None:
        """Compiles a stored program and loads it into an engine, before a call of this shape needs it."""
        await self.stored.find(name, call, self.recovery(), is_used=False)

    async def check(self, spec: bytes, ends_at: float = 0.0) -> tuple[bytes | None, list[Finding]]:
        """Describes a program without keeping it; returns the bytes of a `Program`, or what is wrong with the spec.

        `spec`: bytes of a `ProgramSpec`.
        """
        try:
            program = await self._compiler.describe(spec, RegistryLookup(self._rules), self.recovery(RunOnce(ends_at)))
        except GradruleError as cause:
            if cause.reason in _NOT_FINDINGS:
                raise
            return None, list(cause.findings[:MAX_FINDINGS])
        return program.program, []

    async def _inline(
        self, spec: bytes, call: CallShape, recovery: CallRecovery[Engine]
    ) -> tuple[RunnableProgram, bool]:
        """The program, and whether it was made just now."""
        raw = hashlib.sha256(spec).digest()
        key = Inline(self._spec_digests.get(raw), self._rules.revision, call)
        found = self.cache.get(key)
        if found is not None:
            return found, False

        def is_known(digest: bytes) -> bool:
            # The bytes are new here, and what they say may not be: maps have no order.
            nonlocal key, found
            self._spec_digests.put(raw, digest)
            key = key._replace(spec_hash=digest)
            found = self.cache.get(key, is_counted=False)
            return found is not None

        rules = RegistryLookup(self._rules)
        program = await self._compiler.compile_unless_known(spec, call, rules, recovery, is_known)
        if program is not None:
            self.cache.put(key, program)
            return program, True
        assert found is not None
        return found, False

    async def _run(
        self,
        program: RunnableProgram,
        run: link_pb2.RunRequest,
        received_ns: int,
        compile_started_ns: int,
        how: RunMode,
        engine: Engine | None,
        recovery: CallRecovery[Engine],
    ) -> tuple[bytes, bool, ProcessRef]:
        """Runs on an engine as it is now; tells also whether the program had to be loaded first, and where it ran."""
        recorder = recovery.recorder(program.loadable.workload)
        with self._loaded.held(program.loadable, engine, how.ends_at, recorder) as load:
            is_loaded_now = not load.is_over
            with timing_compilation() if is_loaded_now else contextlib.nullcontext():
                await self._loaded.wait(load, may_move=engine is None)
            run.key = load.engine_key
            # Queueing is counted from here: what came before counts as compiling.
            run.received_ns = received_ns + time.monotonic_ns() - compile_started_ns
            place = ProcessRef(load.engine, load.generation)
            try:
                return await how.on(load.engine, run, recorder), is_loaded_now, place
            except ProgramNotLoaded:
                self._loaded.forget(load)
                raise


_NOT_FINDINGS = frozenset(
    {
        errors_pb2.ERROR_REASON_ENGINE_CRASHED,
        errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE,
        errors_pb2.ERROR_REASON_MEMORY_EXCEEDED,
        errors_pb2.ERROR_REASON_QUARANTINED,
        errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
        errors_pb2.ERROR_REASON_INTERNAL,
        errors_pb2.ERROR_REASON_BLOB_NOT_FOUND,
    }
)


def _blobs(request: link_pb2.RawEvaluateRequest) -> list[str]:
    """Blobs that the call's values are."""
    values = (*request.feeds, *request.grad_ys, *request.tangents, *request.vectors)
    return [item.value.blob.sha256 for item in values if item.value.HasField("blob")]


def call_shape(request: link_pb2.RawEvaluateRequest) -> CallShape:
    """The structure of a call; UNKNOWN_FEED where a name is given twice, or is no name."""
    return CallShape(
        _names([item.name for item in request.feeds], "feeds"),
        _names([item.name for item in request.grad_ys], "grad_ys"),
        request.derivative,
        _names([item.name for item in request.tangents], "tangents"),
        _names([item.name for item in request.vectors], "vectors"),
        request.stacked_grad_ys,
    )


def _names(given: Sequence[str], field: str) -> frozenset[str]:
    """Canonical names; UNKNOWN_FEED where one is given twice, or is no name."""
    names = [canonical(name) for name in given]
    unique = frozenset(names)
    if len(names) != len(unique):
        twice = next(name for name in names if names.count(name) > 1)
        raise error(errors_pb2.ERROR_REASON_UNKNOWN_FEED, f"{field} name {twice!r} twice", node=twice, field=field)
    for name in unique:
        padded = _PADDED_OUTPUT.fullmatch(name)
        if padded is not None:
            raise error(
                errors_pb2.ERROR_REASON_UNKNOWN_FEED,
                f"{field} name {name!r}, which is no name of a tensor; did you mean '{padded[1]}:{padded[2]}'?",
                field=field,
            )
    return unique
