"""Sends graphs that crash their process, beside a healthy client, to a server that runs any op.

Target: each gets a typed error that names the crash, and no check refuses it before; the healthy client sees no error.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence

from tests.battery import harmful_requests
from tests.battery.answer_checks import Judgement
from tests.battery.figures import Figures, Findings, Scale
from tests.battery.fuzzing.sending import channel
from tests.battery.known_answers import HealthyCalls
from tests.battery.serving import served
from tests.processes import engines
from tests.service.harmful_graphs import CRASHES, HarmfulGraph
from tests.service.servers import RunningServer

TARGET = "each gets a typed error that names the crash; a healthy client sees 0 errors"
LONG_ROUNDS = 50
_DEADLINE_S = 60.0
_SIGNAL = re.compile(r"\bSIG[A-Z]{3,}\b")


def run(scale: Scale) -> Figures:
    """Runs fifty rounds of the corpus at full scale, each with different graphs."""
    with served(scale, "crashes", **settings()) as server:
        return asyncio.run(crash(server, scale, CRASHES, scale.count(LONG_ROUNDS)))


def settings() -> dict[str, object]:
    """Returns settings of a server that refuses no graph; the second engine is a spare."""
    return {"trust": "full", "spares": 1}


async def crash(server: RunningServer, scale: Scale, corpus: Sequence[HarmfulGraph], rounds: int) -> Figures:
    """Runs that many rounds."""
    findings, told, clock, done = Findings(), Counter[str](), scale.clock(), 0
    async with harmful_requests.healthy_client_beside(server.target) as seen, channel(server.target) as own:
        for bad in (bad for _ in range(rounds) for bad in corpus):
            if clock.is_over or server.process.poll() is not None:
                break
            before = set(await harmful_requests.wait_for_engines(server, 2))
            judged = await harmful_requests.send(own, harmful_requests.request(bad), _DEADLINE_S)
            died = bool(before - set(engines(server.process.pid)))
            told[judged.reason or judged.verdict.name] += 1
            for fault in judge(bad, judged, died):
                findings.add(fault)
            done += 1
        # The next request must be answered.
        await asyncio.sleep(1.0)
    return summary(seen, findings, told, done, server.process.poll())


def summary(seen: HealthyCalls, findings: Findings, told: Counter[str], done: int, ended_with: int | None) -> Figures:
    """Returns the row's figures."""
    for fault in harmful_requests.complaints("crashes", seen):
        findings.add(fault)
    if ended_with is not None:
        findings.add(f"the front end ended with {ended_with}")
    if not told["ENGINE_CRASHED"]:
        findings.add("no engine crashed: nothing was shown")
    return Figures(
        target=TARGET,
        cases=done,
        failures=findings.count,
        met=not findings.count,
        details={
            "told": dict(told),
            "healthy_asked": seen.asked,
            "healthy_errors": seen.errors,
            "healthy_p99_ms": round(seen.quantile(0.99) * 1e3, 1),
            "healthy_longest_ms": round(seen.quantile(1.0) * 1e3, 1),
        },
        findings=findings.lines,
    )


def judge(bad: HarmfulGraph, judged: Judgement, died: bool) -> list[str]:
    """Returns the faults of the answer to a crashing graph. died: whether an engine ended meanwhile."""
    found = harmful_requests.unexpected(bad, judged)
    if found:
        return found
    is_crash = judged.reason == "ENGINE_CRASHED"
    missing = ["the signal"] if (is_crash or died) and not _SIGNAL.search(judged.what) else []
    if is_crash and bad.says not in judged.what:
        missing.append(repr(bad.says))
    return [f"{bad.name}: {judged.what!r} does not name {what}" for what in missing]
