"""Decodes the status of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradrule._builder.names import counted
from gradrule._builder.notebook_text import short_repr
from gradrule.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    """Holds the used amount of a resource and its limit.

    Attributes:
        used: Amount in use.
        limit: Largest amount; 0: no limit.
    """

    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Describes an engine, which is a process that runs programs.

    Attributes:
        index: Number of the engine.
        device: Device that it runs on.
        pid: Process id; None while there is no process.
        ready: Whether it accepts calls.
        running: Number of running calls.
        waiting: Number of calls that wait for it.
        programs: Number of programs in its memory.
        resident_bytes: Bytes of main memory.
        uptime: Seconds since it became ready.
        ended: Number of earlier engines with this index that ended, by reason.
        tenant: Tenant whose calls it runs; empty: none yet.
        holds_sessions: Whether it runs only sessions.
    """

    index: int
    device: str
    pid: int | None
    ready: bool
    running: int
    waiting: int
    programs: int
    resident_bytes: int
    uptime: float
    ended: Mapping[str, int]
    tenant: str
    holds_sessions: bool


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """Describes a cache.

    Attributes:
        name: Name of the cache.
        entries: Number of entries.
        size_bytes: Estimated bytes.
    """

    name: str
    entries: Usage
    size_bytes: Usage


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """Describes the resources that a tenant uses; names as in the quotas."""

    name: str
    requests: Usage
    programs: Usage
    rules: Usage
    sessions: Usage
    session_bytes: Usage
    handles: Usage
    handle_bytes: Usage
    blob_bytes: Usage


@dataclass(frozen=True, slots=True)
class QuarantinedProgram:
    """Describes a program that the server refuses to run for some time.

    Attributes:
        digest: First digits of the program's SHA-256, in hex.
        reason: Why it is refused.
        remaining: Seconds until it may run again.
    """

    digest: str
    reason: str
    remaining: float


@dataclass(frozen=True, slots=True)
class CompileWorkersStatus:
    """Describes the compile workers of all tenants, which are processes that read graphs; old servers report zeros.

    Attributes:
        count: Number of workers.
        busy: Number of workers with a task.
        waiting: Number of tasks that wait for a worker.
        resident_bytes: Bytes of main memory of all workers.
    """

    count: int
    busy: int
    waiting: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class RegistryStatus:
    """Describes the registry: the database of rules and programs, and the store of blobs; old servers report nothing.

    Attributes:
        database: The database, without its password: URL, or path of a file.
        problem: Why the database cannot be used; empty: it can.
        unavailable_for: Seconds since the database could not be used for the first time; None: it can be used.
        blobs: Where blobs are: URL of an object store, or path of a folder.
    """

    database: str
    problem: str
    unavailable_for: float | None
    blobs: str


@dataclass(frozen=True, slots=True)
class EngineUse:
    """Describes the use of the engines of all tenants; old servers report zeros.

    If there are not enough engines, they are taken from tenants, whose programs have to be compiled again.

    Attributes:
        evictions: Number of engines that were taken from their tenants, by reason: `turn` (another tenant waited),
            `memory` (all engines together exceeded their memory) or `idle` (not used for ten minutes).
        since_eviction: Seconds since an engine was taken for the reason `turn` or `memory`; None: never.
        waiting_tenants: Number of tenants that wait for an engine.
        engines: Number of engines.
        memory_bytes: Bytes of main memory of all engines and compile workers; what they share counts once.
    """

    evictions: Mapping[str, int]
    since_eviction: float | None
    waiting_tenants: int
    engines: Usage
    memory_bytes: Usage


@dataclass(frozen=True, slots=True, repr=False)
class ServerStatus:
    """Describes the state of a server.

    Attributes:
        version: Version of gradrule.
        tensorflow_version: Version of TensorFlow in the engines.
        uptime: Seconds since the start.
        ready: Whether the server accepts calls.
        engines: The engines.
        spare_engines: Number of engines that are started in advance.
        requests: Number of running requests.
        caches: The caches.
        tenants: The first 1,000 tenants.
        tenant_count: Number of all tenants.
        quarantined_programs: The first 1,000 refused programs.
        quarantined_program_count: Number of all refused programs.
        compile_workers: The compile workers.
        host: Name of the machine that the server runs on.
        registry: The registry.
        engine_use: Use of the engines of all tenants.
    """

    version: str
    tensorflow_version: str
    uptime: float
    ready: bool
    engines: tuple[EngineStatus, ...]
    spare_engines: int
    requests: Usage
    caches: tuple[CacheStatus, ...]
    tenants: tuple[TenantStatus, ...]
    tenant_count: int
    quarantined_programs: tuple[QuarantinedProgram, ...]
    quarantined_program_count: int
    compile_workers: CompileWorkersStatus
    host: str
    registry: RegistryStatus
    engine_use: EngineUse

    def __repr__(self) -> str:
        state = "ready" if self.ready else "not ready"
        return short_repr(
            f"<ServerStatus {self.version}, {state}, {counted(len(self.engines), 'engine')}, up {self.uptime:.0f} s>"
        )


def server_status(message: admin_pb2.ServerStatus) -> ServerStatus:
    """Decodes a server's status."""
    return ServerStatus(
        version=message.version,
        tensorflow_version=message.tensorflow_version,
        uptime=message.uptime.ToNanoseconds() / 1e9,
        ready=message.ready,
        engines=tuple(map(_engine, message.engines)),
        spare_engines=message.spare_engines,
        requests=_usage(message.requests),
        caches=tuple(CacheStatus(item.name, _usage(item.entries), _usage(item.size_bytes)) for item in message.caches),
        tenants=tuple(map(_tenant, message.tenants)),
        tenant_count=message.tenant_count,
        quarantined_programs=tuple(
            QuarantinedProgram(item.digest, item.reason, item.remaining.ToNanoseconds() / 1e9)
            for item in message.quarantined_programs
        ),
        quarantined_program_count=message.quarantined_program_count,
        compile_workers=CompileWorkersStatus(
            message.compile_workers.count,
            message.compile_workers.busy,
            message.compile_workers.waiting,
            message.compile_workers.resident_bytes,
        ),
        host=message.host,
        registry=_registry(message.registry),
        engine_use=_engine_use(message.engine_use),
    )


def _engine_use(message: admin_pb2.EngineUse) -> EngineUse:
    since = message.since_eviction.ToNanoseconds() / 1e9 if message.HasField("since_eviction") else None
    return EngineUse(
        evictions=dict(message.evictions),
        since_eviction=since,
        waiting_tenants=message.waiting_tenants,
        engines=_usage(message.engines),
        memory_bytes=_usage(message.memory_bytes),
    )


def _registry(message: admin_pb2.RegistryStatus) -> RegistryStatus:
    away = message.unavailable_for.ToNanoseconds() / 1e9 if message.HasField("unavailable_for") else None
    return RegistryStatus(message.database, message.problem, away, message.blobs)


def _engine(message: admin_pb2.EngineStatus) -> EngineStatus:
    return EngineStatus(
        index=message.index,
        device=message.device,
        pid=message.pid or None,
        ready=message.ready,
        running=message.running,
        waiting=message.waiting,
        programs=message.programs,
        resident_bytes=message.resident_bytes,
        uptime=message.uptime.ToNanoseconds() / 1e9,
        ended=dict(message.ended),
        tenant=message.tenant,
        holds_sessions=message.holds_sessions,
    )


def _tenant(message: admin_pb2.TenantStatus) -> TenantStatus:
    return TenantStatus(
        name=message.name,
        requests=_usage(message.requests),
        programs=_usage(message.programs),
        rules=_usage(message.rules),
        sessions=_usage(message.sessions),
        session_bytes=_usage(message.session_bytes),
        handles=_usage(message.handles),
        handle_bytes=_usage(message.handle_bytes),
        blob_bytes=_usage(message.blob_bytes),
    )


def _usage(message: admin_pb2.Usage) -> Usage:
    return Usage(message.used, message.limit)
