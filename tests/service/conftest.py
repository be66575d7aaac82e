"""What most tests of refusals end with."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from tests.service import raw
from tests.service.servers import RunningServer


@pytest.fixture
def same_engine(server: RunningServer, channel: grpc.Channel) -> Iterator[None]:
    """After the test the same engine still answers right."""
    before = server.engine_pid()
    assert before is not None
    yield
    raw.assert_healthy(channel)
    assert server.engine_pid() == before
