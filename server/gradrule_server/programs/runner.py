"""Runs compiled programs on engines: once, forward only, or in a session."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from gradrule.v1 import errors_pb2, evaluate_pb2, session_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.batching import BatchKey
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import RunTemplate, release_payload, with_values
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_run, timing_compilation
from gradrule_server.programs.call_requests import EvaluateCall
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.loaded import Load, LoadedPrograms
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.recovery.crash_history import OutcomeRecorder, Workload
from gradrule_server.recovery.endings import EngineLost, ProgramNotLoaded
from gradrule_server.registry.blobs import BlobStore


def turn_ends_at(ends_at: float, message: evaluate_pb2.EvaluateHeader | link_pb2.RawSessionRequest) -> float:
    """Returns the loop time until which a call waits for its turn on an engine: at most for its `run_timeout`.

    `ends_at`: Loop time of its deadline; 0: none.
    """
    if not message.HasField("run_timeout"):
        return ends_at
    return min(ends_at or math.inf, asyncio.get_running_loop().time() + message.run_timeout.ToNanoseconds() / 1e9)


def may_batch(program: RunnableProgram, header: evaluate_pb2.EvaluateHeader) -> bool:
    """Returns whether a program and its caller allow that a call runs together with others.

    Raises MALFORMED_REQUEST if the call, and not the program, declares the axis of examples.
    """
    if header.batching.HasField("axis"):
        message = "the axis is part of the program: set spec.batching.axis when it is compiled"
        raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message, field="batching.axis")
    return program.loadable.is_batched and (header.batching.allowed or not header.batching.HasField("allowed"))


def run_limit_s(header: evaluate_pb2.EvaluateHeader) -> float:
    """Returns the request's `run_timeout` in seconds; infinity if it has none."""
    return header.run_timeout.ToNanoseconds() / 1e9 if header.HasField("run_timeout") else math.inf


def run_limit_error(limit_s: float) -> GradruleError:
    """Returns the error of a run that takes longer than its `run_timeout`, seconds."""
    message = f"not done within {limit_s:.3g} s, not counting the time for compiling (run_timeout)"
    return error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, message, field="run_timeout")


class Run(NamedTuple):
    """One run of a loaded program.

    Attributes:
        template: Builds the messages to the engine that has loaded it.
        received_ns: When the run began to wait for the engine, CLOCK_MONOTONIC.
        values: Bytes of an `EvaluateRequest` with a header, in parts.
        batch_key: Key of the calls that it may run together with; None: it runs alone.
    """

    template: RunTemplate
    received_ns: int
    values: Sequence[bytes]
    batch_key: BatchKey | None

    @property
    def request(self) -> link_pb2.RunRequest:
        """The message of the run, for messages that hold it."""
        return link_pb2.RunRequest.FromString(self.template.message)


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

    async def run(self, engine: Engine, run: Run, recorder: OutcomeRecorder) -> bytes:
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

    async def run(self, engine: Engine, run: Run, recorder: OutcomeRecorder) -> bytes:
        payload = run.template.payload(run.received_ns, run.values)
        return await engine.call(Kind.RUN, payload, self.ends_at, recorder, batch_key=run.batch_key, memory=self.memory)


@dataclass(slots=True)
class RunForward:
    """Runs forward only; the engine keeps what the backward part needs, under the name `handle`.

    `kept_bytes`: Bytes that the engine keeps; set by `run`.
    """

    ends_at: float
    handle: str
    kept_bytes: int = 0
    pinned: Engine | None = None

    def undo(self, engine: Engine) -> None:
        engine.notify(Kind.RELEASE, release_payload(self.handle))

    async def run(self, engine: Engine, run: Run, recorder: OutcomeRecorder) -> bytes:
        message = link_pb2.ForwardRequest(run=run.request, handle=self.handle)
        payload = with_values(message, run.received_ns, run.values)
        reply = link_pb2.ForwardReply.FromString(await engine.call(Kind.FORWARD, payload, self.ends_at, recorder))
        self.kept_bytes = reply.kept_bytes
        return reply.response


@dataclass(slots=True)
class RunInSession:
    """Runs with the variables of a session.

    `store`: variables that get the outputs as values. `optimizer`: applies the gradients of `loss`. `handle`: under
    this name the engine keeps a forward run. `reply`: size and steps of the session; set by `run`.
    """

    channel: SessionChannel
    ends_at: float
    store: tuple[str, ...] = ()
    optimizer: session_pb2.Optimizer | None = None
    loss: str = ""
    handle: str = ""
    reply: link_pb2.SessionReply | None = None
    undo: Callable[[Engine], None] | None = None

    @property
    def pinned(self) -> Engine | None:
        return self.channel.engine

    async def run(self, engine: Engine, run: Run, recorder: OutcomeRecorder) -> bytes:
        self.reply = await self.channel.run(run, self, recorder)
        return self.reply.response


class SessionChannel(Protocol):
    """Sends messages to the engine that holds a session."""

    @property
    def engine(self) -> Engine:
        """The engine that holds the session."""
        ...

    async def run(self, run: Run, mode: RunInSession, recorder: OutcomeRecorder) -> link_pb2.SessionReply:
        """Runs a program.

        Raises `EngineLost` if the engine ends meanwhile, SESSION_LOST if it had ended before.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """One process of an engine; another process takes its place after it has ended."""

    engine: Engine
    generation: int

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, and what it kept is lost."""
        return self.generation != self.engine.generation


class RunResult(NamedTuple):
    """The result of a run.

    Attributes:
        answer: Bytes of an `EvaluateResponse`.
        process: Where the program ran.
        template: Builds messages for further runs with these params.
    """

    answer: bytes
    process: ProcessRef
    template: RunTemplate


class ForwardRun(NamedTuple):
    """A forward run that an engine keeps.

    Attributes:
        answer: Bytes of an `EvaluateResponse`.
        kept_bytes: Bytes that the engine keeps on the device.
        process: The engine process that keeps it.
        workload: What the program counts as in the history of crashes.
        is_within_quota: Whether the engine has checked `kept_bytes`, before the run changed variables of a session.
    """

    answer: bytes
    kept_bytes: int
    process: ProcessRef
    workload: Workload
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

    def recovery(self, mode: RunMode | None = None) -> CallRecovery[Engine]:
        """Returns what runs one call again if its engine ends."""
        if mode is None:
            return CallRecovery(self._loaded.pool, self._loaded.crash_history)
        return CallRecovery(self._loaded.pool, self._loaded.crash_history, ends_at=mode.ends_at, pinned=mode.pinned)

    async def run(
        self,
        program: RunnableProgram,
        call: EvaluateCall,
        received_ns: int,
        compile_started_ns: int,
        mode: RunMode,
        *,
        recovery: CallRecovery[Engine] | None = None,
        is_new: bool = False,
        lost: EngineLost | None = None,
    ) -> RunResult:
        """Runs a program on the values of a call.

        Args:
            program: The program.
            call: The call.
            received_ns: When the request was received, CLOCK_MONOTONIC.
            compile_started_ns: When finding or compiling the program began, CLOCK_MONOTONIC.
            mode: How the engine runs the program.
            recovery: Runs the call again if its engine ends; None: a new one.
            is_new: Whether the program was compiled for this call.
            lost: The loss of the engine that ran the call before.
        """
        header, values = call.header, call.values
        template = RunTemplate.create(program.compiled.param_settings(header.params), self._blobs.folder_name)
        recovery = recovery or self.recovery(mode)
        workload = program.loadable.workload
        recorder, limit_s = recovery.recorder(workload), run_limit_s(header)
        is_batched = may_batch(program, header)

        async def attempt(engine: Engine | None) -> tuple[bytes, int, bool, ProcessRef]:
            nonlocal lost
            if lost is not None:
                before, lost = lost, None
                raise before
            recovery.is_building = True
            async with self._loaded.hold_with_blobs(program.loadable, engine, mode.ends_at, recorder) as load:
                is_loaded_now = not load.is_done
                with timing_compilation() if is_loaded_now else contextlib.nullcontext():
                    await self._loaded.wait(load, may_move=engine is None)
                template.set_key(load.engine_key)
                # The time until now counts as compiling, from now on as queueing.
                queued_ns = received_ns + time.monotonic_ns() - compile_started_ns
                batch_key = BatchKey(load.engine_key, template.settings) if is_batched else None
                run = Run(template, queued_ns, values, batch_key)
                process = ProcessRef(load.engine, load.generation)
                recovery.is_building = False
                try:
                    limited = replace(recorder, least_run_s=load.least_run_s)
                    answer = await _run_in_time(mode, load, run, limited, limit_s)
                except ProgramNotLoaded:
                    self._loaded.forget(load)
                    raise
                return answer, queued_ns, is_loaded_now, process

        recovery.turn_ends_at = turn_ends_at(mode.ends_at, header)
        blobs = call.blobs
        async with self._blobs.acquired(blobs) if blobs else contextlib.nullcontext():
            answer, queued_ns, is_loaded_now, process = await recovery.run(workload, attempt, undo=mode.undo)
        record_run(answer, queued_ns)
        # Concatenating messages merges them, so an answer of any size is not parsed again here.
        tail = evaluate_pb2.EvaluateResponse()
        if is_new or is_loaded_now:
            tail.timings.compile.FromNanoseconds(queued_ns - received_ns)
        answer = b"".join([answer, program.compiled.digests_tail, tail.SerializeToString()])
        return RunResult(answer, process, template)


async def _run_in_time(mode: RunMode, load: Load, run: Run, recorder: OutcomeRecorder, limit_s: float) -> bytes:
    """Runs a loaded program, for at most `limit_s` seconds. Raises DEADLINE_EXCEEDED.

    The deadline alone limits the first run: TensorFlow optimizes functions when they run for the first time, which
    takes as long as compiling.
    """
    ends_at, limit_at = mode.ends_at, asyncio.get_running_loop().time() + limit_s
    if load.has_run and limit_at < (ends_at or math.inf):
        mode.ends_at = limit_at
        try:
            async with asyncio.timeout_at(limit_at) as limit:
                return await mode.run(load.engine, run, recorder)
        except TimeoutError:
            if not limit.expired():
                raise
            raise run_limit_error(limit_s) from None
        finally:
            mode.ends_at = ends_at
    answer = await mode.run(load.engine, run, recorder)
    load.has_run = True
    return answer
