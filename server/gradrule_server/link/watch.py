"""Looks after all processes: ends those that answer nothing any more, and those that take too much memory."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from gradrule_server.link.framing import Kind
from gradrule_server.link.process import EngineProcess
from gradrule_server.recovery.endings import EndReason

_log = logging.getLogger(__name__)

_MEMORY_PERIOD_S = 0.25
# The process keeps to the limit itself, as far as the kernel can count; this is for what it cannot.
_MEMORY_SLACK = 1.125
# TensorFlow holds the interpreter lock for seconds at most; a machine may be busy with something else for longer.
_SILENCE_IDLE_S = 10.0
_SILENCE_RUNNING_S = 30.0
_RESIDENT = re.compile(r"^Rss(Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)


class Watch:
    """Watches for as long as `run` does. `heartbeat_s`: between two pings, 0: none. `memory_limit`: bytes, 0: none."""

    def __init__(self, processes: Callable[[], Iterable[EngineProcess]], heartbeat_s: float, memory_limit: int) -> None:
        self._processes = processes
        self._heartbeat_s = heartbeat_s
        self._memory_limit = memory_limit

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._look_at_memory())
            if self._heartbeat_s:
                tasks.create_task(self._beat())

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._heartbeat_s
            await asyncio.sleep(self._heartbeat_s)
            # Answers that came while this loop was busy have not been read yet.
            late_s = max(0.0, loop.time() - due)
            for process in self._processes():
                self._look_at(process, late_s)

    def _look_at(self, process: EngineProcess, late_s: float) -> None:
        connection = process.connection
        if not connection.greeting.done():
            return
        now = asyncio.get_running_loop().time()
        if connection.is_compiling:
            # That may take long in one piece; the deadline of who waits for it decides.
            connection.last_heard = now
        connection.last_heard = min(now, connection.last_heard + late_s)
        silence_s = now - connection.last_heard
        if silence_s > (_SILENCE_RUNNING_S if connection.running else _SILENCE_IDLE_S):
            _log.warning("engine %d has answered nothing for %.1f s; ending it", process.pid, silence_s)
            process.end(EndReason.HEARTBEAT)
        else:
            connection.tell(Kind.PING, b"")

    async def _look_at_memory(self) -> None:
        while True:
            await asyncio.sleep(_MEMORY_PERIOD_S)
            for process in self._processes():
                arenas = process.arenas.held_bytes if process.arenas is not None else 0
                if process.connection.memories is not None:
                    arenas += process.connection.memories.held_bytes
                process.resident_bytes = resident_bytes(process.pid, arenas)
                if self._memory_limit and process.resident_bytes > self._memory_limit * _MEMORY_SLACK:
                    _log.warning("engine %d takes %d bytes; ending it", process.pid, process.resident_bytes)
                    process.end(EndReason.MEMORY)


def resident_bytes(pid: int, arenas: int) -> int:
    """What of a process lies in memory, without files, arenas and memory of clients. 0 where that cannot be told.

    What it shares with others counts: a process makes such memory alone too, and the kernel's limit leaves that out.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        # It is gone, or there is no such file system.
        return 0
    sizes = {name: int(size) * 1024 for name, size in _RESIDENT.findall(status)}
    return sizes.get("Anon", 0) + max(0, sizes.get("Shmem", 0) - arenas)
