"""An engine of one tenant, as the front end holds it: given work, ended when it overruns, replaced when it dies."""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, error
from gradrule_server.link.batching import BatchKey
from gradrule_server.link.engine_request import ConnectionLost, EngineRequest
from gradrule_server.link.framing import Kind
from gradrule_server.link.process import EngineProcess, EngineRefused
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.link.spares import Spares
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.crash_history import OutcomeRecorder
from gradrule_server.recovery.endings import CrashReport, EndReason, EngineEnd, EngineLost

__all__ = ["Engine", "EngineRefused", "EngineStatus"]

_log = logging.getLogger(__name__)

_MOST_UNBATCHED = 1024
_RETRY_AFTER_S = 2.0
_OVERRUN_GRACE_S = 0.5
# How long a call that was cancelled may go on where ending its engine would cost others their sessions and handles.
_CANCEL_PATIENCE_S = 4.5


class Use(enum.Enum):
    """What an engine is for."""

    PROGRAMS = enum.auto()
    """Calls without a session. Its process is replaced when it ends."""
    EXTRA = enum.auto()
    """Programs that would wait behind one that compiles for long; for a while."""
    SESSIONS = enum.auto()
    """Sessions and nothing else, so that no other call ends them."""
    TRIAL = enum.auto()
    """One call alone."""
    COMPILE = enum.auto()
    """Reads graphs and runs nothing: see `link.workers`."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine as it is now.

    `owner`: its tenant; None while it has none. `ended`: how many processes in its place ended, by reason.
    """

    index: int
    owner: str | None
    holds_sessions: bool
    device: str
    pid: int
    is_ready: bool
    running: int
    waiting: int
    programs: int
    jit_programs: int
    resident_bytes: int
    uptime_s: float
    ended: dict[str, int]


class Engine:
    """One engine. It runs the work of one tenant, its owner, as long as it lives. Belongs to one asyncio loop.

    Args:
        index: Its number in metrics.
        spares: Where its processes come from; None where the caller installs one.
        on_change: Called when a process comes or goes.
        owner: The tenant; None until a tenant needs it.
        use: What it is for.
        ended: Where its processes' ends are counted, by reason.
    """

    def __init__(
        self,
        index: int,
        spares: Spares | None,
        on_change: Callable[[Engine], None] = lambda engine: None,
        *,
        owner: str | None = None,
        use: Use = Use.PROGRAMS,
        ended: Counter[str] | None = None,
    ) -> None:
        self.index = index
        self.owner = owner
        self.use = use
        self._spares = spares
        self._on_change = on_change
        self._process: EngineProcess | None = None
        self._filling: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self._ended: Counter[str] = Counter() if ended is None else ended
        self.used_at = 0.0
        """Loop time of the last request, or of the start of its process."""
        self.shelf: object = None
        """What those who load programs note of it; it goes with the engine."""
        self._unbatched: set[str] = set()
        """Programs whose calls ran together when a process ended: from then on they run alone."""
        self._without_jit: set[str] = set()
        """Programs that XLA compiled when a process ended: it does not compile them again."""
        self.last_ending: EngineEnd | None = None
        """How the process before this one ended, as soon as that is known."""
        self.generation = 0
        """Grows whenever a process comes or goes: what the last one held is gone."""
        self.kept = 0
        """Sessions and forward handles that are pinned to the process."""
        self.programs = 0
        """Programs that the process holds."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes work."""
        return self._process is not None

    @property
    def is_extra(self) -> bool:
        """Whether it is there for a while only."""
        return self.use is Use.EXTRA

    @property
    def is_idle(self) -> bool:
        """Whether ending it would cost nobody a request, a session or a forward handle."""
        return self._process is not None and not self.load and not self.kept

    @property
    def is_doomed(self) -> bool:
        """Whether its process is about to be ended."""
        return self._process is not None and (self._process.is_ending or self._process.connection.has_given_up)

    @property
    def pid(self) -> int | None:
        """That process's id."""
        return self._process.pid if self._process is not None else None

    @property
    def resident_bytes(self) -> int:
        """Memory of its process when it was last looked at."""
        return self._process.resident_bytes if self._process is not None else 0

    @property
    def load(self) -> int:
        """Requests under way and waiting."""
        connection = self._process.connection if self._process is not None else None
        return 0 if connection is None else connection.running + connection.waiting

    @property
    def has_room(self) -> bool:
        """Whether one more request would not have to wait."""
        return self._process is not None and self._process.connection.has_room

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being compiled."""
        return self._process is not None and self._process.connection.is_compiling

    def has_compiled_for(self, seconds: float) -> bool:
        """Whether it has been at one and the same program for so long."""
        if self._process is None or not self._process.connection.is_compiling:
            return False
        return asyncio.get_running_loop().time() - self._process.connection.compiling_since >= seconds

    def status(self, device: str) -> EngineStatus:
        """As it is now."""
        process = self._process
        connection = process.connection if process is not None else None
        return EngineStatus(
            index=self.index,
            owner=self.owner,
            holds_sessions=self.use is Use.SESSIONS,
            device=device,
            pid=process.pid if process is not None else 0,
            is_ready=self.is_ready,
            running=connection.running if connection is not None else 0,
            waiting=connection.waiting if connection is not None else 0,
            programs=self.programs if self.is_ready else 0,
            jit_programs=len(connection.jit.chosen) if connection is not None else 0,
            resident_bytes=process.resident_bytes if process is not None else 0,
            uptime_s=time.monotonic() - process.started_at if process is not None else 0.0,
            ended=dict(self._ended),
        )

    async def fill(self) -> None:
        """Takes a process as soon as there is one. `EngineRefused` where the first of all cannot start."""
        if self._spares is not None:
            self.install(await self._spares.take())

    def start(self) -> None:
        """Takes a spare at once, or waits in a task for the next process that is ready."""
        assert self._spares is not None
        spare = self._spares.take_now()
        if spare is not None:
            self.install(spare)
            return
        self._filling = asyncio.create_task(self.fill(), name="engine-fill")
        self._filling.add_done_callback(_report_failure)

    def install(self, process: EngineProcess) -> None:
        """From now on this process serves here."""
        self._process = process
        process.connection.process = process
        process.connection.on_lost = lambda: self._on_lost(process)
        self.generation += 1
        self.kept = self.programs = 0
        self.used_at = asyncio.get_running_loop().time()
        for digest in self._without_jit:
            notice = link_pb2.JitNotice(key=digest, outcome=link_pb2.JitNotice.OUTCOME_REFUSED)
            process.connection.tell(Kind.JIT_NOTICE, notice.SerializeToString())
        self._on_change(self)
        if process.connection.is_closed:
            self._on_lost(process)

    def remove(self) -> EngineProcess | None:
        """Gives up the process, which is returned if it does nothing, and ended otherwise."""
        self._is_stopped = True
        if self._filling is not None:
            self._filling.cancel()
        process = self._process
        self._process = None
        if process is None:
            return None
        self.generation += 1
        process.connection.on_lost = None
        if process.connection.running:
            process.end(EndReason.OVERRUN)
            return None
        return process

    async def call(
        self,
        kind: Kind,
        payload: bytes,
        ends_at: float,
        recorder: OutcomeRecorder | None = None,
        on_ask: Callable[[EngineRequest, bytes], None] | None = None,
        batch_key: BatchKey | None = None,
        memory: MemoryUse | None = None,
    ) -> bytes:
        """One request, given up when the caller is cancelled. `ends_at`: loop time after which it is of no use.
        `on_ask`: called with each question of the process's. `batch_key`: which others it may run with.
        `memory`: of a client, which the request uses.

        ENGINE_UNAVAILABLE while there is no engine; `EngineLost` if it dies meanwhile. An engine that is still at it
        soon after the call was given up is ended, since nothing else stops a kernel or a loop that never ends.
        """
        if asyncio.get_running_loop().time() >= ends_at:
            raise error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, "the deadline passed before the engine was asked")
        work = self.submit(kind, payload, recorder, batch_key=batch_key, memory=memory)
        if on_ask is not None:
            work.on_ask = functools.partial(on_ask, work)
        try:
            return await work.answer
        except asyncio.CancelledError:
            self.abandon(work, ends_at)
            raise
        except ConnectionLost as gone:
            raise await self.lost(work, gone) from None

    def submit(
        self,
        kind: Kind,
        payload: bytes | Sequence[bytes],
        recorder: OutcomeRecorder | None = None,
        suffix: bytes = b"",
        batch_key: BatchKey | None = None,
        memory: MemoryUse | None = None,
    ) -> EngineRequest:
        """Hands a request in, see `Connection.submit`; `EngineLost` or ENGINE_UNAVAILABLE where there is no engine.

        `memory`: of a client, which the request uses.
        """
        if self._process is None:
            raise engine_unavailable()
        if self._unbatched and batch_key is not None and batch_key.digest in self._unbatched:
            batch_key = None
        try:
            shared_bytes = 0
            if memory is not None:
                self._process.connection.attach(memory.memory)
                shared_bytes = memory.size
            work = self._process.connection.submit(kind, payload, recorder, suffix, batch_key, shared_bytes)
        except ConnectionLost:
            raise lost_before_start() from None
        self.used_at = work.submitted_at
        return work

    def abandon(self, work: EngineRequest, ends_at: float) -> None:
        """Nobody waits for it any more: it is dropped, or, where it runs, the engine is ended soon.

        It is an overrun only where `ends_at` has passed by then: whoever cancels may have had enough of a good program.
        """
        if work.ended or work.connection.drop(work):
            return
        work.is_given_up = True
        loop = asyncio.get_running_loop()
        # Once the deadline has passed, or where nobody else loses anything, there is nothing to wait for.
        patience_s = min(max(0.0, ends_at - loop.time()), _CANCEL_PATIENCE_S) if self.kept else 0.0
        work.set_timer(loop.call_later(patience_s + _OVERRUN_GRACE_S, self._end_given_up, work, ends_at))

    def _end_given_up(self, work: EngineRequest, ends_at: float) -> None:
        """Ends the engine, unless others keep something in it and the request holds up nobody before its deadline."""
        loop = asyncio.get_running_loop()
        if work.batch is not None and not work.batch.is_given_up:
            # Somebody waits for another request of the same run.
            work.set_timer(loop.call_later(_OVERRUN_GRACE_S, self._end_given_up, work, ends_at))
        elif self.kept and not work.connection.waiting and loop.time() < ends_at and not work.ended:
            due = min(ends_at + _OVERRUN_GRACE_S, loop.time() + _CANCEL_PATIENCE_S)
            work.set_timer(loop.call_at(due, self._end_given_up, work, ends_at))
        else:
            self._end_overrun(work, ends_at)

    def limit(self, work: EngineRequest, ends_at: float, least_s: float) -> None:
        """Somebody waits for it, or does again: only where it runs after `ends_at`, and has for so long, it overran."""
        loop = asyncio.get_running_loop()
        work.is_given_up = False

        def look() -> None:
            due = max(ends_at, (loop.time() if work.started_at is None else work.started_at) + least_s)
            if work.ended:
                return
            if loop.time() < due:
                work.set_timer(loop.call_at(due, look))
            else:
                self._end_overrun(work, ends_at)

        look()

    async def lost(self, work: EngineRequest, gone: ConnectionLost) -> EngineLost:
        """The error of a request whose engine is gone."""
        process = work.connection.process
        if not gone.started or process is None:
            return lost_before_start()
        try:
            ending = await process.wait_ended()
        except asyncio.CancelledError:
            work.is_given_up = True
            raise
        return _lost(process, ending)

    async def wait_lost(self) -> EngineEnd | None:
        """Waits until the process that serves now is gone. Returns how it ended; None where there is no process."""
        process = self._process
        if process is None:
            return self.last_ending
        await process.connection.wait_closed()
        return await process.wait_ended()

    def tell(self, kind: Kind, payload: bytes) -> None:
        """One message without an answer."""
        if self._process is not None:
            self._process.connection.tell(kind, payload)

    def keeps(self, generation: int, change: int) -> None:
        """So many more sessions and handles are pinned to that process."""
        if generation == self.generation:
            self.kept += change

    async def stop(self) -> None:
        """Ends the process."""
        self._is_stopped = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        if self._process is not None:
            process, self._process = self._process, None
            process.connection.on_lost = None
            await process.stop()
        if self._reports:
            await asyncio.wait(self._reports)

    def _on_lost(self, process: EngineProcess) -> None:
        """The process is gone: another takes its place where it runs programs, at once or as soon as there is one."""
        if self._process is not process:
            return
        self._process = None
        process.crash_report.present = process.connection.present
        if len(self._unbatched) < _MOST_UNBATCHED:
            self._unbatched |= {batch.key.digest for batch in process.connection.lost_batches}
        if len(self._without_jit) < _MOST_UNBATCHED:
            self._without_jit |= {key.partition("/")[0] for key in _run_by_xla(process)}
        report = asyncio.create_task(self._report(process), name="engine-report")
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)
        if self.use is Use.PROGRAMS and self._spares is not None and not self._is_stopped:
            self.start()
        if self._process is None:
            self.generation += 1
            self.kept = self.programs = 0
            self._on_change(self)

    async def _report(self, process: EngineProcess) -> None:
        ending = self.last_ending = await process.wait_ended()
        self._ended[ending.reason] += 1
        _log.warning("engine %d ended (%s)", process.pid, ending)
        for work in process.connection.lost:
            if work.is_given_up and work.recorder is not None:
                work.recorder.record_engine_loss(_lost(process, ending))

    def _end_overrun(self, work: EngineRequest, ends_at: float) -> None:
        process = self._process
        if process is None or process is not work.connection.process or work.ended or work.started_at is None:
            return
        now = asyncio.get_running_loop().time()
        overran = now >= ends_at
        _log.warning(
            "a request %s; ending engine %d", "overran its deadline" if overran else "is given up", process.pid
        )
        process.end(EndReason.OVERRUN)
        # A request of a batch runs for as long as all of them.
        if overran and work.batch is None and work.recorder is not None:
            work.recorder.record_overrun(now - work.started_at)


def engine_unavailable() -> Exception:
    """There is no engine. ENGINE_UNAVAILABLE."""
    return error(
        errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE,
        "no engine is ready; one is being started",
        retry_after_s=_RETRY_AFTER_S,
    )


def lost_before_start() -> EngineLost:
    """The engine is gone, and the request had not started."""
    return EngineLost(
        [Finding(errors_pb2.ERROR_REASON_ENGINE_CRASHED, "the engine died before it took the request up")],
        engine_end=EngineEnd(EndReason.STOPPED, "its connection broke"),
        ran_alone=False,
        crash_report=CrashReport(),
    )


def _lost(process: EngineProcess, ending: EngineEnd) -> EngineLost:
    """The process ended so, while it had the request."""
    reason, message = errors_pb2.ERROR_REASON_ENGINE_CRASHED, f"the engine died while it held the request: {ending}"
    if ending.reason is EndReason.MEMORY:
        reason, message = errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, f"the engine ran out of memory: {ending}"
    ran_alone = process.connection.lost_one
    return EngineLost(
        [Finding(reason, message)], engine_end=ending, ran_alone=ran_alone, crash_report=process.crash_report
    )


def _run_by_xla(process: EngineProcess) -> set[str]:
    """Returns keys of programs whose code of XLA may have ended a process: compiled or run then."""
    jit = process.connection.jit
    lost = [work for work in process.connection.lost if work.kind is Kind.RUN and not work.is_given_up]
    if any(work.batch_key is None for work in lost):
        # It is not known which program such a request runs.
        return jit.compiling | jit.chosen
    return jit.compiling | (jit.chosen & {work.batch_key.program for work in lost if work.batch_key is not None})


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (cause := task.exception()) is not None:
        _log.critical("an engine's place cannot be filled any more", exc_info=cause)
