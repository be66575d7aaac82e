"""What happens to a call that loses its engine: it is run again on the next, since evaluation is pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from gradrule_server.link.engine import Engine
from gradrule_server.link.faults import EngineLost, NotLoaded

T = TypeVar("T")


class Retries:
    """The second chances of one call: as many as it needs for others' faults, one for what may be its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._suspected = False
        self._loaded_again = False

    async def run(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What `attempt` returns. `EngineLost` where the engine ended under it for the second time.

        A new attempt must load again what it needs.
        """
        while True:
            try:
                return await attempt()
            except EngineLost as lost:
                if lost.suspect and self._suspected:
                    raise
                self._suspected |= lost.suspect
                await self._engine.wait_ready()
            except NotLoaded:
                if self._loaded_again:
                    raise
                self._loaded_again = True
