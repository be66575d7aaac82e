"""Time limits of calls: deadlines of requests, checks at intervals, and answers that their clients do not read.

Most requests end long before their deadline, and most answers are read at once. So many requests share one timer of the
event loop: setting one for each would cost more, nearly always for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

from gradrule.v1 import errors_pb2
from gradrule_server.errors import error
from gradrule_server.front.calls import Write
from gradrule_server.front.sockets import close_connection

# Deadlines are rounded up to 1/100 s: a request ends at most 10 ms after its deadline.
_STEPS_PER_S = 100
# Rate at which a client must read an answer.
_MIN_BYTES_PER_S = 1 << 20


class Deadlines:
    """Cancels requests that run when their deadline passes, with DEADLINE_EXCEEDED.

    Groups the deadlines by the step in which they pass. The one timer waits for the first step.
    """

    def __init__(self) -> None:
        self._steps: dict[int, set[Deadline]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_step = 0

    def after(self, seconds: float) -> Deadline:
        """Returns a context manager that cancels the code within it after some seconds."""
        return Deadline(self, seconds, asyncio.get_running_loop().time() + seconds)

    def add(self, deadline: Deadline) -> int:
        """Starts to watch a deadline; returns its step."""
        step = int(deadline.ends_at * _STEPS_PER_S) + 1
        same_step = self._steps.get(step)
        if same_step is None:
            self._steps[step] = {deadline}
            if self._timer is None or step < self._next_step:
                self._set_timer(step)
        else:
            same_step.add(deadline)
        return step

    def discard(self, deadline: Deadline, step: int) -> None:
        """Stops watching a deadline. The timer is not cancelled, since that costs more than one needless call."""
        same_step = self._steps.get(step)
        if same_step is not None:
            same_step.discard(deadline)
            if not same_step:
                del self._steps[step]

    def _set_timer(self, step: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_step = step
        self._timer = asyncio.get_running_loop().call_at(step / _STEPS_PER_S, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for step in [step for step in self._steps if step <= now * _STEPS_PER_S]:
            for deadline in self._steps.pop(step):
                deadline.expire()
        if self._steps:
            self._set_timer(min(self._steps))


class Deadline:
    """Context manager that cancels the current task at a deadline, and raises DEADLINE_EXCEEDED then."""

    __slots__ = ("_cancelling", "_deadlines", "_has_passed", "_seconds", "_step", "_task", "ends_at")

    def __init__(self, deadlines: Deadlines, seconds: float, ends_at: float) -> None:
        self._deadlines = deadlines
        self._seconds = seconds
        self._has_passed = False
        self.ends_at = ends_at
        """Event loop time, seconds."""

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
        """Cancels the task; called once the deadline has passed."""
        self._has_passed = True
        self._task.cancel()


class IntervalChecks:
    """Calls every check once per interval, on the event loop."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._checks: set[Callable[[], object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, check: Callable[[], object]) -> None:
        """Starts to call a check."""
        self._checks.add(check)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.interval_s, self._check_all)

    def discard(self, check: Callable[[], object]) -> None:
        """Stops calling a check. The timer goes on, since many short calls would otherwise set it again each time."""
        self._checks.discard(check)

    def _check_all(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.interval_s, self._check_all) if self._checks else None
        for check in list(self._checks):
            check()


def read_timeout(stall_s: float, size: int) -> float:
    """Returns the seconds that a client has to read an answer of `size` bytes."""
    return stall_s + size / _MIN_BYTES_PER_S


class UnreadAnswer:
    """A unary answer that gRPC is sending. Closes the client's connection if it is not read in time.

    gRPC for Python cannot cancel a call from the server's side, and a status waits behind the unread message. Only
    closing the connection frees the memory of the message.

    Args:
        peer: as gRPC gives it. Kept here, since gRPC crashes if asked for the peer of a call that is over.
        timeout_s: seconds that the client has.
        checks: call `check` at intervals.
        on_done: called when gRPC has finished the call.
    """

    __slots__ = ("_checks", "_left_s", "_on_done", "_peer")

    def __init__(self, peer: str, timeout_s: float, checks: IntervalChecks, on_done: Callable[[], object]) -> None:
        self._peer = peer
        self._left_s = timeout_s
        self._checks = checks
        self._on_done = on_done
        checks.add(self.check)

    def check(self) -> None:
        """Closes the connection if the time is up."""
        before, self._left_s = self._left_s, self._left_s - self._checks.interval_s
        if before >= 0 > self._left_s:
            close_connection(self._peer)

    def finish(self, _: object) -> None:
        """Stops the checks; gRPC calls this when it has finished the call."""
        self._checks.discard(self.check)
        self._on_done()


class WatchedWriter:
    """Writes messages of a stream one at a time; calls `on_stall` once if one is not read within `read_timeout`."""

    def __init__(self, write: Write, stall_s: float, on_stall: Callable[[], object]) -> None:
        self._write = write
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def write(self, data: bytes) -> None:
        """Writes a message; returns when the transport has taken it."""
        self._due = due = self._loop.time() + read_timeout(self._stall_s, len(data))
        # Many writes share one timer: most end at once, and setting a timer costs more than a write.
        if self._timer is None or self._timer.when() > due:
            self._set_timer(due)
        try:
            await self._write(data)
        finally:
            self._due = None

    def close(self) -> None:
        """Stops watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._due = None

    def _set_timer(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._due > self._loop.time():
            self._set_timer(self._due)
        else:
            self._on_stall()
