"""What happens to a call that loses its engine: it is run again, since evaluation is pure.

Whoever ran in an engine when it died is a suspect. If some of them never ran to an end before, one of those did it:
they are tried one after the other, each alone in an engine, until one ends that too; all others are run again as if
nothing had happened. Only who is found guilty that way, or dies a second time, learns of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.account import Account
from gradrule_server.link.endings import Ending, Inquest, Reason
from gradrule_server.link.engine import Engine
from gradrule_server.link.faults import EngineLost, NotLoaded
from gradrule_server.programs.conduct import Charge, Suspect, suspect_of
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.programs.shelf import Loadable

T = TypeVar("T")


class _Cleared(Exception):
    """Somebody else was found guilty."""


Attempt = Callable[[Engine | None], Awaitable[T]]
"""Loads what it needs and runs, on the engine that it is given, or on any."""

# Engines that are killed from outside are not the call's doing, but each costs time.
_MOST_KILLED = 5
# Who lost an engine waits for the next one as long as its deadline lets it, or so long.
_PATIENCE_S = 60.0
# A trial takes so long at most, or so many times as long as the call has run, and as anything of the program ever did.
_LEAST_TRIAL_S = 5.0
_TRIAL_FACTOR = 5.0
_LOOK_S = 0.1
_NO_END = "it did not come to an end when it ran alone"
# Clients cancel at their deadlines, and may be so much before ours.
_EARLY_S = 0.5


class Retries:
    """The further chances of one call.

    `ends_at`: loop time of the call's deadline, as far as is known. `pinned`: the call means this engine and no other.
    """

    def __init__(self, loaded: LoadedPrograms, ends_at: float = 0.0, pinned: Engine | None = None) -> None:
        self._loaded = loaded
        self.ends_at = ends_at
        self.pinned = pinned
        self._killed = 0
        self._patience_s = 0.0
        self._suspicions = 0
        self._was_loaded_again = False
        self._held_against: EngineLost | None = None
        self._ran_s = 0.0

    def check(self, program: Loadable) -> None:
        """QUARANTINED where the program is refused now."""
        self._loaded.conduct.check(suspect_of(program))

    def account(self, program: Loadable) -> Account:
        """What is told of the program's doings."""
        return Charge(self._loaded.conduct, suspect_of(program))

    async def run(
        self,
        program: Loadable,
        attempt: Attempt[T],
        *,
        proves: bool = True,
        undo: Callable[[Engine], None] | None = None,
    ) -> T:
        """What `attempt` returns. `EngineLost` where it is to blame for an engine's end; QUARANTINED.

        `proves`: whether the program has run then; what was only loaded may end engines yet. `undo`: takes back what an
        attempt left in an engine; whoever passes a trial is run once more then, in an engine that stays.
        """
        try:
            return await self._run(program, attempt, proves, undo)
        except (asyncio.CancelledError, GradruleError) as cause:
            is_late = isinstance(cause, GradruleError) and cause.reason == errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED
            if self._held_against is not None and (is_late or isinstance(cause, asyncio.CancelledError)):
                # Who gives up before the trial is over is not tried any more.
                self.note_lost(program, self._held_against)
            raise
        finally:
            self._held_against = None

    async def _run(
        self, program: Loadable, attempt: Attempt[T], proves: bool, undo: Callable[[Engine], None] | None
    ) -> T:
        conduct, suspect = self._loaded.conduct, suspect_of(program)
        attended: list[Inquest] = []
        has_passed = False
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                if self._held_against is None:
                    conduct.check(suspect)
                    if self.pinned is None and not self._loaded.pool.serves(program.owner):
                        await self._loaded.pool.provide(program.owner, self._patience_s)
                    answer = await attempt(self.pinned)
                else:
                    answer = await self._alone(self._held_against, suspect, attempt, undo)
            except _Cleared:
                self._held_against = None
            except EngineLost as lost:
                self._patience_s = _PATIENCE_S
                attended.append(lost.inquest)
                self._ran_s = loop.time() - started
                if self.pinned is not None:
                    self.note_lost(program, lost)
                    raise
                if lost.ending.reason is Reason.KILLED:
                    self._killed += 1
                    if self._killed > _MOST_KILLED:
                        raise
                if lost.is_suspect and self._held_against is not None:
                    raise self._found_guilty(self._held_against.inquest, suspect, lost) from None
                if lost.is_suspect and has_passed:
                    # It passes alone, and not among others: another trial would tell no more.
                    self.note_lost(program, lost)
                    raise
                if lost.is_suspect:
                    self._held_against = lost
                    if await self._is_presumed_innocent(lost, suspect):
                        self._held_against = None
            except NotLoaded:
                if self._was_loaded_again:
                    raise
                self._was_loaded_again = True
            else:
                if proves:
                    conduct.proved(suspect)
                for inquest in attended:
                    inquest.cleared.add(suspect)
                if self._held_against is None or undo is None:
                    return answer
                self._held_against, has_passed = None, True

    def note_lost(self, program: Loadable, lost: EngineLost) -> None:
        """A call that cannot be run elsewhere cannot be tried either: what it was at is noted."""
        self.account(program).lost(lost)

    async def _is_presumed_innocent(self, lost: EngineLost, suspect: Suspect) -> bool:
        """Whether somebody else is the likelier cause: then it is simply run again, the first time."""
        self._suspicions += 1
        is_proven = self._loaded.conduct.is_proven(suspect)
        if not is_proven:
            lost.inquest.unproven += 1
        # By then all others of the same end have been counted.
        await asyncio.sleep(0)
        return self._suspicions == 1 and is_proven and lost.inquest.unproven > 0

    async def _alone(
        self, lost: EngineLost, suspect: Suspect, attempt: Attempt[T], undo: Callable[[Engine], None] | None
    ) -> T:
        """What `attempt` returns in an engine of its own; `_Cleared` where that is not needed any more."""
        conduct, inquest = self._loaded.conduct, lost.inquest
        async with self._loaded.pool.trials.hold(suspect.owner):
            if inquest.culprit == suspect and inquest.verdict is not None:
                raise inquest.verdict
            # Its like, if it was new, may have passed meanwhile.
            may_have_passed = suspect in inquest.cleared or (inquest.unproven > 0 and conduct.is_proven(suspect))
            if inquest.culprit is not None or (self._suspicions == 1 and may_have_passed):
                raise _Cleared
            conduct.check(suspect)
            async with self._loaded.pool.alone(suspect.owner) as engine:
                answer = await self._in_time(suspect, attempt(engine), lost.ending)
                if undo is not None:
                    undo(engine)
                return answer

    async def _in_time(self, suspect: Suspect, trial: Awaitable[T], ending: Ending) -> T:
        """What a trial comes to; a strike where it does not end by the deadline.

        Once it took much longer than it should, it makes way for others that wait for theirs: ENGINE_CRASHED then.
        """
        conduct, loop = self._loaded.conduct, asyncio.get_running_loop()
        started = loop.time()
        most_s = max(_LEAST_TRIAL_S, _TRIAL_FACTOR * (self._ran_s + conduct.longest(suspect)))
        try:
            async with asyncio.timeout(None) as limit, self._making_way(limit, suspect.owner, started + most_s):
                return await trial
        except asyncio.CancelledError:
            if 0 < self.ends_at <= loop.time() + _EARLY_S:
                conduct.overran(suspect, loop.time() - started, _NO_END)
            raise
        except TimeoutError:
            if not limit.expired():
                raise
            conduct.overran(suspect, loop.time() - started, _NO_END)
            raise error(
                errors_pb2.ERROR_REASON_ENGINE_CRASHED,
                f"an engine died while it held the request ({ending}), and when it ran alone it did not "
                f"come to an end within {most_s:.0f} s",
            ) from None

    @contextlib.asynccontextmanager
    async def _making_way(self, limit: asyncio.Timeout, owner: str, due: float) -> AsyncIterator[None]:
        """Within this context `limit` is reached once the owner's next trial waits, from `due` on (loop time)."""

        async def look() -> None:
            await asyncio.sleep(due - loop.time())
            while not self._loaded.pool.trials.waiting(owner):
                await asyncio.sleep(_LOOK_S)
            limit.reschedule(loop.time())

        loop = asyncio.get_running_loop()
        looking = asyncio.create_task(look(), name="trial-limit")
        try:
            yield
        finally:
            looking.cancel()

    def _found_guilty(self, inquest: Inquest, suspect: Suspect, lost: EngineLost) -> GradruleError:
        """It ended a second engine, in which nothing else ran."""
        self._loaded.conduct.convict(suspect, str(lost.ending))
        if lost.ending.reason is Reason.MEMORY:
            reason = errors_pb2.ERROR_REASON_MEMORY_EXCEEDED
            limit = self._loaded.pool.memory_limit
            least = f" (--memory-limit: {limit} bytes)" if limit else ""
            message = f"the graph takes more memory than an engine has{least}: {lost.ending}"
        else:
            reason = errors_pb2.ERROR_REASON_ENGINE_CRASHED
            message = f"the graph ended each engine that ran it: {lost.ending}"
        inquest.culprit, inquest.verdict = suspect, error(reason, message)
        return inquest.verdict
