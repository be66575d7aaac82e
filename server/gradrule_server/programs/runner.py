"""Runs compiled programs on engines: once, forward only, or in a session."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import NoMemoryLeft, error
from gradrule_server.link.batching import BatchKey
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import release_payload, with_values
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_cache_lookup, record_run, timing_compilation
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.loaded import Load, LoadedPrograms
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.recovery.crash_history import OutcomeRecorder
from gradrule_server.recovery.endings import EngineLost, ProgramNotLoaded
from gradrule_server.registry.blobs import BlobStore


def run_limit_s(message: evaluate_pb2.EvaluateHeader | link_pb2.RawSessionRequest) -> float:
    """Returns the `run_timeout` of a call in seconds; infinity if it has none."""
    return message.run_timeout.ToNanoseconds() / 1e9 if message.HasField("run_timeout") else math.inf


def turn_ends_at(ends_at: float, limit_s: float) -> float:
    """Returns the loop time until which a call waits for its turn on an engine: at most for its `run_timeout`.

    Args:
        ends_at: Loop time of its deadline; 0: none.
        limit_s: Its `run_timeout`, seconds; infinity: none.
    """
    if limit_s == math.inf:
        return ends_at
    return min(ends_at or math.inf, asyncio.get_running_loop().time() + limit_s)


@dataclass(slots=True, eq=False)
class CallPlan:
    """What is decided once about the calls of one header.

    Attributes:
        program: Their program.
        settings: Bytes of a `RunRequest` with params and blob folder.
        recorder: Records what they do to engines.
        suffix: Bytes that end each answer: digests, and the description of a program that the call holds.
        run_limit_s: Most seconds of a run; infinity: only the deadline limits it.
        is_batched: Whether they may run together with others.
        load: The program in the engine that runs the next call; `message` and `batch_key` belong to it.
        message: Bytes of a `RunRequest`: the settings with the program's key in that engine.
        batch_key: Key of the calls that they may run together with; None: they run alone.
    """

    program: RunnableProgram
    settings: bytes
    recorder: OutcomeRecorder
    suffix: bytes
    run_limit_s: float
    is_batched: bool
    load: Load | None = None
    message: bytes = b""
    batch_key: BatchKey | None = None

    def set_load(self, load: Load) -> None:
        """Sets the engine that runs the next call."""
        self.load = load
        self.message = self.settings + link_pb2.RunRequest(key=load.engine_key).SerializeToString()
        self.batch_key = BatchKey(load.engine_key, self.settings) if self.is_batched else None


class Run(NamedTuple):
    """One run of a loaded program.

    Attributes:
        plan: How it runs.
        load: The program in an engine.
        values: Bytes of an `EvaluateRequest` with a header, in parts.
        received_ns: When the run began to wait for the engine, CLOCK_MONOTONIC.
        ends_at: Loop time at which it ends at the latest.
        least_run_s: Seconds that it may run before its engine is ended, even if its deadline passes.
    """

    plan: CallPlan
    load: Load
    values: Sequence[bytes]
    received_ns: int
    ends_at: float
    least_run_s: float = 0.0

    @property
    def request(self) -> link_pb2.RunRequest:
        """The message of the run, for messages that hold it."""
        return link_pb2.RunRequest.FromString(self.plan.message)


class RunMode(Protocol):
    """One way to run a program. `ends_at`: loop time of the deadline; 0: none."""

    ends_at: float

    @property
    def pinned(self) -> Engine | None:
        """The only engine that can run it; None: any engine can."""
        ...

    @property
    def undo(self) -> Callable[[Engine], None] | None:
        """Removes what a run left in an engine, before it runs in another one; None: it leaves nothing."""
        ...

    async def run(self, run: Run) -> bytes:
        """Runs a loaded program; returns the bytes of an `EvaluateResponse`."""
        ...


@dataclass(slots=True)
class RunOnce:
    """Runs forward and backward; the engine keeps nothing.

    `memory`: the client's shared memory that the call uses.
    """

    ends_at: float
    pinned: Engine | None = None
    undo: Callable[[Engine], None] | None = None
    memory: MemoryUse | None = None

    async def run(self, run: Run) -> bytes:
        plan = run.plan
        payload = with_values(plan.message, run.received_ns, run.values)
        return await run.load.engine.call(
            Kind.RUN,
            payload,
            run.ends_at,
            plan.recorder,
            suffix=plan.suffix,
            batch_key=plan.batch_key,
            memory=self.memory,
            least_run_s=run.least_run_s,
        )


@dataclass(slots=True)
class RunForward:
    """Runs forward only; the engine keeps what the backward part needs, under the name `handle`.

    `kept`: What the engine keeps, without the answer; set by `run`.
    """

    ends_at: float
    handle: str
    kept: ForwardRun | None = None
    pinned: Engine | None = None

    def undo(self, engine: Engine) -> None:
        engine.notify(Kind.RELEASE, release_payload(self.handle))

    async def run(self, run: Run) -> bytes:
        engine = run.load.engine
        message = link_pb2.ForwardRequest(run=run.request, handle=self.handle)
        payload = with_values(message.SerializeToString(), run.received_ns, run.values)
        answer = await engine.call(Kind.FORWARD, payload, run.ends_at, run.plan.recorder, least_run_s=run.least_run_s)
        reply = link_pb2.ForwardReply.FromString(answer)
        self.kept = ForwardRun(b"", reply.kept_bytes, ProcessRef(engine, run.load.generation), run.plan.recorder)
        return reply.response + run.plan.suffix


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """One process of an engine; another process takes its place after it has ended."""

    engine: Engine
    generation: int

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, and what it kept is lost."""
        return self.generation != self.engine.generation


class ForwardRun(NamedTuple):
    """A forward run that an engine keeps.

    Attributes:
        answer: Bytes of an `EvaluateResponse`.
        kept_bytes: Bytes that the engine keeps on the device.
        process: The engine process that keeps it.
        recorder: Records what pulling back does to the engine.
        is_within_quota: Whether the engine has checked `kept_bytes`, before the run changed variables of a session.
    """

    answer: bytes
    kept_bytes: int
    process: ProcessRef
    recorder: OutcomeRecorder
    is_within_quota: bool = False


class ProgramRunner:
    """Runs programs of one tenant.

    Args:
        loaded: The programs that engines hold, of all tenants.
        blobs: The tenant's blobs.
    """

    def __init__(self, loaded: LoadedPrograms, blobs: BlobStore) -> None:
        self._loaded = loaded
        self._blobs = blobs

    def recovery(self, ends_at: float, pinned: Engine | None = None, limit_s: float = math.inf) -> CallRecovery[Engine]:
        """Returns what runs one call again if its engine ends; see `CallRecovery` and `turn_ends_at`."""
        recovery = CallRecovery(self._loaded.pool, self._loaded.crash_history, ends_at=ends_at, pinned=pinned)
        recovery.turn_ends_at = turn_ends_at(ends_at, limit_s)
        return recovery

    def plan(
        self, program: RunnableProgram, header: evaluate_pb2.EvaluateHeader, *, describes: bool = False
    ) -> CallPlan:
        """Decides how calls with a header run.

        `describes`: Whether their answers describe the program.

        Raises:
            GradruleError: Params are invalid. MALFORMED_REQUEST if the call, and not the program, declares the axis of
                examples.
        """
        compiled, batching = program.compiled, header.batching
        if batching.HasField("axis"):
            message = "the axis is part of the program: set spec.batching.axis when it is compiled"
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message, field="batching.axis")
        params = compiled.param_settings(header.params)
        return CallPlan(
            program,
            link_pb2.RunRequest(params=params, blob_folder=self._blobs.folder_name).SerializeToString(),
            self._loaded.crash_history.recorder(program.loadable.workload),
            compiled.digests_tail + compiled.tail if describes else compiled.digests_tail,
            run_limit_s(header),
            program.loadable.is_batched and (batching.allowed or not batching.HasField("allowed")),
        )

    async def run(
        self,
        plan: CallPlan,
        values: Sequence[bytes],
        received_ns: int,
        started_ns: int,
        mode: RunMode,
        *,
        is_new: bool = False,
        blobs: Sequence[str] = (),
    ) -> bytes:
        """Runs a program on the values of a call; returns the bytes of an `EvaluateResponse`.

        Args:
            plan: How the call runs.
            values: Bytes of an `EvaluateRequest` with a header, in parts.
            received_ns: When the request was received, CLOCK_MONOTONIC.
            started_ns: When finding or compiling the program began, CLOCK_MONOTONIC.
            mode: How the engine runs the program.
            is_new: Whether the program was compiled for this call.
            blobs: The blobs that hold values.
        """
        if blobs:
            async with self._blobs.acquired(blobs):
                return await self.run(plan, values, received_ns, started_ns, mode, is_new=is_new)
        loaded, loadable, lost = self._loaded, plan.program.loadable, None
        load = self._find_warm(plan) if mode.pinned is None else None
        if load is not None:
            loaded.crash_history.check(plan.recorder.workload)
            since = asyncio.get_running_loop().time()
            # A held program is not dropped.
            load.holders += 1
            try:
                return await self._run_loaded(load, plan, values, received_ns, started_ns, mode, is_compiled=is_new)
            except EngineLost as cause:
                lost = cause
            except NoMemoryLeft as full:
                loaded.make_room(load, full, since)
            except ProgramNotLoaded:
                # It is loaded again below.
                pass
            finally:
                load.holders -= 1
        recovery = self.recovery(mode.ends_at, mode.pinned, plan.run_limit_s)

        async def attempt(engine: Engine | None) -> bytes:
            nonlocal lost
            if lost is not None:
                before, lost = lost, None
                raise before
            recovery.is_building = True
            async with loaded.hold_with_blobs(loadable, engine, mode.ends_at, plan.recorder) as load:
                is_loaded_now = not load.is_done
                with timing_compilation() if is_loaded_now else contextlib.nullcontext():
                    await loaded.wait(load, may_move=engine is None)
                plan.set_load(load)
                recovery.is_building = False
                is_compiled = is_new or is_loaded_now
                return await self._run_loaded(
                    load, plan, values, received_ns, started_ns, mode, is_compiled=is_compiled
                )

        return await recovery.run(loadable.workload, attempt, undo=mode.undo)

    def _find_warm(self, plan: CallPlan) -> Load | None:
        """Returns the program in the best engine if that has run it before; nothing has to be waited for then."""
        load = plan.load
        if load is None or not (load.is_available and load.engine.has_room):
            load = self._loaded.find_loaded(plan.program.loadable)
            if load is None:
                return None
            plan.set_load(load)
        if not load.has_run:
            return None
        record_cache_lookup("loaded", is_hit=True)
        load.mark_used()
        return load

    async def _run_loaded(
        self,
        load: Load,
        plan: CallPlan,
        values: Sequence[bytes],
        received_ns: int,
        started_ns: int,
        mode: RunMode,
        *,
        is_compiled: bool,
    ) -> bytes:
        """Runs the loaded program of a plan, within the limit of its run. Raises DEADLINE_EXCEEDED.

        The deadline alone limits the first run: TensorFlow optimizes functions when they run for the first time, which
        takes as long as compiling. `is_compiled`: Whether the answer tells the time of compiling.
        """
        # The time until now counts as compiling, from now on as queueing.
        queued_ns = received_ns + time.monotonic_ns() - started_ns
        limit_at = asyncio.get_running_loop().time() + plan.run_limit_s
        is_limited = load.has_run and limit_at < mode.ends_at
        ends_at = limit_at if is_limited else mode.ends_at
        run = Run(plan, load, values, queued_ns, ends_at, 0.0 if load.has_run else load.first_run_s)
        try:
            async with asyncio.timeout_at(limit_at if is_limited else None) as limit:
                answer = await mode.run(run)
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"not done within {plan.run_limit_s:.3g} s, not counting the time for compiling (run_timeout)"
            raise error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, message, field="run_timeout") from None
        except ProgramNotLoaded:
            self._loaded.forget(load)
            raise
        load.has_run = True
        record_run(answer, queued_ns)
        if not is_compiled:
            return answer
        # Concatenating messages merges them, so an answer of any size is not parsed again here.
        tail = evaluate_pb2.EvaluateResponse()
        tail.timings.compile.FromNanoseconds(queued_ns - received_ns)
        return answer + tail.SerializeToString()
