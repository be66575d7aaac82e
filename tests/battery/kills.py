"""Kills random engines by SIGKILL under load; every answer is compared with local TensorFlow.

Target: no wrong answers, at least 99.9 % of the requests answered. A request that is answered after a retry that the
server asked for counts as answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from random import Random

from tests.battery.figures import Clock, Figures, Scale
from tests.battery.serving import served
from tests.battery.workload import SHARE, CallCounts, Load
from tests.processes import engines
from tests.service.servers import RunningServer

TARGET = "0 wrong answers, ≥ 99.9 % answered"
LONG = 1_000
# At full scale a kill follows every 1 to 5 s; a short run must fit its kills into half a minute.
_LONG_PAUSE_S = (1.0, 5.0)
_SHORT_PAUSE_S = (0.7, 2.0)
_SHORT = 0.1


def run(scale: Scale) -> Figures:
    """Kills 1,000 engines at full scale."""
    with served(scale, "kills", **settings()) as server:
        return asyncio.run(kill(server, scale, scale.count(LONG)))


def settings() -> dict[str, object]:
    """Returns settings of a server with two engines and a spare."""
    return {"engines": 2, "spares": 1}


async def kill(server: RunningServer, scale: Scale, count: int) -> Figures:
    """Kills that many engines, then continues without kills, so that lost requests are answered."""
    load = Load(server.target, scale.seed)
    working = asyncio.ensure_future(load.run())
    killed = await _kill_engines(server, scale, count, scale.clock())
    await asyncio.sleep(1.0)
    load.stop()
    await working
    return judge(load.seen, killed, count, scale.clock(), server.process.poll() is not None)


def judge(seen: CallCounts, killed: int, count: int, clock: Clock, front_ended: bool) -> Figures:
    """Returns the row's figures from what the callers saw."""
    findings = [*seen.wrong, *seen.unused_ways, *(["the front end ended"] if front_ended else [])]
    enough = killed >= count or clock.ends_at is not None
    return Figures(
        target=TARGET,
        cases=killed,
        failures=len(findings) + sum(seen.errors.values()),
        met=not findings and seen.share >= SHARE and enough,
        details={"kills": killed, **seen.figures()},
        findings=findings[:20],
    )


async def _kill_engines(server: RunningServer, scale: Scale, count: int, clock: Clock) -> int:
    chance = Random(scale.seed)
    low, high = _SHORT_PAUSE_S if scale.share < _SHORT else _LONG_PAUSE_S
    killed = 0
    await asyncio.sleep(1.0)
    while killed < count and not clock.is_over and server.process.poll() is None:
        await asyncio.sleep(chance.uniform(low, high))
        found = engines(server.process.pid)
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(found), signal.SIGKILL)
                killed += 1
    return killed
