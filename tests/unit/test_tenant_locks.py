"""The order in which tasks get a tenant's lock."""

from __future__ import annotations

import asyncio

from gradrule_server.tenant_locks import TenantLocks


class Holders:
    """Tasks that wait for locks, and the order in which they got them."""

    def __init__(self) -> None:
        self.locks = TenantLocks()
        self.had: list[str] = []
        self.goes_on = asyncio.Event()

    def wait(self, name: str) -> asyncio.Task[None]:
        """Starts a task; the owner is the first letter."""
        return asyncio.create_task(self._hold(name))

    async def _hold(self, name: str) -> None:
        async with self.locks.hold(name[0]):
            self.had.append(name)
            await self.goes_on.wait()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_tenant_never_waits_for_another() -> None:
    holders = Holders()
    tasks = [holders.wait(name) for name in ("a1", "a2", "a3", "b1", "c1")]
    await _settle()
    assert holders.had == ["a1", "b1", "c1"]
    assert [holders.locks.waiting(owner) for owner in "abcd"] == [2, 0, 0, 0]
    holders.goes_on.set()
    await asyncio.wait(tasks)
    assert holders.had == ["a1", "b1", "c1", "a2", "a3"]
    assert holders.locks.waiting("a") == 0


async def test_a_cancelled_task_gets_no_lock_and_nothing_is_kept() -> None:
    holders = Holders()
    tasks = [holders.wait(name) for name in ("a1", "a2", "a3")]
    await _settle()
    tasks[1].cancel()
    holders.goes_on.set()
    await asyncio.wait(tasks)
    assert holders.had == ["a1", "a3"]
    assert not holders.locks._locks


async def test_a_task_that_is_cancelled_as_it_gets_the_lock_passes_it_on() -> None:
    holders = Holders()
    async with holders.locks.hold("a"):
        tasks = [holders.wait(name) for name in ("a1", "a2")]
        await _settle()
        holders.goes_on.set()
    # The first task has been given the lock, and has not run yet.
    tasks[0].cancel()
    await asyncio.wait_for(asyncio.wait(tasks), 5)
    assert holders.had == ["a2"]
