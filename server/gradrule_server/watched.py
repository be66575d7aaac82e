"""What operations watch of a server that has one engine and one tenant."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gradrule_server import __version__
from gradrule_server.front.handlers import Door
from gradrule_server.link.engine import Engine
from gradrule_server.operations.request import DEFAULT_TENANT
from gradrule_server.operations.sources import CacheStatus, QueueStatus, Sources
from gradrule_server.programs.house import ProgramHouse
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.settings import Settings


@dataclass(frozen=True, slots=True)
class OneEngineStatus:
    """The engine, as `operations.sources.EngineStatus` wants it."""

    index: int
    device: str
    pid: int | None
    is_ready: bool
    running: int
    waiting: int
    programs: int
    resident_bytes: int
    uptime_s: float
    ended: Mapping[str, int] = field(default_factory=dict)


class OneEngine:
    """One engine as a source. `changed` hears of its coming and going."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.house: ProgramHouse | None = None
        self._ended: Counter[str] = Counter()
        self._since = time.monotonic()

    @property
    def is_ready(self) -> bool:
        return self.engine is not None and self.engine.pid is not None

    @property
    def spares_ready(self) -> int:
        return 0

    def changed(self, ready: bool) -> None:
        """The engine is ready from now on, or gone."""
        self._since = time.monotonic()
        if not ready and self.engine is not None:
            self._ended["overrun" if self.engine.was_overrun else "crash"] += 1

    def status(self) -> Sequence[OneEngineStatus]:
        engine = self.engine
        if engine is None or self.house is None:
            return ()
        pid = engine.pid
        running, waiting = engine.load
        uptime_s = time.monotonic() - self._since if pid is not None else 0.0
        return (
            OneEngineStatus(
                index=0,
                device=engine.greeting.device,
                pid=pid,
                is_ready=pid is not None,
                running=running,
                waiting=waiting,
                programs=self.house.caches()[1].entries,
                resident_bytes=_resident_bytes(pid),
                uptime_s=uptime_s,
                ended=dict(self._ended),
            ),
        )


@dataclass(frozen=True, slots=True)
class OneTenantStatus:
    """The tenant, as `operations.sources.TenantStatus` wants it."""

    name: str
    in_flight: int
    programs: int
    rules: int
    sessions: int
    session_bytes: int
    handles: int
    handle_bytes: int
    blob_bytes: int


class OneTenant:
    """The tenant of a server without credentials, as a source."""

    def __init__(self, door: Door, blobs: BlobStore) -> None:
        self._door = door
        self._blobs = blobs

    def status(self) -> Sequence[OneTenantStatus]:
        return (OneTenantStatus(DEFAULT_TENANT, self._door.in_flight, 0, 0, 0, 0, 0, 0, self._blobs.held_bytes),)


def sources_of(engines: OneEngine, house: ProgramHouse, door: Door, blobs: BlobStore, settings: Settings) -> Sources:
    """All that there is to watch."""

    def caches() -> Sequence[CacheStatus]:
        return house.caches()

    return Sources(
        engines=engines,
        tenants=OneTenant(door, blobs),
        queue=lambda: QueueStatus(door.in_flight, settings.max_concurrent_requests),
        caches=caches,
        quarantined=tuple,
        limits=lambda _: {"in_flight": settings.max_concurrent_requests, "blob_bytes": settings.max_blob_bytes},
        tensorflow_version=lambda: engines.engine.greeting.tensorflow_version if engines.engine is not None else "",
        version=__version__,
    )


def _resident_bytes(pid: int | None) -> int:
    """What of a process lies in memory; 0 where there is none."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
