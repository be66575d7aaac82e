"""Deadlines of requests: whatever runs when its deadline passes is cancelled. One timer serves all requests."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self, cast

from gradrule.v1 import errors_pb2
from gradrule_server.errors import error

# Deadlines are kept in steps: a request ends at most so much after its deadline.
_STEPS_PER_S = 100


class Deadlines:
    """The deadlines of the requests that are under way.

    They are grouped by the step at which they pass, and a timer waits for the first step alone. Nearly all requests end
    long before their deadline, so that a timer for each would be set and cancelled in vain.
    """

    def __init__(self) -> None:
        self._steps: dict[int, set[Deadline]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_step = 0

    def after(self, seconds: float) -> Deadline:
        """Returns a context manager that ends what runs within it after so many seconds."""
        return Deadline(self, seconds, asyncio.get_running_loop().time() + seconds)

    def add(self, deadline: Deadline) -> int:
        """Watches a deadline; returns its step."""
        step = int(deadline.ends_at * _STEPS_PER_S) + 1
        same = self._steps.get(step)
        if same is None:
            self._steps[step] = {deadline}
            if self._timer is None or step < self._next_step:
                self._wait_for(step)
        else:
            same.add(deadline)
        return step

    def discard(self, deadline: Deadline, step: int) -> None:
        """Watches a deadline no more. The timer runs out by itself."""
        same = self._steps.get(step)
        if same is not None:
            same.discard(deadline)
            if not same:
                del self._steps[step]

    def _wait_for(self, step: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_step = step
        self._timer = asyncio.get_running_loop().call_at(step / _STEPS_PER_S, self._pass)

    def _pass(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for step in [step for step in self._steps if step <= now * _STEPS_PER_S]:
            for deadline in self._steps.pop(step):
                deadline.expire()
        if self._steps:
            self._wait_for(min(self._steps))


class Deadline:
    """A deadline of the task that enters it. DEADLINE_EXCEEDED is raised on leaving, where it has passed."""

    __slots__ = ("_cancelling", "_deadlines", "_has_passed", "_seconds", "_step", "_task", "ends_at")

    def __init__(self, deadlines: Deadlines, seconds: float, ends_at: float) -> None:
        self._deadlines = deadlines
        self._seconds = seconds
        self._has_passed = False
        self.ends_at = ends_at
        """Loop time."""

    def __enter__(self) -> Self:
        self._task = cast("asyncio.Task[object]", asyncio.current_task())
        self._cancelling = self._task.cancelling()
        self._step = self._deadlines.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._has_passed:
            self._deadlines.discard(self, self._step)
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, f"not done within {self._seconds:.3g} s") from cause

    def expire(self) -> None:
        """Cancels the task: the deadline has passed."""
        self._has_passed = True
        self._task.cancel()
