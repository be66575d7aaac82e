"""The table of transitions is complete: every state handles every event that can happen in it, and no call is stuck."""

from __future__ import annotations

import pytest

from gradrule_server.recovery.recovery_states import TRANSITIONS, CallState, Event

_RUNNING = [state for state in CallState if not state.is_final]
_ALWAYS_POSSIBLE = [
    Event.COMPLETED,
    Event.NOT_LOADED,
    Event.ENGINE_ENDED,
    Event.ENGINE_CRASHED,
    Event.TRIED_TOO_OFTEN,
]


@pytest.mark.parametrize("state", _RUNNING)
@pytest.mark.parametrize("event", _ALWAYS_POSSIBLE)
def test_every_running_state_handles_every_outcome(state: CallState, event: Event) -> None:
    assert (state, event) in TRANSITIONS


@pytest.mark.parametrize("state", [state for state in CallState if state.is_final])
def test_no_transition_leaves_a_final_state(state: CallState) -> None:
    assert not [pair for pair in TRANSITIONS if pair[0] is state]


@pytest.mark.parametrize("state", [CallState.ALONE, CallState.REPEATED, *(s for s in CallState if s.is_final)])
def test_every_state_can_be_reached(state: CallState) -> None:
    assert state in TRANSITIONS.values()


def test_only_a_crash_alone_leads_to_quarantine() -> None:
    pairs = [pair for pair, state in TRANSITIONS.items() if state is CallState.QUARANTINED]
    assert pairs == [(CallState.ALONE, Event.ENGINE_CRASHED)]


def test_a_pinned_call_never_runs_elsewhere() -> None:
    following = {state for (before, _), state in TRANSITIONS.items() if before is CallState.PINNED}
    assert following == {CallState.PINNED, CallState.ANSWERED, CallState.FAILED}
