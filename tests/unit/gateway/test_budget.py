"""Requests, bytes and turns are shared by callers."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from gradrule_gateway.budget import Budget, FairSlots, Share
from gradrule_gateway.problems import Problem


def share(budget: Budget, caller: str, size: int = 0) -> Share:
    found = Share(budget)
    found.caller = caller
    found.take(size)
    return found


def test_one_caller_may_have_half_of_the_requests() -> None:
    budget = Budget(max_requests=4, max_bytes=100)
    shares = [share(budget, caller) for caller in "aaabbb"]
    for each in (shares[0], shares[1], shares[3], shares[4]):
        each.start()
    for each in (shares[2], shares[5], share(budget, "c")):
        with pytest.raises(Problem, match="--max-requests"):
            each.start()
    shares[0].release()
    shares[2].start()


def test_one_caller_may_have_three_quarters_of_the_bytes_or_one_request() -> None:
    budget = Budget(max_requests=4, max_bytes=100)
    second, other, large = share(budget, "a"), share(budget, "b", 10), share(budget, "a", 76)
    for each, size in ((second, 1), (other, 15)):
        with pytest.raises(Problem, match="--max-bytes-in-flight"):
            each.take(size)
        each.release()
    large.release()
    second.take(75)
    assert budget.used == 75


def test_bodies_of_the_caller_that_keeps_most_are_given_up_first() -> None:
    budget = Budget(max_requests=4, max_bytes=100)
    given_up: list[str] = []
    for name, size in (("b1", 10), ("a1", 20), ("a2", 20)):
        share(budget, name[0], size).await_body(partial(given_up.append, name))
    share(budget, "c", 45)
    assert not given_up
    share(budget, "d", 10)
    assert given_up == ["a1"]
    assert budget.used == 85


async def test_callers_that_wait_take_turns() -> None:
    slots = FairSlots(2)
    order: list[str] = []
    may_end = asyncio.Event()

    async def work(name: str) -> None:
        async with slots.slot(name[0]):
            order.append(name)
            await may_end.wait()

    tasks = [asyncio.ensure_future(work(name)) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    await asyncio.sleep(0)
    # Half of the slots are for others than the first caller.
    assert (order, slots.waiting) == (["a1", "b1"], 4)
    tasks[1].cancel()
    may_end.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (order[2], sorted(order[3:])) == ("c1", ["a3", "b2"])
    assert (slots.waiting, slots._free) == (0, 2)


async def test_too_many_that_wait_are_refused() -> None:
    slots = FairSlots(1, max_waiting=1)
    async with slots.slot("a"):
        waiting = asyncio.ensure_future(slots.slot("a").__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(Problem, match="wait already"):
            await slots.slot("a").__aenter__()
    await waiting
