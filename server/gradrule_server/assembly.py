"""Creates the parts of the server from its settings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from gradrule.common.fast_paths import disabled_paths
from gradrule_server import __version__
from gradrule_server.front.admission import Admission, InFlightLimits
from gradrule_server.front.connections import ConnectionLimits, ConnectionWatch
from gradrule_server.front.request_pipeline import CallTimes
from gradrule_server.front.server import Certificates
from gradrule_server.front.tenants import Tenants
from gradrule_server.identity import Authenticator
from gradrule_server.identity.certificates import ClientCertificates
from gradrule_server.identity.jwt_verifier import JwtVerifier
from gradrule_server.identity.token_file import TokenFile
from gradrule_server.limits import TENANT_RESOURCES, Limits
from gradrule_server.link.operating_system import available_memory, engine_memory, memory_share, most_threads
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import ProcessOptions
from gradrule_server.operations.operations import Operations
from gradrule_server.operations.status import CacheStatus, RegistryStatus, Sources
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.programs.service import ProgramService
from gradrule_server.programs.warm_up import FILE_NAME, WarmUp
from gradrule_server.recovery.crash_history import CrashHistory, Quarantine
from gradrule_server.registry.blob_index import CACHE_SETTING, BlobAmount
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.data_folder import BLOB_CACHE, BLOBS
from gradrule_server.registry.programs import NeededBlobs
from gradrule_server.registry.store import Store
from gradrule_server.settings import Settings

# An idle engine with a small program takes 26 MiB; what engines really take is measured, see `EnginePool.memory_share`.
_MEMORY_PER_ENGINE = 64 * 1024 * 1024
_MIN_ENGINES, _MOST_ENGINES = 4, 128
# Threads that TensorFlow starts in an engine, and threads of an engine or compile worker besides those for requests.
_TF_THREADS_PER_CORE, _OTHER_THREADS = 4, 2
# Each engine needs some hundred MiB of GPU memory before it computes anything.
_MAX_GPU_ENGINES = 8


def create_authenticator(settings: Settings) -> Authenticator:
    """Returns the authenticator that checks the credentials of callers."""
    admins = frozenset(name.strip() for name in settings.admin_tenants.split(",") if name.strip())
    tokens = None if settings.tokens is None else TokenFile(settings.tokens)
    jwts = None
    if settings.takes_jwts:
        jwts = JwtVerifier(
            key=settings.jwt_key,
            jwks=settings.jwt_jwks,
            issuer=settings.jwt_issuer,
            audience=settings.jwt_audience,
            claim=settings.jwt_tenant_claim,
            admins=admins,
        )
    by_certificate = None if settings.tls_client_ca is None else ClientCertificates(settings.tls_client_name, admins)
    return Authenticator(tokens, jwts, by_certificate)


def load_certificates(settings: Settings) -> Certificates | None:
    """Returns the TLS certificates of the server, or None without TLS."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def call_times(settings: Settings) -> CallTimes:
    """Returns the deadlines and timeouts of calls."""
    return CallTimes(
        settings.default_deadline_s,
        settings.max_deadline_s,
        settings.stall_s,
        # gRPC varies the age of connections by up to 10 %; the next stream should use a new connection.
        stream_age_s=1.1 * settings.max_connection_age_s or None,
    )


def create_connection_watch(settings: Settings) -> ConnectionWatch:
    """Returns the watch that closes connections which exceed the limits on connections and unfinished messages."""
    connection_bytes, address_bytes = settings.unfinished_limits()
    return ConnectionWatch(
        ConnectionLimits(
            connections=settings.max_connections,
            unauthenticated=settings.max_unauthenticated_connections,
            unauthenticated_s=settings.unauthenticated_idle_s,
            connection_bytes=connection_bytes,
            address_bytes=address_bytes,
            stall_s=settings.stall_s,
        )
    )


def create_admission(settings: Settings) -> Admission:
    """Returns the admission control of requests."""
    return Admission(
        InFlightLimits(settings.server_limit("requests"), settings.server_limit("bytes_in_flight")),
        InFlightLimits(settings.tenant_limit("requests"), settings.tenant_limit("bytes_in_flight")),
        settings.max_message_bytes,
    )


def create_blob_store(settings: Settings, store: Store) -> BlobStore:
    """Returns the blobs of all tenants. Raises `StoreError` if the object store of `--blobs` cannot be used."""
    limit = BlobAmount(settings.server_limit("blob_bytes"), settings.server_limit("blobs"))
    if not settings.blobs:
        return BlobStore(settings.data_dir / BLOBS, limit.size, limit.count, needed=NeededBlobs(store))
    from gradrule_server.registry.shared_blobs import MAX_TRANSFERS, open_shared_blobs

    transfers = settings.tenant_share_of(MAX_TRANSFERS)
    shared = open_shared_blobs(settings.blobs, settings.data_dir, store.database, limit, transfers)
    folder = settings.data_dir / BLOB_CACHE
    return BlobStore(folder, settings.blob_cache_bytes, bytes_setting=CACHE_SETTING, shared=shared)


def create_engine_pool(settings: Settings, blobs: BlobStore, on_change: Callable[[bool], None]) -> EnginePool:
    """Returns the pool of engines, not started yet."""
    disabled = disabled_paths(settings.disabled_fast_paths)
    options = ProcessOptions(
        settings.device,
        settings.engine_threads,
        blobs.root,
        _memory_limit(settings),
        settings.sandbox,
        1 if "batching" in disabled else settings.max_batch_size,
        settings.max_batch_delay_ms / 1000,
        ",".join(sorted(disabled)),
    )
    return EnginePool(
        options,
        engines=settings.engines,
        max_engines=_max_engines(settings, _most_engines(settings)),
        max_gpu_engines=_max_engines(settings, _MAX_GPU_ENGINES),
        memory_share=_memory_of_all(settings, options.memory_limit),
        spares=settings.spares,
        heartbeat_s=settings.heartbeat_s,
        on_change=on_change,
    )


def create_loaded_programs(
    settings: Settings, pool: EnginePool, blobs: BlobStore, on_quarantine: Callable[[Quarantine], None]
) -> LoadedPrograms:
    """Returns the cache of programs that engines have loaded."""
    return LoadedPrograms(
        pool,
        blobs,
        settings.program_cache,
        settings.program_cache_bytes,
        CrashHistory(settings.quarantine_s, on_quarantine),
    )


def create_warm_up(settings: Settings, pool: EnginePool, tenants: Tenants) -> WarmUp:
    """Returns what loads recently used programs after a restart, not started yet."""

    async def load_service(name: str) -> ProgramService:
        return (await tenants.load(name)).program_service

    return WarmUp(
        settings.data_dir / FILE_NAME, pool, lambda: [t.program_service for t in tenants.recently_used()], load_service
    )


def graph_limits(settings: Settings, loaded: LoadedPrograms) -> Limits:
    """Returns the limits on graphs."""
    return Limits(trusted=settings.trust == "full", engine_bytes=loaded.pool.memory_limit, **settings.graph_limits())


def create_operations(settings: Settings) -> Operations:
    """Returns metrics, traces and logs, not started yet."""
    return Operations(
        __version__,
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port,
        otel_endpoint=settings.otel_endpoint,
        audit_log=settings.audit_log,
    )


def create_sources(
    settings: Settings,
    loaded: LoadedPrograms,
    tenants: Tenants,
    admission: Admission,
    store: Store,
    blob_store: BlobStore,
    gateway_ends: Mapping[str, int],
) -> Sources:
    """Returns what metrics and status read. `gateway_ends`: counts HTTP gateways that ended, by reason."""
    database, blobs = store.database, settings.blobs or str(settings.data_dir / BLOBS)

    def caches() -> Sequence[CacheStatus]:
        entries, held_bytes, most = tenants.cache_usage()
        engines = len(loaded.pool.engines)
        return (
            CacheStatus("programs", entries, held_bytes, most, settings.program_cache_bytes),
            CacheStatus(
                "loaded",
                len(loaded),
                loaded.held_bytes,
                settings.program_cache * engines,
                settings.program_cache_bytes * engines,
                loaded.unloads,
            ),
        )

    def registry() -> RegistryStatus:
        since = database.away_since
        away_s = None if since is None else time.monotonic() - since
        return RegistryStatus(database.description, blobs, database.away, away_s)

    return Sources(
        engines=loaded.pool,
        tenants=tenants.status,
        in_flight=lambda: admission.in_flight,
        max_in_flight=settings.server_limit("requests"),
        caches=caches,
        quarantines=loaded.crash_history.quarantines,
        limits={resource.name: settings.tenant_limit(resource.name) for resource in TENANT_RESOURCES},
        registry=registry,
        blob_cache=blob_store.cache_use,
        gateway_ends=gateway_ends,
        version=__version__,
    )


def _max_engines(settings: Settings, default: int) -> int:
    """Returns the number of engines of all tenants: as the setting says, or the default, but enough for one tenant."""
    return settings.max_engines if settings.max_engines != "auto" else max(default, _MIN_ENGINES, settings.engines + 1)


def _most_engines(settings: Settings) -> int:
    """Returns the number of engines for which there are memory and threads, each with a compile worker."""
    threads = 2 * (settings.engine_threads + _OTHER_THREADS) + _TF_THREADS_PER_CORE * len(os.sched_getaffinity(0))
    allowed = most_threads()
    by_threads = _MOST_ENGINES if allowed is None else allowed // threads
    return min(available_memory() // _MEMORY_PER_ENGINE, by_threads, _MOST_ENGINES)


def _memory_limit(settings: Settings) -> int:
    """Returns the memory limit of each engine in bytes; 0: no limit."""
    given = settings.memory_limit
    # One share for each process of one tenant: its engines for programs, one for sessions or a trial, and a compile
    # worker. Shares for all tenants would be too small to use, so the pool ends engines before processes of several
    # tenants together exceed their share of the memory (see `EnginePool`).
    return memory_share(settings.engines + 2) if given == "auto" else int(given)


def _memory_of_all(settings: Settings, limit: int) -> int:
    """Returns the memory that engines of all tenants may take: room for one that reaches a limit as it was given."""
    return engine_memory() if settings.memory_limit == "auto" else limit and max(limit, engine_memory())
