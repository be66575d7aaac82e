"""Sends one request repeatedly and times the answers, as a separate process, so that the times are its own.

`--callers N`: each waits for its answer (closed loop). `--rate R`: that many per second, whatever the answers (open
loop).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from gradrule.v1 import evaluate_pb2
from tests.battery import answer_checks

_EVALUATE = "/gradrule.v1.GradientService/Evaluate"
_OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
_DEADLINE_S = 30.0
_WARM_UP_S = 1.0


class Sender:
    """Counts and times requests."""

    def __init__(self, channel: grpc.aio.Channel, request: bytes) -> None:
        self._call: Any = channel.unary_unary(_EVALUATE)
        self._request = request
        self.sent = 0
        self.good = 0
        self.refusals: list[float] = []
        self.other: Counter[str] = Counter()
        self._begins_at = self._ends_at = 0.0
        self._first: list[bytes] | None = None

    async def send(self) -> None:
        """Sends one request."""
        self.sent += 1
        started = time.perf_counter()
        try:
            answer = await self._call(self._request, timeout=_DEADLINE_S)
        except grpc.RpcError as failure:
            taken = time.perf_counter() - started
            judged = answer_checks.check_failure(failure)
            if judged.reason == "OVERLOADED":
                self.refusals.append(taken)
            else:
                self.other[f"{judged.reason} {judged.what}"[:200]] += 1
        else:
            # Answers before or after the run do not count in its rate.
            if not self._is_like_the_first(answer):
                self.other["another answer"] += 1
            elif self._begins_at <= time.perf_counter() <= self._ends_at:
                self.good += 1

    def _is_like_the_first(self, answer: bytes) -> bool:
        outputs = evaluate_pb2.EvaluateResponse.FromString(answer).outputs
        found = [output.SerializeToString() for output in outputs]
        if self._first is None:
            self._first = found
        return bool(found) and found == self._first

    async def closed_loop(self, callers: int, seconds: float) -> None:
        """Waits for each answer. Counting starts once as many calls run as at the end; those are not counted."""
        self._begins_at = time.perf_counter() + _WARM_UP_S
        self._ends_at = self._begins_at + seconds

        async def caller() -> None:
            while time.perf_counter() < self._ends_at:
                await self.send()

        await asyncio.gather(*(caller() for _ in range(callers)))

    async def open_loop(self, rate: float, seconds: float) -> None:
        """Sends at a fixed rate, whatever the answers."""
        self._begins_at = begin = time.perf_counter()
        self._ends_at = begin + seconds
        under_way: set[asyncio.Task[None]] = set()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            task = asyncio.ensure_future(self.send())
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        await asyncio.gather(*under_way)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--request", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--callers", type=int)
    how.add_argument("--rate", type=float)
    options = parser.parse_args()
    async with grpc.aio.insecure_channel(options.target, options=_OPTIONS) as channel:
        await channel.channel_ready()
        sender = Sender(channel, options.request.read_bytes())
        if options.callers is not None:
            await sender.closed_loop(options.callers, options.seconds)
        else:
            await sender.open_loop(options.rate, options.seconds)
    print(json.dumps({"sent": sender.sent, "good": sender.good, "refusals": sender.refusals, "other": sender.other}))


if __name__ == "__main__":
    asyncio.run(main())
