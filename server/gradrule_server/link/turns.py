"""A lock for which owners wait in turn."""

from __future__ import annotations

import asyncio

from gradrule_server.link.owner import OWNER, Served


class Turns:
    """Held by one at a time. Next is who has waited longest of the owner whose turn was longest ago."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._served = Served()

    @property
    def waiting(self) -> int:
        """How many wait for it."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        owner = OWNER.get()
        if self._is_held:
            turn = (owner, asyncio.get_running_loop().create_future())
            self._waiting.append(turn)
            try:
                await turn[1]
            except asyncio.CancelledError:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    # It had just been given to us.
                    self._pass_on()
                raise
        self._is_held = True
        self._served.note(owner)

    async def __aexit__(self, *_: object) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        """It stays held where somebody waits: nobody comes between."""
        # Who has been cancelled, and does not know yet, waits no more.
        waiting = [turn for turn in self._waiting if not turn[1].done()]
        self._is_held = bool(waiting)
        if waiting:
            places = self._served.places()
            turn = min(waiting, key=lambda waits: places.get(waits[0], 0))
            self._waiting.remove(turn)
            turn[1].set_result(None)
