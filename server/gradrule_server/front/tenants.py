"""Loads tenants at their first call, and unloads them when they have not called for a while.

Each tenant has its own rules, programs, blobs, handles, sessions and quotas. What it has stored stays on the disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradrule.v1 import errors_pb2
from gradrule_server.front.admission import InFlight
from gradrule_server.limits import QUOTA_RESOURCES
from gradrule_server.operations.status import TenantUsage
from gradrule_server.policy import Limits
from gradrule_server.programs.forward_handles import HandleManager
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.programs.service import ProgramService
from gradrule_server.programs.session_limits import SessionManager
from gradrule_server.quotas import Quota
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.programs import PinnedBlobs, ProgramRegistry
from gradrule_server.registry.rule_entries import ReadOnlyRules
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import DEFAULT_TENANT, Store

# Idle tenants that stay loaded; more are unloaded, but only after `_IDLE_S`.
_MAX_IDLE = 128
_IDLE_S = 60.0
_MAX_LOADING = 4
_TRIM_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class SharedResources:
    """What all tenants share.

    Attributes:
        server: limits of all tenants together, by quota resource.
        tenant: limits of each tenant, by quota resource.
        tenant_blob_bytes: bytes of each tenant's blobs.
        tenant_blobs: number of each tenant's blobs.
        cache_capacity: number of programs that each tenant has in memory.
        cache_bytes: bytes of the programs of all tenants in memory.
        handle_ttl_s: seconds after which an unused forward handle is closed.
        has_known_calls: whether parsed calls are remembered.
    """

    store: Store
    blobs: BlobStore
    loaded: LoadedPrograms
    limits: Limits
    server: Mapping[str, int]
    tenant: Mapping[str, int]
    tenant_blob_bytes: int
    tenant_blobs: int
    cache_capacity: int
    cache_bytes: int
    handle_ttl_s: float
    has_known_calls: bool = True


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant.

    Attributes:
        quotas: by resource.
        in_flight: its requests and bytes in flight.
        users: number of its calls and streams; 0 means idle.
        idle_since: CLOCK_MONOTONIC, seconds; 0 before its first call.
    """

    name: str
    rules: RuleRegistry
    programs: ProgramRegistry
    blobs: BlobStore
    program_service: ProgramService
    handles: HandleManager
    sessions: SessionManager
    quotas: Mapping[str, Quota]
    in_flight: InFlight = field(default_factory=InFlight)
    users: int = 0
    idle_since: float = 0.0

    def status(self) -> TenantUsage:
        """Returns what the tenant uses of every resource in `limits.TENANT_RESOURCES`."""
        counted = {name: quota.used for name, quota in self.quotas.items()}
        return TenantUsage(
            self.name,
            counted
            | {
                "requests": self.in_flight.requests,
                "bytes_in_flight": self.in_flight.size,
                "programs": len(self.programs),
                "rules": len(self.rules),
                "blobs": self.blobs.held_count,
                "blob_bytes": self.blobs.held_bytes,
            },
        )


class Tenants:
    """The loaded tenants. Belongs to one event loop; loads tenants in threads.

    Its construction reads the disk.
    """

    def __init__(self, shared: SharedResources, read_only: ReadOnlyRules) -> None:
        self._shared = shared
        self._read_only = read_only
        rules, programs = shared.store.counts()
        used = {"rules": rules, "programs": programs, "registry_bytes": shared.store.kept_bytes()}
        # Clients know LIMIT_EXCEEDED for the number of rules and programs, which were limited before there were quotas.
        self._quotas = {
            resource.name: Quota(
                shared.server[resource.name],
                resource.what,
                _flag("max", resource.name),
                used=used.get(resource.name, 0),
                reason=errors_pb2.ERROR_REASON_LIMIT_EXCEEDED
                if resource.name in ("rules", "programs")
                else errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
            )
            for resource in QUOTA_RESOURCES
        }
        self._pins = PinnedBlobs(shared.store, shared.blobs)
        self._tenants: dict[str, Tenant] = {}
        self._idle: OrderedDict[str, Tenant] = OrderedDict()
        self._loading: dict[str, asyncio.Task[Tenant]] = {}
        self._slots = asyncio.Semaphore(_MAX_LOADING)
        self._trimmed_at = 0.0
        self.default = self._tenants[DEFAULT_TENANT] = self._create(DEFAULT_TENANT)
        """The tenant of callers without credentials. Always loaded."""

    def status(self) -> list[TenantUsage]:
        """Returns what the loaded tenants use, ordered by name."""
        return [tenant.status() for _, tenant in sorted(self._tenants.items())]

    def recently_used(self) -> list[Tenant]:
        """Returns the loaded tenants, most recently used first."""
        return sorted(self._tenants.values(), key=lambda tenant: (tenant.users > 0, tenant.idle_since), reverse=True)

    def cache_usage(self) -> tuple[int, int, int]:
        """Returns the number of programs in memory, roughly their bytes, and how many there may be."""
        caches = [tenant.program_service.cache for tenant in self._tenants.values()]
        return (
            sum(len(cache) for cache in caches),
            sum(cache.held_bytes for cache in caches),
            self._shared.cache_capacity * len(caches),
        )

    def get_loaded(self, name: str) -> Tenant | None:
        """Returns a tenant if it is loaded."""
        return self._tenants.get(name)

    async def load(self, name: str) -> Tenant:
        """Returns a tenant, which is loaded first if necessary."""
        found = self._tenants.get(name)
        if found is not None:
            return found
        loading = self._loading.get(name)
        if loading is None:
            loading = self._loading[name] = asyncio.ensure_future(self._load(name))
            loading.add_done_callback(lambda _: self._loading.pop(name, None))
        # Several callers may wait: one that is cancelled must not cancel the loading.
        return await asyncio.shield(loading)

    def retain(self, tenant: Tenant) -> None:
        """Keeps a tenant loaded for one more call or stream, until `release`."""
        if not tenant.users:
            self._idle.pop(tenant.name, None)
        tenant.users += 1

    def release(self, tenant: Tenant) -> None:
        """Ends the use of a tenant by one call or stream."""
        tenant.users -= 1
        if not tenant.users:
            tenant.idle_since = time.monotonic()
            if tenant is not self.default:
                self._idle[tenant.name] = tenant
        if time.monotonic() - self._trimmed_at >= _TRIM_EVERY_S:
            self._trim()

    def set_read_only(self, read_only: ReadOnlyRules) -> None:
        """Replaces the read-only rules that all tenants have."""
        self._read_only = read_only
        for tenant in self._tenants.values():
            tenant.rules.set_read_only(read_only)

    async def _load(self, name: str) -> Tenant:
        async with self._slots:
            read_only = self._read_only
            tenant = await asyncio.to_thread(self._create, name)
        if read_only is not self._read_only:
            tenant.rules.set_read_only(self._read_only)
        self._tenants[name] = tenant
        tenant.idle_since = time.monotonic()
        self._idle[name] = tenant
        return tenant

    def _create(self, name: str) -> Tenant:
        shared = self._shared
        quotas = {
            resource.name: Quota(
                shared.tenant[resource.name],
                resource.what,
                _flag("tenant", resource.name),
                within=self._quotas[resource.name],
            )
            for resource in QUOTA_RESOURCES
        }
        blobs = shared.blobs.for_tenant(name, shared.tenant_blob_bytes, shared.tenant_blobs)
        rules = RuleRegistry(
            shared.store,
            self._read_only,
            tenant=name,
            quota=quotas["rules"],
            bytes_quota=quotas["registry_bytes"],
            bounds=shared.limits,
        )
        programs = ProgramRegistry(
            shared.store,
            blobs,
            tenant=name,
            quota=quotas["programs"],
            bytes_quota=quotas["registry_bytes"],
            pins=self._pins,
        )
        # The quotas of the server count these already.
        quotas["rules"].add_initial_usage(len(rules))
        quotas["programs"].add_initial_usage(len(programs))
        quotas["registry_bytes"].add_initial_usage(shared.store.kept_bytes(name))
        program_service = ProgramService(
            rules,
            programs,
            shared.loaded.pool,
            shared.loaded,
            shared.limits,
            blobs,
            capacity=shared.cache_capacity,
            capacity_bytes=shared.cache_bytes,
            owner=name,
            has_known_calls=shared.has_known_calls,
        )
        handles = HandleManager(
            program_service,
            quota=quotas["handles"],
            bytes_quota=quotas["handle_bytes"],
            ttl_s=shared.handle_ttl_s,
            blob_folder=blobs.folder_name,
        )
        sessions = SessionManager(
            program_service, blobs, shared.limits, quota=quotas["sessions"], bytes_quota=quotas["session_bytes"]
        )
        return Tenant(name, rules, programs, blobs, program_service, handles, sessions, quotas)

    def _trim(self) -> None:
        """Unloads idle tenants, and the oldest programs of the largest cache while all caches take too much memory."""
        now = self._trimmed_at = time.monotonic()
        while len(self._idle) > _MAX_IDLE:
            name, tenant = next(iter(self._idle.items()))
            # A thread of a cancelled call may still write.
            if now - tenant.idle_since < _IDLE_S:
                break
            del self._idle[name], self._tenants[name]
            tenant.blobs.forget_limits()
        caches = [tenant.program_service.cache for tenant in self._tenants.values()]
        # One program may be of any size.
        while (
            sum(cache.held_bytes for cache in caches) > self._shared.cache_bytes
            and sum(len(cache) for cache in caches) > 1
        ):
            max(caches, key=lambda cache: cache.held_bytes).drop_oldest()


def _flag(scope: str, resource: str) -> str:
    return f"--{scope}-{resource.replace('_', '-')}"
