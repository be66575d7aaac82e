"""What processes have used so far, as the kernel counts it: processor time, context switches, page faults.

The kernel counts processor time in nanoseconds, for each process apart, so other work on the machine changes it far
less than it changes elapsed time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

_FRONT_END, _ENGINE = "front end", "engine"
_ENGINE_COMM = "gradrule-engine"


@dataclass(frozen=True)
class Usage:
    """Counts of one process or of several.

    cpu_ns: processor time of all threads. waits: voluntary context switches, each is a thread that went to sleep.
    preemptions: involuntary ones. page_faults: pages that were touched for the first time, or anew after they were
    given back.
    """

    cpu_ns: float = 0.0
    waits: float = 0.0
    preemptions: float = 0.0
    page_faults: float = 0.0

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, item.name) - getattr(other, item.name) for item in fields(self)))

    def __truediv__(self, count: float) -> Self:
        return type(self)(*(getattr(self, item.name) / count for item in fields(self)))


def usage(pid: int) -> Usage:
    """Returns the counts of a process; of one that has ended, zeros."""
    folder = Path(f"/proc/{pid}")
    try:
        # The kernel's number for the processor-time clock of a process, as clock_getcpuclockid(3) makes it.
        cpu_ns = time.clock_gettime_ns((~pid << 3) | 2)
        page_faults = int((folder / "stat").read_text().rpartition(")")[2].split()[7])
    except OSError:
        return Usage()
    waits = preemptions = 0
    for task in (folder / "task").iterdir():
        with contextlib.suppress(OSError):
            status = (task / "status").read_text()
            waits += _number(status, "\nvoluntary_ctxt_switches:")
            preemptions += _number(status, "\nnonvoluntary_ctxt_switches:")
    return Usage(cpu_ns, waits, preemptions, page_faults)


def usages(pids: Iterable[int]) -> dict[int, Usage]:
    """Returns the counts of several processes."""
    return {pid: usage(pid) for pid in pids}


def tree(pid: int) -> list[int]:
    """Returns a process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for item in found:
        found += parents.get(item, [])
    return found


def roles(server: int) -> dict[int, str]:
    """Returns the processes of a gradrule server, each with its part: front end, engine, or its own name."""
    found = {}
    for pid in tree(server):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            found[pid] = _ENGINE if name == _ENGINE_COMM else _FRONT_END if pid == server else name
    return found


def resident_bytes(pids: Iterable[int]) -> int:
    """Returns the memory of processes; what several of them share counts once, in parts (PSS)."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += _number(Path(f"/proc/{pid}/smaps_rollup").read_text(), "\nPss:") * 1024
    return total


def _number(text: str, label: str) -> int:
    start = text.index(label) + len(label)
    return int(text[start:].split(maxsplit=1)[0])
