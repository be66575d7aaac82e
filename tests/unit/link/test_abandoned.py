"""What becomes of an engine whose request nobody waits for any more, and of whoever sent that."""

from __future__ import annotations

import asyncio

import pytest

from gradrule_server.link import engine as engine_module
from gradrule_server.link.framing import Kind
from gradrule_server.recovery.endings import EngineEnd, EngineLost
from tests.unit.link.fake_engine import CRASH, FakeEngine, Overruns

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_OVERRUN_GRACE_S", 0.05)


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def _give_up(engine: FakeEngine, ends_at: float, recorder: Overruns) -> None:
    call = asyncio.create_task(engine.call(Kind.RUN, b"long", ends_at, recorder))
    await engine.next(Kind.RUN)
    call.cancel()
    await asyncio.wait([call])


async def test_who_cancels_before_the_deadline_ends_the_engine_and_is_not_blamed() -> None:
    engine, recorder = FakeEngine(), Overruns()
    process = engine.fake
    await _give_up(engine, _in(60), recorder)
    await asyncio.sleep(0.1)
    assert process.is_killed
    assert recorder.seconds == []


async def test_what_goes_on_after_its_deadline_is_blamed_once_with_the_time_that_it_took() -> None:
    engine, recorder = FakeEngine(), Overruns()
    process = engine.fake
    await _give_up(engine, _in(0.02), recorder)
    await asyncio.sleep(0.1)
    assert process.is_killed
    (seconds,) = recorder.seconds
    assert 0.05 <= seconds < 1
    assert recorder.taken == []


async def test_what_ends_in_time_is_not_blamed_and_its_time_is_known_whoever_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Longer than this test may be interrupted for.
    monkeypatch.setattr(engine_module, "_OVERRUN_GRACE_S", 1.0)
    engine, recorder = FakeEngine(), Overruns()
    await _give_up(engine, _in(0.02), recorder)
    engine.answer(b"long", Kind.RAN)
    await asyncio.sleep(1.2)
    assert not engine.fake.is_killed
    assert recorder.seconds == []
    assert len(recorder.taken) == 1


async def _end(engine: FakeEngine) -> None:
    if engine.is_ready:
        engine.fake.die(CRASH)
    async with asyncio.timeout(5):
        while not engine.last_end:
            await asyncio.sleep(0.001)


async def test_who_gave_up_just_before_a_crash_is_told_of_it() -> None:
    engine, recorder = FakeEngine(), Overruns()
    await _give_up(engine, _in(60), recorder)
    await _end(engine)
    (loss,) = recorder.losses
    assert (loss.engine_end, loss.ran_alone) == (CRASH, True)
    await asyncio.sleep(0.1)
    assert recorder.seconds == []


async def test_who_gives_up_while_nobody_knows_yet_how_the_engine_ended_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, recorder, known = FakeEngine(), Overruns(), asyncio.Event()
    process = engine.fake

    async def wait_ended() -> EngineEnd:
        await known.wait()
        return CRASH

    monkeypatch.setattr(process, "wait_ended", wait_ended)
    call = asyncio.create_task(engine.call(Kind.RUN, b"bad", _in(60), recorder))
    waits = asyncio.create_task(engine.call(Kind.RUN, b"beside", _in(60), Overruns()))
    await engine.next(Kind.RUN, 2)
    process.die(CRASH)
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.wait([call])
    known.set()
    await _end(engine)
    assert [loss.ran_alone for loss in recorder.losses] == [False]
    # Who waits is told by its own call.
    with pytest.raises(EngineLost):
        await waits


@pytest.mark.parametrize("deadline_s", [0.2, 60.0])
async def test_a_cancelled_call_beside_a_session_ends_the_engine_only_at_its_deadline_or_for_a_call_that_waits(
    monkeypatch: pytest.MonkeyPatch, deadline_s: float
) -> None:
    monkeypatch.setattr(engine_module, "_CANCEL_PATIENCE_S", 0.05)
    engine = FakeEngine(threads=1)
    process = engine.fake
    engine.add_kept(engine.generation, 1)
    await _give_up(engine, _in(deadline_s), Overruns())
    if deadline_s > 1:
        await asyncio.sleep(0.3)
        assert not process.is_killed
        assert engine.is_doomed
        engine.submit(Kind.RUN, b"waits")
    async with asyncio.timeout(5):
        while not process.is_killed:
            await asyncio.sleep(0.01)
