"""Tests how an engine handles the frames of a call."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import gradrule as gr
import gradrule_server.engine
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2, program_pb2
from gradrule_server.engine.service import EngineService
from gradrule_server.engine.tensor_sources import BlobReader
from gradrule_server.link.framing import Frame, FrameSocket, Kind
from gradrule_server.link.v1 import link_pb2
from tests.unit.engine.building import prepared

_PACKAGE = Path(gradrule_server.engine.__file__).parent


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    """Yields the engine's and the front end's end of a link."""
    engine, front = socket.socketpair()
    with engine, front:
        yield FrameSocket(engine), FrameSocket(front)


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
    run = Frame(Kind.RUN, 2, link_pb2.RunRequest(key="k", request=call.SerializeToString()).SerializeToString())
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
    answers = [front.receive() for _ in range(3)]
    assert [answer and answer.kind for answer in answers] == [Kind.COMPILED, Kind.RAN, Kind.RAN]
    assert files == {"service.py", "run.py", "arguments.py", "program.py", "response_writer.py"}
