"""Loading of programs into engines, with fake engines whose answers the tests send."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Awaitable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError, NoMemoryLeft, error
from gradrule_server.link.framing import Kind, pack_header
from gradrule_server.link.messages import compile_payload, fault_message
from gradrule_server.link.process import EngineTimes
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs import loaded as loaded_module
from gradrule_server.programs.loaded import Load, Loadable, LoadedPrograms
from gradrule_server.recovery.endings import EndReason, EngineLost
from gradrule_server.registry.blobs import BlobStore
from tests.unit.link.fake_engine import CRASH, FakeEngine, FakePool, FakeRecorder
from tests.waiting import wait_for_condition

_NO_MEMORY = link_pb2.Fault(reason=errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, message="no memory is left", no_memory=True)
_QUICK = EngineTimes(overrun_grace_s=0.05)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, 0)


def program(name: str, size: int = 10) -> Loadable:
    return Loadable(name, link_pb2.CompileRequest(key=name, graph=b"g" * size).SerializeToString())


def keys(engine: FakeEngine) -> list[str]:
    """Returns the keys of the programs that the engine received."""
    return [link_pb2.CompileRequest.FromString(sent).key for sent in engine.sent(Kind.COMPILE)]


def unloaded(engine: FakeEngine) -> list[str]:
    return [link_pb2.UnloadRequest.FromString(sent).key for sent in engine.sent(Kind.UNLOAD)]


async def use(loaded: LoadedPrograms, item: Loadable, until: Awaitable[Any] | None = None) -> str:
    """Holds a program until it is loaded, and then until `until` is done."""
    with loaded.hold(item) as load:
        await loaded.wait(load)
        if until is not None:
            await until
        return load.engine_key


async def test_concurrent_calls_share_one_load(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    users = [asyncio.create_task(use(loaded, program("a"))) for _ in range(3)]
    engine.answer(await engine.next(Kind.COMPILE), Kind.COMPILED)
    assert len(set(await asyncio.gather(*users))) == 1
    assert await use(loaded, program("a")) == keys(engine)[0]
    assert len(keys(engine)) == 1


async def test_a_program_is_not_dropped_between_its_load_and_its_use(blobs: BlobStore) -> None:
    """Another program is loaded meanwhile, which is one too many."""
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 1, 10**6)
    first = asyncio.create_task(use(loaded, program("a"), asyncio.sleep(0.05)))
    compile_a = await engine.next(Kind.COMPILE)
    second = asyncio.create_task(use(loaded, program("b")))
    await asyncio.sleep(0)
    # Nobody has run since the answer arrived when the other program is asked for.
    engine.answer(compile_a, Kind.COMPILED)
    with loaded.hold(program("c")):
        assert unloaded(engine) == []
    key = await first
    assert unloaded(engine) == []
    second.cancel()
    await asyncio.wait([second])
    with loaded.hold(program("d")):
        assert unloaded(engine) == [key]


async def load_measured(loaded: LoadedPrograms, engine: FakeEngine, item: Loadable, count: int, size: int) -> str:
    """Loads a program of which the engine reports the size; `count` as for `load`."""
    user = asyncio.create_task(use(loaded, item))
    sent = await engine.next(Kind.COMPILE, count)
    key = link_pb2.CompileRequest.FromString(sent).key
    report(engine, key, size, engine.memory.used + size)
    engine.answer(sent, Kind.COMPILED)
    return await user


def report(engine: FakeEngine, key: str, size: int, used: int) -> None:
    """Sends a notice of the engine's memory."""
    notice = link_pb2.MemoryNotice(key=key, program_bytes=size, used_bytes=used).SerializeToString()
    engine.fake.connection.data_received(pack_header(Kind.MEMORY_NOTICE, 0, len(notice)) + notice)


async def test_bytes_are_limited_and_the_last_used_program_stays(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 250)
    first = await load_measured(loaded, engine, program("a"), 1, 100)
    second = await load_measured(loaded, engine, program("b"), 2, 100)
    await use(loaded, program("a"))
    await load_measured(loaded, engine, program("c"), 3, 100)
    assert unloaded(engine) == [second]
    assert await use(loaded, program("a")) == first
    assert loaded.held_bytes == 200
    assert loaded.unloads == {"bytes": 1, "count": 0, "memory": 0}


async def test_first_run_counts_with_what_it_adds(blobs: BlobStore) -> None:
    """TensorFlow makes optimized copies in the first run."""
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 250)
    first = await load_measured(loaded, engine, program("a"), 1, 100)
    second = await load_measured(loaded, engine, program("b"), 2, 100)
    report(engine, second, 160, 260)
    await use(loaded, program("b"))
    assert unloaded(engine) == [first]


async def test_a_size_that_is_reported_after_its_program_was_unloaded_does_not_count(blobs: BlobStore) -> None:
    """An engine answers a first run before it measures it."""
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 1, 10**6)
    first = await load_measured(loaded, engine, program("a"), 1, 100)
    await load_measured(loaded, engine, program("b"), 2, 100)
    assert unloaded(engine) == [first]
    report(engine, first, 160, 260)
    assert loaded.held_bytes == 100
    assert engine.memory.used == 260


async def test_memory_in_use_unloads_programs_that_were_not_used_lately(blobs: BlobStore) -> None:
    engine, pool = FakeEngine(), FakePool()
    pool.engines, pool.memory_limit = [engine], 1000
    loaded = LoadedPrograms(pool, blobs, 10, 10**6)
    first = await load_measured(loaded, engine, program("a"), 1, 300)
    second = await load_measured(loaded, engine, program("b"), 2, 300)
    await use(loaded, program("a"))
    assert unloaded(engine) == []
    await load_measured(loaded, engine, program("c"), 3, 300)
    assert unloaded(engine) == [second]
    # What the engine has freed is known once it reports it: another notice without a program.
    report(engine, "", 0, 900)
    await use(loaded, program("c"))
    assert unloaded(engine) == [second, first]
    assert loaded.unloads == {"bytes": 0, "count": 0, "memory": 2}
    assert engine.is_ready


async def test_small_programs_stay_in_an_engine_that_is_full_of_other_things(blobs: BlobStore) -> None:
    """Forward handles take most of its memory. Unloading small programs would only cost their compilation."""
    engine, pool = FakeEngine(), FakePool()
    pool.engines, pool.memory_limit = [engine], 1000
    loaded = LoadedPrograms(pool, blobs, 10, 10**6)
    report(engine, "", 0, 950)
    for count, name in enumerate("ab", 1):
        await load_measured(loaded, engine, program(name), count, 5)
    await use(loaded, program("a"))
    assert unloaded(engine) == []


async def test_idle_programs_are_unloaded_before_an_engine_without_memory_is_replaced(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    idle = [await load(loaded, engine, program(name), count) for count, name in enumerate("ab", 1)]
    process = engine.fake

    async def fail() -> None:
        user = asyncio.create_task(use(loaded, program("c")))
        count = len(keys(engine)) + 1
        engine.answer(await engine.next(Kind.COMPILE, count), Kind.FAULT, _NO_MEMORY.SerializeToString())
        with pytest.raises(NoMemoryLeft):
            await user

    await fail()
    assert unloaded(engine) == idle
    assert not process.is_killed
    await fail()
    assert process.is_killed
    assert process.ended_with is not None
    assert process.ended_with.reason is EndReason.FULL


async def test_calls_without_memory_at_the_same_time_unload_idle_programs_once(blobs: BlobStore) -> None:
    """The first of them makes room, so the engine is not replaced for the others."""
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    idle = await load(loaded, engine, program("a"), 1)
    process = engine.fake
    users = [asyncio.create_task(use(loaded, program("b"))) for _ in range(3)]
    engine.answer(await engine.next(Kind.COMPILE, 2), Kind.FAULT, _NO_MEMORY.SerializeToString())
    for user in users:
        with pytest.raises(NoMemoryLeft):
            await user
    assert unloaded(engine) == [idle]
    assert not process.is_killed


async def test_cancelled_caller_does_not_cancel_the_load_of_others(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    hurried = asyncio.create_task(use(loaded, program("a")))
    patient = asyncio.create_task(use(loaded, program("a")))
    await engine.next(Kind.COMPILE)
    hurried.cancel()
    await asyncio.wait([hurried])
    engine.answer(await engine.next(Kind.COMPILE), Kind.COMPILED)
    assert await patient == keys(engine)[0]


async def test_abandoned_load_continues_and_serves_the_next_call(blobs: BlobStore) -> None:
    engine = FakeEngine(times=_QUICK)
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    hurried = asyncio.create_task(use(loaded, program("a")))
    await engine.next(Kind.COMPILE)
    hurried.cancel()
    await asyncio.wait([hurried])
    assert engine.fake.connection._running[1].is_given_up
    late = asyncio.create_task(use(loaded, program("a")))
    await asyncio.sleep(0)
    assert not engine.fake.connection._running[1].is_given_up
    # Longer than an engine is given whose load nobody waits for.
    await asyncio.sleep(0.1)
    assert not engine.fake.is_killed
    engine.answer(await engine.next(Kind.COMPILE), Kind.COMPILED)
    assert await late == keys(engine)[0]
    assert len(keys(engine)) == 1


async def test_abandoned_load_that_does_not_end_ends_the_engine(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_module, "LONGEST_LOAD_S", 0.1)
    engine = FakeEngine(times=_QUICK)
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    overruns = FakeRecorder()

    async def hurried() -> None:
        with loaded.hold(program("a"), recorder=overruns) as load:
            await loaded.wait(load)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await hurried()
    process = engine.fake
    assert not engine.is_doomed
    await wait_for_condition(lambda: process.is_killed)
    # A slow build says nothing about the program: the caller's deadline was short.
    assert overruns.seconds == []


async def test_abandoned_load_that_never_started_is_dropped(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    first = asyncio.create_task(use(loaded, program("a")))
    compile_a = await engine.next(Kind.COMPILE)
    # One compilation at a time: this one waits.
    second = asyncio.create_task(use(loaded, program("b")))
    await asyncio.sleep(0)
    second.cancel()
    # The very same moment: no callback has run in between.
    third = asyncio.create_task(use(loaded, program("b")))
    engine.answer(compile_a, Kind.COMPILED)
    await first
    engine.answer(await engine.next(Kind.COMPILE, 2), Kind.COMPILED)
    assert (await third).startswith("b/")
    assert len(keys(engine)) == 2


async def test_failed_load_is_tried_again_by_the_next_call(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    fault = fault_message(error(errors_pb2.ERROR_REASON_INVALID_GRAPH, "no")).SerializeToString()
    for count in (1, 2):
        user = asyncio.create_task(use(loaded, program("a")))
        engine.answer(await engine.next(Kind.COMPILE, count), Kind.FAULT, fault)
        with pytest.raises(GradruleError, match="INVALID_GRAPH"):
            await user


async def test_program_is_loaded_again_into_a_new_process(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    user = asyncio.create_task(use(loaded, program("a")))
    await engine.next(Kind.COMPILE)
    engine.fake.die(CRASH)
    with pytest.raises(EngineLost) as lost:
        await user
    assert lost.value.is_blamable
    assert lost.value.ran_alone
    engine.start_another()
    again = asyncio.create_task(use(loaded, program("a")))
    engine.answer(await engine.next(Kind.COMPILE), Kind.COMPILED)
    assert (await again).startswith("a/")


@pytest.mark.parametrize("engines", [1, 2])
async def test_a_call_whose_tenant_has_lost_its_engine_runs_again(blobs: BlobStore, engines: int) -> None:
    """Another tenant may have got the engine while the call waited for its blobs."""
    pool = FakePool(*(FakeEngine(index=index) for index in range(engines)))
    loaded = LoadedPrograms(pool, blobs, 10, 10**6)
    for engine in pool.engines:
        cast(FakeEngine, engine).fake.die(CRASH)
    with pytest.raises(EngineLost) as lost, loaded.hold(program("a")):
        pass
    assert not lost.value.is_blamable


async def test_a_program_beside_forward_handles_is_not_alone(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    await load(loaded, engine, program("a"), 1)
    for kept in (0, 1):
        engine.add_kept(engine.generation, kept)
        full = NoMemoryLeft([Finding(errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, "no memory is left")], holds_nothing=True)
        with pytest.raises(NoMemoryLeft), loaded.hold(program("a")):
            raise full
        assert full.is_alone is not bool(kept)


async def test_program_that_the_engine_lacks_is_loaded_again(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    found: list[Load] = []

    async def user() -> None:
        with loaded.hold(program("a")) as load:
            await loaded.wait(load)
            found.append(load)

    for count in (1, 2):
        task = asyncio.create_task(user())
        engine.answer(await engine.next(Kind.COMPILE, count), Kind.COMPILED)
        await task
        loaded.forget(found[-1])
    assert found[0].engine_key != found[1].engine_key


async def load(loaded: LoadedPrograms, engine: FakeEngine, item: Loadable, count: int) -> str:
    """Loads a program that the engine is the `count`-th time asked to compile."""
    user = asyncio.create_task(use(loaded, item))
    engine.answer(await engine.next(Kind.COMPILE, count), Kind.COMPILED)
    return await user


async def test_call_goes_to_an_engine_with_the_program_unless_it_is_busy(blobs: BlobStore) -> None:
    here, there = FakeEngine(threads=1), FakeEngine(threads=1, index=1)
    loaded = LoadedPrograms(FakePool(here, there), blobs, 10, 10**6)
    await load(loaded, here, program("a"), 1)
    for _ in range(3):
        with loaded.hold(program("a")) as found:
            assert found.engine is here
    here.submit(Kind.RUN, b"long")
    with loaded.hold(program("a")) as found:
        assert found.engine is there
    there.answer(await there.next(Kind.COMPILE), Kind.COMPILED)
    await asyncio.sleep(0)
    there.submit(Kind.RUN, b"long")
    there.submit(Kind.RUN, b"and longer")
    # Both are busy, and this one less.
    with loaded.hold(program("a")) as found:
        assert found.engine is here


async def test_new_program_goes_to_an_engine_without_handles(blobs: BlobStore) -> None:
    here, there = FakeEngine(), FakeEngine(index=1)
    loaded = LoadedPrograms(FakePool(here, there), blobs, 10, 10**6)
    here.add_kept(here.generation, 1)
    with loaded.hold(program("a")) as found:
        assert found.engine is there


async def _compile(loaded: LoadedPrograms, name: str) -> int:
    """Which engine has the program in the end; as a call does, which is run again where its engine is lost."""
    while True:
        try:
            with loaded.hold(program(name)) as load:
                await loaded.wait(load, may_move=True)
                return load.engine.index
        except EngineLost as lost:
            assert not lost.is_blamable


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second is long for a program to compile."""
    monkeypatch.setattr(loaded_module, "_SLOW_COMPILE_S", 0.1)


@pytest.mark.usefixtures("short")
async def test_calls_do_not_wait_for_a_slow_program(blobs: BlobStore) -> None:
    engine, extra = FakeEngine(), FakeEngine(index=1)
    pool = FakePool(engine)
    pool.extras = [extra]
    loaded = LoadedPrograms(pool, blobs, 10, 10**6)
    slow = asyncio.create_task(_compile(loaded, "slow"))
    sent = await engine.next(Kind.COMPILE)
    others = [asyncio.create_task(_compile(loaded, name)) for name in "ab"]
    for count in (1, 2):
        extra.answer(await extra.next(Kind.COMPILE, count), Kind.COMPILED)
    assert await asyncio.gather(*others) == [1, 1]
    # Only what was new waited, and only there: the one that takes long goes on where it is.
    assert len(keys(engine)) == 1
    engine.answer(sent, Kind.COMPILED)
    assert await slow == 0


@pytest.mark.usefixtures("short")
async def test_two_waiting_calls_both_avoid_a_slow_program(blobs: BlobStore) -> None:
    """Neither call drops the load that both wait for."""
    engine, extra = FakeEngine(), FakeEngine(index=1)
    pool = FakePool(engine)
    pool.extras = [extra]
    loaded = LoadedPrograms(pool, blobs, 10, 10**6)
    slow = asyncio.create_task(_compile(loaded, "slow"))
    sent = await engine.next(Kind.COMPILE)
    others = [asyncio.create_task(_compile(loaded, "a")) for _ in range(2)]
    extra.answer(await extra.next(Kind.COMPILE), Kind.COMPILED)
    assert await asyncio.gather(*others) == [1, 1]
    assert len(keys(engine)) == 1
    engine.answer(sent, Kind.COMPILED)
    await slow


async def test_endless_load_ends_the_engine_although_calls_wait(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_module, "LONGEST_LOAD_S", 0.1)
    engine, recorder = FakeEngine(), FakeRecorder()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    loop = asyncio.get_running_loop()

    async def patient(name: str) -> None:
        with loaded.hold(program(name), ends_at=loop.time() + 0.15, recorder=recorder) as load:
            await loaded.wait(load)

    started, process = loop.time(), engine.fake
    waiting = [asyncio.create_task(patient("a"))]
    while not process.is_killed:
        waiting.append(asyncio.create_task(patient("a")))
        waiting[-2].cancel()
        await asyncio.sleep(0.02)
        assert loop.time() - started < 60
    assert loop.time() - started > 0.14
    assert recorder.seconds == []
    assert all(isinstance(end, BaseException) for end in await asyncio.gather(*waiting, return_exceptions=True))


class LoopClock:
    """The clock of the running event loop, which a test moves forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        real_time, self._ahead_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: real_time() + self._ahead_s)

    async def advance(self, seconds: float) -> None:
        """Moves the clock forward, and runs what is due then."""
        self._ahead_s += seconds
        # A timer that is due may set another one that is due as well.
        for _ in range(3):
            await asyncio.sleep(0)


async def test_time_limit_of_a_load_begins_when_it_starts(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, limit_s = LoopClock(monkeypatch), loaded_module.LONGEST_LOAD_S
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    engine.submit(Kind.COMPILE, b"long")
    with loaded.hold(program("b"), ends_at=0.0) as waits:
        await clock.advance(10 * limit_s)
        engine.answer(b"long", Kind.COMPILED)
        assert waits.work.started_at is not None
        await clock.advance(limit_s / 2)
        assert not engine.fake.is_killed
        await clock.advance(limit_s)
        assert not engine.is_ready


@pytest.mark.usefixtures("short")
async def test_call_waits_for_a_slow_program_without_a_spare(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    slow = asyncio.create_task(_compile(loaded, "slow"))
    sent = await engine.next(Kind.COMPILE)
    other = asyncio.create_task(_compile(loaded, "a"))
    await asyncio.sleep(0.4)
    assert not other.done()
    engine.answer(sent, Kind.COMPILED)
    engine.answer(await engine.next(Kind.COMPILE, 2), Kind.COMPILED)
    assert (await slow, await other) == (0, 0)


def _are_gone(*items: weakref.ref[Any]) -> bool:
    gc.collect()
    return all(item() is None for item in items)


async def test_nothing_is_left_of_an_engine_that_died_in_a_trial(blobs: BlobStore) -> None:
    pool = FakePool(FakeEngine())
    loaded = LoadedPrograms(pool, blobs, 10, 10**6)
    async with pool.alone("") as engine:
        with loaded.hold(program("a"), engine) as load:
            pool.trial_engines[0].fake.die(CRASH)
            with pytest.raises(EngineLost):
                await loaded.wait(load)
    gone: list[weakref.ref[object]] = [weakref.ref(engine), weakref.ref(load.work.connection)]
    pool.trial_engines.clear()
    del engine, load
    await wait_for_condition(lambda: _are_gone(*gone))
    assert len(loaded) == 0


async def test_nothing_is_left_of_a_process_that_died_in_its_place(blobs: BlobStore) -> None:
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 10, 10**6)
    with loaded.hold(program("a")) as load:
        engine.fake.die(CRASH)
        with pytest.raises(EngineLost):
            await loaded.wait(load)
    gone = weakref.ref(load.work.connection)
    del load
    engine.start_another()
    with loaded.hold(program("a")):
        pass
    await wait_for_condition(lambda: _are_gone(gone))


async def test_work_for_a_new_program_does_not_grow_with_the_number_of_programs(blobs: BlobStore) -> None:
    """Also once each new program takes the place of another one."""
    engine = FakeEngine()
    loaded = LoadedPrograms(FakePool(engine), blobs, 256, 10**9)
    lines = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if "gradrule_server" in frame.f_code.co_filename else None

    async def lines_of(name: str) -> int:
        nonlocal lines
        lines = 0
        before = sys.gettrace()
        sys.settrace(count)
        try:
            with loaded.hold(program(name)) as found:
                engine.answer(compile_payload_of(found), Kind.COMPILED)
                await asyncio.sleep(0)
        finally:
            sys.settrace(before)
        return lines

    def compile_payload_of(found: Load) -> bytes:
        return b"".join(compile_payload(found.program.request, found.engine_key))

    used = [await lines_of(str(index)) for index in range(300)]
    assert len(loaded) == 256
    assert 0 < used[10] <= used[255] < 1.2 * used[10]
    # The UNLOAD of another program is added.
    assert used[299] < 2 * used[10]
    assert used[299] == used[270]
