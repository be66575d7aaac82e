"""Why an engine process ended, and the errors of the calls that were running in it."""

from __future__ import annotations

import enum
import re
import signal
import socket
from dataclasses import dataclass, field

from gradrule.v1 import errors_pb2
from gradrule_server.errors import Finding, GradruleError, error

_MAX_CHARS = 300
_EXIT_CODE = "exit code"
_RETRY_AFTER_S = 2.0

# A line that TensorFlow logs at severity FATAL, in absl's format or the older one, or the C++ runtime's line about an
# uncaught exception, or that of the dynamic linker about memory that each thread needs.
_FATAL = re.compile(
    r"(?:F\d{4} \S+ +\d+|[-0-9]+ [:.0-9]+: F) \S+\] (?P<text>.+)"
    r"|(?P<thrown>terminate called .+|cannot allocate memory .+|.*pthread_create\(\) failed.*)"
)
_NO_MEMORY = re.compile(
    r"bad_alloc|[Oo]ut of memory|[Cc]annot allocate memory|MemoryError|pthread_create\(\) failed"
    r"|Resource temporarily unavailable"
)
_PATH = re.compile(r"(?<![\w.])(?:[\w.-]+)?(?:/[\w.+@-]+){2,}(?::\d+)?")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")


class EndReason(enum.StrEnum):
    """Why an engine ended."""

    CRASH = "crash"
    """A signal raised by its own code, or an exit code."""
    MEMORY = "memory"
    """It exceeded its memory limit, or an allocation failed."""
    OVERRUN = "overrun"
    """The front end ended it: a call ran past its deadline, or went on after its cancellation."""
    HEARTBEAT = "heartbeat"
    """The front end ended it: it stopped answering pings."""
    FULL = "full"
    """The front end ended it: it had no memory left for a program, and a new process has."""
    EVICTED = "evicted"
    """The front end ended it: the engines of all tenants took too much memory, and those of its tenant the most."""
    KILLED = "killed"
    """Another process sent SIGKILL or SIGTERM."""
    STOPPED = "stopped"
    """The front end stopped it on purpose."""


BLAMABLE_REASONS = frozenset({EndReason.CRASH, EndReason.MEMORY, EndReason.HEARTBEAT})
"""Reasons that a graph can cause."""


@dataclass(slots=True)
class EngineEnd:
    """How an engine ended. All calls that were running in the engine share it.

    Attributes:
        reason: Why.
        description: For people: `SIGABRT`, `exit code 3`.
        fatal_message: TensorFlow's first fatal log message, without paths; empty if there was none.
        is_explained: Whether the call that caused it is known.
    """

    reason: EndReason
    description: str
    fatal_message: str = ""
    is_explained: bool = field(default=False, compare=False)

    @property
    def is_blamable(self) -> bool:
        """Whether a graph that ran in the engine may be the cause."""
        return self.reason in BLAMABLE_REASONS

    @property
    def is_by_signal(self) -> bool:
        """Whether a signal ended the process. With an exit code, an exception of its own Python code ended it."""
        return not self.description.startswith(_EXIT_CODE)

    def __str__(self) -> str:
        return f"{self.description}: {self.fatal_message}" if self.fatal_message else self.description


@dataclass
class ProgramNotLoaded(GradruleError):
    """The engine does not hold the program that it should run; the program has to be loaded again."""


@dataclass(kw_only=True)
class EngineLost(GradruleError):
    """The engine ended before it answered. ENGINE_CRASHED, MEMORY_EXCEEDED, OVERLOADED.

    Attributes:
        engine_end: How the engine ended.
        ran_alone: Whether no other call was running in it.
    """

    engine_end: EngineEnd
    ran_alone: bool

    @property
    def is_blamable(self) -> bool:
        """Whether this call may be the cause.

        False if the call had not started, or if the engine was ended because of another call.
        """
        return self.engine_end.is_blamable


def engine_unavailable() -> GradruleError:
    """Returns ENGINE_UNAVAILABLE: there is no engine now, but one is being started."""
    return error(
        errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE,
        "no engine is ready; one is being started",
        retry_after_s=_RETRY_AFTER_S,
    )


def lost_before_start() -> EngineLost:
    """Returns the error of a request that had not started when its engine ended."""
    return EngineLost(
        [Finding(errors_pb2.ERROR_REASON_ENGINE_CRASHED, "the engine died before it took the request up")],
        engine_end=EngineEnd(EndReason.STOPPED, "its connection broke"),
        ran_alone=False,
    )


def lost_while_running(engine_end: EngineEnd, *, ran_alone: bool) -> EngineLost:
    """Returns the error of a request that was running when its engine ended. See `EngineLost`."""
    reason, message = errors_pb2.ERROR_REASON_ENGINE_CRASHED, f"the engine died while it held the request: {engine_end}"
    retry_after_s = None
    if engine_end.reason is EndReason.MEMORY:
        reason, message = errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, f"the engine ran out of memory: {engine_end}"
    elif engine_end.reason is EndReason.EVICTED:
        reason, retry_after_s = errors_pb2.ERROR_REASON_OVERLOADED, _RETRY_AFTER_S
        message = f"the engine was ended: {engine_end}; send the request again later, or a smaller batch"
    return EngineLost(
        [Finding(reason, message)],
        retry_after_s,
        engine_end=engine_end,
        ran_alone=ran_alone,
    )


_DESCRIPTIONS = {
    EndReason.MEMORY: "it took more memory than its limit (--memory-limit)",
    EndReason.OVERRUN: "it was ended because a call overran its deadline",
    EndReason.HEARTBEAT: "it was ended because it answered nothing any more",
    EndReason.STOPPED: "it was stopped",
    EndReason.EVICTED: "engines took more memory than the server has for them, and those of this tenant took the most",
    EndReason.FULL: "it had no memory left for another program",
}
_SIGNALS_OF_FAILED_ALLOCATIONS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
_SIGNALS_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM)


def end_from_exit(
    code: int | None,
    ended_for: EndReason | None,
    fatal_message: str,
    *,
    was_short_of_memory: bool = False,
    may_lack_memory: bool = False,
) -> EngineEnd:
    """Determines how a process ended.

    Args:
        code: Its exit code, negative for a signal; None if only the loss of the connection is known.
        ended_for: Why the front end ended it; None if the front end did not.
        fatal_message: See `EngineEnd`.
        was_short_of_memory: Whether memory was used up when it ended: the kernel then ends processes by SIGKILL.
        may_lack_memory: Whether a crash without a message may be a failed allocation.
    """
    if ended_for is not None:
        return EngineEnd(ended_for, _DESCRIPTIONS.get(ended_for, ended_for), fatal_message)
    if code is None:
        return EngineEnd(EndReason.CRASH, "its connection broke", fatal_message)
    reason = EndReason.MEMORY if _NO_MEMORY.search(fatal_message) else EndReason.CRASH
    if code >= 0:
        return EngineEnd(reason, f"{_EXIT_CODE} {code}", fatal_message)
    name = _signal_name(-code)
    if -code == signal.SIGKILL and was_short_of_memory:
        return EngineEnd(EndReason.MEMORY, f"{name}, when there was no more memory", fatal_message)
    if -code in _SIGNALS_OF_FAILED_ALLOCATIONS and may_lack_memory and not fatal_message:
        return EngineEnd(EndReason.MEMORY, f"{name}, when little memory was left", fatal_message)
    if -code in _SIGNALS_FROM_OUTSIDE:
        reason = EndReason.KILLED
    return EngineEnd(reason, name, fatal_message)


def fatal_message(line: str) -> str:
    """Extracts the message of a fatal error from a line of stderr, without paths, addresses and host names.

    Returns an empty string for all other lines.
    """
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
