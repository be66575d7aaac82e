"""How an engine's process ended, and what it said last."""

from __future__ import annotations

import enum
import re
import signal
import socket
from collections.abc import Hashable
from dataclasses import dataclass, field

_MAX_CHARS = 300

# A line of TensorFlow's at severity FATAL, in absl's form or in that of before, and what a C++ exception says that
# nobody caught.
_FATAL = re.compile(r"(?:F\d{4} \S+ +\d+|[-0-9]+ [:.0-9]+: F) \S+\] (?P<text>.+)|(?P<thrown>terminate called .+)")
_NO_MEMORY = re.compile(r"bad_alloc|[Oo]ut of memory|Cannot allocate memory|MemoryError")
_PATH = re.compile(r"(?<![\w.])(?:[\w.-]+)?(?:/[\w.+@-]+){2,}(?::\d+)?")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")


class Reason(enum.StrEnum):
    """Why an engine ended."""

    CRASH = "crash"
    """By a signal of its own making, or with an exit code."""
    MEMORY = "memory"
    """It took more memory than it may, or got none any more."""
    OVERRUN = "overrun"
    """A call went on after its deadline, or after it was cancelled."""
    HEARTBEAT = "heartbeat"
    """It answered nothing any more."""
    KILLED = "killed"
    """By somebody else's SIGKILL or SIGTERM."""
    STOPPED = "stopped"
    """It was to."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How an engine ended. `how`: `SIGABRT`, `exit code 3`; `fatal`: TensorFlow's own first line, without paths."""

    reason: Reason
    how: str
    fatal: str = ""

    @property
    def is_blamable(self) -> bool:
        """Whether what ran may be the cause."""
        return self.reason in (Reason.CRASH, Reason.MEMORY, Reason.HEARTBEAT)

    def __str__(self) -> str:
        return f"{self.how}: {self.fatal}" if self.fatal else self.how


@dataclass(slots=True, eq=False)
class Inquest:
    """What came out about an engine's end.

    `present`: the suspects of all that ran; None for a request without one. `unproven`: how many of those that ran
    never ran to an end before. `cleared`: those that have run to an end since; `noted`: those to which this end has
    been put down. `culprit`: the one that did it, once it is found; `verdict`: what it is told.
    """

    present: frozenset[Hashable | None] = frozenset()
    unproven: int = 0
    cleared: set[Hashable] = field(default_factory=set)
    noted: set[Hashable] = field(default_factory=set)
    culprit: Hashable | None = None
    verdict: Exception | None = None


_HOW = {
    Reason.MEMORY: "it took more memory than its limit (--memory-limit)",
    Reason.OVERRUN: "it was ended because a call overran its deadline",
    Reason.HEARTBEAT: "it was ended because it answered nothing any more",
    Reason.STOPPED: "it was stopped",
}
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)


def ending_of(code: int | None, ended_for: Reason | None, fatal: str, *, was_short: bool = False) -> Ending:
    """How a process with this exit code ended (negative: a signal), which was ended on purpose for `ended_for`.

    `was_short`: there was no memory left when it ended; the kernel kills as others do.
    """
    if ended_for is not None:
        return Ending(ended_for, _HOW.get(ended_for, ended_for), fatal)
    if code is None:
        return Ending(Reason.CRASH, "its connection broke", fatal)
    if code >= 0:
        return Ending(Reason.MEMORY if _NO_MEMORY.search(fatal) else Reason.CRASH, f"exit code {code}", fatal)
    how = _signal_name(-code)
    if -code == signal.SIGKILL and was_short:
        return Ending(Reason.MEMORY, f"{how}, when there was no more memory", fatal)
    if -code in _FROM_OUTSIDE:
        return Ending(Reason.KILLED, how, fatal)
    return Ending(Reason.MEMORY if _NO_MEMORY.search(fatal) else Reason.CRASH, how, fatal)


def fatal_text(line: str) -> str:
    """What a line of stderr says that tells of an end: without paths, addresses and host names; else nothing."""
    match = _FATAL.match(line)
    if match is None:
        return ""
    text = _PATH.sub("…", _ADDRESS.sub("…", match["text"] or match["thrown"]))
    host = socket.gethostname()
    if len(host) > 1:
        text = text.replace(host, "…")
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 1] + "…"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
