"""Sends memory bombs beside a healthy client.

Target: each gets a typed error, the next request is answered, no engine takes more than its limit and a quarter, and
the front end no more than ten times the input plus 64 MiB.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.battery import harmful_requests, known_answers
from tests.battery.amplification import CONSTANT_BYTES, FACTOR
from tests.battery.answer_checks import Judgement
from tests.battery.bomb_graphs import BOMBS
from tests.battery.figures import Figures, Findings, Scale
from tests.battery.fuzzing.sending import channel
from tests.battery.known_answers import HealthyCalls
from tests.battery.serving import served
from tests.processes import engines, peak_bytes, reset_peak, resources
from tests.service.harmful_graphs import HarmfulGraph
from tests.service.servers import RunningServer

TARGET = "a typed error each, the next request is answered; a healthy client sees 0 errors"
LONG_ROUNDS = 20
LIMIT_BYTES = 4 << 30
# The memory beyond its limit that an engine may hold before the server notices.
_SLACK = 1.25
_DEADLINE_S = 30.0
_LOOK_S = 0.05


def run(scale: Scale) -> Figures:
    """Runs twenty rounds at full scale, each with different graphs."""
    with served(scale, "bombs", **settings()) as server:
        return asyncio.run(bomb(server, scale, BOMBS, scale.count(LONG_ROUNDS)))


def settings() -> dict[str, object]:
    """Returns settings of a server with engines of 4 GiB and a spare."""
    return {"memory_limit": LIMIT_BYTES, "spares": 1}


@dataclass(frozen=True)
class BombResult:
    """Describes the result of a bomb. front_bytes: peak growth of the front end; engine_bytes: largest engine."""

    judged: Judgement
    sent_bytes: int
    front_bytes: int
    engine_bytes: int
    next_fault: str


async def bomb(server: RunningServer, scale: Scale, corpus: Sequence[HarmfulGraph], rounds: int) -> Figures:
    """Runs that many rounds."""
    findings, told, clock = Findings(), Counter[str](), scale.clock()
    front, engine, done = 0, 0, 0
    async with harmful_requests.healthy_client_beside(server.target) as seen:
        for bad in (bad for _ in range(rounds) for bad in corpus):
            if clock.is_over or server.process.poll() is not None:
                break
            went = await _sent(server, bad)
            told[went.judged.reason or went.judged.verdict.name] += 1
            front, engine, done = max(front, went.front_bytes), max(engine, went.engine_bytes), done + 1
            for fault in judge(bad, went):
                findings.add(fault)
        await asyncio.sleep(0.5)
    details = {"front_peak_mib": front >> 20, "engine_peak_mib": engine >> 20}
    return summary(seen, findings, told, done, server.process.poll(), details)


async def _sent(server: RunningServer, bad: HarmfulGraph) -> BombResult:
    await harmful_requests.wait_for_engines(server, 1)
    data, pid = harmful_requests.request(bad), server.process.pid
    before = resources(pid).resident_bytes
    reset_peak(pid)
    async with channel(server.target) as own:
        asking = asyncio.ensure_future(harmful_requests.send(own, data, _DEADLINE_S))
        largest = 0
        while not asking.done():
            await asyncio.sleep(_LOOK_S)
            for engine in engines(pid):
                with contextlib.suppress(OSError):  # the engine has just ended
                    largest = max(largest, resources(engine).resident_bytes)
        judged = await asking
        number = len(data)
        answer: bytes = await own.unary_unary(harmful_requests.EVALUATE)(
            known_answers.request(number), timeout=_DEADLINE_S
        )
        return BombResult(judged, number, peak_bytes(pid) - before, largest, known_answers.wrong(number, answer))


def judge(bad: HarmfulGraph, went: BombResult) -> list[str]:
    """Returns the faults of one result."""
    found = harmful_requests.unexpected(bad, went.judged)
    if went.front_bytes > FACTOR * went.sent_bytes + CONSTANT_BYTES:
        found.append(f"{bad.name}: {went.sent_bytes} bytes sent, the front end grew by {went.front_bytes >> 20} MiB")
    if went.engine_bytes > _SLACK * LIMIT_BYTES:
        found.append(f"{bad.name}: an engine took {went.engine_bytes >> 20} MiB of {LIMIT_BYTES >> 20} MiB")
    if went.next_fault:
        found.append(f"{bad.name}: the next answer was wrong: {went.next_fault}")
    return found


def summary(
    seen: HealthyCalls,
    findings: Findings,
    told: Counter[str],
    done: int,
    ended_with: int | None,
    details: dict[str, object],
) -> Figures:
    """Returns the row's figures."""
    for fault in harmful_requests.complaints("bombs", seen):
        findings.add(fault)
    if ended_with is not None:
        findings.add(f"the front end ended with {ended_with}")
    return Figures(
        target=TARGET,
        cases=done,
        failures=findings.count,
        met=not findings.count and done > 0,
        details={
            "told": dict(told),
            **details,
            "healthy_asked": seen.asked,
            "healthy_errors": seen.errors,
            "healthy_p99_ms": round(seen.quantile(0.99) * 1e3, 1),
        },
        findings=findings.lines,
    )
