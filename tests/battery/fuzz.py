"""Fuzzes the server with random and structured bytes, requests, graphs, rules, tensors, streams, sessions and uploads.

Target: the front end never dies, and every error is typed. An engine may crash if its caller gets an error that says
so. Failing cases are saved and can be sent again (`--replay`). The row `amplification` measures the memory of inputs.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from pathlib import Path

import grpc

from tests.battery import answer_checks
from tests.battery.figures import Clock, Figures, Findings, Scale
from tests.battery.fuzzing.cases import Case, Cases
from tests.battery.fuzzing.seeds import seeds
from tests.battery.fuzzing.sending import IN_FLIGHT, Outcome, Tally, channel, send
from tests.battery.known_answers import HealthyCalls, HealthyClient
from tests.battery.serving import served
from tests.processes import peak_bytes, reset_peak, resources
from tests.service.servers import RunningServer

TARGET = "0 deaths of the front end, 0 untyped errors"
LONG = 1_000_000
CHANNELS = 4
# Without any answer for this time the server counts as dead.
STALL_S = 5.0
ENGINE_MEMORY = "4GiB"
# The share of the healthy client's requests that may fail. The fuzzer is the same tenant: dozens of its hanging graphs
# can occupy all threads of the engine until a deadline.
FAILED = 0.01
# The share of cases whose status gRPC's own client may lose.
LOST = 0.01
_FEW = 5
_DIED = {"ENGINE_CRASHED", "MEMORY_EXCEEDED", "SESSION_LOST"}


def run(scale: Scale) -> Figures:
    """Sends 10⁶ cases in the long run."""
    with served(scale, "fuzz", **settings()) as server:
        return asyncio.run(fuzz(server, scale, scale.count(LONG)))


def settings() -> dict[str, object]:
    """Returns settings of the fuzzed server: short deadlines, a memory limit, room for all registered cases."""
    return {"default_deadline_s": 10, "max_deadline_s": 10, "memory_limit": ENGINE_MEMORY}


async def fuzz(server: RunningServer, scale: Scale, count: int) -> Figures:
    """Sends that many cases beside a healthy client."""
    findings = Findings()
    tally = Tally()
    cases = Cases(seeds(scale.seed), scale.seed)
    healthy, pulse = HealthyClient(server.target), HealthPoller(server.target)
    beside = [asyncio.ensure_future(healthy.run()), asyncio.ensure_future(pulse.run())]
    before = resources(server.process.pid).resident_bytes
    reset_peak(server.process.pid)
    clock, started = scale.clock(), time.monotonic()
    await _send_all(server, cases, count, clock, findings, tally, scale)
    seconds = time.monotonic() - started
    peak = peak_bytes(server.process.pid) - before if server.process.poll() is None else 0
    healthy.stop()
    pulse.stop()
    await asyncio.gather(*beside)
    for fault in (*harm_to_others(healthy.seen, pulse), *lost_statuses(tally)):
        findings.add(fault)
    if server.process.poll() is not None:
        findings.add(f"the front end ended with {server.process.returncode}")
    if tally.cases and not tally.good:
        findings.add("no answer was good: nothing was shown")
    return Figures(
        target=TARGET,
        cases=tally.cases,
        failures=findings.count,
        met=not findings.count and (tally.cases >= count or clock.is_over),
        findings=findings.lines,
        details={
            "cases_per_s": round(tally.cases / seconds, 1),
            "kinds": dict(tally.kinds),
            "good_answers": tally.good,
            "reasons": dict(tally.reasons.most_common()),
            "engine_deaths_told": sum(tally.reasons[reason] for reason in _DIED),
            "slowest_case_s": round(tally.slowest_s, 2),
            "longest_pause_s": round(pulse.longest_s, 2),
            "front_end_grew_mib": round(peak / 2**20, 1),
            "sent_mib": round(tally.sent_bytes / 2**20, 1),
            "healthy_asked": healthy.seen.asked,
            "healthy_failed": healthy.seen.failed,
            "healthy_errors": healthy.seen.errors,
            "healthy_p99_s": round(healthy.seen.quantile(0.99), 3),
        },
    )


def harm_to_others(seen: HealthyCalls, pulse: HealthPoller) -> list[str]:
    """Returns what other clients suffered. An error that a retry cured does not count."""
    found = [f"the healthy client got a wrong answer: {fault}" for fault in seen.wrong]
    if seen.failed > FAILED * seen.asked:
        found.append(f"{seen.failed} requests of the healthy client failed: {seen.errors}")
    if not seen.answered:
        found.append("the healthy client got no answer")
    if pulse.longest_s > STALL_S:
        found.append(f"the front end told of no health for {pulse.longest_s:.1f} s")
    return found


def lost_statuses(tally: Tally) -> list[str]:
    """Returns a fault if more statuses were lost than gRPC's own client may lose."""
    count = tally.reasons[answer_checks.LOST_STATUS]
    return [f"{count} statuses were lost"] if count > _FEW + LOST * tally.cases else []


async def _send_all(
    server: RunningServer,
    cases: Cases,
    count: int,
    clock: Clock,
    findings: Findings,
    tally: Tally,
    scale: Scale,
) -> None:
    channels = [channel(server.target) for _ in range(CHANNELS)]
    numbers = iter(range(count))

    async def worker(own: grpc.aio.Channel) -> None:
        for number in numbers:
            if clock.is_over or server.process.poll() is not None:
                return
            case = cases.case(number)
            outcome = await send(own, case)
            tally.add(case, outcome)
            note(case, outcome, f"{scale.seed}-{number}", scale.folder / "fuzz", findings)

    try:
        await asyncio.gather(
            *(worker(own) for own, _ in zip(itertools.cycle(channels), range(IN_FLIGHT), strict=False))
        )
    finally:
        for own in channels:
            await own.close()


def note(case: Case, outcome: Outcome, name: str, folder: Path, findings: Findings) -> None:
    """Saves a case that failed or ended an engine, so that it can be sent again."""
    faults = outcome.faults
    for fault in faults:
        path = folder / f"fault-{name}.json"
        case.save(path, faults=faults, reasons=outcome.reasons)
        findings.add(f"{case.kind} {case.method}: {fault} ({path.name})")
    told = [each.what for each in outcome.judgements]
    if not faults and _DIED & set(outcome.reasons):
        case.save(folder / f"died-{name}.json", reasons=outcome.reasons, told=told)
    elif not faults and "DEADLINE_EXCEEDED" in outcome.reasons:
        case.save(folder / f"late-{name}.json", reasons=outcome.reasons, told=told)


async def replay(server: RunningServer, path: Path) -> Outcome:
    """Sends one saved case again."""
    async with channel(server.target) as own:
        return await send(own, Case.load(path))


class HealthPoller:
    """Polls the front end's health and records the longest time without an answer; infinite if a call fails."""

    _CHECK = "/grpc.health.v1.Health/Check"

    def __init__(self, target: str, every_s: float = 0.05) -> None:
        self._target = target
        self._every_s = every_s
        self._stopping = False
        self.longest_s = 0.0

    async def run(self) -> None:
        """Until `stop`."""
        async with channel(self._target) as own:
            while not self._stopping:
                started = time.monotonic()
                try:
                    await own.unary_unary(self._CHECK)(b"", timeout=60.0)
                except grpc.RpcError:
                    self.longest_s = math.inf
                    return
                self.longest_s = max(self.longest_s, time.monotonic() - started)
                await asyncio.sleep(self._every_s)

    def stop(self) -> None:
        """After the question that is under way."""
        self._stopping = True
