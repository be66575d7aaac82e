"""Sources of metrics and status for tests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradrule.v1 import evaluate_pb2
from gradrule_server.limits import TENANT_RESOURCES
from gradrule_server.link.engine import Use
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.status import CacheStatus, RegistryStatus, Sources, TenantUsage
from gradrule_server.recovery.crash_history import Quarantine, Workload
from gradrule_server.registry.blob_index import BlobCacheUse


@dataclass(frozen=True)
class FakeEngine:
    """What status and metrics read of an engine."""

    index: int
    owner: str
    pid: int | None
    is_ready: bool
    running: int
    waiting: int
    programs: int
    resident_bytes: int
    uptime_s: float
    ended: Mapping[str, int]
    holder: str = "programs"
    use: Use = Use.PROGRAMS


ENGINE = FakeEngine(
    index=0,
    owner="ada",
    pid=4711,
    is_ready=True,
    running=2,
    waiting=1,
    programs=3,
    resident_bytes=1 << 30,
    uptime_s=60.5,
    ended={},
)


REGISTRY = RegistryStatus("postgresql://gradrule@db/gradrule", "s3://bucket/blobs")


@dataclass(frozen=True)
class Workers:
    count: int = 3
    busy: int = 2
    waiting: int = 1
    resident_bytes: int = 1 << 20


@dataclass(frozen=True)
class Engines:
    ended: Mapping[int, Mapping[str, int]] = field(default_factory=lambda: {1: {"crash": 2, "memory": 1}})
    engines: Sequence[FakeEngine] = (
        ENGINE,
        replace(ENGINE, index=1, pid=None, is_ready=False, ended={"crash": 2, "memory": 1}),
    )
    device: str = "CPU:0"
    is_ready: bool = True
    spares_ready: int = 1
    max_engines: int = 21
    waiting_tenants: int = 3
    evictions: Mapping[str, int] = field(default_factory=lambda: {"turn": 4, "idle": 1})
    last_eviction_s: float | None = 7.5
    used_bytes: int = 3 << 20
    memory_share: int = 5 << 20
    workers: Workers = field(default_factory=Workers)
    greeting: link_pb2.Greeting = field(default_factory=lambda: link_pb2.Greeting(tensorflow_version="2.21.0"))
    helper_ends: Mapping[str, Mapping[str, int]] = field(
        default_factory=lambda: {"fork_server": {"killed": 2}, "worker": {}}
    )


def tenant(name: str = "default", **used: int) -> TenantUsage:
    """The usage of a tenant; amounts that are not given differ from each other."""
    defaults = {
        **dict.fromkeys((resource.name for resource in TENANT_RESOURCES), 1),
        "requests": 4,
        "programs": 5,
        "rules": 6,
        "sessions": 7,
        "session_bytes": 8,
        "handles": 9,
        "handle_bytes": 10,
        "blob_bytes": 11,
    }
    return TenantUsage(name, defaults | used)


def quarantine(digest: str, cause: str, seconds: float) -> Quarantine:
    """A quarantine that lasts for some seconds more."""
    return Quarantine(Workload("ada", digest, evaluate_pb2.DERIVATIVE_UNSPECIFIED), cause, time.monotonic() + seconds)


def sources(
    tenants: Sequence[TenantUsage] = (tenant(),),
    quarantines: Sequence[Quarantine] = (),
    limits: Mapping[str, int] | None = None,
    registry: RegistryStatus = REGISTRY,
) -> Sources:
    return Sources(
        engines=Engines(),
        tenants=lambda: tenants,
        in_flight=lambda: 4,
        max_in_flight=256,
        caches=lambda: [CacheStatus("programs", 3, 1000, 256, 2000)],
        quarantines=lambda: quarantines,
        limits=limits or {},
        registry=lambda: registry,
        blob_cache=lambda: BlobCacheUse(hits=5, fetches=3, failures=1, fetched_bytes=100, fetch_s=0.5, held_bytes=70),
        gateway_ends={"crash": 1},
        version="1.2.3",
    )
