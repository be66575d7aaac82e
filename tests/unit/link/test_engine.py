"""A real engine process, held as the front end holds it."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.link.engine import Engine, EngineRefused
from gradrule_server.link.framing import Kind
from gradrule_server.link.v1 import link_pb2


async def _until(condition, seconds: float = 60) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


async def test_an_engine_that_dies_is_replaced_and_says_so() -> None:
    changes: list[bool] = []
    engine = Engine("cpu", 2, changes.append)
    await engine.start()
    try:
        assert engine.greeting.device == "CPU:0"
        assert "Sign" in engine.greeting.gradients
        first = engine._process
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        await _until(lambda: not engine.ready)
        with pytest.raises(GradruleError) as refusal:
            await engine.call(Kind.RUN, b"", 1.0)
        assert refusal.value.reason == errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE
        assert refusal.value.retry_after_s
        await _until(lambda: engine.ready)
        assert engine.generation == 2
        assert changes == [True, False, True]
        with pytest.raises(GradruleError) as unknown_key:
            await engine.call(Kind.RUN, link_pb2.RunRequest(key="nothing").SerializeToString(), 10.0)
        assert unknown_key.value.reason == errors_pb2.ERROR_REASON_INTERNAL
    finally:
        await engine.stop()
    assert engine._process is not None and engine._process.returncode is not None


async def test_a_device_that_is_not_there_refuses_the_start() -> None:
    engine = Engine("gpu:7", 2)
    with pytest.raises(EngineRefused, match=r"gpu:7.*--device cpu"):
        await engine.start()
