"""Tests that calls of a server that goes away are sent again, also if many fail at once or their feeds are large."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import gradrule as gr
from tests.unit.client.answering import MIB, PROGRAM, Answering

CALLS = 16


class GoingAway(Answering):
    """Refuses the first attempts, all at once when `count` have come, as a server does that is killed."""

    def __init__(self, count: int) -> None:
        self._all_came = threading.Barrier(count)
        super().__init__()

    def _evaluate(self, raw: bytes, context: Any) -> bytes:
        if "grpc-previous-rpc-attempts" not in dict(context.invocation_metadata()):
            self._all_came.wait(30)
            context.abort(grpc.StatusCode.UNAVAILABLE, "going away")
        return super()._evaluate(raw, context)


@pytest.fixture
def answering(request: pytest.FixtureRequest) -> Iterator[Answering]:
    made = GoingAway(request.param)
    yield made
    made.stop()


@pytest.mark.parametrize(("answering", "size"), [(CALLS, 2), (1, MIB)], indirect=["answering"])
def test_calls_of_a_server_that_goes_away_are_sent_again(answering: Answering, size: int) -> None:
    x = np.arange(size, dtype=np.float32)
    with gr.connect(answering.target, stream=False) as client, ThreadPoolExecutor(CALLS) as threads:
        program = client.program(PROGRAM)
        count = CALLS if size == 2 else 1
        results = list(threads.map(lambda _: program.evaluate({"x": x}), range(count)))
    assert [np.array_equal(result.gradients["x"], x) for result in results] == [True] * count
    assert answering.alone == count
