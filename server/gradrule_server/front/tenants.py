"""Tenants: each has names, programs, sessions, handles and blobs of its own, over what all share.

A tenant is made when it first calls, and forgotten when it has not called for a while; what it keeps stays on the disk.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradrule.v1 import errors_pb2
from gradrule_server.front.admission import Share
from gradrule_server.limits import QUOTA_RESOURCES
from gradrule_server.operations.sources import TenantUsage
from gradrule_server.policy import Limits
from gradrule_server.programs.forward_handles import HandleManager
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.programs.service import ProgramService
from gradrule_server.programs.sessions import SessionManager
from gradrule_server.quotas import Quota
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.programs import PinnedBlobs, ProgramRegistry
from gradrule_server.registry.rule_entries import ReadOnlyRules
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import DEFAULT_TENANT, Store

_MAX_IDLE = 128
_IDLE_S = 60.0
_LOADING = 4
_TRIM_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Shared:
    """What all tenants share. `server`: bounds for all; `tenant`: those of each; both by name of a quota resource.

    `tenant_blob_bytes`, `tenant_blobs`: bytes and number of each tenant's blobs. `cache_bytes`: of programs that are
    kept at hand, of all together.
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
    """One tenant. `quotas`: by kind; `share`: what it has in flight; `users`: calls and streams under way."""

    name: str
    rules: RuleRegistry
    programs: ProgramRegistry
    blobs: BlobStore
    program_service: ProgramService
    handles: HandleManager
    sessions: SessionManager
    quotas: Mapping[str, Quota]
    share: Share = field(default_factory=Share)
    users: int = 0
    left_at: float = 0.0

    def status(self) -> TenantUsage:
        """Returns what the tenant uses."""
        counted = {name: quota.used for name, quota in self.quotas.items()}
        return TenantUsage(
            self.name,
            counted
            | {
                "requests": self.share.requests,
                "programs": len(self.programs),
                "rules": len(self.rules),
                "blob_bytes": self.blobs.held_bytes,
            },
        )


class Tenants:
    """The tenants that are at hand. All but making one happens on one asyncio loop.

    Made in a thread that may block.
    """

    def __init__(self, shared: Shared, read_only: ReadOnlyRules) -> None:
        self._shared = shared
        self._read_only = read_only
        rules, programs = shared.store.counts()
        used = {"rules": rules, "programs": programs, "registry_bytes": shared.store.kept_bytes()}
        # How many there are on the disk was always bounded for the whole server, and says so as it always did.
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
        self._slots = asyncio.Semaphore(_LOADING)
        self._trimmed_at = 0.0
        self.default = self._tenants[DEFAULT_TENANT] = self._make(DEFAULT_TENANT)
        """Whose names are those of callers without credentials. Always at hand."""

    def status(self) -> list[TenantUsage]:
        """Those at hand, by name."""
        return [tenant.status() for _, tenant in sorted(self._tenants.items())]

    def recently_used(self) -> list[Tenant]:
        """Returns the loaded tenants, most recently used first."""
        return sorted(self._tenants.values(), key=lambda tenant: (tenant.users > 0, tenant.left_at), reverse=True)

    def cached(self) -> tuple[int, int, int]:
        """Programs that are kept at hand, roughly their bytes, and how many there may be."""
        caches = [tenant.program_service.cache for tenant in self._tenants.values()]
        return (
            sum(len(cache) for cache in caches),
            sum(cache.held_bytes for cache in caches),
            self._shared.cache_capacity * len(caches),
        )

    def loaded(self, name: str) -> Tenant | None:
        """The tenant, if it is at hand."""
        return self._tenants.get(name)

    async def load(self, name: str) -> Tenant:
        """The tenant, made where it is not at hand."""
        found = self._tenants.get(name)
        if found is not None:
            return found
        loading = self._loading.get(name)
        if loading is None:
            loading = self._loading[name] = asyncio.ensure_future(self._load(name))
            loading.add_done_callback(lambda _: self._loading.pop(name, None))
        # Several callers may wait for it; one that gives up must not take it from the others.
        return await asyncio.shield(loading)

    def enter(self, tenant: Tenant) -> None:
        """A call or stream of the tenant's begins."""
        if not tenant.users:
            self._idle.pop(tenant.name, None)
        tenant.users += 1

    def leave(self, tenant: Tenant) -> None:
        """A call or stream of the tenant's has ended."""
        tenant.users -= 1
        if not tenant.users:
            tenant.left_at = time.monotonic()
            if tenant is not self.default:
                self._idle[tenant.name] = tenant
        if time.monotonic() - self._trimmed_at >= _TRIM_EVERY_S:
            self._trim()

    def set_read_only(self, read_only: ReadOnlyRules) -> None:
        """Replaces what lies below every tenant's rules."""
        self._read_only = read_only
        for tenant in self._tenants.values():
            tenant.rules.set_read_only(read_only)

    async def _load(self, name: str) -> Tenant:
        async with self._slots:
            read_only = self._read_only
            made = await asyncio.to_thread(self._make, name)
        if read_only is not self._read_only:
            made.rules.set_read_only(self._read_only)
        self._tenants[name] = made
        made.left_at = time.monotonic()
        self._idle[name] = made
        return made

    def _make(self, name: str) -> Tenant:
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
        # The server has counted these already.
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
        """Forgets tenants that have not called for long, and programs where all tenants' together are too many."""
        now = self._trimmed_at = time.monotonic()
        while len(self._idle) > _MAX_IDLE:
            name, tenant = next(iter(self._idle.items()))
            # A thread of a call that was given up may still write.
            if now - tenant.left_at < _IDLE_S:
                break
            del self._idle[name], self._tenants[name]
            tenant.blobs.forget_limits()
        caches = [tenant.program_service.cache for tenant in self._tenants.values()]
        # The last program stays, however large it is.
        while (
            sum(cache.held_bytes for cache in caches) > self._shared.cache_bytes
            and sum(len(cache) for cache in caches) > 1
        ):
            max(caches, key=lambda cache: cache.held_bytes).drop_oldest()


def _flag(scope: str, resource: str) -> str:
    return f"--{scope}-{resource.replace('_', '-')}"
