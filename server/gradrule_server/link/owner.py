"""Whose work it is: what waits for an engine is taken up in turn, one owner's after another's."""

from __future__ import annotations

from collections import OrderedDict
from contextvars import ContextVar

_MAX_OWNERS = 1024

OWNER: ContextVar[str] = ContextVar("owner", default="")
"""The tenant for whom the running task works; set where a request is let in."""


class Served:
    """Owners that had a turn: whose was longest ago comes first."""

    def __init__(self) -> None:
        # The latest last.
        self._owners: OrderedDict[str, None] = OrderedDict()

    def note(self, owner: str) -> None:
        """It had its turn just now."""
        self._owners[owner] = None
        self._owners.move_to_end(owner)
        while len(self._owners) > _MAX_OWNERS:
            self._owners.popitem(last=False)

    def places(self) -> dict[str, int]:
        """Owner → place in the row, from 1; whoever is not in it had none for long, and comes before all."""
        return {owner: place for place, owner in enumerate(self._owners, 1)}
