"""Runs the compilations of one tenant as tasks: equal calls share one, and it outlives the deadlines of its calls."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from gradrule.v1 import errors_pb2
from gradrule_server.concurrency import waiting_time
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.engine import Engine
from gradrule_server.operations.request_record import timing_compilation
from gradrule_server.programs.cache import ProgramCache, ProgramKey
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.loaded import LONGEST_LOAD_S
from gradrule_server.recovery.call_recovery import CallRecovery

_log = logging.getLogger(__name__)

# The most compilations of a tenant that go on after the deadlines of their calls. One of them may have a large spec,
# whose bytes stay in this process until an engine has compiled it.
_MAX_OUTLIVING = 4
_LARGE_BYTES = 8 << 20
_CHECK_INTERVAL_S = 0.5

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Compilation:
    """A compilation that runs.

    Attributes:
        task: Compiles.
        recovery: Runs it again if its engine ends; has the latest deadlines of its calls.
        is_large: Whether its spec is large.
        limit_at: Loop time until which it may go on without a call.
        calls: How many calls wait for it.
    """

    task: asyncio.Task[Any]
    recovery: CallRecovery[Engine]
    is_large: bool
    limit_at: float
    calls: int = 0


class CompileTasks:
    """The compilations of one tenant that run now. Belongs to one asyncio loop.

    A compilation whose last call reaches its deadline or is cancelled goes on in the background: until `LONGEST_LOAD_S`
    after its start, and while it keeps no other tenant waiting. It is cancelled if too many go on.

    Args:
        cache: Keeps the programs.
        keeps_others_waiting: Returns whether other tenants wait for engines or workers that this tenant uses.
    """

    def __init__(self, cache: ProgramCache, keeps_others_waiting: Callable[[], bool]) -> None:
        self._cache = cache
        self._keeps_others_waiting = keeps_others_waiting
        self._running: dict[Hashable, _Compilation] = {}

    async def find(
        self,
        key: ProgramKey,
        recovery: CallRecovery[Engine],
        compile: Callable[[CallRecovery[Engine]], Awaitable[RunnableProgram]],
        size: int = 0,
        *,
        is_used: bool = True,
    ) -> tuple[RunnableProgram, bool]:
        """Returns the program with a key, and whether it was compiled now. Arguments and errors are those of `run`.

        `is_used`: Whether a call uses it; see `ProgramCache.put`.
        """
        found = self._cache.get(key)
        if found is not None:
            return found, False

        async def compile_and_keep(recovery: CallRecovery[Engine]) -> RunnableProgram:
            program = await compile(recovery)
            current = self._running.get(key)
            # What was deleted since serves no further call.
            if current is not None and current.task is asyncio.current_task():
                self._cache.put(key, program, is_used=is_used)
            return program

        return await self.run(key, recovery, compile_and_keep, size), True

    async def run(
        self,
        key: Hashable,
        recovery: CallRecovery[Engine],
        compile: Callable[[CallRecovery[Engine]], Awaitable[T]],
        size: int = 0,
    ) -> T:
        """Returns what `compile` returns, from the running compilation of an equal key if there is one.

        Args:
            key: What is compiled: calls of equal keys get the same result.
            recovery: Has the deadline of the call, and the only engine that can compile.
            compile: Compiles.
            size: Bytes of the spec that the compilation keeps in this process.

        Raises:
            GradruleError: DEADLINE_EXCEEDED shortly before the deadline, and what `compile` raises.
        """
        with timing_compilation():
            while True:
                found = self._running.get(key)
                is_shared = found is not None
                if found is None:
                    found = self._start(key, recovery, compile, size)
                try:
                    result: T = await self._wait(key, found, recovery)
                except GradruleError as cause:
                    # The call that started it may have waited for an engine for less time than this one can.
                    if not is_shared or cause.reason != errors_pb2.ERROR_REASON_OVERLOADED:
                        raise
                else:
                    return result

    def cancel(self, is_meant: Callable[[Hashable], bool] = lambda key: True) -> None:
        """Cancels the compilations with certain keys: all, at the end of the server."""
        for key in filter(is_meant, list(self._running)):
            self._running.pop(key).task.cancel()

    def forget(self, is_meant: Callable[[Hashable], bool]) -> None:
        """Makes later calls of certain keys compile again; calls that wait already get the result."""
        for key in filter(is_meant, list(self._running)):
            found = self._running.pop(key)
            if not found.calls:
                found.task.cancel()

    def _start(
        self,
        key: Hashable,
        recovery: CallRecovery[Engine],
        compile: Callable[[CallRecovery[Engine]], Awaitable[Any]],
        size: int,
    ) -> _Compilation:
        limit_at = asyncio.get_running_loop().time() + LONGEST_LOAD_S
        own = recovery.for_task(limit_at)

        async def run() -> Any:
            return await compile(own)

        found = _Compilation(asyncio.create_task(run(), name="compile"), own, size >= _LARGE_BYTES, limit_at)
        self._running[key] = found
        found.task.add_done_callback(lambda _: self._end(key, found))
        return found

    async def _wait(self, key: Hashable, found: _Compilation, recovery: CallRecovery[Engine]) -> Any:
        """Waits for a compilation, at most until shortly before the deadline of the call."""
        loop = asyncio.get_running_loop()
        left_s = waiting_time(recovery.ends_at - loop.time()) if recovery.ends_at else None
        if left_s is not None:
            found.recovery.extend(recovery.ends_at, min(recovery.turn_ends_at or math.inf, loop.time() + left_s))
        found.calls += 1
        try:
            await asyncio.wait({found.task}, timeout=left_s)
            if found.task.done():
                return found.task.result()
        finally:
            found.calls -= 1
            if not (found.calls or found.task.done()):
                self._leave(key, found)
        if self._running.get(key) is found:
            outcome = "this goes on: send the call again later to find it done"
        else:
            outcome = "this was given up, because too many others go on after their deadlines: allow more time"
        raise error(
            errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, f"the program was not compiled before the deadline; {outcome}"
        )

    def _leave(self, key: Hashable, found: _Compilation) -> None:
        """Lets a compilation that no call waits for any more go on, or cancels it."""
        others = [other for other in self._running.values() if not other.calls and other is not found]
        has_large = any(other.is_large for other in others)
        # What was deleted since serves no further call.
        is_current = self._running.get(key) is found
        if is_current and len(others) < _MAX_OUTLIVING and not (found.is_large and has_large):
            self._check(key, found)
        else:
            self._give_up(key, found)

    def _check(self, key: Hashable, found: _Compilation) -> None:
        """Cancels a compilation without a call at its limit, or when it keeps others waiting."""
        if found.task.done() or found.calls:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= found.limit_at or self._keeps_others_waiting():
            self._give_up(key, found)
        else:
            loop.call_later(_CHECK_INTERVAL_S, self._check, key, found)

    def _give_up(self, key: Hashable, found: _Compilation) -> None:
        found.task.cancel()
        self._end(key, found)

    def _end(self, key: Hashable, found: _Compilation) -> None:
        if self._running.get(key) is found:
            del self._running[key]
        task = found.task
        # Without a call that waits, nobody else reads the failure.
        if task.done() and not task.cancelled() and (cause := task.exception()) is not None and not found.calls:
            _log.info("a compilation that went on after the deadline of its call failed: %s", cause)
