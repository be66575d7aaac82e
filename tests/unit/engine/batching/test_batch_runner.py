"""Tests the answers to the requests of one frame, with a socket that only records what is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import errors_pb2, evaluate_pb2
from gradrule_server.engine.arguments import ArgumentReader
from gradrule_server.engine.batching import batch_runner, merging
from gradrule_server.engine.batching.analysis import MAX_EXAMPLES, Layout
from gradrule_server.engine.batching.batch_runner import BatchRunner
from gradrule_server.engine.batching.merging import BatchedCall, run_together
from gradrule_server.engine.build import build
from gradrule_server.engine.large_tensors import AttachedMemories
from gradrule_server.engine.program import BuiltProgram
from gradrule_server.engine.tensor_sources import BlobReader
from gradrule_server.errors import GradruleError
from gradrule_server.link.batching import pack_batch
from gradrule_server.link.framing import FrameSocket, Kind
from gradrule_server.link.v1 import link_pb2
from tests.unit.engine.building import prepared

REFUSED, PROVEN = link_pb2.BatchNotice.OUTCOME_REFUSED, link_pb2.BatchNotice.OUTCOME_PROVEN


def quotient() -> BuiltProgram:
    """Returns a program for 12 // x, which fails if an x is 0."""
    g = gr.Graph()
    g.op_output("FloorDiv", g.constant(np.int32(12)), g.placeholder("x", "int32", [None]), name="y")
    return build(prepared(g).request)


class Engine:
    """Runs requests of one program, and records answers, errors by request, and notices."""

    def __init__(self, built: BuiltProgram) -> None:
        self.answers: dict[int, evaluate_pb2.EvaluateResponse] = {}
        self.errors: dict[int, Exception] = {}
        self.notices: list[link_pb2.BatchNotice] = []
        self.runner = BatchRunner(
            cast(FrameSocket, self),
            ArgumentReader(cast(BlobReader, None)),
            AttachedMemories(None),
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
            request = link_pb2.RunRequest(key="k", request=call.SerializeToString())
            requests.append((number, (request.SerializeToString(),)))
        self.runner.run(99, b"".join(pack_batch(most, requests)))
        return self.notices[-1]

    def results(self) -> dict[int, list[int]]:
        return {
            number: tensor_codec.to_numpy(answer.outputs[0].value.inline_tensor).tolist()
            for number, answer in self.answers.items()
        }


def test_failing_values_fail_only_their_own_request() -> None:
    engine = Engine(quotient())
    assert engine.run([1], [2]).outcome == PROVEN
    assert engine.run([3], [0], [4, 5]).outcome == PROVEN
    assert engine.results() == {0: [4], 2: [3, 2]}
    assert isinstance(engine.errors[1], GradruleError)
    assert engine.errors[1].findings[0].reason == errors_pb2.ERROR_REASON_EXECUTION_FAILED
    engine.run([3], [4])
    assert [answer.batch_size for answer in engine.answers.values()] == [2, 2]


def test_failed_trial_leaves_all_requests_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(merging, "run_together", fails)
    engine = Engine(quotient())
    # A run has at most two examples, so there are two runs, and each is tried.
    assert engine.run([1], [2], [3], [4], most=2).outcome == REFUSED
    assert engine.results() == {0: [12], 1: [6], 2: [4], 3: [3]}
    assert not engine.errors


def test_failed_batch_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError

    engine = Engine(quotient())
    engine.run([1], [2])
    monkeypatch.setattr(batch_runner, "run_together", fails)
    assert engine.run([1], [2]).outcome == REFUSED
    assert engine.results() == {0: [12], 1: [6]}


def test_frame_that_fails_sends_a_fault_and_no_notice() -> None:
    engine = Engine(quotient())
    with pytest.raises(ValueError, match="batch of requests"):
        engine.runner.run(99, b"\1")
    assert not engine.notices


def test_batches_do_not_exceed_the_proven_size() -> None:
    engine = Engine(quotient())
    engine.run([1], [2])
    half = [1] * (MAX_EXAMPLES // 2)
    engine.run(half, half, half, most=10 * MAX_EXAMPLES)
    assert [answer.batch_size for answer in engine.answers.values()] == [MAX_EXAMPLES, MAX_EXAMPLES, 0]


def test_results_with_unexpected_row_count_are_not_split() -> None:
    """Tries a wrong layout."""
    calls = [BatchedCall(number, 0, 0, [np.array([1], np.int32)], 1) for number in range(2)]
    with pytest.raises(ValueError, match="2 rows for each of 2 examples"):
        run_together(quotient(), Layout((True,), (2,)), calls, 2)
