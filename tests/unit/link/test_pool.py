"""Engines and spares, with processes that are not there."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.link import process as process_module
from gradrule_server.link.engine import Use
from gradrule_server.link.framing import Kind, pack_header
from gradrule_server.link.monitor import EngineMonitor
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import EngineRefused, EngineTimes, ProcessOptions
from gradrule_server.link.v1 import link_pb2
from tests.unit.link.fake_engine import CRASH, FakeProcess, Starter

_TIMES = EngineTimes(retry_delay_s=0.01, provide_s=0.1)


@pytest.fixture
def starter(monkeypatch: pytest.MonkeyPatch) -> Starter:
    given = Starter()
    monkeypatch.setattr(process_module, "start_process", given)
    return given


def _pool(engines: int = 1, spares: int = 1, times: EngineTimes = _TIMES, **words: Any) -> EnginePool:
    return EnginePool(ProcessOptions("cpu", 4), engines=engines, spares=spares, heartbeat_s=0, times=times, **words)


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_all_places_are_filled_and_then_the_reserve(starter: Starter) -> None:
    pool = _pool(engines=2, spares=2)
    await pool.start()
    await _until(lambda: pool.spares_ready == 2)
    assert [engine.is_ready for engine in pool.engines] == [True, True]
    assert len(starter.started) == 4
    assert [status.device for status in pool.status()] == ["CPU:0"] * 2
    await pool.stop()
    assert all(process.is_killed for process in starter.started)


async def test_a_spare_takes_the_place_at_once_and_another_is_started(starter: Starter) -> None:
    changes: list[bool] = []
    pool = _pool(on_change=changes.append)
    await pool.start()
    await _until(lambda: pool.spares_ready)
    (engine,) = pool.engines
    filled: list[int] = []
    pool.on_filled.append(lambda place: filled.append(place.index))
    generation = engine.generation
    first, spare = starter.started
    first.die(CRASH)
    # Not a single turn of the loop has passed.
    assert engine.is_ready
    assert engine.pid == spare.pid
    assert engine.generation == generation + 1
    assert filled == [0]
    assert changes == [True]
    await _until(lambda: pool.spares_ready and pool.status()[0].ended == {"crash": 1})
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
    assert [status.holds_sessions for status in pool.status()] == [False, False, True, True]
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


async def test_a_spare_can_serve_as_one_engine_more(starter: Starter) -> None:
    pool = _pool()
    assert pool.borrow("ada") is None
    await pool.start()
    await _until(lambda: pool.spares_ready)
    await pool.provide("ada")
    extra = pool.borrow("ada")
    assert extra is not None
    assert (extra.index, extra.pid, extra.is_extra) == (1, starter.started[1].pid, True)
    assert pool.engines_for("ada") == pool.engines == [pool.engines[0], extra]
    pool.release(extra)
    await _until(lambda: starter.started[1].is_killed and pool.spares_ready == 1)
    assert len(pool.engines) == 1
    await pool.stop()


async def test_there_is_one_extra_engine_for_a_tenant(starter: Starter) -> None:
    pool = _pool(spares=3, max_engines=3)
    await pool.start()
    await _until(lambda: pool.spares_ready == 3)
    first = pool.borrow("a")
    assert first is not None
    assert pool.borrow("a") is None
    assert pool.borrow("b") is not None
    assert pool.borrow("c") is None
    pool.release(first)
    assert pool.borrow("c") is not None
    await pool.stop()


async def test_an_extra_engine_that_dies_is_not_replaced(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    await _until(lambda: pool.spares_ready)
    extra = pool.borrow("ada")
    assert extra is not None
    starter.started[1].die(CRASH)
    await _until(lambda: len(starter.started) == 3 and pool.spares_ready)
    assert not extra.is_ready
    assert pool.is_ready
    pool.release(extra)
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


async def test_what_xla_compiled_when_an_engine_ended_is_not_compiled_again(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    await _until(lambda: pool.spares_ready)
    first = starter.started[0]

    def told(key: str, outcome: link_pb2.JitNotice.Outcome.ValueType) -> None:
        payload = link_pb2.JitNotice(key=key, outcome=outcome).SerializeToString()
        first.connection.data_received(pack_header(Kind.JIT_NOTICE, 0, len(payload)) + payload)

    told("good/1", link_pb2.JitNotice.OUTCOME_COMPILING)
    told("good/1", link_pb2.JitNotice.OUTCOME_COMPILED)
    told("good/1", link_pb2.JitNotice.OUTCOME_CHOSEN)
    told("bad/2", link_pb2.JitNotice.OUTCOME_COMPILING)
    assert pool.status()[0].jit_programs == 1
    first.die(CRASH)
    notices = [payload for kind, _, payload in starter.transports[1].sent if kind is Kind.JIT_NOTICE]
    assert [link_pb2.JitNotice.FromString(payload).key for payload in notices] == ["bad"]
    assert pool.status()[0].jit_programs == 0
    await pool.stop()
