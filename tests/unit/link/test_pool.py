"""Engines and spares, with processes that are not there."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.link import process as process_module
from gradrule_server.link.engine import Engine, Use
from gradrule_server.link.framing import Kind, pack_header
from gradrule_server.link.monitor import EngineMonitor
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import EngineRefused, EngineTimes, ProcessOptions
from gradrule_server.link.request_scheduler import ConnectionLost, EngineRequest
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import EndReason, EngineLost
from tests.unit.link.fake_engine import CRASH, FakeProcess, Starter

_TIMES = EngineTimes(retry_delay_s=0.01, provide_s=0.1, turn_s=0.01)


@pytest.fixture
def starter(monkeypatch: pytest.MonkeyPatch) -> Starter:
    given = Starter()
    monkeypatch.setattr(process_module, "start_process", given)
    return given


def _pool(engines: int = 1, spares: int = 1, times: EngineTimes = _TIMES, **words: Any) -> EnginePool:
    return EnginePool(ProcessOptions("cpu", 4), engines=engines, spares=spares, heartbeat_s=0, times=times, **words)


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_all_places_are_filled_and_then_the_reserve(starter: Starter) -> None:
    pool = _pool(engines=2, spares=2)
    await pool.start()
    await _until(lambda: pool.spares_ready == 2)
    assert [engine.is_ready for engine in pool.engines] == [True, True]
    assert len(starter.started) == 4
    assert pool.device == "CPU:0"
    await pool.stop()
    assert all(process.is_killed for process in starter.started)


async def test_a_spare_takes_the_place_at_once_and_another_is_started(starter: Starter) -> None:
    changes: list[bool] = []
    pool = _pool(on_change=changes.append)
    await pool.start()
    await _until(lambda: pool.spares_ready)
    (engine,) = pool.engines
    generation = engine.generation
    first, spare = starter.started
    first.die(CRASH)
    # Not a single turn of the loop has passed.
    assert engine.is_ready
    assert engine.pid == spare.pid
    assert engine.generation == generation + 1
    assert changes == [True]
    await _until(lambda: pool.spares_ready and pool.engines[0].ended == {"crash": 1})
    assert len(starter.started) == 3
    await pool.stop()


async def test_without_a_spare_it_is_reported_until_another_is_there(starter: Starter) -> None:
    changes: list[bool] = []
    pool = _pool(spares=0, on_change=changes.append)
    await pool.start()
    starter.errors = [OSError("no memory")] * 30
    starter.started[0].die(CRASH)
    assert not pool.is_ready
    with pytest.raises(GradruleError) as refusal:
        await pool.provide("ada")
    assert refusal.value.reason == errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE
    starter.errors = []
    await _until(lambda: pool.is_ready)
    await pool.provide("ada")
    assert changes == [True, False, True]
    await pool.stop()


async def test_one_of_two_is_enough(starter: Starter) -> None:
    changes: list[bool] = []
    pool = _pool(engines=2, spares=0, on_change=changes.append)
    await pool.start()
    await _until(lambda: all(engine.is_ready for engine in pool.engines))
    starter.errors = [OSError("no memory")] * 30
    starter.started[0].die(CRASH)
    assert pool.is_ready
    await pool.provide("ada")
    assert pool.engines_for("ada") == [pool.engines[1]]
    assert changes == [True]
    await pool.stop()


async def test_a_spare_that_dies_is_replaced(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    await _until(lambda: pool.spares_ready)
    starter.started[1].die(CRASH)
    assert pool.spares_ready == 0
    await _until(lambda: pool.spares_ready)
    assert pool.engines[0].pid == starter.started[0].pid
    assert len(starter.started) == 3
    await pool.stop()


async def test_spares_that_end_right_after_their_greeting_are_started_at_intervals(
    starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _pool(spares=0, times=replace(_TIMES, retry_delay_s=3600))
    await pool.start()
    greet = FakeProcess.greet

    async def greet_and_end(process: FakeProcess, timeout_s: float) -> link_pb2.Greeting:
        greeting = await greet(process, timeout_s)
        process.die(CRASH)
        return greeting

    monkeypatch.setattr(FakeProcess, "greet", greet_and_end)
    starter.started[0].die(CRASH)
    await _until(lambda: len(starter.started) == 2)
    await asyncio.sleep(0.05)
    assert len(starter.started) == 2
    await pool.stop()


async def test_processes_that_ended_are_forgotten(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    for count in range(2, 6):
        await _until(lambda: pool.spares_ready)
        assert len(starter.started) == count
        starter.started[-2].die(CRASH)
    await _until(lambda: pool.spares_ready)
    gone = [weakref.ref(process) for process in starter.started]
    starter.started.clear()
    starter.transports.clear()

    def left() -> int:
        gc.collect()
        return sum(process() is not None for process in gone)

    await _until(lambda: len(pool._spares.processes) == left() == 2)
    await pool.stop()


@pytest.mark.parametrize("error", [EngineRefused("no such device"), OSError("no memory")])
async def test_what_never_ran_refuses_the_start(starter: Starter, error: Exception) -> None:
    starter.errors = [error]
    pool = _pool()
    with pytest.raises(type(error), match=str(error)):
        await pool.start()
    await pool.stop()


async def test_a_trial_takes_a_process_that_nobody_gets_afterwards(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    await _until(lambda: pool.spares_ready)
    async with pool.alone("ada") as engine:
        assert (engine.pid, engine.owner) == (starter.started[1].pid, "ada")
        assert engine not in pool.engines
        generation = engine.generation
    assert engine.generation > generation
    await _until(lambda: starter.started[1].is_killed and pool.spares_ready == 1)
    assert len(starter.started) == 3
    await pool.stop()


async def test_alone_leaves_no_process_that_still_works(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    async with pool.alone("ada") as engine:
        process = starter.started[1]
        engine.submit(Kind.RUN, b"endless")
    assert process.is_killed
    await pool.stop()


async def test_alone_with_no_reserve_starts_one_and_keeps_none(starter: Starter) -> None:
    pool = _pool(spares=0)
    await pool.start()
    async with pool.alone("ada") as engine:
        assert engine.is_ready
    await _until(lambda: [process.is_killed for process in starter.started] == [False, True])
    assert pool.spares_ready == 0
    await pool.stop()


async def test_what_a_process_kept_that_is_gone_does_not_count(starter: Starter) -> None:
    pool = _pool(spares=0)
    await pool.start()
    (engine,) = pool.engines
    engine.add_kept(engine.generation, 1)
    engine.add_kept(engine.generation - 1, -1)
    assert engine.kept == 1
    starter.started[0].die(CRASH)
    await _until(lambda: engine.is_ready)
    assert engine.kept == 0
    await pool.stop()


async def test_the_first_engine_goes_to_the_first_tenant_and_each_other_tenant_gets_its_own(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    await pool.provide("ada")
    await pool.provide("grace")
    await pool.provide("ada")
    assert [engine.owner for engine in pool.engines] == ["ada", "grace"]
    assert len({engine.pid for engine in pool.engines}) == 2
    # A process that takes the place of another works for the same tenant.
    starter.started[0].die(CRASH)
    await pool.provide("ada")
    assert [engine.owner for engine in pool.engines] == ["ada", "grace"]
    await pool.stop()


async def test_callers_who_come_at_once_get_one_engine(starter: Starter) -> None:
    pool = _pool(spares=0)
    await pool.start()
    await pool.provide("ada")
    await asyncio.gather(*(pool.provide("grace") for _ in range(5)), *(pool.session_engine("grace") for _ in range(5)))
    assert [(engine.owner, engine.use) for engine in pool.engines] == [
        ("ada", Use.PROGRAMS),
        ("grace", Use.PROGRAMS),
        ("grace", Use.SESSIONS),
    ]
    await pool.stop()


async def test_sessions_have_an_engine_in_which_no_program_runs(starter: Starter) -> None:
    pool = _pool(engines=2)
    await pool.start()
    first = await pool.session_engine("ada")
    first.add_kept(first.generation, 1)
    await pool.provide("ada")
    assert first not in pool.engines_for("ada")
    assert await pool.session_engine("ada") is first
    assert await pool.session_engine("grace") is not first
    assert [engine.use is Use.SESSIONS for engine in pool.engines] == [False, False, True, True]
    await pool.stop()


async def test_an_engine_that_is_about_to_be_ended_takes_no_new_session(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    doomed = await pool.session_engine("ada")
    doomed.add_kept(doomed.generation, 1)
    work = doomed.submit(Kind.SESSION, b"endless")
    doomed.abandon(work, asyncio.get_running_loop().time() + 60)
    new = await pool.session_engine("ada")
    assert new is not doomed
    assert await pool.session_engine("ada") is new
    # The request ends in time: that engine is used again, and the other one is not needed.
    process = next(item for item in starter.started if item.pid == doomed.pid)
    process.connection.data_received(pack_header(Kind.RAN, work.id, 0))
    assert await pool.session_engine("ada") is doomed
    assert new not in pool.engines
    await pool.stop()


async def test_a_lost_engine_of_sessions_is_not_replaced_until_a_session_needs_it(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    engine = await pool.session_engine("ada")
    process = next(item for item in starter.started if item.pid == engine.pid)
    waits = asyncio.create_task(engine.wait_lost())
    await asyncio.sleep(0)
    process.die(CRASH)
    assert await waits == CRASH
    assert [item.use for item in pool.engines] == [Use.PROGRAMS]
    assert (await pool.session_engine("ada")).pid != process.pid
    # Its end is counted all the same.
    assert pool.ended[1] == {"crash": 1}
    await pool.stop()


async def test_a_tenant_gets_more_engines_up_to_its_number_and_the_server_s(starter: Starter) -> None:
    pool = _pool(engines=2, spares=1, max_engines=3)
    await pool.start()
    await _until(lambda: all(engine.is_ready for engine in pool.engines) and pool.spares_ready)
    await pool.provide("ada")
    second = pool.claim_another("ada")
    assert second is not None
    assert pool.claim_another("ada") is None
    await pool.provide("grace")
    assert len(pool.engines) == 3
    assert pool.claim_another("grace") is None
    await pool.stop()


async def test_the_idle_engine_that_was_used_least_recently_makes_room(starter: Starter) -> None:
    pool = _pool(max_engines=3)
    await pool.start()
    for owner in ("ada", "grace", "alan"):
        await pool.provide(owner)
        pool.engines_for(owner)[0].submit(Kind.RUN, b"work")
    for process in starter.started:
        # The first request of each is answered.
        process.connection.data_received(pack_header(Kind.RAN, 1, 0))
    by_owner = {engine.owner: engine for engine in pool.engines}
    by_owner["ada"].submit(Kind.RUN, b"more")
    by_owner["grace"].add_kept(by_owner["grace"].generation, 1)
    pid_of_alan = by_owner["alan"].pid
    await pool.provide("edith")
    assert {engine.owner for engine in pool.engines} == {"ada", "grace", "edith"}
    await _until(lambda: [process.pid for process in starter.started if process.is_killed] == [pid_of_alan])
    by_owner["edith"] = pool.engines_for("edith")[0]
    by_owner["edith"].submit(Kind.RUN, b"work")
    with pytest.raises(GradruleError) as refusal:
        await pool.provide("alan")
    assert refusal.value.reason == errors_pb2.ERROR_REASON_OVERLOADED
    assert refusal.value.retry_after_s
    assert "--max-engines" in refusal.value.message
    await pool.stop()


async def _full_pool(starter: Starter, owners: str, turn_s: float = 0.01, **words: Any) -> EnginePool:
    """Returns a pool in which each owner has an engine, and no further one has room."""
    pool = _pool(max_engines=len(owners), times=replace(_TIMES, turn_s=turn_s), **words)
    await pool.start()
    for owner in owners:
        await pool.provide(owner)
    return pool


def _process(starter: Starter, engine: Engine) -> FakeProcess:
    return next(process for process in starter.started if process.pid == engine.pid)


def _answer(starter: Starter, engine: Engine, request: EngineRequest) -> None:
    _process(starter, engine).connection.data_received(pack_header(Kind.RAN, request.id, 0))


def _deadline(seconds: float = 60.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_tenant_waits_for_its_turn_and_gets_the_place_of_an_engine_that_becomes_idle(starter: Starter) -> None:
    pool = await _full_pool(starter, "ab")
    works = {engine: engine.submit(Kind.RUN, b"work") for engine in pool.engines}
    waits = asyncio.create_task(pool.provide("c", _deadline()))
    await _until(lambda: any(engine.is_given_away for engine in pool.engines))
    assert not waits.done()
    for engine, work in works.items():
        if engine.is_given_away:
            _answer(starter, engine, work)
    await waits
    assert pool.serves("c")
    assert len(pool.engines) == 2
    assert not any(engine.is_given_away for engine in pool.engines)
    await pool.stop()


async def test_a_tenant_keeps_its_engine_for_its_turn(starter: Starter) -> None:
    pool = await _full_pool(starter, "a", turn_s=3600)
    waits = asyncio.create_task(pool.provide("b", _deadline()))
    await _until(lambda: pool.waiting_tenants)
    # A turn starts anew with a compilation, since its program has to run too.
    (engine,) = pool.engines
    work = engine.submit(Kind.COMPILE, b"work")
    _process(starter, engine).connection.data_received(pack_header(Kind.COMPILED, work.id, 0))
    engine.turn_started -= 3599
    pool._assign()
    assert engine.owner == "a"
    assert not engine.is_given_away
    pool._times = replace(pool._times, turn_s=0)
    pool._assign()
    await waits
    assert [engine.owner for engine in pool.engines] == ["b"]
    await pool.stop()


async def test_compilations_prolong_a_turn_up_to_a_limit(starter: Starter) -> None:
    pool = await _full_pool(starter, "a", turn_s=3600)
    (engine,) = pool.engines
    work = engine.submit(Kind.COMPILE, b"work")
    _process(starter, engine).connection.data_received(pack_header(Kind.COMPILED, work.id, 0))
    engine.turn_started -= pool._times.longest_turn_s
    await pool.provide("b", _deadline())
    assert pool._times.longest_turn_s < 30
    await pool.stop()


async def test_a_long_call_on_an_engine_that_is_given_away_does_not_keep_others_from_being_given_away(
    starter: Starter,
) -> None:
    pool = await _full_pool(starter, "ab")
    works = {engine: engine.submit(Kind.RUN, b"work") for engine in pool.engines}
    waits = asyncio.create_task(pool.provide("c", _deadline()))
    await _until(lambda: any(engine.is_given_away for engine in pool.engines))
    long = next(engine for engine in pool.engines if engine.is_given_away)
    other = next(engine for engine in pool.engines if engine is not long)
    await _until(lambda: other.is_given_away)
    _answer(starter, other, works[other])
    await waits
    # Nobody waits for it any more.
    assert not long.is_given_away
    assert pool.engines_for("c")
    await pool.stop()


async def test_a_new_process_does_not_start_the_turn_anew(starter: Starter) -> None:
    """A tenant whose calls end its processes again and again would keep its engine for ever."""
    pool = await _full_pool(starter, "a", turn_s=3600)
    (engine,) = pool.engines
    engine.turn_started -= 3600
    _process(starter, engine).die(CRASH)
    await _until(lambda: engine.is_ready)
    work = engine.submit(Kind.RUN, b"work")
    waits = asyncio.create_task(pool.provide("b", _deadline()))
    await _until(lambda: engine.is_given_away)
    _answer(starter, engine, work)
    await waits
    await pool.stop()


async def test_tenants_get_their_turns_in_the_order_in_which_they_came(starter: Starter) -> None:
    pool = await _full_pool(starter, "a")
    served: list[str] = []

    async def call(owner: str) -> None:
        await pool.provide(owner, _deadline())
        served.append(owner)

    (engine,) = pool.engines
    work = engine.submit(Kind.RUN, b"work")
    tasks = []
    # Many calls of one tenant wait in one place.
    for owner in ("b", "b", "b", "c", "b", "d"):
        tasks.append(asyncio.create_task(call(owner)))
        await asyncio.sleep(0)
    assert pool.waiting_tenants == 3
    await _until(lambda: engine.is_given_away)
    _answer(starter, engine, work)
    await asyncio.gather(*tasks)
    assert served == ["b", "b", "b", "b", "c", "d"]
    await pool.stop()


async def test_calls_that_had_not_started_leave_an_engine_that_is_given_away(starter: Starter) -> None:
    starter.threads = 1
    pool = await _full_pool(starter, "a")
    (engine,) = pool.engines
    ends_at = _deadline()
    running = asyncio.create_task(engine.call(Kind.RUN, b"runs", ends_at))
    queued = asyncio.create_task(engine.call(Kind.RUN, b"waits", ends_at))
    await asyncio.sleep(0)
    waits = asyncio.create_task(pool.provide("b", ends_at))
    with pytest.raises(EngineLost) as lost:
        await queued
    assert not lost.value.is_blamable
    assert not pool.serves("a")
    assert not waits.done()
    process = _process(starter, engine)
    process.connection.data_received(pack_header(Kind.RAN, 1, 0))
    assert await running == b""
    await waits
    assert process.is_killed
    await pool.stop()


async def test_a_call_that_holds_a_program_keeps_its_engine(starter: Starter) -> None:
    pool = await _full_pool(starter, "a")
    (engine,) = pool.engines
    with engine.held():
        waits = asyncio.create_task(pool.provide("b", _deadline()))
        await _until(lambda: engine.is_given_away)
        # It has no request there now, and sends one later.
        await asyncio.sleep(0.05)
        work = engine.submit(Kind.RUN, b"work")
    assert not waits.done()
    _answer(starter, engine, work)
    await waits
    await pool.stop()


async def test_a_compilation_without_a_caller_leaves_its_engine_to_another_tenant(starter: Starter) -> None:
    pool = await _full_pool(starter, "a")
    (engine,) = pool.engines
    with engine.held():
        work = engine.submit(Kind.COMPILE, b"long")
        engine.limit_run(work, _deadline(), 60.0)
        assert not pool.is_kept_waiting_by("a")
        waits = asyncio.create_task(pool.provide("b", _deadline()))
        await _until(lambda: pool.is_kept_waiting_by("a"))
        assert not waits.done()
        engine.abandon(work, _deadline())
    await waits
    assert engine not in pool.engines
    await pool.stop()


async def test_a_compilation_without_a_caller_does_not_end_its_engine(starter: Starter) -> None:
    pool = _pool(times=replace(_TIMES, overrun_grace_s=0.01))
    await pool.start()
    (engine,) = pool.engines
    work = engine.submit(Kind.COMPILE, b"long")
    engine.abandon(work, _deadline(0.0))
    await asyncio.sleep(0.05)
    assert engine.is_ready
    assert not engine.is_doomed
    await pool.stop()


async def test_calls_are_refused_shortly_before_their_deadlines_and_told_what_is_full(starter: Starter) -> None:
    pool = await _full_pool(starter, "abc")
    await pool.session_engine("s", _deadline())
    for engine in pool.engines:
        engine.add_kept(engine.generation, 1)
    started = asyncio.get_running_loop().time()
    with pytest.raises(
        GradruleError, match=r"all 3 engines \(--max-engines\).*sessions hold 1, forward handles 2"
    ) as full:
        await pool.provide("d", started + 0.5)
    assert full.value.reason == errors_pb2.ERROR_REASON_OVERLOADED
    assert asyncio.get_running_loop().time() >= started + 0.4
    assert pool.waiting_tenants == 0
    await pool.stop()


async def test_who_waits_no_longer_leaves_the_queue_and_the_engine_is_taken_back(starter: Starter) -> None:
    pool = await _full_pool(starter, "a")
    (engine,) = pool.engines
    work = engine.submit(Kind.RUN, b"work")
    waits = asyncio.create_task(pool.provide("b", _deadline()))
    await _until(lambda: engine.is_given_away)
    back = asyncio.create_task(pool.provide("a", _deadline()))
    await asyncio.sleep(0)
    assert not back.done()
    waits.cancel()
    await back
    assert pool.engines_for("a") == [engine]
    assert pool.waiting_tenants == 0
    assert not work.ended
    await pool.stop()


async def test_an_engine_that_is_given_away_and_dies_is_not_replaced(starter: Starter) -> None:
    pool = await _full_pool(starter, "a")
    (engine,) = pool.engines
    engine.submit(Kind.RUN, b"work")
    waits = asyncio.create_task(pool.provide("b", _deadline()))
    await _until(lambda: engine.is_given_away)
    _process(starter, engine).die(CRASH)
    await waits
    assert [item.owner for item in pool.engines] == ["b"]
    await pool.stop()


async def test_sessions_never_hold_the_last_engine(starter: Starter) -> None:
    changes: list[bool] = []
    pool = _pool(max_engines=3, on_change=changes.append, times=replace(_TIMES, turn_s=0.01))
    await pool.start()
    first = await pool.session_engine("a", _deadline())
    first.add_kept(first.generation, 1)
    second = await pool.session_engine("b", _deadline())
    second.add_kept(second.generation, 1)
    third = asyncio.create_task(pool.session_engine("c", _deadline()))
    await asyncio.sleep(0.05)
    assert not third.done()
    with pytest.raises(GradruleError, match="sessions hold 2, forward handles 0 engines, which are all that they may"):
        await pool.session_engine("d", _deadline(0.05))
    # Everybody's calls get their turn on the engine that is left.
    for owner in "efa":
        await pool.provide(owner, _deadline())
    assert pool.is_ready
    second.add_kept(second.generation, -1)
    assert (await third).owner == "c"
    assert second not in pool.engines
    assert changes == [True]
    await pool.stop()


async def test_forward_handles_never_hold_the_last_engine(starter: Starter) -> None:
    pool = await _full_pool(starter, "ab")
    first, second = pool.engines
    await pool.wait_to_keep("a", _deadline())
    pool.check_may_keep(first)
    first.add_kept(first.generation, 1)
    # Further handles hold no further engine.
    await pool.wait_to_keep("a", _deadline(0.05))
    pool.check_may_keep(first)
    with pytest.raises(GradruleError, match="OVERLOADED"):
        await pool.wait_to_keep("b", _deadline(0.05))
    with pytest.raises(GradruleError, match="OVERLOADED"):
        pool.check_may_keep(second)
    waits = asyncio.create_task(pool.wait_to_keep("b", _deadline()))
    await asyncio.sleep(0)
    first.add_kept(first.generation, -1)
    await waits
    await pool.stop()


async def test_an_engine_whose_last_session_has_ended_makes_room_for_forward_handles(starter: Starter) -> None:
    pool = _pool(max_engines=2)
    await pool.start()
    sessions = await pool.session_engine("a", _deadline())
    sessions.add_kept(sessions.generation, 1)
    await pool.provide("b", _deadline())
    waits = asyncio.create_task(pool.wait_to_keep("b", _deadline()))
    await asyncio.sleep(0.05)
    assert not waits.done()
    sessions.add_kept(sessions.generation, -1)
    await waits
    assert sessions not in pool.engines
    (engine,) = pool.engines_for("b")
    pool.check_may_keep(engine)
    await pool.stop()


async def test_an_engine_that_keeps_nothing_any_more_is_given_away_though_it_is_busy(starter: Starter) -> None:
    pool = await _full_pool(starter, "a")
    (engine,) = pool.engines
    engine.add_kept(engine.generation, 1)
    work = engine.submit(Kind.RUN, b"work")
    waits = asyncio.create_task(pool.provide("b", _deadline()))
    await asyncio.sleep(0.05)
    assert not engine.is_given_away
    engine.add_kept(engine.generation, -1)
    await _until(lambda: engine.is_given_away)
    _answer(starter, engine, work)
    await waits
    await pool.stop()


async def test_an_engine_that_keeps_a_handle_meanwhile_is_taken_back(starter: Starter) -> None:
    pool = await _full_pool(starter, "ab")
    first, second = pool.engines
    works = [engine.submit(Kind.FORWARD, b"work") for engine in pool.engines]
    waits = asyncio.create_task(pool.provide("c", _deadline()))
    await _until(lambda: first.is_given_away or second.is_given_away)
    given, other = (first, second) if first.is_given_away else (second, first)
    back = asyncio.create_task(pool.provide(given.owner or "", _deadline()))
    await asyncio.sleep(0)
    given.add_kept(given.generation, 1)
    # Its tenant's calls go on, although the first tenant still waits.
    await back
    assert not waits.done()
    await _until(lambda: other.is_given_away)
    _answer(starter, other, works[pool.engines.index(other)])
    await waits
    assert given in pool.engines
    await pool.stop()


async def test_a_server_whose_only_engine_holds_sessions_is_not_ready(starter: Starter) -> None:
    changes: list[bool] = []
    pool = _pool(max_engines=1, on_change=changes.append, times=replace(_TIMES, turn_s=0.01))
    await pool.start()
    engine = await pool.session_engine("a", _deadline())
    engine.add_kept(engine.generation, 1)
    assert not pool.is_ready
    engine.add_kept(engine.generation, -1)
    await pool.provide("b", _deadline())
    assert changes == [True, False, True]
    await pool.stop()


async def test_all_calls_of_more_tenants_than_engines_are_answered(starter: Starter) -> None:
    pool = _pool(max_engines=2, times=replace(_TIMES, turn_s=0.02))
    await pool.start()
    answered: Counter[str] = Counter()

    async def work_without_a_break(owner: str) -> None:
        while min(answered[owner] for owner in "abcde") < 20:
            await pool.provide(owner, _deadline())
            engine = pool.engines_for(owner)[0]
            with engine.held():
                work = engine.submit(Kind.RUN, b"work")
                await asyncio.sleep(0.002)
                assert not _process(starter, engine).is_killed
                _answer(starter, engine, work)
            answered[owner] += 1

    async with asyncio.timeout(30):
        # Each tenant has several calls at a time, so that no engine is ever idle by itself.
        await asyncio.gather(*(work_without_a_break(owner) for owner in "abcde" for _ in range(3)))
    # Turns are long: few calls cost a change of engines.
    assert len(starter.started) < answered.total() / 2
    await pool.stop()


async def test_engines_of_tenants_that_are_gone_end(starter: Starter) -> None:
    pool = _pool(times=replace(_TIMES, idle_s=0.05, idle_period_s=0.02))
    await pool.start()
    await pool.provide("ada")
    await pool.session_engine("ada")
    kept = await pool.session_engine("grace")
    kept.add_kept(kept.generation, 1)
    await pool.provide("grace")
    await _until(lambda: len(pool.engines) == 2)
    # The one that was used last stays that is warm, and what holds a session.
    assert kept in pool.engines
    assert [engine.use for engine in pool.engines if engine is not kept] == [Use.PROGRAMS]
    await pool.stop()


async def test_a_tenant_may_have_one_engine_more_than_usual(starter: Starter) -> None:
    pool = _pool()
    assert pool.claim_another("ada", surplus=1) is None
    await pool.start()
    await _until(lambda: pool.spares_ready)
    await pool.provide("ada")
    assert pool.claim_another("ada") is None
    extra = pool.claim_another("ada", surplus=1)
    assert extra is not None
    assert (extra.index, extra.pid) == (1, starter.started[1].pid)
    assert pool.engines_for("ada") == pool.engines == [pool.engines[0], extra]
    await _until(lambda: pool.spares_ready)
    assert pool.claim_another("ada", surplus=1) is None
    await pool.stop()


async def test_an_engine_more_than_usual_needs_a_place_and_ends_once_no_program_is_compiled(starter: Starter) -> None:
    pool = _pool(max_engines=2)
    await pool.start()
    await _until(lambda: pool.spares_ready)
    await pool.provide("ada")
    (first,) = pool.engines
    first.programs = 1
    slow = first.submit(Kind.COMPILE, b"slow")
    extra = pool.claim_another("ada", surplus=1)
    assert extra is not None
    assert pool.claim_another("grace", surplus=1) is None
    _answer(starter, extra, extra.submit(Kind.RUN, b"work"))
    assert extra in pool.engines
    _answer(starter, first, slow)
    assert pool.engines == [first]
    await pool.stop()


async def test_a_stop_leaves_no_process_that_is_starting(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = _pool(spares=0)
    await pool.start()

    async def never(process: FakeProcess) -> link_pb2.Greeting:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(FakeProcess, "greet", never)
    starter.started[0].die(CRASH)
    await _until(lambda: len(starter.started) == 2)
    await pool.stop()
    assert starter.started[1].is_killed


async def test_a_stop_ends_all_though_the_watch_had_died(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(_: object) -> None:
        raise RuntimeError("no /proc")

    monkeypatch.setattr(EngineMonitor, "run", fails)
    pool = _pool(engines=2)
    await pool.start()
    await _until(lambda: pool.spares_ready)
    await pool.stop()
    assert all(process.is_killed for process in starter.started)


_SHARED = 200
"""Bytes that the processes of these tests share with the fork server."""


def _take_memory(starter: Starter, engine: Engine, own: int) -> None:
    process = _process(starter, engine)
    process.own_bytes, process.resident_bytes = own, own + _SHARED


async def _pool_with_memory(starter: Starter, share: int, **taken: int) -> EnginePool:
    """Returns a pool in which each tenant has an engine that takes so many bytes; all were used just now."""
    pool = _pool(memory_share=share, spares=0, times=replace(_TIMES, memory_period_s=3600, turn_s=0.05))
    await pool.start()
    for owner, own in taken.items():
        await pool.provide(owner, _deadline())
        _take_memory(starter, pool.engines_for(owner)[0], own)
    return pool


def _owners(pool: EnginePool) -> list[str | None]:
    return [engine.owner for engine in pool.engines]


async def test_engines_are_added_while_memory_is_left_for_one_like_the_others(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=200, b=200, c=200)
    assert pool.used_bytes == 800
    await pool.provide("d", _deadline())
    assert len(pool.engines) == 4
    assert not pool.evictions
    _take_memory(starter, pool.engines_for("d")[0], 1)
    # There are 199 bytes left.
    pool.engines_for("a")[0].used_at -= 1
    await pool.provide("e", _deadline())
    assert _owners(pool) == ["b", "c", "d", "e"]
    assert pool.evictions == {"turn": 1}
    assert (pool.last_eviction_s or 0) > 0
    await pool.stop()


async def test_a_tenant_without_room_in_memory_is_told_so(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=800)
    (engine,) = pool.engines
    work = engine.submit(Kind.RUN, b"work")
    with pytest.raises(GradruleError, match=r"all 1 engines \(no memory is left for more\) are in use"):
        await pool.provide("b", _deadline(0.05))
    _answer(starter, engine, work)
    await pool.provide("b", _deadline())
    assert _owners(pool) == ["b"]
    await pool.stop()


async def test_sessions_that_take_all_memory_leave_an_engine_for_calls(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=100)
    sessions = await pool.session_engine("a", _deadline())
    sessions.add_kept(sessions.generation, 1)
    _take_memory(starter, sessions, 800)
    pool._remove(pool.engines_for("a")[0])
    await pool.provide("b", _deadline())
    assert _owners(pool) == ["a", "b"]
    (engine,) = pool.engines_for("b")
    work = engine.submit(Kind.RUN, b"work")
    with pytest.raises(GradruleError, match="no memory is left"):
        await pool.session_engine("b", _deadline(0.05))
    _answer(starter, engine, work)
    await pool.stop()


async def test_the_server_stays_ready_when_sessions_get_the_place_of_the_last_other_engine(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=800)
    pool.engines[0].used_at -= 1
    sessions = await pool.session_engine("b", _deadline())
    sessions.add_kept(sessions.generation, 1)
    await _until(lambda: pool.is_ready)
    assert _owners(pool) == ["b", None]
    # The same if an engine ends because sessions have grown.
    await pool.provide("a", _deadline())
    (idle,) = pool.engines_for("a")
    idle.used_at -= 100
    _take_memory(starter, idle, 100)
    _take_memory(starter, sessions, 900)
    pool._check_memory()
    assert pool.evictions == {"turn": 1, "memory": 1}
    await _until(lambda: pool.is_ready)
    assert _owners(pool) == ["b", None]
    await pool.stop()


async def test_the_largest_tenant_loses_its_engine_when_memory_is_short_even_if_it_is_in_use(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=100, b=100, c=100)
    (large,) = pool.engines_for("b")
    work = large.submit(Kind.RUN, b"work")
    process = _process(starter, large)
    _take_memory(starter, large, 700)
    pool._check_memory()
    assert _owners(pool) == ["a", "c"]
    assert process.ended_with is not None
    assert process.ended_with.reason is EndReason.EVICTED
    assert isinstance(work.answer.exception(), ConnectionLost)
    assert pool.evictions == {"memory": 1}
    pool._check_memory()
    assert _owners(pool) == ["a", "c"]
    await pool.stop()


async def test_engines_that_were_idle_for_long_end_first_when_memory_is_short(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=100, b=100, c=100, d=100)
    _take_memory(starter, pool.engines_for("c")[0], 600)
    for owner, idle_s in (("a", 200), ("b", 300)):
        pool.engines_for(owner)[0].used_at -= idle_s
    pool._check_memory()
    assert _owners(pool) == ["a", "c", "d"]
    await pool.stop()


async def test_idle_compile_workers_end_before_engines_when_memory_is_short(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=100, b=600)
    async with pool.workers.hold("a") as busy:
        _take_memory(starter, busy, 100)
        async with pool.workers.hold("b") as idle:
            _take_memory(starter, idle, 100)
        pool._check_memory()
        assert pool.workers.workers == [busy]
    assert _owners(pool) == ["a", "b"]
    assert not pool.evictions
    await pool.stop()


async def test_a_session_is_spared_when_memory_is_short_unless_its_tenant_takes_half(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=100, b=100)
    sessions = await pool.session_engine("c", _deadline())
    sessions.add_kept(sessions.generation, 1)
    _take_memory(starter, sessions, 450)
    _take_memory(starter, pool.engines_for("a")[0], 280)
    pool._check_memory()
    assert _owners(pool) == ["b", "c"]
    _take_memory(starter, sessions, 780)
    pool._check_memory()
    assert _owners(pool) == ["b"]
    await pool.stop()


async def test_a_trial_ends_too_when_its_tenant_takes_the_most_memory(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=100)
    async with pool.alone("b") as trial:
        _take_memory(starter, trial, 900)
        work = trial.submit(Kind.RUN, b"work")
        pool._check_memory()
        assert isinstance(work.answer.exception(), ConnectionLost)
    assert _owners(pool) == ["a"]
    await pool.stop()


async def test_a_tenant_alone_may_use_all_memory_that_its_limits_allow(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=100)
    (engine,) = pool.engines
    work = engine.submit(Kind.RUN, b"work")
    _take_memory(starter, engine, 2000)
    pool._check_memory()
    assert pool.engines == [engine]
    _answer(starter, engine, work)
    await pool.stop()


async def test_memory_is_not_limited_without_a_share(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 0, a=1 << 40, b=1 << 40)
    pool._check_memory()
    assert _owners(pool) == ["a", "b"]
    await pool.stop()


async def test_a_tenant_that_needs_less_than_its_fair_share_does_not_wait_for_one_that_takes_more(
    starter: Starter,
) -> None:
    pool = await _pool_with_memory(starter, 1000, a=50, b=50, c=50)
    (large,) = pool.engines_for("c")
    work = large.submit(Kind.RUN, b"work")
    _take_memory(starter, large, 690)
    await pool.provide("d", _deadline())
    assert _owners(pool) == ["a", "b", "c", "d"]
    _take_memory(starter, pool.engines_for("d")[0], 50)
    pool._check_memory()
    assert _owners(pool) == ["a", "b", "d"]
    assert isinstance(work.answer.exception(), ConnectionLost)
    await pool.stop()


async def test_a_tenant_whose_engine_was_ended_for_its_size_waits_for_as_much_room(starter: Starter) -> None:
    """It takes no engine of a tenant that uses less, nor makes others wait."""
    pool = await _pool_with_memory(starter, 1000, a=50, c=50, b=50)
    (large,) = pool.engines_for("b")
    work = large.submit(Kind.RUN, b"work")
    _take_memory(starter, large, 800)
    pool._check_memory()
    assert isinstance(work.answer.exception(), ConnectionLost)
    small, other = pool.engines
    _take_memory(starter, small, 240)
    _take_memory(starter, other, 120)
    waits = asyncio.create_task(pool.provide("b", _deadline()))
    await asyncio.sleep(0.1)
    assert pool.engines == [small, other]
    with pytest.raises(GradruleError, match="no memory is left for another one of 0 MiB, as this tenant's last one"):
        await pool.session_engine("b", _deadline(0.05))
    await pool.provide("d", _deadline())
    assert _owners(pool) == ["a", "c", "d"]
    _take_memory(starter, pool.engines_for("d")[0], 20)
    assert not waits.done()
    # Half of the share is free again.
    _take_memory(starter, small, 100)
    pool._check_memory()
    await waits
    assert _owners(pool) == ["a", "c", "d", "b"]
    assert pool.evictions == {"memory": 1}
    await pool.stop()


async def test_large_tenants_take_turns(starter: Starter) -> None:
    pool = await _pool_with_memory(starter, 1000, a=50, b=50)
    first, second = pool.engines_for("a")[0], pool.engines_for("b")[0]
    works = [engine.submit(Kind.RUN, b"work") for engine in (first, second)]
    _take_memory(starter, first, 420)
    _take_memory(starter, second, 450)
    pool._check_memory()
    assert isinstance(works[1].answer.exception(), ConnectionLost)
    waits = asyncio.create_task(pool.provide("b", _deadline()))
    await asyncio.sleep(0.1)
    assert pool.engines == [first]
    _answer(starter, first, works[0])
    # Its turn is over.
    await waits
    assert _owners(pool) == ["b"]
    assert pool.evictions == {"memory": 1, "turn": 1}
    await pool.stop()


async def test_the_fair_share_of_a_tenant_leaves_room_for_what_no_tenant_has(starter: Starter) -> None:
    """Each takes less than a third of the share, and the largest more than a third of what is left for tenants."""
    pool = await _pool_with_memory(starter, 1000, a=50, b=50, c=50)
    for owner, own in (("a", 270), ("b", 290), ("c", 260)):
        _take_memory(starter, pool.engines_for(owner)[0], own)
    pool._check_memory()
    assert _owners(pool) == ["a", "c"]
    await pool.stop()
