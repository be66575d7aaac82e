"""Servers for the battery: started as a user would, on loopback, each with a folder of its own, and watched."""

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
    """A server with these settings; one that is not (yet) a setting of the server's is an error."""
    folder = data_folder(scale, row)
    with started_server(folder, flags(settings)) as server:
        yield server


def flags(settings: Mapping[str, object]) -> list[str]:
    """Command-line flags of settings; `KeyError` for one that does not exist."""
    found = []
    for name, value in settings.items():
        if name not in Settings.model_fields:
            raise KeyError(name)
        found += [flag_name(name), str(value)]
    return found


def data_folder(scale: Scale, row: str) -> Path:
    """A fresh folder for a server of a row."""
    while True:
        folder = scale.folder / "servers" / f"{row}-{next(_numbers)}"
        if not folder.exists():
            return folder


async def settled(server: RunningServer, before: Resources, within_s: float) -> Resources:
    """Waits until the front end has about as many descriptors as `before`, at most `within_s`; what it holds then."""
    ends_at = time.monotonic() + within_s
    while True:
        now = resources(server.process.pid)
        if now.descriptors <= before.descriptors + SPARE_DESCRIPTORS or time.monotonic() > ends_at:
            return now
        await asyncio.sleep(0.2)


def growth_faults(before: Resources, after: Resources) -> list[str]:
    """Returns what a front end holds on to after an attack, one line for each; nothing where it gave all back."""
    found = []
    if after.descriptors > before.descriptors + SPARE_DESCRIPTORS:
        found.append(f"{after.descriptors} descriptors, {before.descriptors} before")
    if after.resident_bytes > before.resident_bytes + _SPARE_BYTES:
        found.append(f"the front end keeps {(after.resident_bytes - before.resident_bytes) >> 20} MiB")
    return found
