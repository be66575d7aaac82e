"""Who gets a lock next."""

from __future__ import annotations

import asyncio

from gradrule_server.link.owner import OWNER
from gradrule_server.link.turns import Turns


class Holders:
    """Tasks that wait for a lock, and in which order they had it."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.had: list[str] = []
        self.most = 0
        self._holding = 0

    def wait(self, name: str) -> asyncio.Task[None]:
        """The owner is the first letter."""
        token = OWNER.set(name[0])
        task = asyncio.create_task(self._hold(name))
        OWNER.reset(token)
        return task

    async def _hold(self, name: str) -> None:
        async with self.turns:
            self._holding += 1
            self.most = max(self.most, self._holding)
            self.had.append(name)
            await asyncio.sleep(0.001)
            self._holding -= 1


async def test_owners_take_turns_and_one_has_it_at_a_time() -> None:
    holders = Holders()
    await asyncio.gather(*(holders.wait(name) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")))
    assert holders.had == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    assert holders.most == 1
    assert holders.turns.waiting == 0
    await asyncio.wait_for(holders.wait("a5"), 5)


async def test_who_gives_up_takes_no_turn() -> None:
    holders = Holders()
    tasks = [holders.wait(name) for name in ("a1", "b1", "c1")]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert holders.had == ["a1", "c1"]
    assert holders.turns.waiting == 0


async def test_who_was_cancelled_and_does_not_know_yet_gets_no_turn() -> None:
    holders = Holders()
    async with holders.turns:
        tasks = [holders.wait(name) for name in ("a1", "b1")]
        await asyncio.sleep(0)
        tasks[0].cancel()
    await asyncio.wait_for(asyncio.wait(tasks), 5)
    assert holders.had == ["b1"]


async def test_who_gives_up_when_it_is_their_turn_passes_it_on() -> None:
    holders = Holders()
    async with holders.turns:
        tasks = [holders.wait(name) for name in ("a1", "b1")]
        await asyncio.sleep(0)
    # The first has it, and has not heard of it.
    tasks[0].cancel()
    await asyncio.wait_for(asyncio.wait(tasks), 5)
    assert holders.had == ["b1"]
