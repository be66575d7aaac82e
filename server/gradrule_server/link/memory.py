"""How much memory there is, and how much of it an engine may take where no setting says."""

from __future__ import annotations

import os
from pathlib import Path

_ENGINES_SHARE = 0.8
_LEAST = 1024 * 1024 * 1024

_UNIFIED = Path("/sys/fs/cgroup")
_CGROUP = Path("/proc/self/cgroup")


def share_of_memory(engines: int) -> int:
    """Bytes for each engine: what the machine or this process's container has, less some for all else, divided."""
    return max(_LEAST, int(available_memory() * _ENGINES_SHARE) // engines)


def available_memory() -> int:
    """Returns the bytes that the machine has, or this process's container where that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_container_limits()])


def _container_limits() -> list[int]:
    """The limits of the control groups that this process is in."""
    limits = []
    for line in _lines(_CGROUP):
        _, controllers, name = line.split(":", 2)
        if not controllers:
            folder, file = _UNIFIED / name.lstrip("/"), "memory.max"
        elif "memory" in controllers.split(","):
            folder, file = _UNIFIED / "memory" / name.lstrip("/"), "memory.limit_in_bytes"
        else:
            continue
        # Within a container its own group often shows as the root.
        for place in (folder, *folder.parents):
            limits += [int(text) for text in _lines(place / file) if text.isdigit()]
            if place == _UNIFIED:
                break
    return limits


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        # There is no such file on this system.
        return []
