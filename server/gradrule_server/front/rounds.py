"""What is looked at again and again, for as long as there is any."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Looked(Protocol):
    """Something that is looked at."""

    def look(self) -> None:
        """Once in each round."""


class Rounds:
    """Looks at all that was added every so many seconds; one timer serves all of it."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._all: set[Looked] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, item: Looked) -> None:
        """Looks at it from now on."""
        self._all.add(item)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.every_s, self._round)

    def discard(self, item: Looked) -> None:
        """Looks at it no more. The timer runs out by itself: it would be set anew with each of many short calls."""
        self._all.discard(item)

    def _round(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.every_s, self._round) if self._all else None
        for item in list(self._all):
            item.look()
