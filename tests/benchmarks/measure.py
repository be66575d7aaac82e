"""Interleaved measuring: in each round every contender runs once, so that what else the machine does hits all alike."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Call = Callable[[], object]


@dataclass(frozen=True)
class Samples:
    """One contender's median per round, and the median of those."""

    per_round: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.per_round)


@dataclass(frozen=True)
class Row:
    """One line of the table: gradrule against one peer.

    ratio: the median over rounds of gradrule's value by the peer's in the same round. bar: what it should be at most
    (or at least, where `more_is_better`); None where design asks for none.
    """

    work: str
    peer: str
    unit: str
    ours: Samples
    theirs: Samples
    bar: float | None
    more_is_better: bool = False

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(self.ours.per_round, self.theirs.per_round, strict=True))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where there is none."""
        if self.bar is None:
            return None
        return self.ratio >= self.bar if self.more_is_better else self.ratio <= self.bar

    def as_json(self) -> dict[str, object]:
        return {
            "work": self.work,
            "peer": self.peer,
            "unit": self.unit,
            "gradrule": _rounded(self.ours.median),
            "peer_value": _rounded(self.theirs.median),
            "ratio": _rounded(self.ratio),
            "ratio_min": _rounded(min(self.ratios)),
            "ratio_max": _rounded(max(self.ratios)),
            "bar": self.bar,
            "bar_is": "at least" if self.more_is_better else "at most",
            "met": self.met,
        }


def latencies(
    contenders: Mapping[str, Call], *, rounds: int, calls: int, warm_up: int, budget_s: float
) -> dict[str, Samples]:
    """p50 in microseconds per round of `calls` calls each."""
    for call in contenders.values():
        for _ in range(warm_up):
            call()
    return _in_turns(
        {name: functools.partial(_p50, call, calls) for name, call in contenders.items()}, rounds, budget_s
    )


def rates(
    contenders: Mapping[str, Callable[[int], object]], *, rounds: int, calls: int, budget_s: float
) -> dict[str, Samples]:
    """Requests per second per round; a contender makes so many requests and returns when all are done."""
    for run in contenders.values():
        run(max(calls // 4, 1))
    return _in_turns({name: functools.partial(_rate, run, calls) for name, run in contenders.items()}, rounds, budget_s)


def _in_turns(contenders: Mapping[str, Callable[[], float]], rounds: int, budget_s: float) -> dict[str, Samples]:
    """One value of each contender per round. Past the budget no further round begins: slow machines measure less."""
    ends = time.monotonic() + budget_s
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        if number and time.monotonic() > ends:
            break
        for name in _order(list(contenders), number):
            found[name].append(contenders[name]())
    return {name: Samples(tuple(values)) for name, values in found.items()}


def _order(names: Sequence[str], number: int) -> Sequence[str]:
    """Another contender begins each round: none always runs after the same one."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def _p50(call: Call, calls: int) -> float:
    """Median duration of a call, in microseconds."""
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def _rate(run: Callable[[int], object], calls: int) -> float:
    """Calls per second."""
    start = time.perf_counter()
    run(calls)
    return calls / (time.perf_counter() - start)


def _rounded(value: float) -> float:
    """Four significant digits."""
    return round(value, 3 - math.floor(math.log10(abs(value)))) if value else 0.0
