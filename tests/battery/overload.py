"""Sends five times as many requests as the server can answer.

Target: goodput at least 90 % of the peak, refusals within 10 ms (p99).

The peak is the best rate of closed-loop callers over several numbers of callers. Then requests come at five times that
rate (open loop). Separate processes send and time them: an event loop that does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import gradrule as gr
from gradrule.common import tensor_codec
from gradrule.v1 import evaluate_pb2
from tests.battery.figures import Figures, Scale
from tests.battery.serving import served
from tests.service import raw
from tests.service.graph_defs import build_graph, placeholder

TARGET = "goodput ≥ 90 % of the peak, refusals < 10 ms (p99)"
GOODPUT = 0.9
# A goodput above the peak shows that the peak was measured too low, so the load was no overload.
MOST = 1.1
REFUSAL_S = 0.010
FACTOR = 5.0
SENDERS = 2
PEAK_CALLERS = (2, 4, 8)
LONG_S = 120.0
SHORT_S = 4.0
# Long enough that the cost of a refusal is small: on few cores the callers compete with the server.
WORK_S = 0.08
_CAPACITY = 8


def run(scale: Scale) -> Figures:
    """Runs two minutes at five times the capacity at full scale."""
    with served(scale, "overload", max_concurrent_requests=_CAPACITY) as server:
        return asyncio.run(overload(server.target, scale, max(SHORT_S, LONG_S * scale.share)))


async def overload(target: str, scale: Scale, seconds: float) -> Figures:
    """Measures the peak, then overloads for that many seconds."""
    seconds = scale.seconds or seconds
    request = scale.folder / f"overload-{os.getpid()}.bin"
    request.parent.mkdir(parents=True, exist_ok=True)
    request.write_bytes(await _request(target))
    peaks = {callers: await _rate(target, request, callers, max(2.0, seconds / 3)) for callers in PEAK_CALLERS}
    peak = max(peaks.values())
    senders = [
        _sent(target, request, "--rate", str(FACTOR * peak / SENDERS), "--seconds", str(seconds))
        for _ in range(SENDERS)
    ]
    return judge(peak, seconds, await asyncio.gather(*senders), peaks)


def judge(peak: float, seconds: float, found: list[dict[str, Any]], peaks: dict[int, float]) -> Figures:
    """Returns the row's figures from what the senders saw."""
    good = sum(each["good"] for each in found)
    refusals = [time for each in found for time in each["refusals"]]
    other = {name: sum(each["other"].get(name, 0) for each in found) for each in found for name in each["other"]}
    sent = sum(each["sent"] for each in found)
    goodput = good / seconds
    p99 = float(np.quantile(refusals, 0.99)) if refusals else float("inf")
    findings = []
    if goodput < GOODPUT * peak:
        findings.append(f"goodput {goodput:.1f}/s is {goodput / peak:.0%} of the peak of {peak:.1f}/s")
    if p99 > REFUSAL_S:
        findings.append(f"refusals took {p99 * 1e3:.1f} ms (p99)")
    if goodput > MOST * peak:
        findings.append(f"goodput {goodput:.1f}/s is more than the peak of {peak:.1f}/s: the peak was none")
    findings += [f"{count} × {name}" for name, count in other.items()]
    return Figures(
        target=TARGET,
        cases=sent,
        failures=len(findings),
        met=not findings,
        details={
            "peak_per_s": round(peak, 1),
            "peaks": {str(callers): round(rate, 1) for callers, rate in peaks.items()},
            "offered_per_s": round(sent / seconds, 1),
            "goodput_per_s": round(goodput, 1),
            "goodput_of_peak": round(goodput / peak, 3),
            "refused": len(refusals),
            "neither": other,
            "refusal_p50_ms": round(float(np.median(refusals)) * 1e3, 2) if refusals else None,
            "refusal_p99_ms": round(p99 * 1e3, 2) if refusals else None,
            "cores": os.cpu_count(),
        },
        findings=findings,
    )


async def _request(target: str) -> bytes:
    """Makes a request that takes about `WORK_S`: a loop whose number of iterations is fed."""

    def build() -> None:
        x = placeholder("x", shape=(128, 128))
        turns = placeholder("turns", tf.int32, ())
        _, last = tf.while_loop(lambda i, _: i < turns, lambda i, value: (i + 1, tf.tanh(value @ x)), [0, x])
        tf.reduce_sum(last, name="y")

    client = gr.aio.connect(target, timeout=60.0)
    try:
        program = await client.compile(build_graph(build), fetches=["y"], name="overload")
        x = np.random.default_rng(1).normal(0, 0.1, (128, 128)).astype(np.float32)
        turns, taken = 50, 0.0
        while taken < WORK_S and turns < 200_000:
            turns *= 2
            # Other work on the machine only makes it longer, so take the minimum.
            results = [await program.evaluate({"x": x, "turns": np.int32(turns)}) for _ in range(5)]
            taken = min(result.timings.run for result in results)
    finally:
        await client.close()
    message = evaluate_pb2.EvaluateRequest(program=program.name, feeds=raw.feeds({"x": raw.tensor(x)}))
    value = message.feeds.add(name="turns").value.inline_tensor
    value.CopyFrom(tensor_codec.to_message(np.int32(turns)))
    return message.SerializeToString()


async def _rate(target: str, request: Path, callers: int, seconds: float) -> float:
    """Returns answers per second of closed-loop callers."""
    found = await _sent(target, request, "--callers", str(callers), "--seconds", str(seconds))
    return float(found["good"]) / seconds


async def _sent(target: str, request: Path, *words: str) -> dict[str, Any]:
    """Returns the report of a sender process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.battery.load_sender",
        *("--target", target, "--request", str(request), *words),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the sender ended with {process.returncode}")
    found: dict[str, Any] = json.loads(output)
    return found
