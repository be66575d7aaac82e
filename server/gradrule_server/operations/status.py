"""Builds the server's status for `AdminService`."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.duration_pb2 import Duration

from gradrule.v1 import admin_pb2
from gradrule_server.limits import REPORTED_RESOURCES
from gradrule_server.operations.sources import Snapshot, Sources, TenantUsage, take_snapshot

MAX_TENANTS = 1000
MAX_QUARANTINED = 1000


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
    )
    _set_seconds(status.uptime, uptime_s)
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
            pid=engine.pid or 0,
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
    for resource in REPORTED_RESOURCES:
        usage: admin_pb2.Usage = getattr(message, resource.name)
        usage.used, usage.limit = tenant.used[resource.name], limits.get(resource.name, 0)


def _set_seconds(duration: Duration, seconds: float) -> None:
    duration.FromNanoseconds(int(max(0.0, seconds) * 1e9))
