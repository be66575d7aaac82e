"""What is looked at again and again, for as long as there is any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Rounds:
    """Calls all that was added every so many seconds; one timer serves all of it."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._looks: dict[object, Callable[[], object]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, look: Callable[[], object]) -> Callable[[], object]:
        """Adds one; returns what takes it out."""
        mark = object()
        self._looks[mark] = look
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._round)

        def take_out() -> None:
            # The timer may run out by itself: it would be set again at once where short calls follow each other.
            self._looks.pop(mark, None)

        return take_out

    def _round(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._round) if self._looks else None
        for look in list(self._looks.values()):
            look()
