"""Tests that calls of a server that goes away are sent again, also if many fail at once or their feeds are large."""

from __future__ import annotations

import asyncio
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


class LosingAnswers(Answering):
    """Breaks off each second answer after its headers, after which gRPC does not retry a call."""

    status = (grpc.StatusCode.UNAVAILABLE, "Connection reset by peer")

    def _evaluate(self, raw: bytes, context: Any) -> bytes:
        answer = super()._evaluate(raw, context)
        if self.alone % 2:
            context.send_initial_metadata(())
            context.abort(*self.status)
        return answer


@pytest.fixture
def losing() -> Iterator[LosingAnswers]:
    made = LosingAnswers()
    yield made
    made.stop()


# The second is what a call gets that arrives while a server stops.
@pytest.mark.parametrize("status", [LosingAnswers.status, (grpc.StatusCode.CANCELLED, "CANCELLED")])
def test_call_whose_answer_is_lost_is_sent_again(losing: LosingAnswers, status: Any) -> None:
    losing.status = status
    with gr.connect(losing.target, stream=False) as client:
        program = client.program(PROGRAM)
        assert program.evaluate({"x": [1.0, 2.0]}).gradients["x"].tolist() == [1.0, 2.0]
        assert losing.alone == 2
        assert [result.gradients["x"].tolist() for result in program.map([{"x": [3.0]}])] == [[3.0]]
    assert losing.alone == 4


def test_call_whose_answer_is_lost_is_sent_again_by_the_async_client(losing: LosingAnswers) -> None:
    async def body() -> None:
        async with gr.aio.connect(losing.target, stream=False) as client:
            program = await client.program(PROGRAM)
            assert (await program.evaluate({"x": [1.0, 2.0]})).gradients["x"].tolist() == [1.0, 2.0]

    asyncio.run(body())
    assert losing.alone == 2


def test_call_whose_answer_is_lost_twice_fails(losing: LosingAnswers, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(raw: bytes, context: Any) -> bytes:
        losing.alone = 0
        return LosingAnswers._evaluate(losing, raw, context)

    monkeypatch.setattr(losing, "_evaluate", lose)
    with gr.connect(losing.target, stream=False) as client:
        program = client.program(PROGRAM)
        with pytest.raises(gr.errors.UnavailableError, match="reset by peer"):
            program.evaluate({"x": [1.0]})
