"""The state machine of a call whose engine may end: its states, the events, and the table of transitions.

A call starts in SHARED (or in PINNED, if only one engine holds what it needs). Usually it completes there. If its
engine ends, the call runs again:

- The engine's end has nothing to do with any graph (it was killed from outside, or ended because of another call's
  deadline): the call runs again in the same way.
- The engine crashed while the call ran in it: the call may be the cause. A trial follows: it runs ALONE, in an
  engine in which nothing else runs. If that engine crashes too, the call is the culprit: its caller gets the error,
  and its graph goes into quarantine. If the call completes, its caller notices nothing but the time.
- The engine has no memory left: its idle programs are unloaded, or it gets a new process, which holds nothing yet, and
  the call runs again. This says nothing about the graph, so there is no quarantine; a call that does not fit alone
  fails with MEMORY_EXCEEDED.
- While the call waits for its trial, another call may be found to be the culprit: then this one is cleared.

`call_recovery` drives this machine: it runs the call as the state says, turns the outcome into an event, and looks up
the next state here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType


class CallState(enum.Enum):
    """How a call runs next, or how it ended."""

    SHARED = enum.auto()
    """It runs in any engine of its tenant, beside other calls."""
    PINNED = enum.auto()
    """It runs in the one engine that holds its session; no other engine can run it."""
    ALONE = enum.auto()
    """A trial: it is suspected of a crash, and runs in an engine of its own that is thrown away afterwards."""
    REPEATED = enum.auto()
    """It completed alone, and runs once more beside other calls: its engine has to keep what the call leaves there."""

    ANSWERED = enum.auto()
    """Final: the caller gets the answer."""
    FAILED = enum.auto()
    """Final: the caller gets the error; the loss of the engine is recorded in the crash history."""
    QUARANTINED = enum.auto()
    """Final: the call crashed an engine in which nothing else ran. The caller gets the error; the graph is refused."""

    @property
    def is_final(self) -> bool:
        """Whether the call does not run again."""
        return self in _FINAL


_FINAL = frozenset({CallState.ANSWERED, CallState.FAILED, CallState.QUARANTINED})


class Event(enum.Enum):
    """The outcome of one run of a call."""

    COMPLETED = enum.auto()
    """The engine answered."""
    COMPLETED_AND_UNDONE = enum.auto()
    """The engine answered, but what the call left there was for an engine that stays."""
    NOT_LOADED = enum.auto()
    """The engine had dropped the program."""
    ENGINE_ENDED = enum.auto()
    """The engine ended for a reason that no graph can cause, or before the call started."""
    ENGINE_CRASHED = enum.auto()
    """The engine ended while the call ran, and the call may be the cause."""
    CRASHED_BY_OTHERS = enum.auto()
    """The engine ended while the call ran, but a call of a graph that never completed before is the likelier cause."""
    CLEARED = enum.auto()
    """Another call was found to be the culprit, or another call of the same graph completed alone."""
    NO_MEMORY = enum.auto()
    """The engine has no memory left. Without its idle programs, or as another process, it may have enough."""
    NO_MEMORY_AGAIN = enum.auto()
    """The new process has no memory left either, beside other programs."""
    DOES_NOT_FIT = enum.auto()
    """The engine has no memory left, although it holds nothing else."""
    TRIED_TOO_OFTEN = enum.auto()
    """The engine was killed from outside, or had dropped the program, more often than is worth another run."""


TRANSITIONS: Mapping[tuple[CallState, Event], CallState] = MappingProxyType(
    {
        (CallState.SHARED, Event.COMPLETED): CallState.ANSWERED,
        (CallState.SHARED, Event.NOT_LOADED): CallState.SHARED,
        (CallState.SHARED, Event.ENGINE_ENDED): CallState.SHARED,
        (CallState.SHARED, Event.CRASHED_BY_OTHERS): CallState.SHARED,
        (CallState.SHARED, Event.ENGINE_CRASHED): CallState.ALONE,
        (CallState.SHARED, Event.NO_MEMORY): CallState.SHARED,
        (CallState.SHARED, Event.NO_MEMORY_AGAIN): CallState.ALONE,
        (CallState.SHARED, Event.DOES_NOT_FIT): CallState.FAILED,
        (CallState.SHARED, Event.TRIED_TOO_OFTEN): CallState.FAILED,
        (CallState.PINNED, Event.COMPLETED): CallState.ANSWERED,
        (CallState.PINNED, Event.NOT_LOADED): CallState.PINNED,
        (CallState.PINNED, Event.ENGINE_ENDED): CallState.FAILED,
        (CallState.PINNED, Event.ENGINE_CRASHED): CallState.FAILED,
        (CallState.PINNED, Event.NO_MEMORY): CallState.PINNED,
        (CallState.PINNED, Event.DOES_NOT_FIT): CallState.FAILED,
        (CallState.PINNED, Event.TRIED_TOO_OFTEN): CallState.FAILED,
        (CallState.ALONE, Event.COMPLETED): CallState.ANSWERED,
        (CallState.ALONE, Event.COMPLETED_AND_UNDONE): CallState.REPEATED,
        (CallState.ALONE, Event.NOT_LOADED): CallState.ALONE,
        (CallState.ALONE, Event.ENGINE_ENDED): CallState.ALONE,
        (CallState.ALONE, Event.ENGINE_CRASHED): CallState.QUARANTINED,
        (CallState.ALONE, Event.CLEARED): CallState.SHARED,
        (CallState.ALONE, Event.DOES_NOT_FIT): CallState.FAILED,
        (CallState.ALONE, Event.TRIED_TOO_OFTEN): CallState.FAILED,
        (CallState.REPEATED, Event.COMPLETED): CallState.ANSWERED,
        (CallState.REPEATED, Event.NOT_LOADED): CallState.REPEATED,
        (CallState.REPEATED, Event.ENGINE_ENDED): CallState.REPEATED,
        # It completes alone and crashes beside others: another trial would show nothing new.
        (CallState.REPEATED, Event.ENGINE_CRASHED): CallState.FAILED,
        (CallState.REPEATED, Event.DOES_NOT_FIT): CallState.FAILED,
        (CallState.REPEATED, Event.TRIED_TOO_OFTEN): CallState.FAILED,
    }
)
"""The next state, by state and event. Pairs that are missing cannot happen."""
