"""Compiles, checks, stores and runs the programs of a tenant.

Everything runs on one asyncio loop; slow work runs in threads. Callers cancel their calls at the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2
from gradrule_server.errors import Finding, GradruleError, error
from gradrule_server.link.engine import Engine
from gradrule_server.link.messages import CallShape
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_run, timing_compilation
from gradrule_server.policy import Limits
from gradrule_server.programs.cache import InlineKey, ProgramCache, SpecDigests, StoredKey
from gradrule_server.programs.call_structure import USES_MEMORY, CallStructure, call_shape, memory_use, structure_of
from gradrule_server.programs.compiler import Compiler, RunnableProgram
from gradrule_server.programs.known_calls import KnownCalls
from gradrule_server.programs.loaded import Loadable, LoadedPrograms
from gradrule_server.programs.preparer import Preparer, RegistryLookup
from gradrule_server.programs.run_modes import ProcessRef, RunForward, RunMode, RunOnce, may_batch
from gradrule_server.programs.stored_programs import StoredPrograms
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.recovery.endings import EngineLost, ProgramNotLoaded
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.programs import ProgramRegistry
from gradrule_server.registry.rules import RuleRegistry

MAX_FINDINGS = 100


class ProgramService:
    """Compiles, stores and runs the programs of one tenant.

    Args:
        rules: The tenant's rules.
        programs: The tenant's stored programs.
        pool: The engines of all tenants.
        loaded: The programs that engines hold, of all tenants.
        limits: The limits on graphs.
        blobs: The tenant's blobs.
        capacity: Most programs in the cache.
        capacity_bytes: Most bytes in the cache.
        owner: The tenant.
        has_known_calls: Whether calls whose structure is known skip parsing.
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
        """The programs that were used last, by calls and sessions."""
        self._spec_digests = SpecDigests()
        self.preparer = Preparer(pool, loaded.crash_history, limits, blobs, owner)
        """Sends tasks to the compile workers."""
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
        """Runs a program once; returns the bytes of an `EvaluateResponse`.

        Args:
            raw: The request's bytes.
            read: Parses them.
            received_ns: When the request was received, CLOCK_MONOTONIC.
            ends_at: Loop time of the deadline.
            used: Returns a context within which a call uses a client's shared memory.
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
            # For a call with an inline program, the engine receives the values only.
            mode = RunOnce(ends_at, memory=memory, may_batch=may_batch(request))
            return (await self._evaluate(request, raw, call, received_ns, mode))[0]

    async def _evaluate_once(
        self,
        raw: bytes,
        read: Callable[[], Awaitable[link_pb2.RawEvaluateRequest]],
        received_ns: int,
        ends_at: float,
        structure: CallStructure,
        memory: MemoryUse | None = None,
    ) -> bytes:
        """Runs a call whose structure could be read without parsing it."""
        done = await self._known.run(structure, raw, received_ns, ends_at, memory)
        if isinstance(done, bytes):
            return done
        request = await read()
        mode = RunOnce(ends_at, memory=memory, may_batch=may_batch(request))
        return (await self._evaluate(request, raw, call_shape(request), received_ns, mode, structure, done))[0]

    async def forward(
        self, request: link_pb2.RawEvaluateRequest, handle: str, received_ns: int, ends_at: float
    ) -> tuple[bytes, RunForward, ProcessRef, Loadable]:
        """Runs the forward part; the engine keeps what the backward part needs, under the name `handle`.

        Returns the bytes of an `EvaluateResponse`, the run, the engine process that keeps it, and the program.
        """
        call = replace(call_shape(request), split=True)
        mode = RunForward(ends_at, handle)
        answer, process, program = await self._evaluate(request, request.SerializeToString(), call, received_ns, mode)
        return answer, mode, process, program

    async def compile_for_session(self, spec: bytes, call: CallShape, mode: RunMode) -> RunnableProgram:
        """Returns a program for a session, loaded into the session's engine; does not add it to the cache."""
        lookup = RegistryLookup(self._rules)
        return await self._compiler.compile(spec, replace(call, session=True), lookup, self.recovery(mode))

    def recovery(self, mode: RunMode | None = None) -> CallRecovery[Engine]:
        """Returns what runs one call again if its engine ends."""
        if mode is None:
            return CallRecovery(self.pool, self._loaded.crash_history)
        return CallRecovery(self.pool, self._loaded.crash_history, ends_at=mode.ends_at, pinned=mode.pinned)

    async def run_inline(self, request: link_pb2.RawEvaluateRequest, received_ns: int, mode: RunMode) -> bytes:
        """Runs the program that a request holds; returns the bytes of an `EvaluateResponse`."""
        return (await self._evaluate(request, b"", call_shape(request), received_ns, mode))[0]

    async def run(
        self,
        program: RunnableProgram,
        request: link_pb2.RawEvaluateRequest,
        received_ns: int,
        compile_started_ns: int,
        mode: RunMode,
        *,
        payload: bytes | None = None,
        recovery: CallRecovery[Engine] | None = None,
        is_new: bool = False,
        lost: EngineLost | None = None,
        known_as: tuple[CallStructure, StoredKey] | None = None,
    ) -> tuple[bytes, ProcessRef]:
        """Runs a program on the values of a request; returns the bytes of an `EvaluateResponse`, and where it ran.

        Args:
            program: The program.
            request: The parsed request.
            received_ns: When the request was received, CLOCK_MONOTONIC.
            compile_started_ns: When compiling began, CLOCK_MONOTONIC.
            mode: How the engine runs the program.
            payload: Bytes of a request with these values; None: they are written here.
            recovery: Runs the call again if its engine ends; None: a new one.
            is_new: Whether the program was compiled for this call.
            lost: The loss of the engine that ran the call before.
            known_as: The structure of such calls and the program's key, to skip parsing next time.
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
            request=payload, params=program.compiled.param_settings(request.params), blob_folder=self._blobs.folder_name
        )

        recovery = recovery or self.recovery(mode)

        async def attempt(engine: Engine | None) -> tuple[bytes, bool, ProcessRef]:
            nonlocal lost
            if lost is not None:
                before, lost = lost, None
                raise before
            return await self._run_on_engine(program, run, received_ns, compile_started_ns, mode, engine, recovery)

        blobs = _value_blobs(request)
        if not self._blobs.are_verified(blobs):
            # Verifying takes long, and must not block the event loop.
            await asyncio.to_thread(self._blobs.verify, blobs)
        with self._blobs.pinned(blobs):
            answer, is_loaded_now, process = await recovery.run(program.loadable.workload, attempt, undo=mode.undo)
        record_run(answer, run.received_ns)
        if known_as is not None:
            self._known.add(*known_as, program, run, may_batch(request))
        # Concatenating messages merges them, so an answer of any size is not parsed again here.
        tail = evaluate_pb2.EvaluateResponse()
        if is_new or is_loaded_now:
            tail.timings.compile.FromNanoseconds(run.received_ns - received_ns)
        return b"".join([answer, program.compiled.digests_tail, tail.SerializeToString()]), process

    async def _evaluate(
        self,
        request: link_pb2.RawEvaluateRequest,
        raw: bytes,
        call: CallShape,
        received_ns: int,
        mode: RunMode,
        structure: CallStructure | None = None,
        lost: EngineLost | None = None,
    ) -> tuple[bytes, ProcessRef, Loadable]:
        """Finds or compiles the program of a request and runs it; returns answer, engine process and program.

        `structure`: Of the call; None: it cannot be known without parsing. `lost`: See `run`.
        """
        target = request.WhichOneof("target")
        if target is None:
            raise error(
                errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the request names no program and holds none", field="target"
            )
        recovery = self.recovery(mode)
        compile_started = time.monotonic_ns()
        payload = known_as = None
        if target == "program":
            key, program, is_new = await self.stored.find(request.program, call, recovery)
            payload, known_as = raw, None if structure is None else (structure, key)
        else:
            program, is_new = await self._find_inline(request.spec, call, recovery)
        answer, process = await self.run(
            program,
            request,
            received_ns,
            compile_started,
            mode,
            payload=payload,
            recovery=recovery,
            is_new=is_new,
            lost=lost,
            known_as=known_as,
        )
        return (answer + program.compiled.tail if target == "spec" else answer), process, program.loadable

    async def compile(self, spec: bytes, program_id: str, ends_at: float = 0.0) -> program_pb2.Program:
        """Compiles and stores a program. `spec`: Bytes of a `ProgramSpec`. `program_id`: Empty: one is derived."""
        return await self.stored.create(spec, program_id, self.recovery(RunOnce(ends_at)))

    async def load_stored(self, name: str, call: CallShape, ends_at: float) -> None:
        """Compiles a stored program and loads it into an engine, before a call of this shape needs it.

        Tries once. `ends_at`: loop time after which it is ended.
        """
        once = CallRecovery(self.pool, self._loaded.crash_history, ends_at=ends_at, is_speculative=True)
        await self.stored.find(name, call, once, is_used=False)

    async def check(self, spec: bytes, ends_at: float = 0.0) -> tuple[bytes | None, list[Finding]]:
        """Describes a program without storing it; returns the bytes of a `Program`, or what is wrong with the spec.

        `spec`: Bytes of a `ProgramSpec`.
        """
        try:
            program = await self._compiler.describe(spec, RegistryLookup(self._rules), self.recovery(RunOnce(ends_at)))
        except GradruleError as cause:
            if cause.reason in _NOT_FINDINGS:
                raise
            return None, list(cause.findings[:MAX_FINDINGS])
        return program.program, []

    async def _find_inline(
        self, spec: bytes, call: CallShape, recovery: CallRecovery[Engine]
    ) -> tuple[RunnableProgram, bool]:
        """Returns the program of a spec, and whether it was compiled now."""
        raw = hashlib.sha256(spec).digest()
        key = InlineKey(self._spec_digests.get(raw), self._rules.revision, call)
        found = self.cache.get(key)
        if found is not None:
            return found, False

        def is_known(digest: bytes) -> bool:
            # Other bytes may hold the same spec, because maps have no order.
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

    async def _run_on_engine(
        self,
        program: RunnableProgram,
        run: link_pb2.RunRequest,
        received_ns: int,
        compile_started_ns: int,
        mode: RunMode,
        engine: Engine | None,
        recovery: CallRecovery[Engine],
    ) -> tuple[bytes, bool, ProcessRef]:
        """Runs a program on one engine; returns the answer, whether the program was loaded for it, and where it ran."""
        recorder = recovery.recorder(program.loadable.workload)
        with self._loaded.hold(program.loadable, engine, mode.ends_at, recorder) as load:
            is_loaded_now = not load.is_done
            with timing_compilation() if is_loaded_now else contextlib.nullcontext():
                await self._loaded.wait(load, may_move=engine is None)
            run.key = load.engine_key
            # The time until now counts as compiling, from now on as queueing.
            run.received_ns = received_ns + time.monotonic_ns() - compile_started_ns
            process = ProcessRef(load.engine, load.generation)
            try:
                return await mode.run(load.engine, run, recorder), is_loaded_now, process
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


def _value_blobs(request: link_pb2.RawEvaluateRequest) -> list[str]:
    """Returns the blobs that hold values of the call."""
    values = (*request.feeds, *request.grad_ys, *request.tangents, *request.vectors)
    return [item.value.blob.sha256 for item in values if item.value.HasField("blob")]
