"""Builds the server's status for `AdminService` from engines, tenants, admission control and caches.

`metrics` reads the same sources. All are read on the event loop, where their values are consistent.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from gradrule.v1 import admin_pb2
from gradrule_server.link.engine import Use
from gradrule_server.link.pool import EnginePool
from gradrule_server.recovery.crash_history import Quarantine

if TYPE_CHECKING:
    from gradrule_server.registry.blob_index import BlobCacheUse

MAX_TENANTS = 1000
_TENANT_USAGES = [
    field.name for field in admin_pb2.TenantStatus.DESCRIPTOR.fields if field.message_type is admin_pb2.Usage.DESCRIPTOR
]
MAX_QUARANTINED = 1000
# Logs and status show the beginning of a digest, which is enough to recognise it.
_DIGEST_SHOWN = 16


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What a tenant uses: an amount for the name of each resource in `limits.TENANT_RESOURCES`."""

    name: str
    used: Mapping[str, int]


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
    """What status and metrics read.

    Attributes:
        engines: The engines, with their compile workers.
        tenants: Returns what the loaded tenants use.
        in_flight: Returns the number of requests in the server.
        max_in_flight: Its limit.
        caches: Returns the state of all caches of programs.
        quarantines: Returns the quarantines that hold now.
        limits: The limits of each tenant, by the name of a `limits.TenantResource`; missing: no limit.
        registry: Returns the state of the registry.
        blob_cache: Returns how the cache of an object store's blobs was used.
        gateway_ends: How many HTTP gateways ended unexpectedly, by reason.
        version: The server's version.
    """

    engines: EnginePool
    tenants: Callable[[], Sequence[TenantUsage]]
    in_flight: Callable[[], int]
    max_in_flight: int
    caches: Callable[[], Sequence[CacheStatus]]
    quarantines: Callable[[], Sequence[Quarantine]]
    limits: Mapping[str, int]
    registry: Callable[[], RegistryStatus]
    blob_cache: Callable[[], BlobCacheUse]
    gateway_ends: Mapping[str, int]
    version: str


def shown_digest(found: Quarantine) -> str:
    """Returns the start of the digest of a quarantined graph."""
    return found.workload.graph[:_DIGEST_SHOWN]


def server_status(sources: Sources, uptime_s: float) -> admin_pb2.ServerStatus:
    """Returns the current status. Must be called on the event loop."""
    engines, workers, registry = sources.engines, sources.engines.workers, sources.registry()
    tenants, quarantines = sources.tenants(), sources.quarantines()
    status = admin_pb2.ServerStatus(
        version=sources.version,
        tensorflow_version=engines.greeting.tensorflow_version,
        ready=engines.is_ready,
        spare_engines=engines.spares_ready,
        requests=admin_pb2.Usage(used=sources.in_flight(), limit=sources.max_in_flight),
        tenant_count=len(tenants),
        quarantined_program_count=len(quarantines),
        compile_workers=admin_pb2.CompileWorkersStatus(
            count=workers.count, busy=workers.busy, waiting=workers.waiting, resident_bytes=workers.resident_bytes
        ),
        engine_use=admin_pb2.EngineUse(
            evictions=engines.evictions,
            waiting_tenants=engines.waiting_tenants,
            engines=admin_pb2.Usage(used=len(engines.engines), limit=engines.max_engines),
            memory_bytes=admin_pb2.Usage(used=engines.used_bytes, limit=engines.memory_share),
        ),
        host=socket.gethostname(),
        registry=admin_pb2.RegistryStatus(database=registry.database, problem=registry.problem, blobs=registry.blobs),
    )
    _set_seconds(status.uptime, uptime_s)
    if engines.last_eviction_s is not None:
        _set_seconds(status.engine_use.since_eviction, engines.last_eviction_s)
    if registry.unavailable_s is not None:
        _set_seconds(status.registry.unavailable_for, registry.unavailable_s)
    for engine in sorted(engines.engines, key=lambda engine: engine.index):
        message = status.engines.add(
            index=engine.index,
            tenant=engine.owner or "",
            holds_sessions=engine.use is Use.SESSIONS,
            device=engines.device,
            pid=engine.pid or 0,
            ready=engine.is_ready,
            running=engine.running,
            waiting=engine.waiting,
            programs=engine.programs,
            resident_bytes=engine.resident_bytes,
            ended=engine.ended,
        )
        _set_seconds(message.uptime, engine.uptime_s)
    for cache in sources.caches():
        status.caches.add(
            name=cache.name,
            entries=admin_pb2.Usage(used=cache.entries, limit=cache.max_entries),
            size_bytes=admin_pb2.Usage(used=cache.held_bytes, limit=cache.max_bytes),
        )
    busiest = sorted(tenants, key=lambda tenant: (-tenant.used["requests"], tenant.name))
    for tenant in busiest[:MAX_TENANTS]:
        usages = status.tenants.add(name=tenant.name)
        for resource in _TENANT_USAGES:
            usage: admin_pb2.Usage = getattr(usages, resource)
            usage.used, usage.limit = tenant.used[resource], sources.limits.get(resource, 0)
    for quarantine in quarantines[:MAX_QUARANTINED]:
        program = status.quarantined_programs.add(digest=shown_digest(quarantine), reason=quarantine.cause)
        _set_seconds(program.remaining, quarantine.left_s)
    return status


def _set_seconds(duration: Duration, seconds: float) -> None:
    duration.FromNanoseconds(int(max(0.0, seconds) * 1e9))
