"""Tests timeouts: values that are refused, and the time for compiling."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import gradrule as gr
from gradrule._messages import call_arguments, request_messages, rpc_calls
from gradrule._messages.program_calls import ProgramBase
from gradrule._rpc import call_routes
from gradrule.v1 import program_pb2

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


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan"), "3", True, None], ids=repr)
def test_wrong_times_for_compiling_are_refused(timeout: Any) -> None:
    with pytest.raises(gr.errors.InvalidParamError, match="compile_timeout is a number of seconds, 0 or more"):
        gr.connect("localhost:1", compile_timeout=timeout)


def test_only_compiling_may_use_the_time_for_compiling() -> None:
    def limited(call: rpc_calls.Call[Any], timeout: float | None = None, compile_s: float = 300.0) -> Any:
        return call_routes.limit(call, timeout, 30.0, compile_s)

    g = gr.Graph()
    g.placeholder("x", "float32", [None])
    source, arguments = request_messages.sent_graph(g), call_arguments.ProgramArguments(fetches="x")
    call: Any = rpc_calls.evaluate(source, {"x": [1.0]}, None, arguments)
    assert limited(call, timeout=5.0) == 5
    assert limited(call, compile_s=0.0) == 30
    assert call.request.run_timeout_s is None
    assert limited(call) == 330
    assert call.request.run_timeout_s == 30
    assert limited(rpc_calls.compile_program(g, None, arguments)) == 330
    program = ProgramBase(program_pb2.Program(name="programs/p"))
    # The server may have removed the compiled program, so each call gets the time.
    calls: list[Any] = [program._call({}, None, None) for _ in range(2)]
    assert [limited(call) for call in calls] == [330, 330]
    assert calls[1].request.run_timeout_s == 30
    own_limit: Any = program._call({}, None, None)
    assert limited(own_limit, timeout=5.0) == 5
    assert own_limit.request.run_timeout_s is None
