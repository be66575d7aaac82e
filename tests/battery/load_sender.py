"""Sends one request again and again and times what comes back; a process of its own, so that its figures are its own.

`--callers N`: each waits for its answer (closed loop). `--rate R`: so many per second, whatever becomes of them (open
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
    """Counts and times."""

    def __init__(self, channel: grpc.aio.Channel, request: bytes) -> None:
        self._call: Any = channel.unary_unary(_EVALUATE)
        self._request = request
        self.sent = 0
        self.good = 0
        self.refusals: list[float] = []
        self.other: Counter[str] = Counter()
        self._begins_at = self._ends_at = 0.0
        self._first: list[bytes] | None = None

    async def ask(self) -> None:
        """One request."""
        self.sent += 1
        started = time.perf_counter()
        try:
            answer = await self._call(self._request, timeout=_DEADLINE_S)
        except grpc.RpcError as failure:
            taken = time.perf_counter() - started
            judged = answer_checks.of_failure(failure)
            if judged.reason == "OVERLOADED":
                self.refusals.append(taken)
            else:
                self.other[f"{judged.reason} {judged.what}"[:200]] += 1
        else:
            # What comes earlier or later is no part of the rate during the run.
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

    async def wait_each(self, callers: int, seconds: float) -> None:
        """Closed loop. It counts once as many calls are under way as will be at the end: those are not counted."""
        self._begins_at = time.perf_counter() + _WARM_UP_S
        self._ends_at = self._begins_at + seconds

        async def caller() -> None:
            while time.perf_counter() < self._ends_at:
                await self.ask()

        await asyncio.gather(*(caller() for _ in range(callers)))

    async def at_rate(self, rate: float, seconds: float) -> None:
        """Open loop: a request's time does not depend on what became of those before it."""
        self._begins_at = begin = time.perf_counter()
        self._ends_at = begin + seconds
        under_way: set[asyncio.Task[None]] = set()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            task = asyncio.ensure_future(self.ask())
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
            await sender.wait_each(options.callers, options.seconds)
        else:
            await sender.at_rate(options.rate, options.seconds)
    print(json.dumps({"sent": sender.sent, "good": sender.good, "refusals": sender.refusals, "other": sender.other}))


if __name__ == "__main__":
    asyncio.run(main())
