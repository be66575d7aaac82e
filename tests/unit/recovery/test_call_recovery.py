"""Which calls run again, run alone, or fail when their engine ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import Finding, GradruleError, NoMemoryLeft
from gradrule_server.link.engine import Engine
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.recovery import crash_history as crash_history_module
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.recovery.crash_history import CrashHistory, Workload
from gradrule_server.recovery.endings import EndReason, EngineEnd, EngineLost, ProgramNotLoaded
from gradrule_server.registry.blobs import BlobStore
from tests.unit.link.fake_engine import CRASH, KILLED, FakeEngine, FakePool
from tests.waiting import wait_for_condition

_FINDINGS = [Finding(errors_pb2.ERROR_REASON_ENGINE_CRASHED, "gone")]
OVERRUN = EngineEnd(EndReason.OVERRUN, "it overran")


def lost(ending: EngineEnd = CRASH, *, ran_alone: bool = False) -> EngineLost:
    """Returns the loss of an engine. `ending`: copied unless it is not `CRASH`, since calls share it."""
    return EngineLost(_FINDINGS, engine_end=replace(ending) if ending is CRASH else ending, ran_alone=ran_alone)


class Attempts:
    """Fails with each error in turn (None: not), then returns how often it was made; notes where."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.places: list[Engine | None] = []

    async def __call__(self, engine: Engine | None) -> int:
        self.places.append(engine)
        # All calls of an engine are running when it ends.
        await asyncio.sleep(0)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        return len(self.places)

    @property
    def alone(self) -> list[bool]:
        return [place is not None for place in self.places]


@pytest.fixture
async def make(tmp_path: Path) -> Callable[..., LoadedPrograms]:
    def build(quarantine_s: float = 60.0) -> LoadedPrograms:
        return LoadedPrograms(FakePool(FakeEngine()), BlobStore(tmp_path, 0), 10, 10**6, CrashHistory(quarantine_s))

    return build


@pytest.fixture
async def loaded(make: Callable[..., LoadedPrograms]) -> LoadedPrograms:
    return make()


def recover(loaded: LoadedPrograms, ends_at: float = 0.0, pinned: Engine | None = None) -> CallRecovery[Engine]:
    return CallRecovery(loaded.pool, loaded.crash_history, ends_at=ends_at, pinned=pinned)


def program(name: str = "a", owner: str = "") -> Workload:
    return Workload(owner, f"graph of {name}", evaluate_pb2.DERIVATIVE_UNSPECIFIED)


async def run(loaded: LoadedPrograms, attempts: Attempts, name: str = "a", owner: str = "") -> int:
    return await recover(loaded).run(program(name, owner), attempts)


async def test_a_call_that_crashes_an_engine_alone_fails_and_is_quarantined(loaded: LoadedPrograms) -> None:
    attempts = Attempts(lost(), lost(ran_alone=True))
    with pytest.raises(GradruleError) as guilty:
        await run(loaded, attempts)
    assert attempts.alone == [False, True]
    assert guilty.value.reason == errors_pb2.ERROR_REASON_ENGINE_CRASHED
    assert "SIGABRT: Check failed: a" in guilty.value.message
    with pytest.raises(GradruleError) as refused:
        await run(loaded, Attempts())
    assert refused.value.reason == errors_pb2.ERROR_REASON_QUARANTINED
    assert refused.value.retry_after_s == pytest.approx(60, abs=5)
    assert "SIGABRT: Check failed: a" in refused.value.message
    # Neither another graph nor another's is.
    assert await run(loaded, Attempts(), "b") == 1
    assert await run(loaded, Attempts(), owner="another") == 1


async def test_a_graph_that_takes_too_much_memory_gets_memory_exceeded(loaded: LoadedPrograms) -> None:
    ending = EngineEnd(EndReason.MEMORY, "it took more")
    with pytest.raises(GradruleError) as guilty:
        await run(loaded, Attempts(lost(ending), lost(ending, ran_alone=True)))
    assert guilty.value.reason == errors_pb2.ERROR_REASON_MEMORY_EXCEEDED


async def test_a_graph_that_takes_too_much_memory_is_not_quarantined(loaded: LoadedPrograms) -> None:
    for _ in range(3):
        ending = EngineEnd(EndReason.MEMORY, "it took more")
        with pytest.raises(GradruleError) as guilty:
            await run(loaded, Attempts(lost(ending), lost(ending, ran_alone=True)))
        assert guilty.value.reason == errors_pb2.ERROR_REASON_MEMORY_EXCEEDED
    assert not loaded.crash_history.quarantines()


def full(*, is_alone: bool = False) -> NoMemoryLeft:
    finding = Finding(errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, "no memory is left")
    return NoMemoryLeft([finding], is_alone=is_alone)


async def test_a_call_without_memory_runs_once_more(loaded: LoadedPrograms) -> None:
    attempts = Attempts(full(is_alone=True))
    assert await run(loaded, attempts) == 2
    assert attempts.alone == [False, False]


async def test_a_call_without_memory_beside_others_runs_alone(loaded: LoadedPrograms) -> None:
    attempts = Attempts(full(), full())
    assert await run(loaded, attempts) == 3
    assert attempts.alone == [False, False, True]


@pytest.mark.parametrize("errors", [[full(), full(is_alone=True)], [full(), full(), full()]])
async def test_a_call_that_does_not_fit_alone_says_so(loaded: LoadedPrograms, errors: list[NoMemoryLeft]) -> None:
    attempts = Attempts(*errors)
    with pytest.raises(GradruleError, match="even alone, the graph takes more memory than an engine has") as refused:
        await run(loaded, attempts)
    assert refused.value.reason == errors_pb2.ERROR_REASON_MEMORY_EXCEEDED
    assert len(attempts.places) == len(errors)
    assert not loaded.crash_history.quarantines()


async def test_a_call_that_fits_alone_is_not_said_to_be_too_large(loaded: LoadedPrograms) -> None:
    """A forward handle has to stay in an engine that keeps others."""
    attempts = Attempts(full(), full(), None, full())
    with pytest.raises(NoMemoryLeft, match="MEMORY_EXCEEDED: no memory is left"):
        await recover(loaded).run(program(), attempts, undo=lambda engine: None)
    assert attempts.alone == [False, False, True, False]


async def test_a_session_without_memory_does_not_run_again(loaded: LoadedPrograms) -> None:
    attempts = Attempts(full())
    [engine] = loaded.pool.engines
    with pytest.raises(NoMemoryLeft):
        await recover(loaded, pinned=engine).run(program(), attempts)
    assert len(attempts.places) == 1


@pytest.mark.parametrize(("errors", "runs"), [([full()], 2), ([full(), full()], 0)])
async def test_a_session_loads_a_program_once_more_without_idle_ones(
    loaded: LoadedPrograms, errors: list[NoMemoryLeft], runs: int
) -> None:
    attempts = Attempts(*errors)
    [engine] = loaded.pool.engines
    recovery = recover(loaded, pinned=engine)
    recovery.is_building = True
    if runs:
        assert await recovery.run(program(), attempts) == runs
    else:
        with pytest.raises(NoMemoryLeft):
            await recovery.run(program(), attempts)
    assert attempts.places == [engine, engine]


async def test_a_suspect_that_completes_its_trial_gets_its_answer(loaded: LoadedPrograms) -> None:
    attempts = Attempts(lost())
    assert await run(loaded, attempts) == 2
    assert attempts.alone == [False, True]
    assert await run(loaded, Attempts()) == 1


async def test_the_only_suspect_fails_without_a_trial(loaded: LoadedPrograms) -> None:
    attempts = Attempts(lost(ran_alone=True))
    with pytest.raises(GradruleError, match="ENGINE_CRASHED: the graph ended the engine that ran it: SIGABRT"):
        await run(loaded, attempts)
    assert attempts.alone == [False]
    with pytest.raises(GradruleError, match="QUARANTINED"):
        await run(loaded, Attempts())


@pytest.mark.parametrize(
    ("reason", "how"),
    [(EndReason.MEMORY, "it ended"), (EndReason.HEARTBEAT, "it ended"), (EndReason.CRASH, "exit code 1")],
)
async def test_the_only_suspect_runs_alone_if_the_engine_or_the_machine_may_be_the_cause(
    loaded: LoadedPrograms, reason: EndReason, how: str
) -> None:
    attempts = Attempts(lost(EngineEnd(reason, how), ran_alone=True))
    assert await run(loaded, attempts) == 2
    assert attempts.alone == [False, True]


async def test_each_of_several_suspects_runs_alone_once(loaded: LoadedPrograms) -> None:
    end = replace(CRASH)
    others = [Attempts(lost(end)) for _ in range(3)]
    assert await asyncio.gather(*(run(loaded, item, f"{number}") for number, item in enumerate(others))) == [2, 2, 2]
    assert [item.alone for item in others] == [[False, True]] * 3


async def test_once_the_culprit_is_found_the_other_suspects_run_beside_others(loaded: LoadedPrograms) -> None:
    end = replace(CRASH)
    guilty = Attempts(lost(end), lost(ran_alone=True))
    others = [Attempts(lost(end)) for _ in range(3)]
    results = await asyncio.gather(
        run(loaded, guilty, "guilty"),
        *(run(loaded, item, f"other{number}") for number, item in enumerate(others)),
        return_exceptions=True,
    )
    assert isinstance(results[0], GradruleError)
    assert results[1:] == [2, 2, 2]
    assert [item.alone for item in others] == [[False, False]] * 3


async def test_many_callers_of_one_bad_graph_cost_one_trial(loaded: LoadedPrograms) -> None:
    end = replace(CRASH)
    callers = [Attempts(lost(end), lost(ran_alone=True)) for _ in range(5)]
    results = await asyncio.gather(*(run(loaded, item) for item in callers), return_exceptions=True)
    reasons = [result.reason for result in results if isinstance(result, GradruleError)]
    crashed, quarantined = errors_pb2.ERROR_REASON_ENGINE_CRASHED, errors_pb2.ERROR_REASON_QUARANTINED
    assert reasons == [crashed, *[quarantined] * 4]
    assert [len(item.places) for item in callers] == [2, 1, 1, 1, 1]


async def test_a_call_runs_again_as_often_as_others_end_its_engine(loaded: LoadedPrograms) -> None:
    attempts = Attempts(*(lost(OVERRUN) for _ in range(8)))
    assert await run(loaded, attempts) == 9
    assert not any(attempts.alone)


async def test_a_call_runs_again_five_times_if_its_engines_are_killed(loaded: LoadedPrograms) -> None:
    attempts = Attempts(*(lost(KILLED) for _ in range(5)))
    assert await run(loaded, attempts) == 6
    assert not any(attempts.alone)
    with pytest.raises(EngineLost):
        await run(loaded, Attempts(*(lost(KILLED) for _ in range(6))))
    assert await run(loaded, Attempts()) == 1


async def test_an_engine_that_is_killed_during_a_trial_proves_nothing(loaded: LoadedPrograms) -> None:
    attempts = Attempts(lost(), lost(KILLED), lost(KILLED))
    assert await run(loaded, attempts) == 4
    assert attempts.alone == [False, True, True, True]


async def test_a_program_that_is_not_loaded_is_loaded_again_once(loaded: LoadedPrograms) -> None:
    recovery = recover(loaded)
    assert await recovery.run(program(), Attempts(ProgramNotLoaded(_FINDINGS))) == 2
    with pytest.raises(ProgramNotLoaded):
        await recovery.run(program(), Attempts(ProgramNotLoaded(_FINDINGS)))


async def test_two_overruns_lead_to_quarantine(loaded: LoadedPrograms) -> None:
    recorder = loaded.crash_history.recorder(program())
    recorder.record_overrun(1.6)
    recorder.record_overrun(1.6)
    with pytest.raises(GradruleError, match="QUARANTINED"):
        await run(loaded, Attempts())


async def test_an_overrun_counts_only_if_it_is_far_longer_than_building_and_all_runs(loaded: LoadedPrograms) -> None:
    recorder = loaded.crash_history.recorder(program())
    # The engine has built the program.
    recorder.record_completion(2.0)
    for seconds in (0.5, 9.0, 9.0):
        recorder.record_overrun(seconds)
    assert count_crashes(loaded) == 0
    recorder.record_overrun(11.0)
    assert count_crashes(loaded) == 1


async def test_a_pinned_call_is_not_run_again(loaded: LoadedPrograms) -> None:
    engine = loaded.pool.engines[0]

    async def once(attempts: Attempts) -> None:
        with pytest.raises(EngineLost):
            await recover(loaded, pinned=engine).run(program(), attempts)

    first = Attempts(lost(ran_alone=True))
    await once(first)
    assert first.places == [engine]
    await once(Attempts(lost(ran_alone=True)))
    with pytest.raises(GradruleError, match="QUARANTINED"):
        await run(loaded, Attempts())


async def test_a_pinned_call_is_not_blamed_for_calls_beside_it(loaded: LoadedPrograms) -> None:
    for _ in range(5):
        pinned = recover(loaded, pinned=loaded.pool.engines[0])
        with pytest.raises(EngineLost):
            await pinned.run(program(), Attempts(lost()))
    assert await run(loaded, Attempts()) == 1


async def test_a_call_that_leaves_state_in_its_engine_runs_again_after_its_trial(loaded: LoadedPrograms) -> None:
    attempts, undone = Attempts(lost()), list[Engine]()
    assert await recover(loaded).run(program(), attempts, undo=undone.append) == 3
    assert attempts.alone == [False, True, False]
    assert undone == [attempts.places[1]]
    # A call that completes alone and crashes beside others fails in the end.
    again = Attempts(lost(), None, lost())
    with pytest.raises(EngineLost):
        await recover(loaded).run(program(), again, undo=undone.append)
    assert again.alone == [False, True, False]


async def _hangs(engine: Engine | None) -> int:
    await asyncio.sleep(60)
    raise AssertionError


class Hangs:
    """Loses its engine, beside others; then it sets `is_hanging` and does not return."""

    def __init__(self) -> None:
        self.loss: EngineLost | None = lost()
        self.is_hanging = asyncio.Event()

    async def __call__(self, engine: Engine | None) -> int:
        cause, self.loss = self.loss, None
        if cause is not None:
            raise cause
        self.is_hanging.set()
        return await _hangs(engine)


def count_crashes(loaded: LoadedPrograms) -> int:
    return len(loaded.crash_history._crashes.get(program(), []))


async def _gives_up(recovery: CallRecovery[Engine]) -> None:
    """A call is cancelled during its trial."""
    attempts = Hangs()
    call = asyncio.create_task(recovery.run(program(), attempts))
    await attempts.is_hanging.wait()
    call.cancel()
    await asyncio.wait([call])


async def test_a_workload_quarantined_meanwhile_is_not_run_again(loaded: LoadedPrograms) -> None:
    async def overruns_for_others(engine: Engine | None) -> int:
        loaded.crash_history.quarantine(program(), "it went on")
        raise lost(OVERRUN)

    with pytest.raises(GradruleError, match="QUARANTINED"):
        await recover(loaded).run(program(), overruns_for_others)


async def test_a_call_cancelled_before_its_trial_shows_anything_counts_as_no_crash(loaded: LoadedPrograms) -> None:
    async with loaded.pool.trials.hold(""):
        recovery = recover(loaded, asyncio.get_running_loop().time() + 60)
        call = asyncio.create_task(recovery.run(program(), Hangs()))
        await wait_for_condition(lambda: loaded.pool.trials.waiting(""))
        call.cancel()
        await asyncio.wait([call])
    await _gives_up(recover(loaded, asyncio.get_running_loop().time() + 60))
    assert count_crashes(loaded) == 0


@pytest.mark.usefixtures("quick")
async def test_a_workload_that_hangs_in_two_trials_is_quarantined(loaded: LoadedPrograms) -> None:
    await _gives_up(recover(loaded, asyncio.get_running_loop().time() + 0.01))
    assert count_crashes(loaded) == 1
    await _gives_up(recover(loaded, asyncio.get_running_loop().time() + 0.01))
    with pytest.raises(GradruleError, match="QUARANTINED"):
        await run(loaded, Attempts())


@pytest.mark.usefixtures("quick")
async def test_a_trial_that_still_builds_at_its_deadline_does_not_count(loaded: LoadedPrograms) -> None:
    recovery = recover(loaded, asyncio.get_running_loop().time() + 0.01)
    recovery.is_building = True
    await _gives_up(recovery)
    assert count_crashes(loaded) == 0
    assert await run(loaded, Attempts()) == 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_history_module, "_MIN_OVERRUN_S", 0.0)
