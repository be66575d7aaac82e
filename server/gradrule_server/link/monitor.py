"""Monitors all engine processes: ends those that stop answering or take too much memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from weakref import WeakKeyDictionary

from gradrule_server.link.framing import Kind
from gradrule_server.link.process import DEFAULT_TIMES, EngineProcess, EngineTimes
from gradrule_server.recovery.endings import EndReason

_log = logging.getLogger(__name__)

# The kernel enforces the limit for the memory that it counts. This limit is for all other memory.
_MEMORY_SLACK = 1.125
# Memory that no other process has: unlike the private pages, those of the fork server have been written by a process.
_PRIVATE = re.compile(r"^Private_Dirty:\s+(\d+) kB$", re.MULTILINE)
# Page faults of a process after which its own memory is measured anew, at most every 2 s: that takes milliseconds.
_FAULTS = 1024
_OWN_PERIOD_S = 2.0
# A process without a request is measured in one of so many rounds, since it hardly grows.
_IDLE_ROUNDS = 4
_RESIDENT = re.compile(r"^Rss(Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)


class EngineMonitor:
    """Monitors processes while `run` runs.

    Args:
        processes: Returns the processes.
        heartbeat_s: Between pings; 0: none.
        memory_limit: Of each process, bytes; 0: none.
        times: How long it waits for answers.
        on_measured: Called when the memory of all processes was measured.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[EngineProcess]],
        heartbeat_s: float,
        memory_limit: int,
        times: EngineTimes = DEFAULT_TIMES,
        on_measured: Callable[[], None] = lambda: None,
    ) -> None:
        self._times = times
        self._on_measured = on_measured
        self._own: WeakKeyDictionary[EngineProcess, _OwnMemory] = WeakKeyDictionary()
        self._processes = processes
        self._heartbeat_s = heartbeat_s
        self._memory_limit = memory_limit

    async def run(self) -> None:
        """Monitors until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._check_memory())
            if self._heartbeat_s:
                tasks.create_task(self._check_heartbeats())

    async def _check_heartbeats(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._heartbeat_s
            await asyncio.sleep(self._heartbeat_s)
            # While this loop was busy it read no answers; that time does not count as silence.
            late_s = max(0.0, loop.time() - due)
            for process in self._processes():
                self._check_heartbeat(process, late_s)

    def _check_heartbeat(self, process: EngineProcess, late_s: float) -> None:
        connection = process.connection
        if not connection.greeting.done():
            return
        now = asyncio.get_running_loop().time()
        if connection.is_compiling:
            # A compilation may take long without a break; `Engine.limit_run` ends it.
            connection.last_heard = now
        connection.last_heard = min(now, connection.last_heard + late_s)
        silence_s = now - connection.last_heard
        if silence_s > (self._times.silence_running_s if connection.running else self._times.silence_idle_s):
            _log.warning("engine %d has answered nothing for %.1f s; ending it", process.pid, silence_s)
            process.end(EndReason.HEARTBEAT)
        else:
            connection.notify(Kind.PING, b"")

    async def _check_memory(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(self._times.memory_period_s)
            for process in self._processes():
                if process.own_bytes and number % _IDLE_ROUNDS and not process.connection.running:
                    continue
                await self._measure(process)
                if self._memory_limit and process.resident_bytes > self._memory_limit * _MEMORY_SLACK:
                    _log.warning("engine %d takes %d bytes; ending it", process.pid, process.resident_bytes)
                    process.end(EndReason.MEMORY)
            self._on_measured()

    async def _measure(self, process: EngineProcess) -> None:
        """Measures the memory of a process."""
        arenas, channel = process.arenas, process.connection.memories
        anonymous, shared = resident_sizes(process.pid)
        # All pages of this memory are exempt, whether the process has mapped them or not.
        exempt = (0 if arenas is None else arenas.held_bytes) + (0 if channel is None else channel.shared_bytes)
        memory = self._own.setdefault(process, _OwnMemory(anonymous))
        if memory.is_due(process.pid):
            await memory.measure(process.pid, anonymous)
        own = max(0, anonymous - memory.shared_bytes)
        charged = max(0, shared - exempt)
        process.resident_bytes, process.own_bytes = anonymous + charged, own + charged


class _OwnMemory:
    """Measures the anonymous memory that a process shares with no other: exactly if it has written to many pages."""

    def __init__(self, anonymous: int) -> None:
        self.shared_bytes = anonymous
        """The part of its private memory that it shares: all of it until it is measured."""
        self.measured_at = 0.0
        """When it was measured, CLOCK_MONOTONIC, seconds."""
        self._faults = -_FAULTS

    def is_due(self, pid: int) -> bool:
        """Returns whether the process may have written to many pages since it was measured."""
        if time.monotonic() < self.measured_at + _OWN_PERIOD_S:
            return False
        return _page_faults(pid) >= self._faults + _FAULTS

    async def measure(self, pid: int, anonymous: int) -> None:
        """Measures it. `anonymous`: the private memory of the process as `resident_sizes` returns it."""
        self.measured_at, self._faults = time.monotonic(), _page_faults(pid)
        with contextlib.suppress(RuntimeError):
            own = await asyncio.to_thread(own_bytes, pid)
            self.shared_bytes = 0 if own is None else max(0, anonymous - own)


def own_bytes(pid: int) -> int | None:
    """Returns the bytes that only this process has in memory; None: unknown. Takes milliseconds."""
    try:
        found = _PRIVATE.search(Path(f"/proc/{pid}/smaps_rollup").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _page_faults(pid: int) -> int:
    """Returns how often a process has written to a page for the first time; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[7])
    except OSError:
        return 0


def resident_sizes(pid: int) -> tuple[int, int]:
    """Returns the bytes of a process that lie in memory: private ones, and those shared with other processes.

    Files do not count. Returns zeros if the process is gone.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        # The process is gone, or the system has no such files.
        return 0, 0
    sizes = {name: int(size) * 1024 for name, size in _RESIDENT.findall(status)}
    return sizes.get("Anon", 0), sizes.get("Shmem", 0)
