"""The loop of a driver: a process that holds one contender and measures it when the bench asks.

Lines of JSON on standard input and output. This module imports the standard library alone, so that drivers of peers,
which run in an environment without gradrule, can use it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

Call = Callable[[], object]
Many = Callable[[int, int], object]


class Contender(Protocol):
    """What a driver measures."""

    def call(self) -> object:
        """Does the work once."""

    def many(self, count: int, in_flight: int) -> object:
        """Does the work so many times, with so many requests under way at a time."""


def many_by_threads(call: Call, count: int, in_flight: int) -> None:
    """Makes calls from so many threads."""
    with ThreadPoolExecutor(in_flight) as threads:
        for _ in threads.map(lambda _: call(), range(count)):
            pass


def serve(contender: Contender) -> None:
    """Answers the bench's questions until standard input ends."""
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer: dict[str, Any] = _answer(contender, question)
        except Exception as failure:  # The bench raises it there; a driver must not end without an answer.
            answer = {"failure": f"{type(failure).__name__}: {failure}"[:2000]}
        print(json.dumps(answer), file=answers)


def _answer(contender: Contender, question: dict[str, int]) -> dict[str, float]:
    calls, in_flight = question["calls"], question.get("in_flight", 0)
    if in_flight:
        started = time.perf_counter()
        contender.many(calls, in_flight)
        return {"per_s": calls / (time.perf_counter() - started)}
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        contender.call()
        times.append(time.perf_counter_ns() - start)
    times.sort()
    p99 = times[min(len(times) - 1, len(times) * 99 // 100)]
    return {"p50_us": statistics.median(times) / 1e3, "p99_us": p99 / 1e3, "max_us": times[-1] / 1e3}
