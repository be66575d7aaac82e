"""Divides the gateway's requests, bytes and processes among callers."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable

from gradrule_gateway.problems import Problem

_RETRY_S = 1.0


class Budget:
    """Counts requests and bytes. One caller may use half of the requests, and three quarters of the bytes.

    Args:
        max_requests: Requests that are handled at the same time.
        max_bytes: Total size of bodies, converted requests and answers that are kept at the same time.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.requests = self.used = 0
        self.requests_of: Counter[str] = Counter()
        self.bytes_of: Counter[str] = Counter()
        # Requests whose body has not arrived, the oldest first.
        self.unfinished: dict[Share, Callable[[], None]] = {}

    def make_room(self, share: Share) -> None:
        """Gives up unfinished bodies until the kept bytes are within the limits. Raises `Problem` if they cannot be."""
        while True:
            of_caller = self.bytes_of[share.caller]
            is_full = self.used > self.max_bytes
            # A caller's only request may have any size.
            if not is_full and (of_caller <= 3 * self.max_bytes // 4 or of_caller == share.held):
                return
            candidates = [each for each in self.unfinished if each is not share and each.held]
            if not is_full:
                candidates = [each for each in candidates if each.caller == share.caller]
            # The oldest of the caller that keeps most.
            oldest = max(candidates, key=lambda each: self.bytes_of[each.caller], default=None)
            if oldest is None:
                raise _overloaded("the gateway is handling the maximum number of bytes (--max-bytes-in-flight)")
            give_up = self.unfinished[oldest]
            oldest.release()
            give_up()


class Share:
    """Counts what one request uses.

    Args:
        budget: What all requests may use.
    """

    def __init__(self, budget: Budget) -> None:
        self.caller = ""
        """Name of the caller that sent the request; set before the body is read."""
        self.held = 0
        self._budget = budget
        self._is_running = False

    def start(self) -> None:
        """Counts the request as one that is handled. Raises `Problem` if there are too many."""
        budget = self._budget
        if budget.requests >= budget.max_requests or budget.requests_of[self.caller] >= (budget.max_requests + 1) // 2:
            raise _overloaded("the gateway is handling the maximum number of requests (--max-requests)")
        self._is_running = True
        budget.requests += 1
        budget.requests_of[self.caller] += 1

    def take(self, size: int) -> None:
        """Counts bytes that are kept from now on. Raises `Problem` if too many are kept."""
        self._add(size)
        if self.held > self._budget.max_bytes:
            raise Problem(
                "MESSAGE_TOO_LARGE",
                f"the request and its answer need more than {self._budget.max_bytes} bytes, which is the gateway's "
                "--max-bytes-in-flight",
            )
        self._budget.make_room(self)

    def give(self, size: int) -> None:
        """Counts bytes that are no longer kept."""
        self._add(-size)

    def await_body(self, give_up: Callable[[], None]) -> None:
        """Lets other requests give up this one while its body has not arrived."""
        self._budget.unfinished[self] = give_up

    def end_body(self) -> None:
        """Keeps the request from now on: its body has arrived."""
        self._budget.unfinished.pop(self, None)

    def release(self) -> None:
        """Counts the request as done, and its bytes as no longer kept."""
        self.end_body()
        self.give(self.held)
        if self._is_running:
            self._is_running = False
            self._budget.requests -= 1
            _subtract(self._budget.requests_of, self.caller, 1)

    def _add(self, size: int) -> None:
        self.held += size
        self._budget.used += size
        _subtract(self._budget.bytes_of, self.caller, -size)


class FairSlots:
    """Lets a number of jobs run at the same time, of one caller at most half. Callers that wait take turns.

    Args:
        count: The number of jobs.
        max_waiting: Jobs of one caller that may wait; None: any number.
    """

    def __init__(self, count: int, max_waiting: int | None = None) -> None:
        self._free = count
        self._max_waiting = max_waiting
        self._most = (count + 1) // 2
        self._running: Counter[str] = Counter()
        # The caller whose turn is next is the first.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for their turn."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def slot(self, caller: str) -> AsyncIterator[None]:
        """Waits for the caller's turn; the `with` statement is the job. Raises `Problem` if too many wait."""
        if self._max_waiting is not None and len(self._waiting.get(caller, ())) >= self._max_waiting:
            raise _overloaded(f"{self._max_waiting} requests of this client wait already")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self._give_turns()
        try:
            await turn
            yield
        finally:
            # A cancelled task cancels the future that it waits for, unless its turn has come.
            if not turn.cancelled():
                self._free += 1
                _subtract(self._running, caller, 1)
                self._give_turns()

    def _give_turns(self) -> None:
        while self._free:
            caller = next((each for each in self._waiting if self._running[each] < self._most), None)
            if caller is None:
                return
            turns = self._waiting.pop(caller)
            turn = turns.popleft()
            if turns:
                self._waiting[caller] = turns
            if not turn.cancelled():
                self._free -= 1
                self._running[caller] += 1
                turn.set_result(None)


def _subtract(counts: Counter[str], key: str, number: int) -> None:
    """Subtracts a number; drops keys that have 0, because callers are many."""
    counts[key] -= number
    if not counts[key]:
        del counts[key]


def _overloaded(detail: str) -> Problem:
    return Problem("OVERLOADED", detail, status=503, retry_after_s=_RETRY_S)
