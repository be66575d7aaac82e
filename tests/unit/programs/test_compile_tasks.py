"""Compilations that calls share, and that go on after the deadlines of their calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.link.engine import Engine
from gradrule_server.programs import compile_tasks as compile_tasks_module
from gradrule_server.programs.cache import ProgramCache
from gradrule_server.programs.compile_tasks import CompileTasks
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.recovery.crash_history import CrashHistory
from tests.unit.link.fake_engine import FakePool
from tests.waiting import wait_for_condition

_SHORT_S, _LONG_S = 0.05, 60.0


class Fixture:
    """The compilations of a tenant; `compile` ends when the test opens the gate."""

    def __init__(self) -> None:
        self.keeps_others_waiting = False
        self.tasks = CompileTasks(ProgramCache(10, 10**6), lambda: self.keeps_others_waiting)
        self.gate = asyncio.Event()
        self.started = self.ended = self.cancelled = 0
        self.recoveries: list[CallRecovery[Engine]] = []
        self.failure: Exception | None = None

    async def compile(self, recovery: CallRecovery[Engine]) -> str:
        self.started += 1
        self.recoveries.append(recovery)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.failure is not None:
            raise self.failure
        self.ended += 1
        return f"result {self.started}"

    def call(self, seconds: float, key: str = "a", size: int = 0, **options: Any) -> asyncio.Task[str]:
        """Starts a call with a deadline."""
        ends_at = asyncio.get_running_loop().time() + seconds
        recovery: CallRecovery[Engine] = CallRecovery(FakePool(), CrashHistory(), ends_at=ends_at, **options)
        return asyncio.create_task(self.tasks.run(key, recovery, self.compile, size))

    async def call_late(self, key: str = "a", size: int = 0) -> str:
        """Makes a call that reaches its deadline; returns the message."""
        with pytest.raises(GradruleError) as late:
            await self.call(_SHORT_S, key, size)
        assert late.value.reason == errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED
        return late.value.message


@pytest.fixture
async def fixture() -> Fixture:
    return Fixture()


async def test_calls_of_one_key_share_a_compilation(fixture: Fixture) -> None:
    calls = [fixture.call(_LONG_S) for _ in range(8)]
    await wait_for_condition(lambda: fixture.started)
    other = fixture.call(_LONG_S, "b")
    await wait_for_condition(lambda: fixture.started == 2)
    fixture.gate.set()
    assert len(set(await asyncio.gather(*calls))) == 1
    await other
    assert fixture.started == 2
    # Callers keep results in caches of their own.
    await fixture.call(_LONG_S)
    assert fixture.started == 3


async def test_a_compilation_goes_on_after_the_deadline_of_its_call(fixture: Fixture) -> None:
    assert "goes on" in await fixture.call_late()
    assert "goes on" in await fixture.call_late()
    again = fixture.call(_LONG_S)
    fixture.gate.set()
    assert await again == "result 1"
    assert (fixture.started, fixture.cancelled) == (1, 0)


async def test_a_compilation_goes_on_if_its_only_call_is_cancelled(fixture: Fixture) -> None:
    cancelled = fixture.call(_LONG_S)
    await wait_for_condition(lambda: fixture.started)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    again = fixture.call(_LONG_S)
    fixture.gate.set()
    assert await again == "result 1"
    assert fixture.cancelled == 0


async def test_few_compilations_go_on_at_once(fixture: Fixture) -> None:
    most = compile_tasks_module._MAX_OUTLIVING
    for number in range(most):
        assert "goes on" in await fixture.call_late(f"k{number}")
    assert "given up" in await fixture.call_late("one more")
    await wait_for_condition(lambda: fixture.cancelled == 1)
    # A compilation for which a call waits again does not count.
    waits = fixture.call(_LONG_S, "k0")
    await asyncio.sleep(0)
    assert "goes on" in await fixture.call_late("one more")
    fixture.gate.set()
    await waits
    await wait_for_condition(lambda: fixture.ended == most + 1)
    fixture.gate.clear()
    assert "goes on" in await fixture.call_late("one more")


async def test_one_compilation_of_a_large_spec_goes_on(fixture: Fixture) -> None:
    large = compile_tasks_module._LARGE_BYTES
    assert "goes on" in await fixture.call_late("a", large)
    assert "given up" in await fixture.call_late("b", large)
    assert "goes on" in await fixture.call_late("c", large - 1)


async def test_a_compilation_without_a_call_ends_at_its_limit(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_tasks_module, "LONGEST_LOAD_S", 0.0)
    monkeypatch.setattr(compile_tasks_module, "_CHECK_INTERVAL_S", 0.01)
    patient = fixture.call(_LONG_S)
    await fixture.call_late()
    await asyncio.sleep(0.1)
    # A call with a later deadline waits for it.
    assert not fixture.cancelled
    assert fixture.recoveries[0].ends_at > asyncio.get_running_loop().time() + 30
    patient.cancel()
    await asyncio.wait([patient])
    await wait_for_condition(lambda: fixture.cancelled)


async def test_a_compilation_without_a_call_makes_way_for_other_tenants(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_tasks_module, "_CHECK_INTERVAL_S", 0.01)
    waits = fixture.call(_LONG_S, "waits")
    await fixture.call_late("late")
    fixture.keeps_others_waiting = True
    await wait_for_condition(lambda: fixture.cancelled)
    fixture.gate.set()
    await waits
    assert fixture.cancelled == 1


async def test_a_failure_reaches_all_calls_and_the_next_call_compiles_again(fixture: Fixture) -> None:
    fixture.failure = error(errors_pb2.ERROR_REASON_INVALID_GRAPH, "no")
    calls = [fixture.call(_LONG_S) for _ in range(2)]
    await fixture.call_late("late")
    fixture.gate.set()
    for call in calls:
        with pytest.raises(GradruleError, match="INVALID_GRAPH"):
            await call
    fixture.failure = None
    assert await fixture.call(_LONG_S) == "result 3"


async def test_a_call_waits_for_an_engine_as_long_as_it_can_although_another_cannot(fixture: Fixture) -> None:
    """The compilation of the first call got no engine in the time that this call has."""
    hurried, patient = fixture.call(_LONG_S), fixture.call(_LONG_S)
    await wait_for_condition(lambda: fixture.started)
    fixture.failure = error(errors_pb2.ERROR_REASON_OVERLOADED, "all engines are in use")
    fixture.gate.set()
    with pytest.raises(GradruleError, match="OVERLOADED"):
        await hurried
    fixture.failure = None
    assert await patient == "result 2"


async def test_turn_on_an_engine_ends_before_the_call_gives_up(fixture: Fixture) -> None:
    """The caller of a call that gets no engine receives OVERLOADED."""
    call = fixture.call(10.0)
    await wait_for_condition(lambda: fixture.started)
    [own] = fixture.recoveries
    assert own.turn_ends_at < asyncio.get_running_loop().time() + 9.8 < own.ends_at
    call.cancel()


async def test_calls_share_no_compilation_of_what_was_deleted_since(fixture: Fixture) -> None:
    before = fixture.call(_LONG_S)
    await fixture.call_late("b")
    fixture.tasks.forget(lambda key: key in ("a", "b"))
    after = fixture.call(_LONG_S)
    await wait_for_condition(lambda: fixture.started == 3)
    await wait_for_condition(lambda: fixture.cancelled == 1)
    fixture.gate.set()
    await asyncio.gather(before, after)
    assert fixture.ended == 2


async def test_all_compilations_end_with_the_server(fixture: Fixture) -> None:
    await fixture.call_late()
    fixture.tasks.cancel()
    await wait_for_condition(lambda: fixture.cancelled)
