"""Tests deadlines, checks at intervals, and limits of the time in which answers are read."""

from __future__ import annotations

import asyncio

import pytest

from gradrule_server.errors import GradruleError, reason_name
from gradrule_server.front.time_limits import Deadlines, WatchedWriter

MIB = 1 << 20


async def work(deadlines: Deadlines, seconds: float, takes_s: float) -> str:
    try:
        with deadlines.after(seconds):
            await asyncio.sleep(takes_s)
    except GradruleError as cause:
        return reason_name(cause.reason)
    return "done"


async def test_only_requests_past_their_deadline_are_cancelled() -> None:
    deadlines = Deadlines()
    # A later deadline is watched first, so the timer must be set again for the earlier one.
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


class Client:
    """Reads `bytes_per_s`; whether it was found not to read."""

    def __init__(self, bytes_per_s: float, stall_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.is_stalled = False
        self.writer = WatchedWriter(self._read, stall_s, self._stalled)

    async def _read(self, data: bytes) -> None:
        await asyncio.sleep(len(data) / self.bytes_per_s)

    def _stalled(self) -> None:
        self.is_stalled = True


@pytest.mark.parametrize(("size", "stalls"), [(MIB, False), (1000, True)])
async def test_large_message_gets_more_time(size: int, stalls: bool) -> None:
    client = Client(bytes_per_s=size / 0.5, stall_s=0.1)
    await client.writer.write(bytes(size))
    assert client.is_stalled is stalls
    client.writer.close()


async def test_small_message_after_a_large_one_gets_no_more_time() -> None:
    client = Client(bytes_per_s=1e9, stall_s=0.1)
    await client.writer.write(bytes(10 * MIB))
    client.bytes_per_s = 1000.0
    await client.writer.write(bytes(1000))
    assert client.is_stalled
    client.writer.close()
