"""Sends graphs that run without end, beside a healthy client, to a server that runs any op.

Target: the engine has ended or is idle at most a second after the deadline; the caller gets a typed error; the healthy
client sees no error.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.battery import harmful_requests
from tests.battery.answer_checks import Judgement, Verdict
from tests.battery.figures import Figures, Findings, Scale
from tests.battery.fuzzing.sending import channel
from tests.battery.known_answers import HealthyCalls
from tests.battery.serving import served
from tests.processes import busy_processes
from tests.service.harmful_graphs import HANGS, HarmfulGraph
from tests.service.servers import RunningServer

TARGET = "engine gone ≤ 1 s after the deadline; a typed error; a healthy client sees 0 errors"
LONG_ROUNDS = 50
DEADLINE_S = 2.0
GONE_S = 1.0
_WATCH_S = 3.0
_EVERY_S = 0.05
# The number of consecutive samples at work after which an engine is not just answering something small.
_LOOKS = 4


def run(scale: Scale) -> Figures:
    """Runs fifty rounds of the corpus at full scale, each with different graphs."""
    with served(scale, "hangs", **settings()) as server:
        return asyncio.run(hang(server, scale, HANGS, scale.count(LONG_ROUNDS)))


def settings() -> dict[str, object]:
    """Returns settings of a server with this deadline and without limits that refuse a hanging graph."""
    return {
        "trust": "full",
        "spares": 1,
        "default_deadline_s": DEADLINE_S,
        "max_constant_bytes": 8 << 30,
        "max_node_outputs": 10**8,
    }


@dataclass(frozen=True)
class HangResult:
    """Describes the end of one graph. late_s: seconds of work after the deadline or the answer."""

    judged: Judgement
    late_s: float


async def hang(
    server: RunningServer, scale: Scale, corpus: Sequence[HarmfulGraph], rounds: int, gone_s: float = GONE_S
) -> Figures:
    """Runs that many rounds."""
    findings, told, clock = Findings(), Counter[str](), scale.clock()
    late: list[float] = []
    async with harmful_requests.healthy_client_beside(server.target, every_s=0.2) as seen:
        for bad in (bad for _ in range(rounds) for bad in corpus):
            if clock.is_over or server.process.poll() is not None:
                break
            ended = await _ended(server, bad)
            told[ended.judged.reason or ended.judged.verdict.name] += 1
            late.append(ended.late_s)
            for fault in judge(bad, ended, gone_s):
                findings.add(fault)
        await asyncio.sleep(1.0)
    return summary(seen, findings, told, late, server.process.poll())


async def _ended(server: RunningServer, bad: HarmfulGraph) -> HangResult:
    loop = asyncio.get_running_loop()
    watched = await harmful_requests.wait_for_engines(server, 2)
    data = harmful_requests.request(bad)
    async with channel(server.target) as own:
        # The server's deadline starts with the request, not with the connection.
        await own.channel_ready()
        deadline = loop.time() + DEADLINE_S
        asking = asyncio.ensure_future(harmful_requests.send(own, data, None))
        ends_at, busy_at = deadline, 0.0
        at_work = [busy_processes(watched)] * _LOOKS
        while loop.time() < ends_at + _WATCH_S:
            await asyncio.sleep(_EVERY_S)
            if asking.done():
                ends_at = min(ends_at, loop.time())
            at_work = [*at_work[1:], busy_processes(watched)]
            if set.intersection(*at_work):
                busy_at = loop.time()
        late_s = max(0.0, busy_at - ends_at)
        if asking.done():
            return HangResult(asking.result(), late_s)
        asking.cancel()
        return HangResult(Judgement(Verdict.FAULT, what="no answer"), late_s)


def judge(bad: HarmfulGraph, ended: HangResult, gone_s: float = GONE_S) -> list[str]:
    """Returns the faults of the end of one graph."""
    # A growing graph may exhaust its memory first.
    found = harmful_requests.unexpected(bad, ended.judged, "MEMORY_EXCEEDED")
    # A compilation goes on after the deadline of its call, for a limited time.
    if ended.late_s > gone_s and "goes on" not in ended.judged.what:
        found.append(f"{bad.name}: an engine worked on {ended.late_s:.1f} s after the deadline ({ended.judged.reason})")
    return found


def summary(
    seen: HealthyCalls, findings: Findings, told: Counter[str], late: list[float], ended_with: int | None
) -> Figures:
    """Returns the row's figures."""
    for fault in harmful_requests.complaints("hangs", seen):
        findings.add(fault)
    if ended_with is not None:
        findings.add(f"the front end ended with {ended_with}")
    if not told["DEADLINE_EXCEEDED"]:
        findings.add("nothing hung: nothing was shown")
    return Figures(
        target=TARGET,
        cases=len(late),
        failures=findings.count,
        met=not findings.count,
        details={
            "told": dict(told),
            "latest_s": round(max(late, default=0.0), 2),
            "healthy_asked": seen.asked,
            "healthy_errors": seen.errors,
            "healthy_p99_ms": round(seen.quantile(0.99) * 1e3, 1),
            "healthy_longest_ms": round(seen.quantile(1.0) * 1e3, 1),
        },
        findings=findings.lines,
    )
