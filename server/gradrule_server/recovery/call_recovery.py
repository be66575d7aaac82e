"""Runs one call until it completes, although engines may end meanwhile.

See `recovery_states` for the states and transitions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, NamedTuple, Protocol, TypeVar

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import TenantLocks
from gradrule_server.errors import GradruleError, NoMemoryLeft, error
from gradrule_server.recovery.crash_history import CrashHistory, HistoryRecorder, Workload
from gradrule_server.recovery.endings import CrashReport, EndReason, EngineEnd, EngineLost, ProgramNotLoaded
from gradrule_server.recovery.recovery_states import TRANSITIONS, CallState, Event

EngineT = TypeVar("EngineT")
EngineT_co = TypeVar("EngineT_co", covariant=True)
T = TypeVar("T")

# An engine that is killed from outside is not the call's fault, but each run costs time.
_MAX_KILLED = 5
# A call that lost its engine waits for the next one until its deadline, or this long.
_PATIENCE_S = 60.0
# A trial (a run alone) may take this long, or this many times as long as the call ran before and as the longest run of
# its workload together.
_MIN_TRIAL_S = 5.0
_TRIAL_FACTOR = 5.0
_POLL_S = 0.1
_DID_NOT_END = "it did not come to an end when it ran alone"
# Clients cancel at their deadlines, which may be this much before ours.
EARLY_S = 0.5


class _ClearedError(Exception):
    """Another call was found to be the culprit."""


class Engines(Protocol[EngineT_co]):
    """The engines that calls run on."""

    memory_limit: int
    """Bytes that an engine may take; 0: no limit."""
    trials: TenantLocks
    """Held while a call runs alone: each tenant has one such call at a time."""

    def serves(self, owner: str) -> bool:
        """Returns whether a tenant has an engine that accepts calls."""
        ...

    async def provide(self, owner: str, ends_at: float = 0.0, patience_s: float = 0.0) -> None:
        """Waits until a tenant has an engine that accepts calls, at most until its turn at the deadline."""
        ...

    def alone(self, owner: str) -> AbstractAsyncContextManager[EngineT_co]:
        """Provides an engine that runs one call and is ended afterwards."""
        ...


class ProcessWords(NamedTuple):
    """How errors describe the processes that run calls, as clauses.

    Attributes:
        limited: Whose memory limit is meant.
        ended: Which processes a graph ended.
    """

    limited: str = "an engine has"
    ended: str = "engine that ran it"


class CallRecovery(Generic[EngineT]):
    """Runs one call again when its engine ends.

    Args:
        engines: The engines of all tenants.
        crash_history: The crash history of all workloads.
        ends_at: Loop time of the call's deadline; 0: none is known.
        pinned: The only engine that can run the call; None: any engine can.
        is_speculative: No client waits for it: it runs once, and whatever happens is recorded for no workload.
        words: How errors describe the engines.
    """

    def __init__(
        self,
        engines: Engines[EngineT],
        crash_history: CrashHistory,
        *,
        ends_at: float = 0.0,
        pinned: EngineT | None = None,
        is_speculative: bool = False,
        words: ProcessWords = ProcessWords(),  # noqa: B008
    ) -> None:
        self._engines = engines
        self._crash_history = crash_history
        self.ends_at = ends_at
        self.turn_ends_at = ends_at
        """Loop time until which the call waits for its turn on an engine; 0: some seconds."""
        self.is_building = False
        """Whether the current attempt reads, compiles or loads a graph, and runs nothing yet."""
        self._pinned = pinned
        self.is_speculative = is_speculative
        """Whether no client waits for it."""
        self._words = words
        self._kills = 0
        self._crashes = 0
        self._short_runs = 0
        self._was_loaded_again = False
        self._patience_s = 0.0
        self._last_run_s = 0.0
        # The loss of the engine that the call is suspected of.
        self._suspected_loss: EngineLost | None = None

    def for_task(self, ends_at: float) -> CallRecovery[EngineT]:
        """Returns one for work that calls share. `ends_at`: Loop time until which it may go on without a call."""
        own = CallRecovery(self._engines, self._crash_history, ends_at=ends_at, pinned=self._pinned, words=self._words)
        own.turn_ends_at = 0.0
        return own

    def extend(self, ends_at: float, turn_ends_at: float) -> None:
        """Allows at least as much time as one more call has: see `ends_at` and `turn_ends_at`."""
        self.ends_at, self.turn_ends_at = max(self.ends_at, ends_at), max(self.turn_ends_at, turn_ends_at)

    def recorder(self, workload: Workload) -> HistoryRecorder:
        """Returns what records the outcomes of the workload's requests."""
        return HistoryRecorder(self._crash_history, workload)

    def load_recorder(self, workload: Workload) -> HistoryRecorder | None:
        """Returns what records the outcome of loading the workload; None: nothing does."""
        return None if self.is_speculative else self.recorder(workload)

    async def run(
        self,
        workload: Workload,
        attempt: Callable[[EngineT | None], Awaitable[T]],
        *,
        proves: bool = True,
        undo: Callable[[EngineT], None] | None = None,
    ) -> T:
        """Runs a call until it completes.

        Args:
            workload: What is blamed if the call ends engines.
            attempt: Loads what the call needs and runs it, on the given engine; None: on any engine.
            proves: Whether the workload has run once `attempt` returns. A program that was only loaded may still crash.
            undo: Removes what an attempt left in an engine. A call with `undo` that completes alone runs once more, in
                an engine that stays.

        Returns:
            What `attempt` returns.

        Raises:
            EngineLost: The call may be to blame for an engine's end.
            GradruleError: QUARANTINED, ENGINE_CRASHED, MEMORY_EXCEEDED, and what `attempt` raises.
        """
        if self.is_speculative:
            return await self._run_shared(workload, attempt)
        try:
            return await self._run(workload, attempt, proves, undo)
        except (asyncio.CancelledError, GradruleError) as cause:
            is_late = isinstance(cause, GradruleError) and cause.reason == errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED
            if self._suspected_loss is not None and (is_late or isinstance(cause, asyncio.CancelledError)):
                # The call ends before its trial does, so the trial shows nothing.
                self.recorder(workload).record_engine_loss(self._suspected_loss)
            raise
        finally:
            self._suspected_loss = None

    async def _run(
        self,
        workload: Workload,
        attempt: Callable[[EngineT | None], Awaitable[T]],
        proves: bool,
        undo: Callable[[EngineT], None] | None,
    ) -> T:
        """Drives the state machine."""
        state = CallState.SHARED if self._pinned is None else CallState.PINNED
        reports: list[CrashReport] = []
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            failure: GradruleError | None = None
            try:
                if state is CallState.ALONE:
                    answer = await self._run_alone(workload, attempt, undo)
                else:
                    answer = await self._run_shared(workload, attempt)
            except _ClearedError:
                event = Event.CLEARED
            except EngineLost as lost:
                failure = lost
                self._last_run_s = loop.time() - started
                reports.append(lost.crash_report)
                event = await self._event_of_loss(state, lost, workload)
            except ProgramNotLoaded as missing:
                failure = missing
                event = Event.TRIED_TOO_OFTEN if self._was_loaded_again else Event.NOT_LOADED
                self._was_loaded_again = True
            except NoMemoryLeft as full:
                failure = full
                event = self._event_of_no_memory(state, full)
            else:
                self._record_success(workload, reports, proves=proves)
                is_undone = state is CallState.ALONE and undo is not None
                event = Event.COMPLETED_AND_UNDONE if is_undone else Event.COMPLETED
            before, state = state, TRANSITIONS[state, event]
            if state is CallState.ANSWERED:
                return answer
            if state is CallState.QUARANTINED and isinstance(failure, EngineLost):
                raise self._quarantine(workload, failure) from None
            if state is CallState.FAILED and failure is not None:
                if isinstance(failure, EngineLost):
                    self.recorder(workload).record_engine_loss(failure)
                elif isinstance(failure, NoMemoryLeft) and before not in (CallState.PINNED, CallState.REPEATED):
                    # Sessions and forward handles need memory beside what their engine keeps.
                    failure = self._no_memory_error(failure)
                try:
                    raise failure
                finally:
                    # The error has this frame in its traceback.
                    del failure
            if state is not CallState.ALONE:
                self._suspected_loss = None

    async def _run_shared(self, workload: Workload, attempt: Callable[[EngineT | None], Awaitable[T]]) -> T:
        """Runs the call in the engine that it is pinned to, or in any."""
        self._crash_history.check(workload)
        if self._pinned is None and not self._engines.serves(workload.owner):
            await self._engines.provide(workload.owner, self.turn_ends_at, self._patience_s)
        return await attempt(self._pinned)

    def _event_of_no_memory(self, state: CallState, full: NoMemoryLeft) -> Event:
        """Classifies a run for which its engine had no memory left."""
        self._patience_s = _PATIENCE_S
        self._short_runs += 1
        if state is CallState.PINNED and self.is_building and self._short_runs == 1:
            # Idle programs were unloaded. What was run is not repeated: a session may have applied part of it.
            return Event.NO_MEMORY
        if state is not CallState.SHARED or (self._short_runs > 1 and (full.is_alone or full.holds_nothing)):
            return Event.DOES_NOT_FIT
        return Event.NO_MEMORY if self._short_runs == 1 else Event.NO_MEMORY_AGAIN

    def _no_memory_error(self, full: NoMemoryLeft) -> GradruleError:
        """Returns MEMORY_EXCEEDED for a call that does not fit alone."""
        return error(
            errors_pb2.ERROR_REASON_MEMORY_EXCEEDED,
            f"even alone, the graph takes more memory than {self._words.limited}: {full.message}",
        )

    async def _event_of_loss(self, state: CallState, lost: EngineLost, workload: Workload) -> Event:
        """Classifies the loss of an engine."""
        self._patience_s = _PATIENCE_S
        if lost.engine_end.reason in (EndReason.KILLED, EndReason.EVICTED):
            self._kills += 1
            if self._kills > _MAX_KILLED:
                return Event.TRIED_TOO_OFTEN
        if not lost.is_blamable:
            return Event.ENGINE_ENDED
        if state is CallState.SHARED:
            self._suspected_loss = lost
            if await self._is_other_likelier(lost, workload):
                return Event.CRASHED_BY_OTHERS
        return Event.ENGINE_CRASHED

    def _record_success(self, workload: Workload, reports: list[CrashReport], *, proves: bool) -> None:
        if proves:
            self._crash_history.record_success(workload)
        for report in reports:
            report.cleared.add(workload)

    async def _is_other_likelier(self, lost: EngineLost, workload: Workload) -> bool:
        """Returns whether another call is the likelier cause: the first time, this one simply runs again then."""
        self._crashes += 1
        has_succeeded = self._crash_history.has_succeeded(workload)
        if not has_succeeded:
            lost.crash_report.unproven += 1
        # In the next turn of the loop all other calls of the same engine have been counted.
        await asyncio.sleep(0)
        return self._crashes == 1 and has_succeeded and lost.crash_report.unproven > 0

    async def _run_alone(
        self,
        workload: Workload,
        attempt: Callable[[EngineT | None], Awaitable[T]],
        undo: Callable[[EngineT], None] | None,
    ) -> T:
        """Runs the call in an engine of its own (a trial). Raises `_ClearedError` if that is not necessary any more."""
        history, lost = self._crash_history, self._suspected_loss
        async with self._engines.trials.hold(workload.owner):
            if lost is None:
                # It is suspected of nothing, only too large to run beside others.
                async with self._engines.alone(workload.owner) as engine:
                    answer = await attempt(engine)
                    if undo is not None:
                        undo(engine)
                    return answer
            report = lost.crash_report
            if report.culprit == workload and report.culprit_error is not None:
                raise report.culprit_error
            # Another call of the same workload, if the workload was new, may have completed meanwhile.
            may_have_completed = workload in report.cleared or (report.unproven > 0 and history.has_succeeded(workload))
            if report.culprit is not None or (self._crashes == 1 and may_have_completed):
                raise _ClearedError
            history.check(workload)
            async with self._engines.alone(workload.owner) as engine:
                answer = await self._run_in_time(workload, attempt(engine), lost.engine_end)
                if undo is not None:
                    undo(engine)
                return answer

    async def _run_in_time(self, workload: Workload, trial: Awaitable[T], engine_end: EngineEnd) -> T:
        """Waits for a trial. A run that does not end by the deadline counts as an overrun; building does not.

        A trial that takes much longer than expected ends once another trial waits: ENGINE_CRASHED.
        """
        history, loop = self._crash_history, asyncio.get_running_loop()
        started = loop.time()
        most_s = max(_MIN_TRIAL_S, _TRIAL_FACTOR * (self._last_run_s + history.longest_run_s(workload)))
        try:
            async with asyncio.timeout(None) as limit, self._yields_to_next(limit, workload.owner, started + most_s):
                return await trial
        except asyncio.CancelledError:
            if not self.is_building and 0 < self.ends_at <= loop.time() + EARLY_S:
                history.record_overrun(workload, loop.time() - started, _DID_NOT_END)
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            if not self.is_building:
                history.record_overrun(workload, loop.time() - started, _DID_NOT_END)
            raise error(
                errors_pb2.ERROR_REASON_ENGINE_CRASHED,
                f"an engine died while it held the request ({engine_end}), and when it ran alone it did not "
                f"come to an end within {most_s:.0f} s",
            ) from None

    @contextlib.asynccontextmanager
    async def _yields_to_next(self, limit: asyncio.Timeout, owner: str, due: float) -> AsyncIterator[None]:
        """Lets `limit` expire once the owner's next trial waits, but not before `due` (loop time)."""

        async def expire() -> None:
            await asyncio.sleep(due - loop.time())
            while not self._engines.trials.waiting(owner):
                await asyncio.sleep(_POLL_S)
            limit.reschedule(loop.time())

        loop = asyncio.get_running_loop()
        expiring = asyncio.create_task(expire(), name="trial-limit")
        try:
            yield
        finally:
            expiring.cancel()

    def _quarantine(self, workload: Workload, lost: EngineLost) -> GradruleError:
        """Puts a workload into quarantine that crashed an engine alone; returns the error for its callers.

        A graph that took too much memory is not quarantined: the next call may have a smaller batch.
        """
        if lost.engine_end.reason is not EndReason.MEMORY:
            self._crash_history.quarantine(workload, str(lost.engine_end))
        failure = _culprit_error(lost.engine_end, self._engines.memory_limit, self._words)
        if self._suspected_loss is not None:
            report = self._suspected_loss.crash_report
            report.culprit, report.culprit_error = workload, failure
        return failure


def _culprit_error(engine_end: EngineEnd, memory_limit: int, words: ProcessWords) -> GradruleError:
    """Returns the error for calls of a graph that ended processes in which nothing else ran.

    Args:
        engine_end: How the last process ended.
        memory_limit: Bytes that such a process may take; 0: no limit.
        words: How the error describes the processes.
    """
    if engine_end.reason is EndReason.MEMORY:
        limit = f" (--memory-limit: {memory_limit} bytes)" if memory_limit else ""
        message = (
            f"the graph takes more memory than {words.limited}{limit}: {engine_end}. Send a smaller batch or graph, or "
            "start the server with a larger --memory-limit"
        )
        return error(errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, message)
    return error(errors_pb2.ERROR_REASON_ENGINE_CRASHED, f"the graph ended each {words.ended}: {engine_end}")
