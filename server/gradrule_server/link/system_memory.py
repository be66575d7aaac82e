"""Determines how much memory the machine has, and whether the kernel has killed processes for lack of it."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path

_ENGINES_SHARE = 0.8
_LEAST_LIMIT = 1024 * 1024 * 1024

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")

# The first file counts the kills in this container, the second those on the whole machine.
_KILL_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
_SAMPLE_PERIOD_S = 1.0
# The front end notices a killed process some time after the kill, so kills of the last samples count.
_SAMPLES = 4


def memory_share(engines: int) -> int:
    """Returns the default memory limit of an engine: most of the available memory, divided by their number. Bytes."""
    return max(_LEAST_LIMIT, int(available_memory() * _ENGINES_SHARE) // engines)


def available_memory() -> int:
    """Returns the memory of the machine, or of this process's container if that has less. Bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_container_limits()])


class OomKills:
    """Samples the kernel's count of processes that it killed because memory ran out."""

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=_SAMPLES)

    async def run(self) -> None:
        """Takes a sample each second, until it is cancelled."""
        while True:
            self._samples.append(_oom_kill_count())
            await asyncio.sleep(_SAMPLE_PERIOD_S)

    @property
    def has_grown(self) -> bool:
        """Whether a process was killed within the last seconds; False without samples."""
        return bool(self._samples) and _oom_kill_count() > self._samples[0]


OOM_KILLS = OomKills()
"""Shared by all engine processes, since there is one kernel."""


def _container_limits() -> list[int]:
    """Returns the memory limits of the control groups that contain this process. Bytes."""
    limits = []
    for line in _lines(_OWN_CGROUPS):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            folder, file = _CGROUP_ROOT / name.lstrip("/"), "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = _CGROUP_ROOT / "memory" / name.lstrip("/"), "memory.limit_in_bytes"
        else:
            continue
        # Inside a container its own group often appears as the root.
        for place in (folder, *folder.parents):
            limits += [int(text) for text in _lines(place / file) if text.isdigit()]
            if place == _CGROUP_ROOT:
                break
    return limits


def _oom_kill_count() -> int:
    for counter in _KILL_COUNTERS:
        lines = _lines(counter)
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file; none if this system has no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
