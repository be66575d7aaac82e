"""What a row of the battery is given, and what it reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Scale:
    """How much of the long run a row does.

    share: of the long run's numbers; 1 is all. seconds: where given, the row does what fits into them instead.
    folder: where it puts what it leaves behind: failing inputs, data of servers.
    """

    share: float
    seed: int
    folder: Path
    seconds: float | None = None

    @property
    def is_sample(self) -> bool:
        """Whether a row does less than the long run."""
        return self.seconds is not None or self.share < 1

    def count(self, long: int, least: int = 1) -> int:
        """So many cases of the long run's."""
        return max(least, round(long * self.share))

    def clock(self, otherwise: float | None = None) -> Clock:
        """The time that the row has from now on. `otherwise`: seconds of a row whose length is a time."""
        limit = self.seconds
        if limit is None and otherwise is not None:
            limit = otherwise * self.share
        return Clock(None if limit is None else time.monotonic() + limit)


@dataclass(frozen=True)
class Clock:
    """Says when the time of a row is over."""

    ends_at: float | None

    @property
    def is_over(self) -> bool:
        return self.ends_at is not None and time.monotonic() >= self.ends_at


@dataclass
class Figures:
    """What a row found. met: whether the target stands. details: figures by name, JSON values."""

    target: str
    cases: int
    failures: int
    met: bool
    details: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    """What failed, one line each, the first ones."""


class Row(Protocol):
    """One row: a module's function `run`."""

    def __call__(self, scale: Scale) -> Figures: ...


MAX_FINDINGS = 20


class Findings:
    """Counts failures and keeps the first few in words."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.count = 0
        self.lines: list[str] = []
        self._say = say

    def add(self, line: str) -> None:
        """One failure."""
        self.count += 1
        if len(self.lines) < MAX_FINDINGS:
            self.lines.append(line)
        if self._say is not None:
            self._say(line)
