"""Restarts two servers behind one client in turn by SIGTERM, under load.

Target: no error that a client may not simply retry, no wrong answer, and exit code 0 of each server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.battery.figures import Figures, Findings, Scale
from tests.battery.serving import data_folder
from tests.battery.workload import SHARE, Load
from tests.service.servers import RunningServer, started_server

TARGET = "0 errors that a client cannot retry"
LONG = 40
_SETTLE_S = 1.0


def run(scale: Scale) -> Figures:
    """Makes 40 restarts at full scale, at least one of each server."""
    with two_replicas(scale) as pair:
        return asyncio.run(restart(pair, scale, scale.count(LONG, 2)))


@dataclass
class Replica:
    """Holds one server: its port and folder stay, its process does not."""

    port: int
    folder: Path
    running: contextlib.ExitStack
    server: RunningServer

    def restart(self) -> int:
        """Stops it like an orchestrator and starts it again; returns how it ended."""
        code = self.server.terminate()
        self.running.close()
        self.server = self.running.enter_context(_started(self.folder, self.port))
        return code


@contextlib.contextmanager
def two_replicas(scale: Scale) -> Iterator[list[Replica]]:
    """Starts two servers, each with its own folder and port."""
    with contextlib.ExitStack() as stack:
        pair = []
        for _ in range(2):
            port, folder = _free_port(), data_folder(scale, "rolling")
            running = stack.enter_context(contextlib.ExitStack())
            pair.append(Replica(port, folder, running, running.enter_context(_started(folder, port))))
        yield pair


def _started(folder: Path, port: int) -> contextlib.AbstractContextManager[RunningServer]:
    return started_server(folder, ["--port", str(port)])


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


async def restart(pair: list[Replica], scale: Scale, count: int) -> Figures:
    """So many restarts, one server after the other, each when the other is up."""
    target = "ipv4:" + ",".join(f"127.0.0.1:{replica.port}" for replica in pair)
    load = Load(target, scale.seed, callers=6, by_name=False)
    working = asyncio.ensure_future(load.run())
    clock = scale.clock()
    findings = Findings()
    done = 0
    await asyncio.sleep(_SETTLE_S)
    while done < count and not clock.is_over and not working.done():
        code = await asyncio.to_thread(pair[done % 2].restart)
        if code:
            findings.add(f"a server that was told to stop ended with {code}")
        done += 1
        await asyncio.sleep(_SETTLE_S)
    load.stop()
    await working
    return judge(load, findings, done, count, clock.ends_at is not None)


def judge(load: Load, findings: Findings, done: int, count: int, by_time: bool) -> Figures:
    """Returns the row's figures."""
    for fault in load.seen.wrong:
        findings.add(fault)
    for reason, number in load.seen.errors.items():
        findings.add(f"{number} × {reason}")
    if load.seen.share < SHARE:
        findings.add(f"{load.seen.answered} of {load.seen.asked} requests were answered")
    return Figures(
        target=TARGET,
        cases=done,
        failures=findings.count,
        met=not findings.count and (done >= count or by_time),
        details={"restarts": done, **load.seen.figures()},
        findings=findings.lines,
    )
