"""Which workloads are quarantined, and for how long."""

from __future__ import annotations

import time

import pytest

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.programs.loaded import Loadable
from gradrule_server.recovery import crash_history as crash_history_module
from gradrule_server.recovery.crash_history import CrashHistory, Quarantine, Workload

_BAD = Workload("tenant", "bad", evaluate_pb2.DERIVATIVE_VJP)
_OTHERS = (
    _BAD._replace(owner="another"),
    _BAD._replace(graph="other"),
    _BAD._replace(derivative=evaluate_pb2.DERIVATIVE_UNSPECIFIED),
)


class Clock:
    """A monotonic clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_a_quarantine_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    reported: list[Quarantine] = []
    crash_history = CrashHistory(60, reported.append)
    crash_history.quarantine(_BAD, "SIGABRT: Check failed: a")
    clock.now += 20
    with pytest.raises(GradruleError, match=r"40 s.*SIGABRT: Check failed: a") as refusal:
        crash_history.check(_BAD)
    assert refusal.value.reason == errors_pb2.ERROR_REASON_QUARANTINED
    assert refusal.value.retry_after_s == 40
    assert [found.workload for found in reported] == [_BAD]
    assert crash_history.quarantines() == reported
    clock.now += 40
    assert crash_history.quarantines() == []
    crash_history.check(_BAD)


@pytest.mark.parametrize("other", _OTHERS)
def test_other_tenants_graphs_and_derivatives_are_not_quarantined(other: Workload) -> None:
    crash_history = CrashHistory(60)
    crash_history.quarantine(_BAD, "SIGABRT")
    crash_history.check(other)


def test_the_workload_of_a_program_depends_on_its_graph_and_not_on_feeds() -> None:
    first = Loadable("key of one shape", b"a", graph="bad", derivative=_BAD.derivative, owner="tenant")
    second = Loadable("key of another shape", b"b", nodes=3, graph="bad", derivative=_BAD.derivative, owner="tenant")
    assert first.workload == second.workload == _BAD


def test_two_crashes_within_the_window_lead_to_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    crash_history = CrashHistory(60)
    crash_history.record_crash(_BAD, "overrun")
    crash_history.check(_BAD)
    clock.now += 601
    crash_history.record_crash(_BAD, "overrun")
    crash_history.check(_BAD)
    clock.now += 599
    crash_history.record_crash(_BAD, "overrun")
    with pytest.raises(GradruleError, match="QUARANTINED"):
        crash_history.check(_BAD)


def test_a_quarantine_of_no_length_refuses_nothing() -> None:
    reported: list[Quarantine] = []
    crash_history = CrashHistory(0, reported.append)
    crash_history.record_crash(_BAD, "overrun")
    crash_history.record_crash(_BAD, "overrun")
    crash_history.quarantine(_BAD, "SIGABRT")
    crash_history.check(_BAD)
    assert reported == []


def test_the_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_history_module, "_MAX_ENTRIES", 3)
    crash_history = CrashHistory(60)
    workloads = [Workload("", str(number), _BAD.derivative) for number in range(5)]
    for workload in workloads:
        crash_history.quarantine(workload, "SIGABRT")
    assert [found.workload for found in crash_history.quarantines()] == workloads[2:]
