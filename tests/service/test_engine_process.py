"""A real engine process, controlled as by the front end, without spares."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import tensorflow as tf

from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.link import process as process_module
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import Kind
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import EngineRefused, EngineTimes, ProcessOptions, start_process
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import EndReason, EngineLost, ProgramNotLoaded
from tests.call_payloads import call_payload
from tests.processes import count_descriptors
from tests.service import loop_graphs
from tests.service.shared_fork_server import SharedForkServer
from tests.waiting import wait_for_condition

pytestmark = pytest.mark.asyncio(loop_scope="module")


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def _pool(device: str = "cpu", **words: Any) -> EnginePool:
    """Returns a pool with one engine of two threads."""
    return EnginePool(ProcessOptions(device, 2), spares=0, **words)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fork_server() -> AsyncIterator[SharedForkServer]:
    server = SharedForkServer()
    yield server
    await server.end()


@pytest.fixture
def quick_starts(fork_server: SharedForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets pools fork their engines from one shared process."""
    monkeypatch.setattr(process_module, "ForkServer", lambda: fork_server)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(quick_starts: None) -> AsyncIterator[Engine]:
    """Returns an engine of two threads."""
    pool = _pool(times=EngineTimes(retry_delay_s=0.05))
    await pool.start()
    yield pool.engines[0]
    await pool.stop()


async def _compile_endless(engine: Engine) -> None:
    graph = loop_graphs.endless()
    request = link_pb2.CompileRequest(
        key="endless",
        graph=graph.SerializeToString(),
        inputs=[tensor_pb2.TensorSpec(name="x", dtype=tensor_pb2.DT_FLOAT)],
        fetches=[link_pb2.Endpoint(name="y", tensor="y:0")],
    )
    await engine.call(Kind.COMPILE, request.SerializeToString(), _in(60))


def _run(x: float) -> bytes:
    call = evaluate_pb2.EvaluateRequest()
    call.feeds.add(name="x").value.inline_tensor.ParseFromString(
        tf.make_tensor_proto(x, tf.float32).SerializeToString()
    )
    return call_payload(link_pb2.RunRequest(key="endless"), call)


@pytest.mark.usefixtures("quick_starts")
async def test_dead_engine_is_replaced_and_reported() -> None:
    changes: list[bool] = []
    lost = asyncio.Event()

    def note(ready: bool) -> None:
        changes.append(ready)
        if not ready:
            lost.set()

    pool = _pool(on_change=note)
    await pool.start()
    (engine,) = pool.engines
    try:
        assert pool.greeting.device == "CPU:0"
        assert "Sign" in pool.greeting.gradients
        first = engine.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        # The next engine starts within milliseconds, so polling could miss the time without one.
        async with asyncio.timeout(60):
            await lost.wait()
        with pytest.raises(GradruleError) as refusal:
            await engine.call(Kind.RUN, b"", _in(1.0))
        assert refusal.value.reason == errors_pb2.ERROR_REASON_ENGINE_UNAVAILABLE
        assert refusal.value.retry_after_s
        await wait_for_condition(lambda: engine.pid)
        assert engine.generation == 3
        assert changes == [True, False, True]
        call = evaluate_pb2.EvaluateRequest()
        with pytest.raises(ProgramNotLoaded) as unknown_key:
            await engine.call(Kind.RUN, call_payload(link_pb2.RunRequest(key="nothing"), call), _in(10))
        assert unknown_key.value.reason == errors_pb2.ERROR_REASON_INTERNAL
        last = engine.pid
        assert last is not None
        assert dict(pool.engines[0].ended) == {"killed": 1}
        assert str(engine.last_end) == "SIGKILL"
    finally:
        await pool.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


@pytest.mark.usefixtures("quick_starts")
async def test_missing_device_refuses_the_start() -> None:
    pool = _pool("gpu:7")
    with pytest.raises(EngineRefused, match=r"gpu:7.*--device cpu"):
        await pool.start()
    await pool.stop()


async def test_waiting_call_is_dropped_and_overrunning_call_ends_the_engine(
    engine: Engine,
) -> None:
    """Two endless calls occupy both threads; the deadline of a third passes: only theirs end the engine."""
    await _compile_endless(engine)
    first = engine.pid
    ends_at = _in(7.0)
    hanging = [asyncio.create_task(engine.call(Kind.RUN, _run(loop_graphs.ENDLESS), ends_at)) for _ in range(2)]
    await asyncio.sleep(0.5)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await engine.call(Kind.RUN, _run(loop_graphs.ENDS), _in(0.5))
    waiting = asyncio.create_task(engine.call(Kind.RUN, _run(loop_graphs.ENDS), _in(60)))
    await asyncio.sleep(1.5)
    assert engine.pid == first
    await asyncio.sleep(max(0.0, ends_at - asyncio.get_running_loop().time()))
    for call in hanging:
        call.cancel()
    await asyncio.wait(hanging)
    with pytest.raises(EngineLost) as lost:
        await waiting
    assert not lost.value.is_blamable
    await wait_for_condition(lambda: engine.pid not in (None, first))


async def test_only_the_overrunning_call_is_blamed(engine: Engine) -> None:
    await _compile_endless(engine)
    beside = asyncio.create_task(engine.call(Kind.RUN, _run(loop_graphs.ENDLESS), _in(60)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await engine.call(Kind.RUN, _run(loop_graphs.ENDLESS), _in(0.5))
    with pytest.raises(EngineLost) as lost:
        await beside
    assert lost.value.engine_end.reason is EndReason.OVERRUN
    assert not lost.value.is_blamable


@pytest.mark.parametrize("kept", [0, 1])
async def test_cancelled_call_runs_until_its_deadline_on_an_engine_with_state(engine: Engine, kept: int) -> None:
    await _compile_endless(engine)
    engine.add_kept(engine.generation, kept)
    first = engine.pid
    hanging = asyncio.create_task(engine.call(Kind.RUN, _run(loop_graphs.ENDLESS), _in(6 if kept else 300)))
    await asyncio.sleep(0.5)
    hanging.cancel()
    if kept:
        # Longer than the patience and the grace period together.
        await asyncio.sleep(1.5)
        assert engine.pid == first
    await wait_for_condition(lambda: engine.pid not in (None, first))


async def test_expired_call_is_not_sent(engine: Engine) -> None:
    with pytest.raises(GradruleError) as late:
        await engine.call(Kind.COMPILE, b"not looked at", _in(-1))
    assert late.value.reason == errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED


async def test_start_is_retried_after_any_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failures = start_process, [OSError(errno.EMFILE, "Too many open files"), RuntimeError("odd")]

    async def failing(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return await start(*args)

    monkeypatch.setattr(process_module, "start_process", failing)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await wait_for_condition(lambda: engine.generation == 3)
    assert [record.exc_info is not None for record in caplog.records if "cannot be started" in record.message] == [
        True,
        True,
    ]


async def test_failed_start_leaves_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_process(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    pool = _pool()
    before = count_descriptors()
    with pytest.raises(OSError, match="memory"):
        await pool.start()
    await pool.stop()
    assert count_descriptors() == before
