"""Defines what a row of the battery gets and what it reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Scale:
    """Defines how much of the full scale a row runs.

    share: of the full numbers; 1 is all. seconds: if given, the row runs for that time instead.
    folder: for failing inputs and data of servers.
    """

    share: float
    seed: int
    folder: Path
    seconds: float | None = None

    @property
    def is_sample(self) -> bool:
        """Returns whether a row runs less than the full scale."""
        return self.seconds is not None or self.share < 1

    def count(self, long: int, least: int = 1) -> int:
        """Returns the number of cases for a number at full scale."""
        return max(least, round(long * self.share))

    def clock(self, otherwise: float | None = None) -> Clock:
        """Returns the time limit from now on. `otherwise`: seconds for a row whose length is a time."""
        limit = self.seconds
        if limit is None and otherwise is not None:
            limit = otherwise * self.share
        return Clock(None if limit is None else time.monotonic() + limit)


@dataclass(frozen=True)
class Clock:
    """Measures the time of a row."""

    ends_at: float | None

    @property
    def is_over(self) -> bool:
        return self.ends_at is not None and time.monotonic() >= self.ends_at


@dataclass
class Figures:
    """Holds the result of a row. met: whether it met its target. details: figures by name, JSON values."""

    target: str
    cases: int
    failures: int
    met: bool
    details: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    """What failed, one line each, the first ones."""


class Row(Protocol):
    """Runs one row: a module's function `run`."""

    def __call__(self, scale: Scale) -> Figures: ...


MAX_FINDINGS = 20


class Findings:
    """Counts failures and stores the first few texts."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.count = 0
        self.lines: list[str] = []
        self._say = say

    def add(self, line: str) -> None:
        """Adds one failure."""
        self.count += 1
        if len(self.lines) < MAX_FINDINGS:
            self.lines.append(line)
        if self._say is not None:
            self._say(line)
