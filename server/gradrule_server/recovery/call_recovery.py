"""Runs one call until it completes, although engines may end meanwhile.

Usually a call completes in an engine of its tenant, beside other calls. If its engine ends, the call runs again:

- The engine's end has nothing to do with any graph (it was killed from outside, or ended because of another call's
  deadline): the call runs again in the same way.
- The engine crashed while only this call ran in it: the call is the cause. Its caller gets the error, and its graph
  goes into quarantine.
- The engine crashed while several calls ran in it: each of them runs alone once, in an engine that runs nothing else
  (a trial). The one that crashes that engine too is the cause; the callers of the others notice nothing but the time.
- The engine has no memory left: its idle programs are unloaded, or it gets a new process, which holds nothing yet, and
  the call runs again. This says nothing about the graph, so there is no quarantine; a call that does not fit alone
  fails with MEMORY_EXCEEDED.
- A call that is pinned to an engine, which holds its session, cannot run elsewhere: it fails.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, NamedTuple, Protocol, TypeVar

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import TenantLocks
from gradrule_server.errors import GradruleError, NoMemoryLeft, error
from gradrule_server.recovery.crash_history import CrashHistory, Workload
from gradrule_server.recovery.endings import EndReason, EngineEnd, EngineLost, ProgramNotLoaded

EngineT = TypeVar("EngineT")
EngineT_co = TypeVar("EngineT_co", covariant=True)
T = TypeVar("T")

# An engine that is killed from outside is not the call's fault, but each run costs time.
_MAX_KILLED = 5
# A call that lost its engine waits for the next one until its deadline, or this long.
_PATIENCE_S = 60.0
# Clients cancel at their deadlines, which may be this much before ours.
_EARLY_S = 0.5


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
        ended: Which process a graph ended.
    """

    limited: str = "an engine has"
    ended: str = "engine that ran it"


class _Place(enum.Enum):
    """Where a call runs next."""

    SHARED = enum.auto()
    """In any engine of its tenant, beside other calls."""
    PINNED = enum.auto()
    """In the one engine that holds its session."""
    ALONE = enum.auto()
    """In an engine of its own that is thrown away afterwards."""
    REPEATED = enum.auto()
    """Beside other calls once more, after it completed alone: its engine has to keep what the call leaves there."""


class CallRecovery(Generic[EngineT]):
    """Runs one call again when its engine ends.

    Args:
        engines: The engines of all tenants.
        crash_history: The crash history of all workloads.
        ends_at: Loop time of the call's deadline; 0: none is known.
        pinned: The only engine that can run the call; None: any engine can.
        words: How errors describe the engines.
    """

    def __init__(
        self,
        engines: Engines[EngineT],
        crash_history: CrashHistory,
        *,
        ends_at: float = 0.0,
        pinned: EngineT | None = None,
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
        self._words = words
        self._kills = 0
        self._short_runs = 0
        self._was_loaded_again = False
        self._patience_s = 0.0
        self._suspected_of: EngineEnd | None = None
        """The end of an engine that the call may have caused; None: it is not suspected."""

    def for_task(self, ends_at: float) -> CallRecovery[EngineT]:
        """Returns one for work that calls share. `ends_at`: Loop time until which it may go on without a call."""
        own = CallRecovery(self._engines, self._crash_history, ends_at=ends_at, pinned=self._pinned, words=self._words)
        own.turn_ends_at = 0.0
        return own

    def extend(self, ends_at: float, turn_ends_at: float) -> None:
        """Allows at least as much time as one more call has: see `ends_at` and `turn_ends_at`."""
        self.ends_at, self.turn_ends_at = max(self.ends_at, ends_at), max(self.turn_ends_at, turn_ends_at)

    async def run(
        self,
        workload: Workload,
        attempt: Callable[[EngineT | None], Awaitable[T]],
        *,
        undo: Callable[[EngineT], None] | None = None,
    ) -> T:
        """Runs a call until it completes.

        Args:
            workload: What is blamed if the call ends engines.
            attempt: Loads what the call needs and runs it, on the given engine; None: on any engine.
            undo: Removes what an attempt left in an engine. A call with `undo` that completes alone runs once more, in
                an engine that stays.

        Returns:
            What `attempt` returns.

        Raises:
            EngineLost: The call may be to blame for an engine's end.
            GradruleError: QUARANTINED, ENGINE_CRASHED, MEMORY_EXCEEDED, and what `attempt` raises.
        """
        place = _Place.SHARED if self._pinned is None else _Place.PINNED
        while True:
            try:
                if place is not _Place.ALONE:
                    return await self._run_shared(workload, attempt)
                async with self._engines.trials.hold(workload.owner):
                    if self._suspected_of is None or not self._suspected_of.is_explained:
                        answer = await self._run_alone(workload, attempt, undo)
                        if undo is None:
                            return answer
                        place = _Place.REPEATED
                    else:
                        # Meanwhile another call has crashed an engine alone.
                        place, self._suspected_of = _Place.SHARED, None
            except EngineLost as lost:
                place = self._place_after_loss(place, lost, workload)
            except ProgramNotLoaded:
                if self._was_loaded_again:
                    raise
                self._was_loaded_again = True
            except NoMemoryLeft as full:
                place = self._place_without_memory(place, full)

    async def _run_shared(self, workload: Workload, attempt: Callable[[EngineT | None], Awaitable[T]]) -> T:
        """Runs the call in the engine that it is pinned to, or in any."""
        self._crash_history.check(workload)
        if self._pinned is None and not self._engines.serves(workload.owner):
            await self._engines.provide(workload.owner, self.turn_ends_at, self._patience_s)
        return await attempt(self._pinned)

    async def _run_alone(
        self,
        workload: Workload,
        attempt: Callable[[EngineT | None], Awaitable[T]],
        undo: Callable[[EngineT], None] | None,
    ) -> T:
        """Runs the call in an engine of its own. A run that does not end by the deadline counts as an overrun."""
        self._crash_history.check(workload)
        loop = asyncio.get_running_loop()
        async with self._engines.alone(workload.owner) as engine:
            started = loop.time()
            try:
                answer = await attempt(engine)
            except asyncio.CancelledError:
                if self._suspected_of and not self.is_building and 0 < self.ends_at <= loop.time() + _EARLY_S:
                    self._crash_history.recorder(workload).record_overrun(loop.time() - started)
                raise
            if undo is not None:
                undo(engine)
            return answer

    def _place_after_loss(self, place: _Place, lost: EngineLost, workload: Workload) -> _Place:
        """Returns where a call runs again that lost its engine; raises the error of its caller if it does not."""
        self._patience_s = _PATIENCE_S
        end = lost.engine_end
        self._kills += end.reason in (EndReason.KILLED, EndReason.EVICTED)
        if place is _Place.PINNED or self._kills > _MAX_KILLED or (end.is_blamable and place is _Place.REPEATED):
            self._crash_history.recorder(workload).record_engine_loss(lost)
            raise lost
        if not end.is_blamable:
            return place
        is_certain = lost.ran_alone and end.reason is EndReason.CRASH and end.is_by_signal
        if place is _Place.ALONE or is_certain:
            raise self._quarantine(workload, end) from None
        self._suspected_of = end
        return _Place.ALONE

    def _place_without_memory(self, place: _Place, full: NoMemoryLeft) -> _Place:
        """Returns where a call runs again whose engine had no memory left; raises MEMORY_EXCEEDED if it does not."""
        self._patience_s = _PATIENCE_S
        self._short_runs += 1
        is_first = self._short_runs == 1
        # Idle programs were unloaded. What a session has run is not repeated: it may have applied part of it.
        if is_first and (place is _Place.SHARED or (place is _Place.PINNED and self.is_building)):
            return place
        if place in (_Place.PINNED, _Place.REPEATED):
            # Sessions and forward handles need memory beside what their engine keeps.
            raise full
        if place is _Place.SHARED and not (full.is_alone or full.holds_nothing):
            return _Place.ALONE
        raise error(
            errors_pb2.ERROR_REASON_MEMORY_EXCEEDED,
            f"even alone, the graph takes more memory than {self._words.limited}: {full.message}",
        ) from None

    def _quarantine(self, workload: Workload, end: EngineEnd) -> GradruleError:
        """Puts a workload into quarantine that ended an engine; returns the error for its caller.

        A graph that took too much memory is not quarantined: the next call may have a smaller batch.
        """
        if self._suspected_of is not None:
            self._suspected_of.is_explained = True
        if end.reason is not EndReason.MEMORY:
            self._crash_history.quarantine(workload, str(end))
            return error(errors_pb2.ERROR_REASON_ENGINE_CRASHED, f"the graph ended the {self._words.ended}: {end}")
        memory_limit = self._engines.memory_limit
        limit = f" (--memory-limit: {memory_limit} bytes)" if memory_limit else ""
        return error(
            errors_pb2.ERROR_REASON_MEMORY_EXCEEDED,
            f"the graph takes more memory than {self._words.limited}{limit}: {end}. Send a smaller batch or graph, or "
            "start the server with a larger --memory-limit",
        )
