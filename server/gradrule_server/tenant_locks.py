"""One lock for each tenant."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator


class TenantLocks:
    """Locks by owner, first come first served. A lock exists only while somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()

    def waiting(self, owner: str) -> int:
        """Returns how many tasks wait for the owner's lock."""
        return max(0, self._users[owner] - 1)

    def is_held(self, owner: str) -> bool:
        """Returns whether a task holds the owner's lock, or waits for it."""
        return self._users[owner] > 0

    @contextlib.asynccontextmanager
    async def hold(self, owner: str) -> AsyncIterator[None]:
        """Holds the owner's lock within the context."""
        self._users[owner] += 1
        try:
            async with self._locks.setdefault(owner, asyncio.Lock()):
                yield
        finally:
            self._users[owner] -= 1
            if not self._users[owner]:
                del self._users[owner], self._locks[owner]
