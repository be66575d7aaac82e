"""Tests timeouts: values that are not positive, finite numbers are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from gradrule._rpc import call_routes

WRONG = [0, -1, float("inf"), float("nan"), "3", True, [1.0], np.float32("nan")]


@pytest.mark.parametrize("timeout", WRONG, ids=repr)
def test_wrong_timeouts_are_refused_everywhere(timeout: Any) -> None:
    says = "timeout is a positive number of seconds, not "
    for connect in (gr.connect, gr.aio.connect):
        with pytest.raises(gr.errors.InvalidParamError, match=says):
            connect("localhost:1", timeout=timeout)
    with gr.connect("localhost:1") as client:
        for call in (client.list_programs, client.wait_ready):
            with pytest.raises(gr.errors.InvalidParamError, match=says):
                call(timeout=timeout)

    async def ask() -> None:
        async with gr.aio.connect("localhost:1") as client:
            for call in (client.list_programs, client.wait_ready):
                with pytest.raises(gr.errors.InvalidParamError, match=says):
                    await call(timeout=timeout)

    asyncio.run(ask())


def test_connect_needs_a_timeout() -> None:
    with pytest.raises(gr.errors.InvalidParamError, match="not None"):
        gr.connect("localhost:1", timeout=None)


def test_right_timeouts() -> None:
    assert call_routes.call_timeout(None, 30.0) == 30.0
    assert call_routes.call_timeout(np.float32(0.5), 30.0) == 0.5
    assert call_routes.call_timeout(3, 30.0) == 3.0
    # Beyond what gRPC's clock holds the deadline would have passed at once.
    assert call_routes.checked_timeout(1e300) == 1e9
    assert call_routes.checked_timeout(10**400) == 1e9
