"""Declares what metrics and status read from engines, tenants, admission control and caches.

All sources are read on the event loop, where their values are consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class EngineStatus(Protocol):
    """One engine.

    Attributes:
        owner: Its tenant; None: a spare engine.
        ended: How often an engine with this index has ended, by reason (`crash`, …).
    """

    @property
    def index(self) -> int: ...
    @property
    def owner(self) -> str | None: ...
    @property
    def holds_sessions(self) -> bool: ...
    @property
    def device(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def programs(self) -> int: ...
    @property
    def jit_programs(self) -> int: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def uptime_s(self) -> float: ...
    @property
    def ended(self) -> Mapping[str, int]: ...


class Workers(Protocol):
    """The compile workers of all tenants: the processes that read graphs."""

    @property
    def count(self) -> int: ...
    @property
    def busy(self) -> int: ...
    @property
    def waiting(self) -> int:
        """Tasks that wait for a worker."""
        ...

    @property
    def resident_bytes(self) -> int: ...


class Engines(Protocol):
    """The engines of a server."""

    @property
    def is_ready(self) -> bool: ...
    @property
    def spares_ready(self) -> int: ...
    @property
    def ended(self) -> Mapping[int, Mapping[str, int]]:
        """How often an engine has ended, by its index and the reason; includes engines that no longer exist."""
        ...

    def status(self) -> Sequence[EngineStatus]:
        """Returns all engines, by index."""
        ...


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant uses: amounts by name, at least of the `limits.REPORTED_RESOURCES`."""

    name: str
    used: Mapping[str, int]


class Tenants(Protocol):
    """The tenants that are loaded."""

    def status(self) -> Sequence[TenantUsage]:
        """Returns the usage of all tenants, in any order."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The compile workers at one moment. `waiting`: tasks that wait for a worker."""

    count: int
    busy: int
    waiting: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """The content and limits of a cache. Bytes are approximate."""

    name: str
    entries: int
    held_bytes: int
    max_entries: int = 0
    max_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A quarantined program: the start of its digest, the reason, and the remaining time in seconds."""

    digest: str
    reason: str
    remaining_s: float


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The number of requests in the server, and its limit."""

    in_flight: int
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Sources:
    """All sources. `limits`: the limits of each tenant, by the name of a `limits.TenantResource`; missing: no limit."""

    engines: Engines
    workers: Workers
    tenants: Tenants
    queue: Callable[[], QueueStatus]
    caches: Callable[[], Sequence[CacheStatus]]
    quarantined: Callable[[], Sequence[Quarantined]]
    limits: Mapping[str, int]
    tensorflow_version: Callable[[], str]
    version: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values of all sources at one moment."""

    is_ready: bool
    spares: int
    engines: Sequence[EngineStatus]
    ended: Mapping[int, Mapping[str, int]]
    workers: WorkerStatus
    tenants: Sequence[TenantUsage]
    queue: QueueStatus
    caches: Sequence[CacheStatus]
    quarantined: Sequence[Quarantined]


def take_snapshot(sources: Sources) -> Snapshot:
    """Reads all sources. Must be called on the event loop."""
    return Snapshot(
        sources.engines.is_ready,
        sources.engines.spares_ready,
        sources.engines.status(),
        {index: dict(counts) for index, counts in sources.engines.ended.items()},
        WorkerStatus(
            sources.workers.count, sources.workers.busy, sources.workers.waiting, sources.workers.resident_bytes
        ),
        sources.tenants.status(),
        sources.queue(),
        sources.caches(),
        sources.quarantined(),
    )
