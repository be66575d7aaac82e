"""Abandoned requests: when their engine is ended, and what is recorded."""

from __future__ import annotations

import asyncio

import pytest

from gradrule_server.link.framing import Kind
from gradrule_server.link.process import EngineTimes
from gradrule_server.recovery.endings import EngineEnd, EngineLost
from tests.unit.link.fake_engine import CRASH, FakeEngine, FakeRecorder
from tests.waiting import wait_for_condition

_QUICK = EngineTimes(overrun_grace_s=0.05)


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def _give_up(engine: FakeEngine, ends_at: float, recorder: FakeRecorder, least_run_s: float = 0.0) -> None:
    call = asyncio.create_task(engine.call(Kind.RUN, b"long", ends_at, recorder, least_run_s=least_run_s))
    await engine.next(Kind.RUN)
    call.cancel()
    await asyncio.wait([call])


async def test_a_call_cancelled_before_its_deadline_ends_the_engine_without_blame() -> None:
    engine, recorder = FakeEngine(times=_QUICK), FakeRecorder()
    process = engine.fake
    await _give_up(engine, _in(60), recorder)
    await wait_for_condition(lambda: process.is_killed)
    assert recorder.seconds == []


async def test_a_first_run_that_overruns_its_deadline_has_more_time() -> None:
    engine, recorder = FakeEngine(times=_QUICK), FakeRecorder()
    process = engine.fake
    await _give_up(engine, _in(0.02), recorder, 0.3)
    async with asyncio.timeout(60):
        while not process.is_killed:
            await asyncio.sleep(0.001)
    assert recorder.seconds[0] >= 0.3


async def test_an_overrun_is_recorded_once_with_its_time() -> None:
    engine, recorder = FakeEngine(times=_QUICK), FakeRecorder()
    process = engine.fake
    await _give_up(engine, _in(0.02), recorder)
    await wait_for_condition(lambda: process.is_killed and recorder.seconds)
    (seconds,) = recorder.seconds
    assert 0.05 <= seconds < 60
    assert recorder.taken == []


async def test_an_abandoned_call_that_ends_in_time_is_recorded_as_completed() -> None:
    # Longer than this test may be interrupted for.
    engine, recorder = FakeEngine(times=EngineTimes(overrun_grace_s=1.0)), FakeRecorder()
    await _give_up(engine, _in(0.02), recorder)
    engine.answer(b"long", Kind.RAN)
    await asyncio.sleep(1.2)
    assert not engine.fake.is_killed
    assert recorder.seconds == []
    assert len(recorder.taken) == 1


async def _end(engine: FakeEngine) -> None:
    if engine.is_ready:
        engine.fake.die(CRASH)
    async with asyncio.timeout(60):
        while not engine.last_end:
            await asyncio.sleep(0.001)


async def test_a_crash_is_recorded_for_a_call_that_was_cancelled_just_before() -> None:
    engine, recorder = FakeEngine(times=_QUICK), FakeRecorder()
    await _give_up(engine, _in(60), recorder)
    await _end(engine)
    (loss,) = recorder.losses
    assert (loss.engine_end, loss.ran_alone) == (CRASH, True)
    await asyncio.sleep(0.1)
    assert recorder.seconds == []


async def test_a_crash_is_recorded_for_a_call_cancelled_before_its_cause_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, recorder, known = FakeEngine(times=_QUICK), FakeRecorder(), asyncio.Event()
    process = engine.fake

    async def wait_ended() -> EngineEnd:
        await known.wait()
        return CRASH

    monkeypatch.setattr(process, "wait_ended", wait_ended)
    call = asyncio.create_task(engine.call(Kind.RUN, b"bad", _in(60), recorder))
    waits = asyncio.create_task(engine.call(Kind.RUN, b"beside", _in(60), FakeRecorder()))
    await engine.next(Kind.RUN, 2)
    process.die(CRASH)
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait([call])
    known.set()
    await _end(engine)
    assert [loss.ran_alone for loss in recorder.losses] == [False]
    # A caller that waits gets the error from its own call.
    with pytest.raises(EngineLost):
        await waits


async def test_a_cancelled_call_beside_a_session_ends_the_engine_only_at_its_deadline() -> None:
    engine = FakeEngine(threads=1, times=_QUICK)
    process, ends_at = engine.fake, _in(0.3)
    engine.add_kept(engine.generation, 1)
    await _give_up(engine, ends_at, FakeRecorder())
    assert engine.is_doomed
    async with asyncio.timeout(60):
        while not process.is_killed:
            await asyncio.sleep(0.01)
    assert _in(0) >= ends_at
