"""What programs have done to engines: which of them work, which end engines, and which are refused for a while."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.errors import error
from gradrule_server.link.endings import Inquest
from gradrule_server.link.faults import EngineLost
from gradrule_server.programs.shelf import Loadable

# How much is remembered; what was heard of least recently goes.
_MOST = 4096

# Overruns of one program count together for so many times as long as it is refused after the last.
_STRIKES_COUNT_FOR = 10
_STRIKES = 2

# Of the ends that one was at together with others, so many at which nobody else was twice tell who it is.
_ENDS = 3
_MOST_ENDS = 16

# What has run before overran where it went on for so many times as long as ever before, and longer than this.
_OVERRUN_FACTOR = 10
_LEAST_OVERRUN_S = 1.0

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Suspect(NamedTuple):
    """What is held to account: whose graph, and what is computed of it; neither values nor names of feeds count."""

    owner: str
    graph: str
    derivative: evaluate_pb2.Derivative.ValueType


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A program that is refused. `until`: CLOCK_MONOTONIC, seconds."""

    suspect: Suspect
    why: str
    until: float

    @property
    def left_s(self) -> float:
        """Seconds until it is taken again."""
        return max(0.0, self.until - time.monotonic())


class Conduct:
    """All that is known of programs. `quarantine_s`: for how long one is refused, 0: never.

    `on_quarantine`: told of each that is refused from now on.
    """

    def __init__(
        self, quarantine_s: float = 0.0, on_quarantine: Callable[[Quarantined], None] = lambda found: None
    ) -> None:
        self._quarantine_s = quarantine_s
        self._on_quarantine = on_quarantine
        self._proven: OrderedDict[Suspect, None] = OrderedDict()
        self._longest: OrderedDict[Suspect, float] = OrderedDict()
        self._strikes: OrderedDict[Suspect, list[float]] = OrderedDict()
        self._ends: OrderedDict[Suspect, list[tuple[float, Inquest]]] = OrderedDict()
        self._quarantined: OrderedDict[Suspect, Quarantined] = OrderedDict()

    def check(self, suspect: Suspect) -> None:
        """QUARANTINED where it is refused now."""
        if not self._quarantined:
            return
        found = self._quarantined.get(suspect)
        if found is None:
            return
        left_s = found.until - time.monotonic()
        if left_s <= 0:
            del self._quarantined[suspect]
            return
        raise error(
            errors_pb2.ERROR_REASON_QUARANTINED,
            f"the graph is refused for another {left_s:.0f} s, because it ended engines ({found.why}); "
            f"it can be sent again then, or changed",
            retry_after_s=left_s,
        )

    def proved(self, suspect: Suspect) -> None:
        """It ran, and its engine lives."""
        if suspect in self._proven:
            self._proven.move_to_end(suspect)
        else:
            _remember(self._proven, suspect, None)

    def is_proven(self, suspect: Suspect) -> bool:
        """Whether it has run before."""
        return suspect in self._proven

    def took(self, suspect: Suspect, seconds: float) -> None:
        """An engine has done something of it, and was at it for so long."""
        if seconds > self._longest.get(suspect, -1.0):
            _remember(self._longest, suspect, seconds)
        else:
            self._longest.move_to_end(suspect)

    def longest(self, suspect: Suspect) -> float:
        """The most seconds that an engine was ever at it, as far as is known."""
        return self._longest.get(suspect, 0.0)

    def overran(self, suspect: Suspect, seconds: float, why: str) -> None:
        """It went on after its deadline, for so long in all, and its engine was ended.

        That is a strike, but for what has run before and might have come to an end once more: deadlines can be short,
        and machines busy.
        """
        expected_s = max(_LEAST_OVERRUN_S, _OVERRUN_FACTOR * self.longest(suspect))
        if not self.is_proven(suspect) or seconds > expected_s:
            self.strike(suspect, why)

    def strike(self, suspect: Suspect, why: str) -> None:
        """It ended an engine; the second time within a while it is refused from then on."""
        since, now = self._while()
        times = [at for at in self._strikes.get(suspect, []) if at > since] + [now]
        _remember(self._strikes, suspect, times)
        if len(times) >= _STRIKES:
            self.convict(suspect, why)

    def attended(self, suspect: Suspect, inquest: Inquest, why: str) -> None:
        """It ran beside others in an engine that ended, and cannot be tried, for it is pinned to that.

        One such end says nothing. It is refused once it was at several that no other can have caused two of. Neither
        those that passed since count as others, nor ends whose cause was found.
        """
        if not inquest.present:
            return
        since, now = self._while()
        ends = [(at, end) for at, end in self._ends.get(suspect, []) if at > since] + [(now, inquest)]
        _remember(self._ends, suspect, ends[-_MOST_ENDS:])
        count, met = 0, set[Hashable | None]()
        for _, end in reversed(ends):
            others = end.present - {suspect} - end.cleared
            if end.culprit is None and met.isdisjoint(others):
                count += 1
                met |= others
        if count >= _ENDS:
            self.convict(suspect, why)

    def convict(self, suspect: Suspect, why: str) -> None:
        """It ended engines, and is refused from now on."""
        self._proven.pop(suspect, None)
        self._strikes.pop(suspect, None)
        self._longest.pop(suspect, None)
        self._ends.pop(suspect, None)
        if self._quarantine_s:
            found = Quarantined(suspect, why, time.monotonic() + self._quarantine_s)
            _remember(self._quarantined, suspect, found)
            self._on_quarantine(found)

    def _while(self) -> tuple[float, float]:
        """Since when strikes count, and now."""
        now = time.monotonic()
        return now - _STRIKES_COUNT_FOR * self._quarantine_s, now

    def quarantined(self) -> list[Quarantined]:
        """Those that are refused now."""
        now = time.monotonic()
        return [found for found in self._quarantined.values() if found.until > now]


@dataclass(frozen=True, slots=True)
class Charge:
    """The account of a request: what engines tell of it is noted of its suspect."""

    conduct: Conduct
    suspect: Suspect

    def took(self, seconds: float) -> None:
        self.conduct.took(self.suspect, seconds)

    def overran(self, seconds: float) -> None:
        self.conduct.overran(self.suspect, seconds, "it went on after its deadline")

    def lost(self, cause: EngineLost) -> None:
        """Its engine ended, and it will not be tried: that is a strike where it ran alone, else it is only noted."""
        if not cause.is_suspect or self.suspect in cause.inquest.noted:
            return
        cause.inquest.noted.add(self.suspect)
        if cause.is_alone:
            self.conduct.strike(self.suspect, str(cause.ending))
        else:
            self.conduct.attended(self.suspect, cause.inquest, str(cause.ending))


def suspect_of(program: Loadable) -> Suspect:
    """What is held to account for a program."""
    return Suspect(program.owner, program.graph, program.derivative)


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > _MOST:
        table.popitem(last=False)
