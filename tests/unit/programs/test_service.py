"""Calls from their bytes to the frames that engines receive."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message

from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2, session_pb2, tensor_pb2
from gradrule_server.errors import GradruleError, NoMemoryLeft, reason_name
from gradrule_server.link.framing import Kind, pack_header
from gradrule_server.link.messages import CallShape, split_values
from gradrule_server.link.v1 import link_pb2
from gradrule_server.policy import Limits
from gradrule_server.programs import loaded as loaded_module
from gradrule_server.programs.cache import InlineKey, SessionKey, StoredKey
from gradrule_server.programs.call_requests import MAX_TENSORS, EvaluateCall, translate
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.forward_handles import StreamHandles
from gradrule_server.programs.loaded import Loadable, LoadedPrograms
from gradrule_server.programs.runner import ProcessRef, RunOnce
from gradrule_server.programs.service import ProgramService
from gradrule_server.programs.sessions import Session
from gradrule_server.quotas import Quota
from gradrule_server.registry.blobs import BlobStore
from tests.unit.link.fake_engine import FakeEngine, FakePool

_LATE = 1e8
"""A deadline that no call reaches, loop time."""
_MARK = b"the content of a tensor"
_SPEC = program_pb2.ProgramSpec(fetches=["fetched"])
_SHAPE = CallShape(feeds=frozenset({"x"}))
_SPLIT = CallShape(feeds=frozenset({"x"}), split=True)


def feeds() -> list[tensor_pb2.NamedTensor]:
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DT_UINT8, tensor_content=_MARK)
    return [tensor_pb2.NamedTensor(name="x", value=tensor_pb2.TensorSource(inline_tensor=tensor))]


def inline_call(feeds: Sequence[tensor_pb2.NamedTensor] = ()) -> EvaluateCall:
    """Returns a call of the program in the cache, without the elements of x unless they are given."""
    call = translate(link_pb2.RawEvaluateRequest(spec=_SPEC.SerializeToString(), feeds=feeds))
    if not feeds:
        call.header.feeds.add(name="x")
    return call


class Fixture:
    """The program service of a tenant, with programs in its cache, and one engine."""

    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine()
        self.blobs = BlobStore(folder, 0)
        pool = FakePool(self.engine)
        loaded = LoadedPrograms(pool, self.blobs, 10, 10**6)
        rules: Any = SimpleNamespace(revision=0)
        programs: Any = None
        self.service = ProgramService(
            rules, programs, pool, loaded, Limits(), self.blobs, capacity=10, capacity_bytes=10**6, owner=""
        )
        compiled: Any = SimpleNamespace(
            param_settings=lambda params: [],
            digests_tail=b"",
            tail=b"",
            program=b"",
            placeholders=frozenset({"x"}),
        )
        program = RunnableProgram(compiled, Loadable("key", b""))
        spec_digest = hashlib.sha256(_SPEC.SerializeToString()).digest()
        session = program_pb2.ProgramSpec(fetches=["fetched"]).SerializeToString(deterministic=True)
        for key in (
            InlineKey(spec_digest, 0, _SHAPE),
            InlineKey(spec_digest, 0, _SPLIT),
            StoredKey("programs/p", CallShape()),
            SessionKey("s", session, _SHAPE),
        ):
            self.service.cache.put(key, program)

    async def evaluate(self, request: evaluate_pb2.EvaluateRequest) -> None:
        """Runs a request that arrives as bytes; the engine answers what it is sent."""
        raw = request.SerializeToString()

        async def parse(request_type: type[Any], raw: bytes) -> Any:
            return request_type.FromString(raw)

        used: Any = None
        await self.answered(self.service.evaluate(raw, parse, 0, _LATE, used), Kind.RUN)

    async def answered(self, call: Awaitable[Any], kind: Kind, reply: Message | None = None) -> Any:
        """Returns the result of a call for which the engine receives one more frame of a kind."""
        task = asyncio.ensure_future(call)
        sent = self.engine.next(kind, len(self.engine.sent(kind)) + 1)
        if not self.engine.sent(Kind.COMPILE):
            self.engine.answer(await self.engine.next(Kind.COMPILE), Kind.COMPILED)
        self.engine.answer(await sent, Kind.RAN, b"" if reply is None else reply.SerializeToString())
        return await task

    def handles(self) -> StreamHandles:
        """Returns the handles of a stream without limits."""
        return StreamHandles(self.service, defaultdict(Quota.unlimited), 60.0)

    async def session(self) -> Session:
        """Returns a session that has started."""
        session = Session(self.service, defaultdict(Quota.unlimited), idle_s=0.0, handle_ttl_s=60.0)
        session._name, session._process = "s", ProcessRef(self.engine, self.engine.generation)
        return session


async def _inline(fixture: Fixture) -> list[bytes]:
    await fixture.evaluate(evaluate_pb2.EvaluateRequest(spec=_SPEC, feeds=feeds()))
    return fixture.engine.sent(Kind.RUN)


async def _named(fixture: Fixture) -> list[bytes]:
    """The second call is known, so nothing is decided again."""
    for _ in range(2):
        await fixture.evaluate(evaluate_pb2.EvaluateRequest(program="programs/p", feeds=feeds()))
    return fixture.engine.sent(Kind.RUN)


async def _with_header(fixture: Fixture) -> list[bytes]:
    """The tensors are parsed by nobody."""
    header = evaluate_pb2.EvaluateHeader(program="programs/p")
    header.feeds.add(name="x", dtype=tensor_pb2.DT_UINT8, shape=[len(_MARK)])
    for _ in range(2):
        request = evaluate_pb2.EvaluateRequest(header=header.SerializeToString(), contents=[_MARK])
        await fixture.evaluate(request)
    return fixture.engine.sent(Kind.RUN)


async def _forward(fixture: Fixture) -> list[bytes]:
    call = inline_call(feeds=feeds())
    await fixture.answered(fixture.service.forward(call, "h", 0, _LATE), Kind.FORWARD, link_pb2.ForwardReply())
    sent = fixture.engine.sent(Kind.FORWARD)
    assert link_pb2.ForwardRequest.FromString(split_values(sent[0]).message).handle == "h"
    return sent


async def _pull_back(fixture: Fixture) -> list[bytes]:
    handles = fixture.handles()
    running = handles.forward(link_pb2.RawForwardRequest(), inline_call(), 0, _LATE)
    answer = await fixture.answered(running, Kind.FORWARD, link_pb2.ForwardReply())
    name = link_pb2.RawForwardResponse.FromString(answer).handle
    request = evaluate_pb2.PullBackRequest(handle=name, grad_ys=feeds())
    await fixture.answered(handles.pull_back(request, 0, _LATE), Kind.PULL_BACK)
    handles.close_all()
    return fixture.engine.sent(Kind.PULL_BACK)


async def test_pulling_back_without_memory_unloads_idle_programs_and_runs_once_more(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    handles = fixture.handles()
    running = handles.forward(link_pb2.RawForwardRequest(), inline_call(), 0, _LATE)
    answer = await fixture.answered(running, Kind.FORWARD, link_pb2.ForwardReply())
    request = evaluate_pb2.PullBackRequest(handle=link_pb2.RawForwardResponse.FromString(answer).handle)
    full = link_pb2.Fault(reason=errors_pb2.ERROR_REASON_MEMORY_EXCEEDED, message="no memory is left", no_memory=True)

    async def answer_last(count: int, kind: Kind, payload: bytes) -> None:
        await fixture.engine.next(Kind.PULL_BACK, count)
        sent = [number for kind, number, _ in fixture.engine.transport.sent if kind is Kind.PULL_BACK]
        header = pack_header(kind, sent[-1], len(payload))
        fixture.engine.fake.connection.data_received(header + payload)

    call = asyncio.create_task(handles.pull_back(request, 0, _LATE))
    await answer_last(1, Kind.FAULT, full.SerializeToString())
    await answer_last(2, Kind.RAN, b"")
    await call
    assert len(fixture.engine.sent(Kind.UNLOAD)) == 1
    # There is nothing left to unload.
    call = asyncio.create_task(handles.pull_back(request, 0, _LATE))
    await answer_last(3, Kind.FAULT, full.SerializeToString())
    with pytest.raises(NoMemoryLeft):
        await call
    handles.close_all()


async def _in_session(fixture: Fixture) -> list[bytes]:
    session = await fixture.session()
    request = session_pb2.SessionEvaluateRequest(fetches=["fetched"], feeds=feeds())
    await fixture.answered(
        session.evaluate(request, 0, _LATE, link_pb2.RawSessionRequest()), Kind.SESSION, link_pb2.SessionReply()
    )
    sent = fixture.engine.sent(Kind.SESSION)
    assert link_pb2.SessionRequest.FromString(split_values(sent[0]).message).session == "s"
    return sent


def test_calls_with_very_many_tensors_are_refused_before_they_are_translated() -> None:
    request = link_pb2.RawEvaluateRequest(program="programs/p", feeds=[{"name": "x"}] * (MAX_TENSORS + 1))
    with pytest.raises(GradruleError) as caught:
        translate(request)
    assert reason_name(caught.value.reason) == "LIMIT_EXCEEDED"


@pytest.fixture
def serialized(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Collects what the messages of API and link are serialized to."""
    found: list[bytes] = []

    def recording(serialize: Callable[..., bytes]) -> Callable[..., bytes]:
        def record(message: Message, **options: Any) -> bytes:
            found.append(serialize(message, **options))
            return found[-1]

        return record

    for module in (evaluate_pb2, link_pb2, session_pb2, tensor_pb2):
        for kind in list(vars(module).values()):
            if isinstance(kind, type) and issubclass(kind, Message):
                monkeypatch.setattr(kind, "SerializeToString", recording(kind.SerializeToString))
    return found


@pytest.mark.parametrize(
    ("run", "requests", "most"),
    [
        # Requests that the test itself serializes count: they are what a client sends.
        (_inline, 1, 0),
        (_named, 2, 0),
        (_with_header, 2, 0),
        (_forward, 0, 0),
        (_pull_back, 0, 0),
        (_in_session, 0, 0),
    ],
    ids=["inline", "named", "header", "forward", "pull back", "session"],
)
async def test_tensors_of_a_call_are_serialized_at_most_once(
    run: Callable[[Fixture], Awaitable[list[bytes]]],
    requests: int,
    most: int,
    tmp_path: Path,
    serialized: list[bytes],
) -> None:
    """The frame for the engine holds the values, and their bytes were copied into no other message."""
    fixture = Fixture(tmp_path)
    for values in await run(fixture):
        assert values.count(_MARK) == 1
        # An engine must not get the graph again.
        assert _SPEC.SerializeToString() not in values
    assert sum(_MARK in data for data in serialized) == requests + most


async def test_time_before_the_program_is_loaded_does_not_count_as_time_of_the_run(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    program = fixture.service.cache.get(InlineKey(hashlib.sha256(_SPEC.SerializeToString()).digest(), 0, _SHAPE))
    assert program is not None
    call = inline_call(feeds=feeds())
    call.header.run_timeout.FromSeconds(30)
    now = time.monotonic_ns()
    for _ in range(2):
        mode = RunOnce(asyncio.get_running_loop().time() + 300)
        plan = fixture.service.runner.plan(program, call.header)
        running = fixture.service.runner.run(plan, call.values, now - 100 * 10**9, now, mode)
        await fixture.answered(running, Kind.RUN)


async def test_only_the_deadline_limits_the_first_run_after_a_load(tmp_path: Path) -> None:
    """The first run compiles TensorFlow's functions. Another process of the engine compiles them again."""
    fixture = Fixture(tmp_path)
    raw = evaluate_pb2.EvaluateRequest(spec=_SPEC, feeds=feeds())
    raw.run_timeout.FromMilliseconds(50)
    loop = asyncio.get_running_loop()

    def evaluate(deadline_s: float) -> asyncio.Task[bytes]:
        request = translate(link_pb2.RawEvaluateRequest.FromString(raw.SerializeToString()))
        mode = RunOnce(loop.time() + deadline_s)
        return asyncio.create_task(fixture.service.run_inline(request, time.monotonic_ns(), mode))

    for _ in range(2):
        first = evaluate(60)
        fixture.engine.answer(await fixture.engine.next(Kind.COMPILE), Kind.COMPILED)
        sent = await fixture.engine.next(Kind.RUN)
        await asyncio.wait([first], timeout=0.2)
        assert not first.done()
        # A call that runs at the same time waits for the same functions.
        second = evaluate(60)
        sent_second = await fixture.engine.next(Kind.RUN, 2)
        await asyncio.wait([second], timeout=0.2)
        for payload in (sent, sent_second):
            fixture.engine.answer(payload, Kind.RAN)
        await asyncio.gather(first, second)
        with pytest.raises(GradruleError, match="run_timeout"):
            await evaluate(60)
        fixture.engine.start_another()


async def test_first_run_after_a_load_ends_at_the_deadline(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    request = inline_call(feeds())
    request.header.run_timeout.FromMilliseconds(50)
    ends_at = asyncio.get_running_loop().time() + 0.3
    mode = RunOnce(ends_at)
    running = asyncio.create_task(fixture.service.run_inline(request, time.monotonic_ns(), mode))
    fixture.engine.answer(await fixture.engine.next(Kind.COMPILE), Kind.COMPILED)
    await fixture.engine.next(Kind.RUN)
    assert mode.ends_at == ends_at
    connection = fixture.engine.fake.connection
    # The front end cancels calls at their deadlines.
    await asyncio.wait([running], timeout=0.35)
    running.cancel()
    async with asyncio.timeout(60):
        await connection.wait_closed()


async def test_first_run_has_more_time_than_its_deadline_if_the_load_took_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It optimizes what was loaded. A later run has not."""
    monkeypatch.setattr(loaded_module, "_FIRST_RUN_FACTOR", 1e6)
    fixture = Fixture(tmp_path)
    connection = fixture.engine.fake.connection
    request = evaluate_pb2.EvaluateRequest(spec=_SPEC, feeds=feeds())

    async def give_up(number: int) -> None:
        ends_at = 0.2
        mode = RunOnce(asyncio.get_running_loop().time() + ends_at)
        running = asyncio.create_task(fixture.service.run_inline(inline_call(feeds()), time.monotonic_ns(), mode))
        if number == 1:
            sent = await fixture.engine.next(Kind.COMPILE)
            await asyncio.sleep(0.01)
            fixture.engine.answer(sent, Kind.COMPILED)
        await fixture.engine.next(Kind.RUN, number)
        await asyncio.wait([running], timeout=ends_at)
        running.cancel()
        await asyncio.wait([running])

    await give_up(1)
    # Engines are ended half a second after deadlines.
    await asyncio.sleep(1.0)
    assert not connection.is_closed
    await fixture.evaluate(request)
    await give_up(3)
    async with asyncio.timeout(60):
        await connection.wait_closed()


async def test_forward_run_that_took_too_long_is_released(tmp_path: Path) -> None:
    fixture = Fixture(tmp_path)
    handles = fixture.handles()
    call, forward = inline_call(), link_pb2.RawForwardRequest()
    call.header.run_timeout.FromMilliseconds(100)
    # The limit does not apply to the first run of a loaded program.
    running = handles.forward(forward, call, time.monotonic_ns(), _LATE)
    await fixture.answered(running, Kind.FORWARD, link_pb2.ForwardReply())
    running = handles.forward(forward, call, time.monotonic_ns(), _LATE)
    with pytest.raises(GradruleError) as failure:
        await running
    assert failure.value.reason == errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED
    assert len(fixture.engine.sent(Kind.RELEASE)) == 1
