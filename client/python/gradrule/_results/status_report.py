"""How a server is doing, decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradrule.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class Usage:
    """How much there is of something, and how much there may be (0: no limit)."""

    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine: a process that runs programs.

    pid: None while there is no process. uptime: seconds since it is ready. ended: how often an engine in its place
    ended, by reason. tenant: whose work it runs; empty: nobody's yet. holds_sessions: it runs nothing but sessions.
    jit_programs: programs of which it runs calls with XLA.
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
    jit_programs: int


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """One cache; its bytes are rough."""

    name: str
    entries: Usage
    size_bytes: Usage


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """What a tenant holds."""

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
    """A program that is refused for `remaining` seconds. digest: the beginning of its own, in hex."""

    digest: str
    reason: str
    remaining: float


@dataclass(frozen=True, slots=True)
class CompileWorkersStatus:
    """The compile workers of all tenants: processes that read graphs.

    busy: how many of them are at a task. waiting: tasks that wait for one. A server older than this client tells zeros.
    """

    count: int
    busy: int
    waiting: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """How a server is doing. uptime: in seconds. tenants, quarantined_programs: the first 1,000 of `…_count`."""

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


def server_status(message: admin_pb2.ServerStatus) -> ServerStatus:
    """The status in a message."""
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
    )


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
        jit_programs=message.jit_programs,
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
