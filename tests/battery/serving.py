"""Starts servers for the battery on loopback, each with its own folder, and watches their resources."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from gradrule_server.settings import Settings, flag_name
from tests.battery.figures import Scale
from tests.processes import Resources, resources
from tests.service.servers import RunningServer, started_server

SPARE_DESCRIPTORS = 3
"""How many more descriptors a server may have after a row than before it."""
_SPARE_BYTES = 256 << 20
"""How much more memory a front end may have after a row than before it: malloc keeps some of what was freed."""

_numbers = itertools.count()


@contextlib.contextmanager
def served(scale: Scale, row: str, **settings: object) -> Iterator[RunningServer]:
    """Starts a server with these settings; raises for an unknown setting."""
    folder = data_folder(scale, row)
    with started_server(folder, flags(settings)) as server:
        yield server


def flags(settings: Mapping[str, object]) -> list[str]:
    """Returns command-line flags of settings; raises `KeyError` for an unknown one."""
    found = []
    for name, value in settings.items():
        if name not in Settings.model_fields:
            raise KeyError(name)
        found += [flag_name(name), str(value)]
    return found


def data_folder(scale: Scale, row: str) -> Path:
    """Returns a new folder for a server of a row."""
    while True:
        folder = scale.folder / "servers" / f"{row}-{next(_numbers)}"
        if not folder.exists():
            return folder


async def settled(server: RunningServer, before: Resources, within_s: float) -> Resources:
    """Waits at most `within_s` until the front end has about as many descriptors as `before`; returns its resources."""
    ends_at = time.monotonic() + within_s
    while True:
        now = resources(server.process.pid)
        if now.descriptors <= before.descriptors + SPARE_DESCRIPTORS or time.monotonic() > ends_at:
            return now
        await asyncio.sleep(0.2)


def growth_faults(before: Resources, after: Resources) -> list[str]:
    """Returns what a front end still holds after an attack, one line for each resource."""
    found = []
    if after.descriptors > before.descriptors + SPARE_DESCRIPTORS:
        found.append(f"{after.descriptors} descriptors, {before.descriptors} before")
    if after.resident_bytes > before.resident_bytes + _SPARE_BYTES:
        found.append(f"the front end keeps {(after.resident_bytes - before.resident_bytes) >> 20} MiB")
    return found
