"""Loads tenants at their first call, and unloads them when they have not called for a while.

Each tenant has its own rules, programs, blobs, handles, sessions and quotas. What it has stored stays on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gradrule.common.fast_paths import disabled_paths
from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.front.admission import InFlight
from gradrule_server.limits import QUOTA_RESOURCES
from gradrule_server.operations.status import TenantUsage
from gradrule_server.policy import Limits
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.programs.service import ProgramService
from gradrule_server.quotas import Quota
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.programs import ProgramRegistry
from gradrule_server.registry.rule_entries import ReadOnlyRules
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import DEFAULT_TENANT, Store
from gradrule_server.registry.usage import STORED_RESOURCES, Usage
from gradrule_server.settings import Settings

# Idle tenants that stay loaded; more are unloaded, but only after `_IDLE_S`.
_MAX_IDLE = 128
_IDLE_S = 60.0
_MAX_LOADING = 4
_TRIM_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class SharedResources:
    """What all tenants share. `limits`: on their graphs; `settings`: has all other limits and times."""

    store: Store
    blobs: BlobStore
    loaded: LoadedPrograms
    limits: Limits
    settings: Settings


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant.

    Attributes:
        quotas: by resource.
        handle_ttl_s: longest lifetime of a forward handle that is not used, seconds.
        session_idle_s: how long a session may get no message, seconds; 0: no limit.
        in_flight: its requests and bytes in flight.
        users: number of its calls and streams; 0 means idle.
        idle_since: CLOCK_MONOTONIC, seconds; 0 before its first call.
    """

    name: str
    rules: RuleRegistry
    programs: ProgramRegistry
    blobs: BlobStore
    program_service: ProgramService
    quotas: Mapping[str, Quota]
    handle_ttl_s: float
    session_idle_s: float
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
                "blobs": self.blobs.used.count,
                "blob_bytes": self.blobs.used.size,
            },
        )


class Tenants:
    """The loaded tenants. Belongs to one event loop; loads tenants in threads.

    Its construction reads the database and the disk, so it may run in a thread.

    Args:
        shared: What all tenants share.
        read_only: The rules that all tenants have.
        loop: The event loop.
    """

    def __init__(self, shared: SharedResources, read_only: ReadOnlyRules, loop: asyncio.AbstractEventLoop) -> None:
        self._shared = shared
        self._read_only = read_only
        self._tenants: dict[str, Tenant] = {}
        self._idle: OrderedDict[str, Tenant] = OrderedDict()
        self._loading: dict[str, asyncio.Task[Tenant]] = {}
        self._slots = asyncio.Semaphore(_MAX_LOADING)
        self._trimmed_at = 0.0
        self._loop = loop if shared.store.is_shared else None
        # Clients know LIMIT_EXCEEDED for the number of rules and programs, which were limited before there were quotas.
        self._quotas = {
            resource.name: Quota(
                shared.settings.server_limit(resource.name),
                resource.what,
                _flag("max", resource.name),
                reason=errors_pb2.ERROR_REASON_LIMIT_EXCEEDED
                if resource.name in ("rules", "programs")
                else errors_pb2.ERROR_REASON_QUOTA_EXCEEDED,
            )
            for resource in QUOTA_RESOURCES
        }
        self._seen: dict[str, Usage] = {}
        self.default = self._tenants[DEFAULT_TENANT] = self._create(DEFAULT_TENANT)
        """The tenant of callers without credentials. Always loaded."""

    def apply_changes(self) -> None:
        """Applies what other servers have written to their common database; called at intervals, in a thread."""
        loaded = dict(self._tenants)
        with contextlib.suppress(GradruleError):
            found = self._shared.store.usage(loaded)
            for name, tenant in loaded.items():
                usage, seen = found.get(name, Usage()), self._seen.get(name, Usage())
                if usage == seen:
                    continue
                if not tenant.rules.refresh():
                    # The database was busy: try again at the next interval.
                    continue
                if usage.programs_revision != seen.programs_revision:
                    tenant.programs.apply_changes()
                self._count(tenant.quotas, usage)
                self._seen[name] = usage

    def _count(self, quotas: Mapping[str, Quota], usage: Usage) -> None:
        """Shows what a tenant has stored, and all tenants together."""
        total = self._shared.store.total_usage()
        for name in STORED_RESOURCES:
            quotas[name].count(getattr(usage, name), getattr(total, name), 0)

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
            self._shared.settings.program_cache * len(caches),
        )

    def stop_compiling(self) -> None:
        """Cancels all compilations: the server ends."""
        for tenant in self._tenants.values():
            tenant.program_service.compile_tasks.cancel()

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
                shared.settings.tenant_limit(resource.name),
                resource.what,
                _flag("tenant", resource.name),
                within=self._quotas[resource.name],
            )
            for resource in QUOTA_RESOURCES
        }
        settings = shared.settings
        blobs = shared.blobs.for_tenant(name, settings.tenant_limit("blob_bytes"), settings.tenant_limit("blobs"))
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
        )
        self._count(quotas, shared.store.usage([name]).get(name, Usage()))
        program_service = ProgramService(
            rules,
            programs,
            shared.loaded.pool,
            shared.loaded,
            shared.limits,
            blobs,
            capacity=settings.program_cache,
            capacity_bytes=settings.program_cache_bytes,
            owner=name,
            has_known_calls="known-calls" not in disabled_paths(settings.disabled_fast_paths),
        )
        tenant = Tenant(
            name,
            rules,
            programs,
            blobs,
            program_service,
            quotas,
            handle_ttl_s=settings.handle_ttl_s,
            session_idle_s=settings.session_idle_s,
        )
        if self._loop is not None:
            programs.on_changed = functools.partial(_call_on_loop, self._loop, program_service.stored.forget)
        return tenant

    def _trim(self) -> None:
        """Unloads idle tenants, and the oldest programs of the largest cache while all caches take too much memory."""
        now = self._trimmed_at = time.monotonic()
        while len(self._idle) > _MAX_IDLE:
            name, tenant = next(iter(self._idle.items()))
            # A thread of a cancelled call may still write.
            if now - tenant.idle_since < _IDLE_S:
                break
            del self._idle[name], self._tenants[name]
            self._seen.pop(name, None)
            tenant.program_service.compile_tasks.cancel()
            tenant.blobs.forget_limits()
        caches = [tenant.program_service.cache for tenant in self._tenants.values()]
        # One program may be of any size.
        while (
            sum(cache.held_bytes for cache in caches) > self._shared.settings.program_cache_bytes
            and sum(len(cache) for cache in caches) > 1
        ):
            max(caches, key=lambda cache: cache.held_bytes).drop_oldest()


def _call_on_loop(loop: asyncio.AbstractEventLoop, forget: Callable[[str], None], name: str) -> None:
    loop.call_soon_threadsafe(forget, name)


def _flag(scope: str, resource: str) -> str:
    return f"--{scope}-{resource.replace('_', '-')}"
