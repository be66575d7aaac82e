"""Fixtures of tests of real servers: two tenants, and an engine that must live on."""

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
    """After the test the same engine still answers right."""
    before = server.engine_pid()
    assert before is not None
    yield
    raw.assert_healthy(channel)
    assert server.engine_pid() == before


@pytest.fixture
def names(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Names of two tenants that only this test knows."""
    return f"ada of {request.node.name}", f"grace of {request.node.name}"


@pytest.fixture
def ada(guarded: Guarded, names: tuple[str, str]) -> Iterator[gr.Client]:
    """Returns a client of the first tenant; where one tenant does harm, it is this one."""
    with guarded.connect(names[0]) as client:
        yield client


@pytest.fixture
def grace(guarded: Guarded, names: tuple[str, str]) -> Iterator[gr.Client]:
    """Returns a client of the second tenant."""
    with guarded.connect(names[1]) as client:
        yield client


@pytest.fixture
def channels(guarded: Guarded) -> Iterator[Callable[[str], grpc.Channel]]:
    """`channels(tenant)`: a bare channel with the tenant's credentials."""
    with ExitStack() as stack:

        def channel(tenant: str) -> grpc.Channel:
            call = grpc.access_token_call_credentials(guarded.web_token(tenant))
            both = grpc.composite_channel_credentials(gr.tls(guarded.authority.file), call)
            return stack.enter_context(grpc.secure_channel(guarded.running.target, both))

        yield channel
