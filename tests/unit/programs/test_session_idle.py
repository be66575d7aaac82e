"""A session that gets no message for some time ends; one that works on a message does not."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.programs.sessions import Session
from gradrule_server.quotas import Quota


def started_session(idle_s: float) -> Any:
    """Returns a session that holds no engine."""
    session = Session(MagicMock(), defaultdict(Quota.unlimited), idle_s=idle_s, handle_ttl_s=60.0)
    session._name = "s1"
    return session


@pytest.mark.timeout(60)
async def test_only_time_between_messages_counts() -> None:
    session = started_session(0.05)
    for _ in range(2):
        with session.working():
            await asyncio.sleep(0.2)
            assert not session.loss.done()
    cause = await session.loss
    assert cause.reason == errors_pb2.ERROR_REASON_SESSION_LOST
    assert "--session-idle-s" in cause.message
    session._service.end_session.assert_called_once_with("s1")
    # Whatever comes later is answered with the same error.
    session._process = SimpleNamespace(is_gone=False)
    with pytest.raises(type(cause), match="SESSION_LOST"):
        await session._check_process()


async def test_zero_disables_the_limit() -> None:
    session = started_session(0.0)
    with session.working():
        pass
    assert session._idle_timer is None
    session.close()


async def test_closed_session_does_not_end_again() -> None:
    session = started_session(0.01)
    with session.working():
        session.close()
    await asyncio.sleep(0.05)
    assert not session.loss.done()
