"""Tests periodic checks, repeated warnings, logged failures of tasks, and the locks of tenants."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest

from gradrule_server.concurrency import PeriodicChecks, RepeatedWarning, TenantLocks, TenantSlots, start_logged_task


def test_failing_check_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Semaphore(0)
    threads: set[str] = set()

    def fail() -> None:
        raise ValueError("not now")

    def check() -> None:
        threads.add(threading.current_thread().name)
        done.release()

    with PeriodicChecks(0.01, fail, check):
        assert done.acquire(timeout=20)
        assert done.acquire(timeout=20)
    assert threads == {"periodic-checks"}
    assert "not now" in caplog.text
    while done.acquire(blocking=False):
        pass
    assert not any(thread.name == "periodic-checks" for thread in threading.enumerate())


def test_warning_is_logged_when_it_changes_and_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    warning = RepeatedWarning(logging.getLogger("here"))
    for problem in (None, "one", "one", "two", "two", None, "two"):
        warning.report(problem)
    assert caplog.messages == ["one", "two", "two"]
    clock[0] += 59
    warning.report("two")
    assert len(caplog.messages) == 3
    clock[0] += 2
    warning.report("two")
    assert caplog.messages[3:] == ["two"]


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
    await asyncio.wait_for(asyncio.wait(tasks), 60)
    assert holders.had == ["a2"]


async def test_failure_of_a_task_is_logged_and_its_cancellation_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("not now")

    failing = start_logged_task(fail(), "failing", logging.getLogger("here").error, "it failed")
    cancelled = start_logged_task(asyncio.sleep(60), "cancelled", logging.getLogger("here").error, "it failed too")
    cancelled.cancel()
    await asyncio.wait([failing, cancelled])
    assert [(record.message, record.exc_info is not None) for record in caplog.records] == [("it failed", True)]


async def test_tenant_gets_no_more_slots_than_its_share_and_others_go_first() -> None:
    slots = TenantSlots(3, 2)
    order: list[str] = []
    may_end = asyncio.Event()

    async def work(tenant: str) -> None:
        async with slots.hold(tenant):
            order.append(tenant)
            await may_end.wait()

    tasks = [asyncio.create_task(work(tenant)) for tenant in "aaaabb"]
    await asyncio.sleep(0)
    await wait_for(lambda: len(order) == 3)
    assert order == ["a", "a", "b"]
    # All slots are taken: a third tenant waits for one until its time is over.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01), slots.hold("c"):
            raise AssertionError
    # A task that gives up leaves its place to others.
    tasks[2].cancel()
    may_end.set()
    await asyncio.wait(tasks)
    assert sorted(order) == ["a", "a", "a", "b", "b"]
    for _ in range(4):
        async with slots.hold("c"):
            assert slots._used.total() == 1
    assert not (slots._used or slots._waiting)


async def test_slot_goes_to_the_tenant_that_has_the_fewest() -> None:
    slots = TenantSlots(2, 2)
    order: list[str] = []
    gates = {name: asyncio.Event() for name in ("a1", "a2", "a3", "b1")}

    async def work(name: str) -> None:
        async with slots.hold(name[0]):
            order.append(name)
            await gates[name].wait()

    tasks = [asyncio.create_task(work(name)) for name in gates]
    await wait_for(lambda: len(order) == 2)
    gates["a1"].set()
    await wait_for(lambda: len(order) == 3)
    assert order == ["a1", "a2", "b1"]
    for gate in gates.values():
        gate.set()
    await asyncio.gather(*tasks)


async def test_tenants_that_keep_others_waiting_are_known_until_the_others_give_up() -> None:
    slots = TenantSlots(1, 1)
    async with slots.hold("a"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), slots.hold("b"):
                raise AssertionError
        waits = [asyncio.ensure_future(slots.hold("b").__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        assert (slots.waiting, slots.is_kept_waiting_by("a"), slots.is_kept_waiting_by("b")) == (2, True, False)
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)
        assert (slots.waiting, slots.is_kept_waiting_by("a")) == (0, False)


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)
