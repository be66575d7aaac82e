"""Counts the calls in progress of each program on each replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from ray.serve.request_router import ReplicaID


class ProgramCalls:
    """Counts the calls that this process has sent and that have not ended. Belongs to one event loop."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[ReplicaID, str]] = {}
        self._counts: Counter[tuple[ReplicaID, str]] = Counter()

    def __len__(self) -> int:
        """Returns the number of calls in progress."""
        return len(self._calls)

    def count(self, replica: ReplicaID, program: str) -> int:
        """Returns the number of calls of a program on a replica."""
        return self._counts[replica, program]

    def add(self, call: str, replica: ReplicaID, program: str) -> None:
        """Counts a call on a replica. If it was counted before, it moves, as when another replica refused it."""
        self.remove(call)
        self._calls[call] = (replica, program)
        self._counts[replica, program] += 1

    def remove(self, call: str, replica: ReplicaID | None = None) -> None:
        """Counts a call no longer.

        Args:
            call: Its ID. Calls that are not counted are ignored.
            replica: Where it has ended. A call that is counted on another replica by now stays; None: on any.
        """
        entry = self._calls.get(call)
        if entry is None or replica not in (None, entry[0]):
            return
        del self._calls[call]
        self._counts[entry] -= 1
        if not self._counts[entry]:
            del self._counts[entry]

    def keep(self, replicas: Collection[ReplicaID]) -> None:
        """Removes the calls on all other replicas."""
        for call in [call for call, (replica, _) in self._calls.items() if replica not in replicas]:
            self.remove(call)
