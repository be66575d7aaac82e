"""Interleaved measuring: in each round every contender runs once, so that what else the machine does hits all alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Samples:
    """One contender's value per round, and the median of those."""

    per_round: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.per_round)


@dataclass(frozen=True)
class Row:
    """One line of the table: gradrule against one peer.

    ratio: the median over rounds of gradrule's value divided by the peer's in the same round. bar: the most it may be,
    or the least where `more_is_better`; None where the design sets none. most: the most that gradrule's own value may
    be, where the design sets that instead of a ratio. note: what the reader must know, such as a smaller form of the
    work. cpu_ratio: the same ratio in processor time of client and server, which other work on the machine changes
    less.
    """

    group: str
    work: str
    peer: str
    unit: str
    ours: Samples
    theirs: Samples
    bar: float | None = None
    more_is_better: bool = False
    most: float | None = None
    note: str = ""
    cpu_ratio: Samples | None = None

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(a / b for a, b in zip(self.ours.per_round, self.theirs.per_round, strict=True))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where there is none."""
        if self.most is not None:
            return self.ours.median <= self.most
        if self.bar is None:
            return None
        return self.ratio >= self.bar if self.more_is_better else self.ratio <= self.bar

    def as_json(self) -> dict[str, object]:
        return {
            "group": self.group,
            "work": self.work,
            "peer": self.peer,
            "unit": self.unit,
            "gradrule": rounded(self.ours.median),
            "peer_value": rounded(self.theirs.median),
            "ratio": rounded(self.ratio),
            "ratio_min": rounded(min(self.ratios)),
            "ratio_max": rounded(max(self.ratios)),
            "rounds": len(self.ratios),
            "cpu_ratio": None if self.cpu_ratio is None else rounded(self.cpu_ratio.median),
            "bar": self.bar if self.most is None else self.most,
            "bar_is": ("at least" if self.more_is_better else "at most") + ("" if self.most is None else " (value)"),
            "met": self.met,
            "note": self.note,
        }


@dataclass(frozen=True)
class Skipped:
    """A line of the table that could not be measured, and the reason."""

    group: str
    work: str
    peer: str
    reason: str
    bar: float | None = None

    def as_json(self) -> dict[str, object]:
        return {
            "group": self.group,
            "work": self.work,
            "peer": self.peer,
            "bar": self.bar,
            "met": None,
            "skipped": self.reason,
        }


@dataclass(frozen=True)
class Table:
    """Figures of a profile, as text."""

    group: str
    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]

    def as_json(self) -> dict[str, object]:
        return {
            "group": self.group,
            "work": self.title,
            "columns": list(self.columns),
            "cells": [*map(list, self.cells)],
        }


class Failed(Skipped):
    """Lines that ended with an error."""


Line = Row | Skipped | Table


def in_turns(
    contenders: Mapping[str, Callable[[], float]], *, rounds: int, budget_s: float = math.inf
) -> dict[str, Samples]:
    """Returns one value of each contender per round.

    Past the budget no further round begins: slow machines measure less.
    """
    found = in_turns_of(contenders, rounds=rounds, budget_s=budget_s)
    return {name: Samples(tuple(values)) for name, values in found.items()}


def in_turns_of(
    contenders: Mapping[str, Callable[[], T]], *, rounds: int, budget_s: float = math.inf
) -> dict[str, list[T]]:
    """Returns what each contender gave in each round."""
    ends = time.monotonic() + budget_s
    found: dict[str, list[T]] = {name: [] for name in contenders}
    for number in range(rounds):
        if number and time.monotonic() > ends:
            break
        for name in _order(list(contenders), number):
            found[name].append(contenders[name]())
    return found


def _order(names: Sequence[str], number: int) -> Sequence[str]:
    """Another contender begins each round: none always runs after the same one."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def rounded(value: float) -> float:
    """Four significant digits."""
    return round(value, 3 - math.floor(math.log10(abs(value)))) if value else 0.0
