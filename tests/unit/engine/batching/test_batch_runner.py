"""Tests the answers to the requests of one frame, with a socket that only records what is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, evaluate_pb2, program_pb2
from gradrule_server.engine import batching
from gradrule_server.engine.arguments import ArgumentReader
from gradrule_server.engine.batching import COMPARED_RUNS, BatchRunner
from gradrule_server.engine.build import build
from gradrule_server.engine.program import BuiltProgram
from gradrule_server.engine.tensor_sources import BlobReader
from gradrule_server.errors import GradruleError
from gradrule_server.link.batching import pack_batch
from gradrule_server.link.framing import FrameSocket, Kind
from gradrule_server.link.v1 import link_pb2
from tests.call_payloads import call_payload
from tests.unit.engine.building import prepared

UNDECIDED = link_pb2.BatchNotice.OUTCOME_UNSPECIFIED
EQUAL = link_pb2.BatchNotice.OUTCOME_EQUAL
REFUSED = link_pb2.BatchNotice.OUTCOME_REFUSED
BATCHING = program_pb2.Batching(axis=0)


def quotient() -> BuiltProgram:
    """Returns a program for 12 // x, which fails if an x is 0."""
    g = gr.Graph()
    g.op_output("FloorDiv", g.constant(np.int32(12)), g.placeholder("x", "int32", [None]), name="y")
    return build(prepared(g, batching=BATCHING).request)


def centred() -> BuiltProgram:
    """Returns a program for x minus the largest x of all examples, which declares batching wrongly."""
    g = gr.Graph()
    x = g.placeholder("x", "int32", [None])
    g.op_output("Sub", x, g.op_output("Max", x, g.constant(np.array([0], np.int32)), keep_dims=True), name="y")
    return build(prepared(g, batching=BATCHING).request)


class Engine:
    """Runs requests of one program, and records answers, errors by request, and notices."""

    def __init__(self, built: BuiltProgram) -> None:
        self.answers: dict[int, evaluate_pb2.EvaluateResponse] = {}
        self.errors: dict[int, Exception] = {}
        self.notices: list[link_pb2.BatchNotice] = []
        self.runner = BatchRunner(
            cast(FrameSocket, self),
            ArgumentReader(cast(BlobReader, None)),
            lambda key: built,
            self.answering,
        )

    def send(self, kind: Kind, number: int, payload: Any) -> None:
        if kind is Kind.BATCH_NOTICE:
            self.notices.append(link_pb2.BatchNotice.FromString(payload))
        else:
            assert number not in self.answers
            self.answers[number] = evaluate_pb2.EvaluateResponse.FromString(b"".join(payload))

    @contextlib.contextmanager
    def answering(self, number: int) -> Iterator[None]:
        try:
            yield
        except Exception as cause:
            self.errors[number] = cause

    def run(self, *feeds: list[int], most: int = 64) -> link_pb2.BatchNotice:
        """Runs requests in one frame; their ids count from 0."""
        self.answers.clear()
        self.errors.clear()
        requests = []
        for number, feed in enumerate(feeds):
            call = evaluate_pb2.EvaluateRequest()
            call.feeds.add(name="x").value.inline_tensor.CopyFrom(tensor_codec.to_message(np.array(feed, np.int32)))
            requests.append((number, (call_payload(link_pb2.RunRequest(key="k"), call),)))
        self.runner.run(99, b"".join(pack_batch(most, requests)))
        return self.notices[-1]

    def compare(self) -> None:
        """Runs as many frames of two requests as are compared before requests run together."""
        for number in range(COMPARED_RUNS):
            notice = self.run([1 + number], [2])
            assert [answer.batch_size for answer in self.answers.values()] == [0, 0]
            assert notice.outcome == (EQUAL if number == COMPARED_RUNS - 1 else UNDECIDED)

    def results(self) -> dict[int, list[int]]:
        return {
            number: tensor_codec.to_numpy(answer.outputs[0].value.inline_tensor).tolist()
            for number, answer in self.answers.items()
        }


def test_failing_values_fail_only_their_own_request() -> None:
    engine = Engine(quotient())
    engine.compare()
    assert engine.run([3], [0], [4, 5]).outcome == EQUAL
    assert engine.results() == {0: [4], 2: [3, 2]}
    assert isinstance(engine.errors[1], GradruleError)
    assert engine.errors[1].findings[0].reason == errors_pb2.ERROR_REASON_EXECUTION_FAILED
    engine.run([3], [4])
    assert [answer.batch_size for answer in engine.answers.values()] == [2, 2]


def test_failed_comparison_leaves_all_requests_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(batching, "run_together", fails)
    engine = Engine(quotient())
    # A run has at most two examples, so there are two runs.
    assert engine.run([1], [2], [3], [4], most=2).outcome == REFUSED
    assert engine.results() == {0: [12], 1: [6], 2: [4], 3: [3]}
    assert not engine.errors


def test_failed_batch_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    engine = Engine(quotient())
    engine.compare()
    monkeypatch.setattr(batching, "run_together", fails)
    assert engine.run([1], [2]).outcome == REFUSED
    assert engine.results() == {0: [12], 1: [6]}


def test_frame_that_fails_sends_a_fault_and_no_notice() -> None:
    engine = Engine(quotient())
    with pytest.raises(ValueError, match="batch of requests"):
        engine.runner.run(99, b"\1")
    assert not engine.notices


def test_batches_do_not_exceed_the_largest_size() -> None:
    engine = Engine(quotient())
    engine.compare()
    engine.run([1] * 8, [1] * 8, [1] * 8, most=16)
    assert [answer.batch_size for answer in engine.answers.values()] == [16, 16, 0]


def test_program_whose_results_differ_is_never_merged_again() -> None:
    engine = Engine(centred())
    for _ in range(3):
        notice = engine.run([1], [5])
        assert notice.outcome == REFUSED
        assert notice.reason == "output 'y' differs when calls run together"
        assert engine.results() == {0: [0], 1: [0]}
        assert [answer.batch_size for answer in engine.answers.values()] == [0, 0]


def test_program_that_does_not_declare_batching_runs_its_calls_alone() -> None:
    g = gr.Graph()
    g.op_output("Neg", g.placeholder("x", "int32", [None]), name="y")
    engine = Engine(build(prepared(g).request))
    for _ in range(2 * COMPARED_RUNS):
        assert engine.run([1], [2]).outcome == UNDECIDED
    assert [answer.batch_size for answer in engine.answers.values()] == [0, 0]
    assert engine.results() == {0: [-1], 1: [-2]}
