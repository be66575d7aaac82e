"""Runs a soak with 10 % cancellations and 5 % errors.

Target: memory, descriptors, threads and shared memory of the front end and of the engines are flat, as `slopes`
defines; every answer is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from tests.battery.figures import Figures, Scale
from tests.battery.serving import served
from tests.battery.slopes import Allowance, Slope, slope
from tests.battery.workload import SHARE, Load
from tests.processes import engines, resources
from tests.service.servers import RunningServer

TARGET = "memory, descriptors, threads, shared memory flat"
LONG_S = 3600.0
SHORT_S = 24.0
CANCELLED = 0.10
WRONG = 0.05
_MEBIBYTE = 2**20
_MEMORY = Allowance(part=0.02, constant=24 * _MEBIBYTE)
_COUNT = Allowance(part=0.0, constant=3.0)
ALLOWED = {
    "front_memory": _MEMORY,
    "front_descriptors": _COUNT,
    "front_threads": _COUNT,
    "engine_memory": _MEMORY,
    "engine_descriptors": _COUNT,
    "engine_threads": _COUNT,
    "shared_memory": _MEMORY,
}


def run(scale: Scale) -> Figures:
    """Runs an hour at full scale."""
    with served(scale, "soak") as server:
        return asyncio.run(soak(server, scale, max(SHORT_S, LONG_S * scale.share)))


@dataclass
class Samples:
    """Holds measurements by figure. restarts: how often the set of engines changed."""

    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ALLOWED})
    restarts: int = 0
    _engines: list[int] = field(default_factory=list)

    def take(self, pid: int) -> None:
        """Takes one sample. The samples of replaced engines start anew, because they are those of other processes."""
        found = engines(pid)
        if found != self._engines:
            self.restarts += bool(self._engines)
            self._engines = found
            self.times.clear()
            for values in self.values.values():
                values.clear()
        front, held = resources(pid), [resources(engine) for engine in found]
        self.times.append(time.monotonic())
        for name, value in {
            "front_memory": front.resident_bytes,
            "front_descriptors": front.descriptors,
            "front_threads": front.threads,
            "engine_memory": sum(each.resident_bytes for each in held),
            "engine_descriptors": sum(each.descriptors for each in held),
            "engine_threads": sum(each.threads for each in held),
            "shared_memory": front.shared_bytes + sum(each.shared_bytes for each in held),
        }.items():
            self.values[name].append(float(value))

    def slopes(self) -> dict[str, Slope]:
        """Returns the slopes of all figures."""
        return {name: slope(self.times, self.values[name], allowance) for name, allowance in ALLOWED.items()}


async def soak(server: RunningServer, scale: Scale, seconds: float) -> Figures:
    """Runs that many seconds, or those of the scale."""
    seconds = scale.seconds or seconds
    load = Load(server.target, scale.seed, callers=6, cancelled=CANCELLED, wrong=WRONG)
    working = asyncio.ensure_future(load.run())
    samples = Samples()
    ends_at = time.monotonic() + seconds
    every_s = min(5.0, max(0.25, seconds / 400))
    while time.monotonic() < ends_at and not working.done():
        await asyncio.sleep(every_s)
        with contextlib.suppress(OSError):  # an engine that ends during a sample counts in the next one
            samples.take(server.process.pid)
    load.stop()
    await working
    return judge(samples, load, server.process.poll() is not None)


def judge(samples: Samples, load: Load, front_ended: bool) -> Figures:
    """Returns the row's figures."""
    slopes = samples.slopes()
    findings = [*load.seen.wrong, *load.seen.unused_ways, *(["the front end ended"] if front_ended else [])]
    findings += [
        f"{name} grew by {found.growth:.0f} ({found.median:.0f} in the median); {found.allowed:.0f} is allowed"
        for name, found in slopes.items()
        if not found.is_flat
    ]
    findings += [f"{count} × {reason}" for reason, count in load.seen.errors.items()]
    if samples.restarts:
        findings.append(f"engines were replaced {samples.restarts} times, though nothing ends one")
    seen = load.seen
    if seen.share < SHARE:
        findings.append(f"{seen.answered} of {seen.asked} requests were answered")
    return Figures(
        target=TARGET,
        cases=seen.asked + seen.cancelled + seen.refused,
        failures=len(findings),
        met=not findings,
        details={
            **seen.figures(),
            "growth": {name: round(found.growth) for name, found in slopes.items()},
            "allowed": {name: round(found.allowed) for name, found in slopes.items()},
            "median": {name: round(found.median) for name, found in slopes.items()},
            "samples": next(iter(slopes.values())).samples,
        },
        findings=findings[:20],
    )
