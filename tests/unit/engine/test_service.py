"""Tests how an engine handles the frames of a call."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError, EncodeError

import gradrule as gr
import gradrule_server.engine
from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2
from gradrule_server.engine import memory
from gradrule_server.engine.memory import _ProcessLimit
from gradrule_server.engine.service import EngineService
from gradrule_server.engine.tensor_sources import BlobReader
from gradrule_server.errors import NoMemoryLeft
from gradrule_server.link.framing import Frame, FrameSocket, Kind
from gradrule_server.link.messages import read_fault
from gradrule_server.link.operating_system import allocated_bytes
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.endings import ProgramNotLoaded
from tests.call_payloads import call_payload
from tests.unit.engine.building import prepared

_PACKAGE = Path(gradrule_server.engine.__file__).parent


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    """Yields the engine's and the front end's end of a link."""
    engine, front = socket.socketpair()
    with engine, front:
        yield FrameSocket(engine), FrameSocket(front)


def _answer(front: FrameSocket) -> Frame:
    """Returns the next frame that is no notice."""
    while (frame := front.receive()) is not None and frame.kind is Kind.MEMORY_NOTICE:
        pass
    assert frame is not None
    return frame


@pytest.mark.parametrize(
    ("cause", "is_short"),
    [
        (EncodeError("Failed to serialize proto"), True),
        (DecodeError("Error parsing message with type 'tensorflow.GraphDef': Arena alloc failed"), True),
        (DecodeError("Error parsing message with type 'tensorflow.GraphDef': Wire format was corrupt"), False),
        (MemoryError("std::bad_alloc"), True),
        (RuntimeError("can't start new thread"), True),
        (ValueError("something else"), False),
    ],
)
def test_lack_of_memory_is_told_as_such(
    ends: tuple[FrameSocket, FrameSocket], monkeypatch: pytest.MonkeyPatch, cause: Exception, is_short: bool
) -> None:
    engine, front = ends
    service = EngineService(engine, "CPU:0", BlobReader(None))

    def fail(_: Any) -> None:
        raise cause

    monkeypatch.setattr(service, "_answer", fail)
    service.handle(Frame(Kind.PREPARE, 1, b""))
    answer = _answer(front)
    told = read_fault(bytes(answer.payload))
    assert isinstance(told, NoMemoryLeft) is is_short
    assert (told.reason == errors_pb2.ERROR_REASON_MEMORY_EXCEEDED) is is_short
    if is_short:
        assert "0 programs are loaded" in told.message
        assert "--memory-limit" in told.message


def test_an_engine_without_any_memory_does_not_claim_to_hold_nothing(
    ends: tuple[FrameSocket, FrameSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end replaces only engines that hold something."""
    engine, front = ends
    monkeypatch.setattr(_ProcessLimit, "bytes", 1 << 40)
    EngineService(engine, "CPU:0", BlobReader(None)).refuse(1)
    answer = _answer(front)
    told = read_fault(bytes(answer.payload))
    assert isinstance(told, NoMemoryLeft)
    assert not told.holds_nothing
    assert "--memory-limit" in told.message


def test_repeated_small_call_runs_through_few_modules(ends: tuple[FrameSocket, FrameSocket]) -> None:
    engine, front = ends
    service = EngineService(engine, "CPU:0", BlobReader(None))
    g = gr.Graph()
    g.op_output("Relu", g.placeholder("x", "float32", [3]), name="y")
    request = prepared(g, {"Relu": "guided_relu"}, vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request
    request.key = "k"
    service.handle(Frame(Kind.COMPILE, 1, request.SerializeToString()))
    call = evaluate_pb2.EvaluateRequest()
    call.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(np.ones(3, np.float32)))
    run = Frame(Kind.RUN, 2, call_payload(link_pb2.RunRequest(key="k"), call))
    service.handle(run)
    files: set[str] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(_PACKAGE):
            files.add(path.name)

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        service.handle(run)
    finally:
        sys.setprofile(before)
    assert [_answer(front).kind for _ in range(3)] == [Kind.COMPILED, Kind.RAN, Kind.RAN]
    assert files == {"service.py", "run.py", "arguments.py", "program.py", "response_writer.py", "derivatives.py"}


def test_a_program_with_an_override_without_effect_is_refused_and_not_kept(
    ends: tuple[FrameSocket, FrameSocket],
) -> None:
    engine, front = ends
    service = EngineService(engine, "CPU:0", BlobReader(None))
    g = gr.Graph()
    x = g.placeholder("x", "float32", [3])
    g.op_output("Sign", x, name="aside")
    g.op_output("Relu", x, name="y")
    request = prepared(g, {"Sign": "ste"}, vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request
    service.handle(Frame(Kind.COMPILE, 1, request.SerializeToString()))
    told = read_fault(bytes(_answer(front).payload))
    assert told.reason == errors_pb2.ERROR_REASON_INACTIVE_OVERRIDE
    assert "override 'Sign' (rule 'ste') has no effect" in told.message
    assert "'aside' (Sign): off the path from ys to xs" in told.message
    run = call_payload(link_pb2.RunRequest(key=request.key), evaluate_pb2.EvaluateRequest())
    service.handle(Frame(Kind.RUN, 2, run))
    assert isinstance(read_fault(bytes(_answer(front).payload)), ProgramNotLoaded)


def _memory(front: FrameSocket) -> link_pb2.MemoryNotice:
    """Returns the next notice of memory; skips answers."""
    while (frame := front.receive()) is not None and frame.kind is not Kind.MEMORY_NOTICE:
        assert frame.kind is not Kind.FAULT, read_fault(bytes(frame.payload))
    assert frame is not None
    return link_pb2.MemoryNotice.FromString(bytes(frame.payload))


def _chain_request(nodes: int) -> link_pb2.CompileRequest:
    g = gr.Graph()
    value = g.placeholder("x", "float32", [3])
    for _ in range(nodes):
        value = g.op_output("Relu", value)
    g.op_output("Identity", value, name="y")
    request = link_pb2.CompileRequest()
    request.CopyFrom(prepared(g, {"Relu": "guided_relu"}, vjp=program_pb2.Vjp(ys=["y"], xs=["x"])).request)
    request.key = "k"
    return request


def test_memory_of_a_program_is_measured_and_freed(
    ends: tuple[FrameSocket, FrameSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what TensorFlow adds in the first run. A program refers to itself, so the collector has to free it."""
    monkeypatch.setattr(memory, "_MAX_GARBAGE_BYTES", 1 << 20)
    engine, front = ends
    service = EngineService(engine, "CPU:0", BlobReader(None))
    first = allocated_bytes()
    service.handle(Frame(Kind.COMPILE, 1, _chain_request(400).SerializeToString()))
    built = _memory(front)
    assert built.key == "k"
    assert built.program_bytes > 1 << 20
    assert built.used_bytes - first > 0.8 * built.program_bytes
    call = evaluate_pb2.EvaluateRequest()
    call.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(np.ones(3, np.float32)))
    run = Frame(Kind.RUN, 2, call_payload(link_pb2.RunRequest(key="k"), call))
    service.handle(run)
    ran = _memory(front)
    assert ran.program_bytes > built.program_bytes
    service.handle(run)
    service.handle(Frame(Kind.UNLOAD, 0, link_pb2.UnloadRequest(key="k").SerializeToString()))
    # The second run was not measured, so the next notice is that of the unloaded program.
    unloaded = _memory(front)
    assert unloaded.key == ""
    assert ran.used_bytes - unloaded.used_bytes > 0.8 * ran.program_bytes


def test_what_lacked_memory_is_freed_before_the_caller_is_told(
    ends: tuple[FrameSocket, FrameSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the exception and reference cycles keep what was half built."""
    engine, _ = ends
    service = EngineService(engine, "CPU:0", BlobReader(None))
    freed: list[bool] = []

    class Held:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            freed.append(True)

    def fail(_: Any) -> None:
        held = Held()
        raise MemoryError(f"std::bad_alloc in {type(held).__name__}")

    monkeypatch.setattr(service, "_answer", fail)
    monkeypatch.setattr(service, "_send_fault", lambda *_: freed.append(False))
    gc.disable()
    try:
        service.handle(Frame(Kind.COMPILE, 1, b""))
    finally:
        gc.enable()
    assert freed == [True, False]
