"""Whether the kernel has killed processes lately because memory ran out."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

# The first counts the kills in this container, whoever is short of memory; the other those on the whole machine.
_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
_PERIOD_S = 1.0
# It takes a while until a process that was killed is known to be gone.
_SAMPLES = 4


class OomKills:
    """The kernel's count of such kills, and what it was some seconds ago."""

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=_SAMPLES)

    async def run(self) -> None:
        """Looks at it now and then, until it is cancelled."""
        while True:
            self._samples.append(_count())
            await asyncio.sleep(_PERIOD_S)

    @property
    def grew(self) -> bool:
        """Whether anything was killed within the last seconds; False where nobody looked."""
        return bool(self._samples) and _count() > self._samples[0]


def _count() -> int:
    for counter in _COUNTERS:
        try:
            lines = counter.read_text().splitlines()
        except OSError:
            # There is no such file on this system.
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.isdigit():
                return int(value)
    return 0


OOM_KILLS = OomKills()
"""There is one kernel."""
