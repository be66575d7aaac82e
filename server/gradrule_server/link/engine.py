"""The front end's view of one engine: submits requests, ends overruns, and replaces a process that died."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import start_logged_task
from gradrule_server.errors import error
from gradrule_server.link.batching import BatchKey
from gradrule_server.link.connection import MeasuredMemory
from gradrule_server.link.framing import Kind
from gradrule_server.link.process import DEFAULT_TIMES, EngineProcess, EngineTimes, Spares
from gradrule_server.link.request_scheduler import ConnectionLost, EngineRequest
from gradrule_server.link.shared_memory import MemoryUse
from gradrule_server.recovery.crash_history import OutcomeRecorder
from gradrule_server.recovery.endings import (
    EndReason,
    EngineEnd,
    EngineLost,
    engine_unavailable,
    lost_before_start,
)

_log = logging.getLogger(__name__)

_MAX_REMEMBERED = 1024


class Use(enum.Enum):
    """What an engine is for."""

    PROGRAMS = enum.auto()
    """Calls without a session. Its process is replaced when it ends."""
    SESSIONS = enum.auto()
    """Sessions and nothing else, so that no other call ends them."""
    TRIAL = enum.auto()
    """A single call."""
    COMPILE = enum.auto()
    """Reads graphs and runs nothing: see `link.workers`."""


class Engine:
    """One engine. It runs the work of one tenant, its owner, as long as it lives. Belongs to one asyncio loop.

    Args:
        index: Its number in metrics.
        spares: Provides its processes; None if the caller installs one.
        on_change: Called when a process comes or goes.
        on_idle: Called when the last request has ended, when the last session or forward handle has, and when an
            engine that was given away gets one.
        owner: The tenant; None until a tenant needs the engine.
        use: What it is for.
        ended: Counts the ends of its processes, by reason.
        times: How long it waits for its processes.
        unbatched: By tenant, programs whose calls run alone from now on, since merged runs gave other results, or were
            under way when a process ended. Engines share it.
    """

    def __init__(
        self,
        index: int,
        spares: Spares | None,
        on_change: Callable[[Engine], None] = lambda engine: None,
        *,
        on_idle: Callable[[Engine], None] = lambda engine: None,
        owner: str | None = None,
        use: Use = Use.PROGRAMS,
        ended: Counter[str] | None = None,
        times: EngineTimes = DEFAULT_TIMES,
        unbatched: dict[str, set[str]] | None = None,
    ) -> None:
        self._times = times
        self.index = index
        self.owner = owner
        self.use = use
        self._spares = spares
        self._on_change = on_change
        self._on_idle = functools.partial(on_idle, self)
        self._process: EngineProcess | None = None
        self._filling: asyncio.Task[None] | None = None
        self._reports: set[asyncio.Task[None]] = set()
        self.is_removed = False
        """Whether it was removed: it gets no further process."""
        self.ended: Counter[str] = Counter() if ended is None else ended
        self.used_at = 0.0
        """Loop time of the last request, or of the start of its process."""
        self._unbatched: dict[str, set[str]] = {} if unbatched is None else unbatched
        self.last_end: EngineEnd | None = None
        """How the previous process ended, once that is known."""
        self.generation = 0
        """Grows whenever a process comes or goes. What the previous process held is lost."""
        self.kept = 0
        """Sessions and forward handles that are pinned to the process."""
        self.holders = 0
        """Calls that hold a program of the engine, whether they have a request there or not."""
        self.turn_started = 0.0
        """Loop time since which its tenant can use it, or since which it is given away."""
        self.is_given_away = False
        """Whether its place goes to another tenant once its running calls have ended; it gets no further calls."""
        self.programs = 0
        """Programs that the process holds."""

    @property
    def is_ready(self) -> bool:
        """Whether it accepts requests."""
        return self._process is not None

    @property
    def is_idle(self) -> bool:
        """Whether ending it would lose no request that a caller waits for, no session and no forward handle."""
        if self._process is None or self.kept or self.holders:
            return False
        return self.load == 0 or self.load == self._process.connection.given_up_compilations

    def turn_ends_at(self, turn_s: float, longest_s: float) -> float:
        """Returns the loop time at which another tenant may get its place.

        Args:
            turn_s: Length of a turn, which starts anew with each compilation, seconds.
            longest_s: Most time since the turn started, seconds.
        """
        compiled_at = 0.0 if self._process is None else self._process.connection.compiled_at
        return min(max(self.turn_started, compiled_at) + turn_s, self.turn_started + longest_s)

    def give_away(self) -> None:
        """Takes no further calls. Calls that have not started run elsewhere."""
        self.is_given_away = True
        self.turn_started = asyncio.get_running_loop().time()
        if self._process is not None:
            self._process.connection.fail_waiting()

    @property
    def is_doomed(self) -> bool:
        """Whether its process will be ended soon."""
        return self._process is not None and (self._process.is_ending or self._process.connection.has_given_up)

    @property
    def pid(self) -> int | None:
        """The id of its process."""
        return self._process.pid if self._process is not None else None

    @property
    def resident_bytes(self) -> int:
        """The last measured memory of its process."""
        return self._process.resident_bytes if self._process is not None else 0

    @property
    def own_bytes(self) -> int:
        """The last measured memory that its process shares with no other; 0: not measured yet."""
        return self._process.own_bytes if self._process is not None else 0

    @property
    def memory(self) -> MeasuredMemory:
        """The memory of its process, as the process has measured it."""
        return self._process.connection.memory if self._process is not None else MeasuredMemory()

    @property
    def load(self) -> int:
        """The number of requests that run or wait."""
        return self.running + self.waiting

    @property
    def running(self) -> int:
        """The number of requests that run."""
        return self._process.connection.running if self._process is not None else 0

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a thread."""
        return self._process.connection.waiting if self._process is not None else 0

    @property
    def has_room(self) -> bool:
        """Whether one more request would start at once."""
        return self._process is not None and self._process.connection.has_room

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being compiled."""
        return self._process is not None and self._process.connection.is_compiling

    def has_compiled_for(self, seconds: float) -> bool:
        """Returns whether it has been compiling the same program for at least this long."""
        if self._process is None or not self._process.connection.is_compiling:
            return False
        return asyncio.get_running_loop().time() - self._process.connection.compiling_since >= seconds

    @property
    def uptime_s(self) -> float:
        """Seconds since its process became ready; 0: it has none."""
        return time.monotonic() - self._process.started_at if self._process is not None else 0.0

    @property
    def holder(self) -> str:
        """What uses it: `sessions`, `handles`, `programs`; `none` if no tenant does."""
        if self.kept:
            return "sessions" if self.use is Use.SESSIONS else "handles"
        return "none" if self.use is Use.SESSIONS or self.owner is None else "programs"

    async def fill(self) -> None:
        """Waits for a process and installs it. Raises `EngineRefused` if the very first process cannot start."""
        if self._spares is not None:
            self.install(await self._spares.take())

    def start(self) -> None:
        """Installs a spare process at once, or the next one that is ready in a background task."""
        assert self._spares is not None
        spare = self._spares.take_now()
        if spare is not None:
            self.install(spare)
            return
        self._filling = start_logged_task(
            self.fill(), "engine-fill", _log.critical, "an engine cannot get a process any more"
        )

    def install(self, process: EngineProcess) -> None:
        """Makes a process this engine's process."""
        self._process = process
        process.connection.process = process
        process.connection.on_lost = lambda: self._handle_end(process)
        self.used_at = asyncio.get_running_loop().time()
        if not self.generation:
            # A later process does not start another turn: its tenant may have ended the process before.
            self.turn_started = self.used_at
        self.generation += 1
        self.kept = self.programs = 0
        process.connection.on_idle = self._on_idle
        process.connection.on_unbatched = self._run_alone
        self._on_change(self)

    def remove(self, reason: EndReason = EndReason.OVERRUN) -> None:
        """Gives up the process and ends it; what runs in it is told `reason`."""
        self.is_removed = True
        if self._filling is not None:
            self._filling.cancel()
        process = self._process
        self._process = None
        if process is None:
            return
        self.generation += 1
        process.connection.on_lost = process.connection.on_idle = None
        process.end(reason)

    def recycle(self) -> bool:
        """Replaces the process by a new one that holds nothing; calls that run in it run again.

        Returns False if that would cost sessions or forward handles, or if the process is not replaced.
        """
        if self._process is None or self.kept or self.use is not Use.PROGRAMS:
            return False
        self._process.end(EndReason.FULL)
        return True

    async def call(
        self,
        kind: Kind,
        payload: bytes | Sequence[bytes],
        ends_at: float,
        recorder: OutcomeRecorder | None = None,
        on_question: Callable[[EngineRequest, bytes], None] | None = None,
        suffix: bytes = b"",
        batch_key: BatchKey | None = None,
        memory: MemoryUse | None = None,
        least_run_s: float = 0.0,
    ) -> bytes:
        """Sends one request and waits for its answer. Abandons the request if the caller is cancelled.

        Args:
            kind: The kind of its frame.
            payload: Its payload, whole or in parts.
            ends_at: Loop time of the deadline.
            recorder: Records what the request does to the engine.
            on_question: Called with each question of the engine.
            suffix: Bytes to append to the answer.
            batch_key: Requests of one key may run together.
            memory: The client's memory that the request uses.
            least_run_s: Seconds that the request may run before its engine is ended, even if its deadline passes.

        Raises:
            EngineLost: The engine ended before it answered.
            GradruleError: ENGINE_UNAVAILABLE, DEADLINE_EXCEEDED, and what the engine answers.
        """
        if asyncio.get_running_loop().time() >= ends_at:
            raise error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, "the deadline passed before the engine was asked")
        request = self.submit(kind, payload, recorder, suffix, batch_key, memory)
        if on_question is not None:
            request.on_question = functools.partial(on_question, request)
        try:
            return await request.answer
        except asyncio.CancelledError:
            self.abandon(request, ends_at, least_run_s)
            raise
        except ConnectionLost as gone:
            raise await self.loss_error(request, gone) from None

    def submit(
        self,
        kind: Kind,
        payload: bytes | Sequence[bytes],
        recorder: OutcomeRecorder | None = None,
        suffix: bytes = b"",
        batch_key: BatchKey | None = None,
        memory: MemoryUse | None = None,
    ) -> EngineRequest:
        """Submits a request; see `Connection.submit` and `call`. Raises `EngineLost` or ENGINE_UNAVAILABLE."""
        if self._process is None:
            raise engine_unavailable()
        if batch_key is not None and batch_key.digest in self._unbatched.get(self.owner or "", ()):
            batch_key = None
        try:
            shared_bytes = 0
            if memory is not None:
                self._process.connection.attach(memory.memory)
                shared_bytes = memory.size
            request = self._process.connection.submit(kind, payload, recorder, suffix, batch_key, shared_bytes)
        except ConnectionLost:
            raise lost_before_start() from None
        self.used_at = request.submitted_at
        return request

    def abandon(self, request: EngineRequest, ends_at: float, least_run_s: float = 0.0) -> None:
        """Gives up a request for which no caller waits: drops it, or ends the engine soon if the request runs.

        Only a request that runs after `ends_at` (loop time) counts as an overrun: callers cancel good programs too.
        A compilation goes on for as long as `limit_run` allows: its program serves the next call.
        """
        if request.ended or request.connection.drop(request):
            return
        request.is_given_up = True
        if request.kind is not Kind.COMPILE:
            now = asyncio.get_running_loop().time()
            # Until the deadline, ending the engine would cost other callers more than the request costs them.
            due = (max(now, ends_at) if self.kept else now) + self._times.overrun_grace_s
            self._end_late(request, due, ends_at, least_run_s)

    def limit_run(self, request: EngineRequest, ends_at: float, least_run_s: float) -> None:
        """Ends the engine if a request still runs after `ends_at` (loop time) and has run for `least_run_s`."""
        self._end_late(request, ends_at, ends_at, least_run_s)

    def _end_late(self, request: EngineRequest, due: float, ends_at: float, least_run_s: float) -> None:
        """Ends the engine at `due` (loop time) or after `least_run_s` if a request runs then; see `abandon`.

        Waits longer while a caller waits for another request of the same batch.
        """
        process, now = self._process, asyncio.get_running_loop().time()
        if request.ended or process is None or process is not request.connection.process:
            return
        if request.batch is not None and not request.batch.is_given_up:
            due = max(due, now + self._times.overrun_grace_s)
        due = max(due, (now if request.started_at is None else request.started_at) + least_run_s)
        if request.started_at is None or now < due:
            loop = asyncio.get_running_loop()
            request.set_timer(loop.call_at(due, self._end_late, request, due, ends_at, least_run_s))
            return
        is_overrun = now >= ends_at
        cause = "ran past its deadline" if is_overrun else "was cancelled and still runs"
        _log.warning("a request %s; ending engine %d", cause, process.pid)
        process.end(EndReason.OVERRUN)
        # A request of a batch runs as long as the whole batch, so its time says nothing about the request. A large
        # program takes long to build, so its callers' deadlines say nothing about it either.
        is_run = request.batch is None and request.kind is not Kind.COMPILE
        if is_overrun and is_run and request.recorder is not None:
            request.recorder.record_overrun(now - request.started_at)

    async def loss_error(self, request: EngineRequest, gone: ConnectionLost) -> EngineLost:
        """Returns the error of a request whose engine ended, once it is known how that ended."""
        process = request.connection.process
        if not gone.started or process is None:
            return lost_before_start()
        try:
            end = await process.wait_ended()
        except asyncio.CancelledError:
            request.is_given_up = True
            raise
        return process.loss_error(end)

    async def wait_lost(self) -> EngineEnd | None:
        """Waits until the current process ends. Returns how it ended; None if there is no process."""
        process = self._process
        if process is None:
            return self.last_end
        await process.connection.wait_closed()
        return await process.wait_ended()

    def notify(self, kind: Kind, payload: bytes) -> None:
        """Sends a message that has no answer."""
        if self._process is not None:
            self._process.connection.notify(kind, payload)

    def add_kept(self, generation: int, change: int) -> None:
        """Changes the number of sessions and handles that are pinned to the process of a generation."""
        if generation == self.generation:
            self.kept += change
            if not self.kept or self.is_given_away:
                self._on_idle()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Counts a call that holds a program of the engine within this context."""
        self.holders += 1
        try:
            yield
        finally:
            self.holders -= 1
            if self.is_idle:
                self._on_idle()

    def _run_alone(self, keys: Iterable[str]) -> None:
        """Runs calls of programs alone from now on. `keys`: those of the programs in an engine."""
        unbatched = self._unbatched.setdefault(self.owner or "", set())
        if len(unbatched) < _MAX_REMEMBERED:
            unbatched.update(BatchKey(key).digest for key in keys)

    def _handle_end(self, process: EngineProcess) -> None:
        """Replaces a process that ended, if this engine runs programs: at once, or as soon as another one is ready."""
        if self._process is not process:
            return
        self._process = None
        self._run_alone(batch.key.program for batch in process.connection.lost_batches)
        report = asyncio.create_task(self._report_end(process), name="engine-report")
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)
        if self.use is Use.PROGRAMS and self._spares is not None and not (self.is_removed or self.is_given_away):
            self.start()
        if self._process is None:
            self.generation += 1
            self.kept = self.programs = 0
            self._on_change(self)

    async def _report_end(self, process: EngineProcess) -> None:
        """Counts and logs how a process ended, and records it for requests that have no caller any more."""
        end = self.last_end = await process.wait_ended()
        self.ended[end.reason] += 1
        _log.warning("engine %d ended (%s)", process.pid, end)
        for request in process.connection.lost:
            if request.is_given_up and request.recorder is not None:
                request.recorder.record_engine_loss(process.loss_error(end))
