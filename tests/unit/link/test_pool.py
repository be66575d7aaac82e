"""Engines and spares, with processes that are not there."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.link import pool as pool_module
from gradrule_server.link import spares as spares_module
from gradrule_server.link.engine import Engine, EngineRefused
from gradrule_server.link.framing import Kind
from gradrule_server.link.owner import OWNER
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import ProcessOptions
from gradrule_server.link.v1 import link_pb2
from gradrule_server.link.watch import Watch
from tests.battery.processes import engines
from tests.unit.link.fake_engine import CRASH, FakeProcess, Starter

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares_module, "_RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(pool_module, "_PATIENCE_S", 0.1)


@pytest.fixture
def starter(monkeypatch: pytest.MonkeyPatch) -> Starter:
    given = Starter()
    monkeypatch.setattr(spares_module, "start_process", given)
    return given


def _pool(engines: int = 1, spares: int = 1, **words: Any) -> EnginePool:
    return EnginePool(ProcessOptions("cpu", 4), engines=engines, spares=spares, heartbeat_s=0, **words)


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


async def test_without_a_spare_it_is_told_until_another_is_there(starter: Starter) -> None:
    changes: list[bool] = []
    pool = _pool(spares=0, on_change=changes.append)
    await pool.start()
    starter.errors = [OSError("no memory")] * 30
    starter.started[0].die(CRASH)
    assert not pool.is_ready
    with pytest.raises(GradruleError) as refusal:
        await pool.wait_ready()
    assert refusal.value.reason == errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE
    starter.errors = []
    await _until(lambda: pool.is_ready)
    await pool.wait_ready()
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
    assert (await pool.least_kept()) is pool.engines[1]
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
    await asyncio.sleep(0.01)
    assert len(pool._spares.processes) == 2
    gc.collect()
    assert sum(process() is not None for process in gone) == 2
    await pool.stop()


@pytest.mark.parametrize("error", [EngineRefused("no such device"), OSError("no memory")])
async def test_what_never_ran_refuses_the_start(starter: Starter, error: Exception) -> None:
    starter.errors = [error]
    pool = _pool()
    with pytest.raises(type(error), match=str(error)):
        await pool.start()
    await pool.stop()


async def test_alone_takes_a_process_and_gives_it_back(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    await _until(lambda: pool.spares_ready)
    async with pool.alone() as engine:
        assert engine.pid == starter.started[1].pid
        assert engine not in pool.engines
        generation = engine.generation
    assert engine.generation > generation
    await _until(lambda: pool.spares_ready == 1)
    await pool.stop()


async def test_alone_leaves_no_process_that_still_works(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    async with pool.alone() as engine:
        process = starter.started[1]
        engine.submit(Kind.RUN, b"endless")
    assert process.is_killed
    await pool.stop()


async def test_alone_with_no_reserve_starts_one_and_keeps_none(starter: Starter) -> None:
    pool = _pool(spares=0)
    await pool.start()
    async with pool.alone() as engine:
        assert engine.is_ready
    assert [transport.is_closed for transport in starter.transports] == [False, True]
    assert pool.spares_ready == 0
    await pool.stop()


async def test_new_state_goes_where_least_is_kept(starter: Starter) -> None:
    pool = _pool(engines=2, spares=0)
    await pool.start()
    await _until(lambda: all(engine.is_ready for engine in pool.engines))
    first, second = pool.engines
    first.keeps(first.generation, 1)
    assert (await pool.least_kept()) is second
    # What was kept by a process that is gone does not count.
    first.keeps(first.generation - 1, -1)
    assert first.kept == 1
    starter.started[0].die(CRASH)
    await _until(lambda: first.is_ready)
    assert first.kept == 0
    await pool.stop()


async def test_a_spare_can_serve_as_one_engine_more(starter: Starter) -> None:
    pool = _pool()
    assert pool.borrow() is None
    await pool.start()
    await _until(lambda: pool.spares_ready)
    extra = pool.borrow()
    assert extra is not None
    assert (extra.index, extra.pid, extra.is_extra) == (1, starter.started[1].pid, True)
    assert pool.engines == [pool.engines[0], extra]
    # It is not to stay: what is kept is kept elsewhere.
    pool.engines[0].keeps(pool.engines[0].generation, 5)
    assert (await pool.least_kept()) is pool.engines[0]
    pool.give_back(extra)
    await _until(lambda: pool.spares_ready == 1)
    assert len(pool.engines) == 1
    await pool.stop()


async def test_there_are_as_many_extra_engines_as_places_and_one_for_an_owner(starter: Starter) -> None:
    pool = _pool(engines=2, spares=3)
    await pool.start()
    await _until(lambda: pool.spares_ready == 3)
    first = _borrow_for(pool, "a")
    assert first is not None
    assert _borrow_for(pool, "a") is None
    assert _borrow_for(pool, "b") is not None
    assert _borrow_for(pool, "c") is None
    pool.give_back(first)
    assert _borrow_for(pool, "c") is not None
    await pool.stop()


def _borrow_for(pool: EnginePool, owner: str) -> Engine | None:
    token = OWNER.set(owner)
    try:
        return pool.borrow()
    finally:
        OWNER.reset(token)


async def test_an_extra_engine_that_dies_is_not_replaced(starter: Starter) -> None:
    pool = _pool()
    await pool.start()
    await _until(lambda: pool.spares_ready)
    extra = pool.borrow()
    assert extra is not None
    starter.started[1].die(CRASH)
    await _until(lambda: len(starter.started) == 3 and pool.spares_ready)
    assert not extra.is_ready
    assert pool.is_ready
    pool.give_back(extra)
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

    monkeypatch.setattr(Watch, "run", fails)
    pool = _pool(engines=2)
    await pool.start()
    await _until(lambda: pool.spares_ready)
    await pool.stop()
    assert all(process.is_killed for process in starter.started)


async def test_a_stop_waits_for_the_ends_of_processes() -> None:
    """Real ones: one serves, its spare is being started."""
    pool = _pool()
    await pool.start()
    await pool.stop()
    assert not engines(os.getpid())
