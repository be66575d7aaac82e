"""Large tensors between the front end and a real engine through shared memory, and its cleanup."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf.message import Message

from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, evaluate_pb2, tensor_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.link import arena
from gradrule_server.link.framing import Kind
from gradrule_server.link.messages import with_values
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import ProcessOptions
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import EngineLost
from tests.call_payloads import call_values
from tests.processes import count_descriptors, shared_bytes
from tests.service.graph_defs import build_graph_def, placeholder
from tests.waiting import wait_for_condition

_MEBIBYTE = 1024 * 1024
_LIMIT = 1024 * _MEBIBYTE


class EngineFixture:
    """Holds one confined engine with a memory limit, and its event loop."""

    def __init__(self, memory_limit: int) -> None:
        self.runner = asyncio.Runner()
        self.pool = EnginePool(ProcessOptions("cpu", 2, memory_limit=memory_limit), spares=0)
        self.runner.run(self.pool.start())
        self.runner.run(_compile(self.pool))

    def close(self) -> None:
        self.runner.run(self.pool.stop())
        self.runner.close()


@pytest.fixture(scope="module")
def front() -> Iterator[EngineFixture]:
    made = EngineFixture(2 << 30)
    yield made
    made.close()


@pytest.fixture(scope="module")
def front_without() -> Iterator[EngineFixture]:
    """Returns an engine without shared memory, as on a system that has none, and with a lower limit."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(arena, "has_sealed_memory", lambda: False)
        made = EngineFixture(_LIMIT)
    yield made
    made.close()


def _graph() -> Any:
    def build() -> None:
        x = placeholder("x", shape=(None,))
        tf.multiply(x, 2.0, name="y")

    return build_graph_def(build)


async def _ask(pool: EnginePool, kind: Kind, request: Message, values: bytes = b"") -> bytes:
    message = request.SerializeToString()
    payload = [message] if kind is Kind.COMPILE else with_values(message, 0, [values])
    return await pool.engines[0].call(kind, payload, asyncio.get_running_loop().time() + 60)


async def _compile(pool: EnginePool) -> None:
    request = link_pb2.CompileRequest(
        key="double",
        graph=_graph().SerializeToString(),
        inputs=[tensor_pb2.TensorSpec(name="x", dtype=tensor_pb2.DT_FLOAT, shape=tensor_codec.shape_message([None]))],
        fetches=[link_pb2.Endpoint(name="y", tensor="y:0")],
        max_rank=1,
    )
    await _ask(pool, Kind.COMPILE, request)


_DOUBLE = link_pb2.RunRequest(key="double")


def _call(values: np.ndarray) -> bytes:
    """Returns the bytes of a call with a header."""
    call = evaluate_pb2.EvaluateRequest()
    inline = call.feeds.add(name="x").value.inline_tensor
    inline.dtype = tensor_pb2.DT_FLOAT
    inline.tensor_shape.CopyFrom(tensor_codec.shape_message(values.shape))
    # Avoids TensorFlow's own message, which makes two more copies.
    inline.tensor_content = values.tobytes()
    return call_values(call)


def _values(answer: bytes) -> np.ndarray:
    response = evaluate_pb2.EvaluateResponse.FromString(answer)
    content = response.outputs[0].value.inline_tensor.tensor_content
    return np.frombuffer(content, np.float32)


def test_large_values_arrive_concurrently_and_their_memory_is_released(front: EngineFixture) -> None:
    front.runner.run(_send_large_values_concurrently(front.pool))


async def _send_large_values_concurrently(pool: EnginePool) -> None:
    pid = pool.engines[0].pid
    assert pid is not None
    before = shared_bytes(pid)
    chance = np.random.default_rng(0)
    given = [chance.random(size, np.float32) for size in (8 * _MEBIBYTE, 100_000, 3, 4 * _MEBIBYTE + 1)] * 3
    answers = await asyncio.gather(*(_ask(pool, Kind.RUN, _DOUBLE, _call(values)) for values in given))
    for values, answer in zip(given, answers, strict=True):
        np.testing.assert_array_equal(_values(answer), 2 * values)
    assert shared_bytes(pid) > before + 60 * _MEBIBYTE
    await wait_for_condition(lambda: shared_bytes(pid) <= before)


def test_stored_values_do_not_change_with_the_next_request(front: EngineFixture) -> None:
    front.runner.run(_store_values_and_send_another_request(front.pool))


async def _store_values_and_send_another_request(pool: EnginePool) -> None:
    size = 4 * _MEBIBYTE
    spec = tensor_pb2.TensorSpec(name="v", dtype=tensor_pb2.DT_FLOAT)
    variable = link_pb2.BoundVariable(spec=spec)
    variable.value.inline_tensor.ParseFromString(tf.make_tensor_proto(np.full(size, 7, np.float32)).SerializeToString())
    assign = link_pb2.SessionAssign(variables=[variable], opens=True)
    opened = link_pb2.SessionRequest(session="s", assign=assign, max_bytes=1 << 30)
    await _ask(pool, Kind.SESSION, opened)
    stored = link_pb2.SessionRun(run=_DOUBLE, store=["w"])
    run = link_pb2.SessionRequest(session="s", run=stored, max_bytes=1 << 30, deadline_ns=2**62)
    await _ask(pool, Kind.SESSION, run, _call(np.full(size, 3, np.float32)))
    for value in (1, 2):
        await _ask(pool, Kind.RUN, _DOUBLE, _call(np.full(size, value, np.float32)))
    read = link_pb2.SessionRequest(session="s", read=link_pb2.SessionRead(variables=["v", "w"]), max_bytes=1 << 30)
    reply = link_pb2.SessionReply.FromString(await _ask(pool, Kind.SESSION, read))
    found = [np.frombuffer(item.value.inline_tensor.tensor_content, np.float32) for item in reply.variables]
    assert [(float(item.min()), float(item.max())) for item in found] == [(7, 7), (6, 6)]


def test_killed_engine_leaves_no_descriptors_or_files(front: EngineFixture) -> None:
    """Neither in the front end's descriptor table nor in the file system."""
    front.runner.run(_kill_engine_twice(front.pool))


async def _kill_engine_twice(pool: EnginePool) -> None:
    descriptors, names = count_descriptors(), set(os.listdir("/dev/shm"))
    mapped = Path("/proc/self/maps").read_text().count("memfd:gradrule")
    engine = pool.engines[0]
    for _ in range(2):
        pid = engine.pid
        assert pid is not None
        # A stopped engine cannot answer before it is killed.
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.ensure_future(_ask(pool, Kind.RUN, _DOUBLE, _call(np.ones(8 * _MEBIBYTE, np.float32))))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineLost):
            await asked
        await wait_for_condition(lambda: pool.is_ready)
        await _compile(pool)
    await wait_for_condition(lambda: count_descriptors() == descriptors)
    # Programs of others may have files there for a moment.
    await wait_for_condition(lambda: set(os.listdir("/dev/shm")) <= names)
    assert Path("/proc/self/maps").read_text().count("memfd:gradrule") == mapped


def test_without_shared_memory_values_travel_through_the_socket(front_without: EngineFixture) -> None:
    values = np.arange(_MEBIBYTE, dtype=np.float32)
    answer = front_without.runner.run(_ask(front_without.pool, Kind.RUN, _DOUBLE, _call(values)))
    np.testing.assert_array_equal(_values(answer), 2 * values)


def test_request_beyond_the_memory_limit_is_refused_and_the_next_one_runs(front_without: EngineFixture) -> None:
    front_without.runner.run(_send_too_large_request_then_small_one(front_without.pool))


async def _send_too_large_request_then_small_one(pool: EnginePool) -> None:
    pid = pool.engines[0].pid
    # The engine itself uses a part of its limit.
    with pytest.raises(GradruleError) as caught:
        await _ask(pool, Kind.RUN, _DOUBLE, _call(np.ones(200 * _MEBIBYTE, np.float32)))
    assert caught.value.reason == errors_pb2.ERROR_REASON_MEMORY_EXCEEDED
    assert "of 1 GiB (--memory-limit) were in use" in caught.value.message
    values = np.arange(_MEBIBYTE, dtype=np.float32)
    np.testing.assert_array_equal(_values(await _ask(pool, Kind.RUN, _DOUBLE, _call(values))), 2 * values)
    assert pool.engines[0].pid == pid
