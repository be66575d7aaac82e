"""Reads the state of engines, tenants, admission control and caches, and builds the server's status for `AdminService`.

All sources are read on the event loop, where their values are consistent.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.duration_pb2 import Duration

from gradrule.v1 import admin_pb2
from gradrule_server.link.monitor import EngineStatus

MAX_TENANTS = 1000
_TENANT_USAGES = [
    field.name for field in admin_pb2.TenantStatus.DESCRIPTOR.fields if field.message_type is admin_pb2.Usage.DESCRIPTOR
]
MAX_QUARANTINED = 1000


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
    def max_engines(self) -> int: ...
    @property
    def waiting_tenants(self) -> int:
        """Tenants that wait for their turn on an engine."""
        ...

    @property
    def evictions(self) -> Mapping[str, int]:
        """How many engines were taken from their tenants, by reason: `turn`, `memory` or `idle`."""
        ...

    @property
    def last_eviction_s(self) -> float | None:
        """Seconds since an engine was taken for `turn` or `memory`; None: never."""
        ...

    @property
    def used_bytes(self) -> int:
        """Memory of engines, spares and compile workers."""
        ...

    @property
    def memory_share(self) -> int:
        """Most bytes that these may take; 0: no limit."""
        ...

    @property
    def ended(self) -> Mapping[int, Mapping[str, int]]:
        """How often an engine has ended, by its index and the reason; includes engines that no longer exist."""
        ...

    def status(self) -> Sequence[EngineStatus]:
        """Returns all engines, by index."""
        ...


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant uses: an amount for the name of each resource in `limits.TENANT_RESOURCES`."""

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
    """The content and limits of a cache. Bytes are approximate. `evictions`: dropped entries by reason."""

    name: str
    entries: int
    held_bytes: int
    max_entries: int = 0
    max_bytes: int = 0
    evictions: Mapping[str, int] = field(default_factory=dict)


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


class BlobCache(Protocol):
    """The files of blobs in an object store, and fetches since the start."""

    @property
    def hits(self) -> int:
        """Blobs that calls needed, and that had a file."""
        ...

    @property
    def fetches(self) -> int: ...
    @property
    def failures(self) -> int:
        """Fetches that failed."""
        ...

    @property
    def fetched_bytes(self) -> int: ...
    @property
    def fetch_s(self) -> float: ...
    @property
    def held_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RegistryStatus:
    """The database of rules and programs, and where blobs are.

    Attributes:
        database: Where the database is, without a password.
        blobs: Where blobs are.
        problem: Why the database cannot be used; empty: it can.
        unavailable_s: Seconds since it could not be used for the first time; None: it can be used.
    """

    database: str
    blobs: str
    problem: str = ""
    unavailable_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sources:
    """All sources.

    Attributes:
        limits: the limits of each tenant, by the name of a `limits.TenantResource`; missing: no limit.
        helper_ends: returns how many helper processes ended unexpectedly, by helper and reason.
    """

    engines: Engines
    workers: Workers
    tenants: Tenants
    queue: Callable[[], QueueStatus]
    caches: Callable[[], Sequence[CacheStatus]]
    quarantined: Callable[[], Sequence[Quarantined]]
    limits: Mapping[str, int]
    tensorflow_version: Callable[[], str]
    version: str
    registry: Callable[[], RegistryStatus]
    blob_cache: Callable[[], BlobCache]
    helper_ends: Callable[[], Mapping[str, Mapping[str, int]]]


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
    registry: RegistryStatus
    blob_cache: BlobCache
    max_engines: int
    waiting_tenants: int
    evictions: Mapping[str, int]
    last_eviction_s: float | None
    used_bytes: int
    memory_share: int
    helper_ends: Mapping[str, Mapping[str, int]]


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
        sources.registry(),
        sources.blob_cache(),
        sources.engines.max_engines,
        sources.engines.waiting_tenants,
        dict(sources.engines.evictions),
        sources.engines.last_eviction_s,
        sources.engines.used_bytes,
        sources.engines.memory_share,
        {helper: dict(counts) for helper, counts in sources.helper_ends().items()},
    )


def server_status(sources: Sources, uptime_s: float) -> admin_pb2.ServerStatus:
    """Returns the current status. Must be called on the event loop."""
    found = take_snapshot(sources)
    status = admin_pb2.ServerStatus(
        version=sources.version,
        tensorflow_version=sources.tensorflow_version(),
        ready=found.is_ready,
        spare_engines=found.spares,
        requests=admin_pb2.Usage(used=found.queue.in_flight, limit=found.queue.max_in_flight),
        tenant_count=len(found.tenants),
        quarantined_program_count=len(found.quarantined),
        compile_workers=admin_pb2.CompileWorkersStatus(
            count=found.workers.count,
            busy=found.workers.busy,
            waiting=found.workers.waiting,
            resident_bytes=found.workers.resident_bytes,
        ),
        engine_use=admin_pb2.EngineUse(
            evictions=found.evictions,
            waiting_tenants=found.waiting_tenants,
            engines=admin_pb2.Usage(used=len(found.engines), limit=found.max_engines),
            memory_bytes=admin_pb2.Usage(used=found.used_bytes, limit=found.memory_share),
        ),
        host=socket.gethostname(),
        registry=admin_pb2.RegistryStatus(
            database=found.registry.database, problem=found.registry.problem, blobs=found.registry.blobs
        ),
    )
    _set_seconds(status.uptime, uptime_s)
    if found.last_eviction_s is not None:
        _set_seconds(status.engine_use.since_eviction, found.last_eviction_s)
    if found.registry.unavailable_s is not None:
        _set_seconds(status.registry.unavailable_for, found.registry.unavailable_s)
    _add_engines(status, found)
    _add_caches(status, found)
    busiest = sorted(found.tenants, key=lambda tenant: (-tenant.used["requests"], tenant.name))
    for tenant in busiest[:MAX_TENANTS]:
        _add_tenant(status, tenant, sources.limits)
    for program in found.quarantined[:MAX_QUARANTINED]:
        message = status.quarantined_programs.add(digest=program.digest, reason=program.reason)
        _set_seconds(message.remaining, program.remaining_s)
    return status


def _add_engines(status: admin_pb2.ServerStatus, found: Snapshot) -> None:
    for engine in found.engines:
        message = status.engines.add(
            index=engine.index,
            tenant=engine.owner or "",
            holds_sessions=engine.holds_sessions,
            device=engine.device,
            pid=engine.pid,
            ready=engine.is_ready,
            running=engine.running,
            waiting=engine.waiting,
            programs=engine.programs,
            jit_programs=engine.jit_programs,
            resident_bytes=engine.resident_bytes,
            ended=engine.ended,
        )
        _set_seconds(message.uptime, engine.uptime_s)


def _add_caches(status: admin_pb2.ServerStatus, found: Snapshot) -> None:
    for cache in found.caches:
        status.caches.add(
            name=cache.name,
            entries=admin_pb2.Usage(used=cache.entries, limit=cache.max_entries),
            size_bytes=admin_pb2.Usage(used=cache.held_bytes, limit=cache.max_bytes),
        )


def _add_tenant(status: admin_pb2.ServerStatus, tenant: TenantUsage, limits: Mapping[str, int]) -> None:
    message = status.tenants.add(name=tenant.name)
    for resource in _TENANT_USAGES:
        usage: admin_pb2.Usage = getattr(message, resource)
        usage.used, usage.limit = tenant.used[resource], limits.get(resource, 0)


def _set_seconds(duration: Duration, seconds: float) -> None:
    duration.FromNanoseconds(int(max(0.0, seconds) * 1e9))
