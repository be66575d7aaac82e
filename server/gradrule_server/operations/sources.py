"""Where the figures come from: engines, tenants, the door, caches, each as much of it as is needed here.

All are asked on the event loop, where what they tell is consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


class EngineStatus(Protocol):
    """One engine.

    owner: its tenant; None while it has none. ended: how often one in its place ended, by reason (`crash`, …).
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
    """The compile workers of all tenants: processes that read graphs."""

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
        """How often an engine ended, by its index and the reason; engines that are gone too."""
        ...

    def status(self) -> Sequence[EngineStatus]:
        """All engines, in order."""
        ...


class TenantStatus(Protocol):
    """What a tenant holds."""

    @property
    def name(self) -> str: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def programs(self) -> int: ...
    @property
    def rules(self) -> int: ...
    @property
    def sessions(self) -> int: ...
    @property
    def session_bytes(self) -> int: ...
    @property
    def handles(self) -> int: ...
    @property
    def handle_bytes(self) -> int: ...
    @property
    def blob_bytes(self) -> int: ...


class Tenants(Protocol):
    """The tenants that the server knows at the moment."""

    def status(self) -> Sequence[TenantStatus]:
        """All tenants, in no order."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Compile workers at one moment. `waiting`: tasks that wait for one."""

    count: int
    busy: int
    waiting: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """One cache. Bytes are rough."""

    name: str
    entries: int
    held_bytes: int
    max_entries: int = 0
    max_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A program that is refused for a while, by the beginning of its digest."""

    digest: str
    reason: str
    left_s: float


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Requests in the server, and how many there may be."""

    in_flight: int
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Sources:
    """All of them. limits: what each tenant may hold, by the name of a field of `TenantStatus`; missing: no limit."""

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
    """What all sources told at one moment."""

    is_ready: bool
    spares: int
    engines: Sequence[EngineStatus]
    ended: Mapping[int, Mapping[str, int]]
    workers: WorkerStatus
    tenants: Sequence[TenantStatus]
    queue: QueueStatus
    caches: Sequence[CacheStatus]
    quarantined: Sequence[Quarantined]


def snapshot(sources: Sources) -> Snapshot:
    """Asks all sources; called on the event loop."""
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


def held(tenant: TenantStatus, name: str) -> int:
    """How much a tenant holds of something, by the name of a field of `TenantStatus`."""
    value: int = getattr(tenant, name)
    return value
