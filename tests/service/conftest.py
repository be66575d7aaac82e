"""Provides fixtures for tests of real servers: two tenants, and a check that the engine survives a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import pytest

import gradrule as gr
from tests.service import raw
from tests.service.guarded import Guarded
from tests.service.servers import RunningServer


@pytest.fixture
def same_engine(server: RunningServer, channel: grpc.Channel) -> Iterator[None]:
    """Checks that the same engine still answers after the test."""
    before = server.engine_pid()
    assert before is not None
    yield
    raw.assert_healthy(channel)
    assert server.engine_pid() == before


@pytest.fixture
def names(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Returns names of two tenants that only this test uses."""
    return f"ada of {request.node.name}", f"grace of {request.node.name}"


@pytest.fixture
def ada(guarded: Guarded, names: tuple[str, str]) -> Iterator[gr.Client]:
    """Returns a client of the first tenant: the harmful one where a test has one."""
    with guarded.connect(names[0]) as client:
        yield client


@pytest.fixture
def grace(guarded: Guarded, names: tuple[str, str]) -> Iterator[gr.Client]:
    """Returns a client of the second tenant."""
    with guarded.connect(names[1]) as client:
        yield client


@pytest.fixture
def channels(guarded: Guarded) -> Iterator[Callable[[str], grpc.Channel]]:
    """Returns a function that opens a plain channel with a tenant's credentials."""
    with ExitStack() as stack:

        def channel(tenant: str) -> grpc.Channel:
            call = grpc.access_token_call_credentials(guarded.web_token(tenant))
            both = grpc.composite_channel_credentials(gr.tls(guarded.authority.file), call)
            return stack.enter_context(grpc.secure_channel(guarded.running.target, both))

        yield channel
