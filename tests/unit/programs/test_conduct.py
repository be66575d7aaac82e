"""Which programs are refused, and for how long."""

from __future__ import annotations

import time

import pytest

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.programs import conduct as conduct_module
from gradrule_server.programs.conduct import Conduct, Quarantined, Suspect, suspect_of
from gradrule_server.programs.shelf import Loadable

_BAD = Suspect("tenant", "bad", evaluate_pb2.DERIVATIVE_VJP)
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


def test_a_convict_is_refused_until_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    told: list[Quarantined] = []
    conduct = Conduct(60, told.append)
    conduct.convict(_BAD, "SIGABRT: Check failed: a")
    clock.now += 20
    with pytest.raises(GradruleError, match=r"40 s.*SIGABRT: Check failed: a") as refusal:
        conduct.check(_BAD)
    assert refusal.value.reason == errors_pb2.ERROR_REASON_QUARANTINED
    assert refusal.value.retry_after_s == 40
    assert [found.suspect for found in told] == [_BAD]
    assert conduct.quarantined() == told
    clock.now += 40
    assert conduct.quarantined() == []
    conduct.check(_BAD)


@pytest.mark.parametrize("other", _OTHERS)
def test_neither_another_s_nor_another_graph_is(other: Suspect) -> None:
    conduct = Conduct(60)
    conduct.convict(_BAD, "SIGABRT")
    conduct.check(other)


def test_a_suspect_is_known_by_its_graph_and_not_by_what_is_fed() -> None:
    first = Loadable("key of one shape", b"a", graph="bad", derivative=_BAD.derivative, owner="tenant")
    second = Loadable("key of another shape", b"b", nodes=3, graph="bad", derivative=_BAD.derivative, owner="tenant")
    assert suspect_of(first) == suspect_of(second) == _BAD


def test_two_strikes_are_enough_within_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    conduct = Conduct(60)
    conduct.strike(_BAD, "overrun")
    conduct.check(_BAD)
    clock.now += 601
    conduct.strike(_BAD, "overrun")
    conduct.check(_BAD)
    clock.now += 599
    conduct.strike(_BAD, "overrun")
    with pytest.raises(GradruleError, match="QUARANTINED"):
        conduct.check(_BAD)


def test_a_quarantine_of_nothing_refuses_nobody() -> None:
    told: list[Quarantined] = []
    conduct = Conduct(0, told.append)
    conduct.strike(_BAD, "overrun")
    conduct.strike(_BAD, "overrun")
    conduct.convict(_BAD, "SIGABRT")
    conduct.check(_BAD)
    assert told == []


def test_a_convict_must_prove_itself_again() -> None:
    conduct = Conduct(60)
    conduct.proved(_BAD)
    assert conduct.is_proven(_BAD)
    conduct.convict(_BAD, "SIGABRT")
    assert not conduct.is_proven(_BAD)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct_module, "_MOST", 3)
    conduct = Conduct(60)
    for number in range(5):
        conduct.proved(Suspect("", str(number), _BAD.derivative))
    assert [conduct.is_proven(Suspect("", str(number), _BAD.derivative)) for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
