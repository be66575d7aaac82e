"""Deadlines: which requests are cancelled, and with which error."""

from __future__ import annotations

import asyncio

import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.front.timers import Deadlines


async def work(deadlines: Deadlines, seconds: float, takes_s: float) -> str:
    try:
        with deadlines.after(seconds):
            await asyncio.sleep(takes_s)
    except GradruleError as cause:
        return reason_name(cause.reason)
    return "done"


async def test_only_requests_past_their_deadline_are_cancelled() -> None:
    deadlines = Deadlines()
    # A later deadline is watched first, so the timer must be set anew for the earlier one.
    found: object = await asyncio.gather(
        work(deadlines, 60, 0.2), work(deadlines, 0.05, 60), work(deadlines, 0.06, 60), work(deadlines, 60, 0)
    )
    assert found == ["done", "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "done"]


@pytest.mark.parametrize("seconds", [0, -1])
async def test_passed_deadline_cancels_a_waiting_request(seconds: float) -> None:
    assert await work(Deadlines(), seconds, 60) == "DEADLINE_EXCEEDED"


async def test_deadline_is_never_early() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await work(Deadlines(), 0.1, 60) == "DEADLINE_EXCEEDED"
    assert loop.time() - began >= 0.1


async def test_cancelled_caller_gets_no_deadline_error() -> None:
    task = asyncio.create_task(work(Deadlines(), 60, 60))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_request_cancelled_at_its_deadline_stays_cancelled() -> None:
    deadlines = Deadlines()

    async def held() -> None:
        with deadlines.after(0):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                # The deadline has passed, and the caller is cancelled before that is noticed.
                task.cancel()
                raise

    task = asyncio.create_task(held())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_other_errors_are_not_changed() -> None:
    deadlines = Deadlines()

    async def fails() -> None:
        with deadlines.after(0):
            try:
                await asyncio.sleep(60)
            finally:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fails()


async def test_ended_requests_leave_nothing() -> None:
    deadlines = Deadlines()
    await asyncio.gather(*(work(deadlines, 30 + number, 0) for number in range(50)), work(deadlines, 0.02, 60))
    assert not deadlines._steps


async def test_deadlines_work_after_an_idle_time() -> None:
    deadlines = Deadlines()
    assert await work(deadlines, 0.02, 0) == "done"
    # The timer of the first one runs out, and nothing is left to wait for.
    await asyncio.sleep(0.05)
    assert await work(deadlines, 0.02, 60) == "DEADLINE_EXCEEDED"
