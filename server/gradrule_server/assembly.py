"""The parts of the server, each as the settings ask for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gradrule.common.fast_paths import disabled_paths
from gradrule_server import __version__
from gradrule_server.front.admission import Admission, Bound
from gradrule_server.front.connections import ConnectionLimits, ConnectionWatch
from gradrule_server.front.server import Connections
from gradrule_server.front.tenants import Shared, Tenants
from gradrule_server.front.tls import Certificates
from gradrule_server.identity import Authenticator
from gradrule_server.identity.certificates import ClientCertificates
from gradrule_server.identity.jwt_verifier import JwtVerifier
from gradrule_server.identity.token_file import TokenFile
from gradrule_server.link.memory import available_memory, share_of_memory
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import ProcessOptions
from gradrule_server.operations.operations import OperationsSettings
from gradrule_server.operations.sources import CacheStatus, QueueStatus, Sources
from gradrule_server.operations.sources import Quarantined as QuarantinedStatus
from gradrule_server.policy import Limits
from gradrule_server.programs.conduct import Conduct, Quarantined
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.quotas import QUOTA_RESOURCES, TENANT_RESOURCES
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.store import Store
from gradrule_server.settings import Settings

_log = logging.getLogger(__name__)

# Digests are told by their beginning: enough to know one again.
_DIGEST_SHOWN = 16

_MEMORY_PER_ENGINE = 768 * 1024 * 1024
_LEAST_ENGINES = 4
# Each engine takes some hundred MiB of a GPU's memory before it computes anything.
_MAX_GPU_ENGINES = 8


def credentials_of(settings: Settings) -> Authenticator:
    """What callers are asked for."""
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


def certificates_of(settings: Settings) -> Certificates | None:
    """What the server shows to its clients; None: no TLS."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def connections_of(settings: Settings) -> Connections:
    """What holds for each connection."""
    return Connections(
        max_message_bytes=settings.max_message_bytes,
        max_metadata_bytes=settings.max_metadata_bytes,
        max_connections=settings.max_connections,
        max_connection_streams=settings.max_connection_streams,
        handshake_timeout_s=settings.handshake_timeout_s,
        keepalive_s=settings.keepalive_s,
        keepalive_timeout_s=settings.keepalive_timeout_s,
        max_age_s=settings.max_connection_age_s,
        age_grace_s=settings.max_connection_age_grace_s,
    )


def watch_of(settings: Settings) -> ConnectionWatch:
    """What clients may hold of connections and of messages that they do not finish."""
    return ConnectionWatch(
        ConnectionLimits(
            connections=settings.max_connections,
            unauthenticated=settings.max_unauthenticated_connections,
            unauthenticated_s=settings.unauthenticated_idle_s,
            connection_bytes=settings.of_tenant("bytes_in_flight"),
            address_bytes=settings.max_bytes_in_flight,
            stall_s=settings.stall_s,
        )
    )


def admission_of(settings: Settings) -> Admission:
    """How much may be in flight."""
    return Admission(
        Bound(settings.max_concurrent_requests, settings.max_bytes_in_flight),
        Bound(settings.of_tenant("requests"), settings.of_tenant("bytes_in_flight")),
        settings.max_message_bytes,
    )


def pool_of(settings: Settings, blobs: BlobStore, on_change: Callable[[bool], None]) -> EnginePool:
    """The engines, not started yet."""
    disabled = disabled_paths(settings.disabled_fast_paths)
    options = ProcessOptions(
        settings.device,
        settings.engine_threads,
        blobs.root,
        _memory_limit(settings),
        settings.sandbox,
        1 if "batching" in disabled else settings.max_batch_size,
        settings.max_batch_delay_ms / 1000,
        settings.jit_after_s,
        ",".join(sorted(disabled)),
    )
    return EnginePool(
        options,
        engines=settings.engines,
        max_engines=_max_engines(settings, available_memory() // _MEMORY_PER_ENGINE),
        max_gpu_engines=_max_engines(settings, _MAX_GPU_ENGINES),
        spares=settings.spares,
        heartbeat_s=settings.heartbeat_s,
        on_change=on_change,
    )


def loaded_of(
    settings: Settings, pool: EnginePool, blobs: BlobStore, on_quarantine: Callable[[str], None]
) -> LoadedPrograms:
    """What engines hold, and what is known of it. `on_quarantine` is told which program is refused, and why."""

    def tell_quarantine(found: Quarantined) -> None:
        digest = found.suspect.graph[:_DIGEST_SHOWN]
        _log.warning("programs of the graph %s are refused: %s", digest, found.why)
        on_quarantine(f"{digest}: {found.why}")

    return LoadedPrograms(
        pool,
        blobs,
        settings.program_cache,
        settings.program_cache_bytes,
        Conduct(settings.quarantine_s, tell_quarantine),
    )


def shared_of(settings: Settings, store: Store, blobs: BlobStore, loaded: LoadedPrograms, limits: Limits) -> Shared:
    """What all tenants share, with the bounds of each."""
    return Shared(
        store,
        blobs,
        loaded,
        limits,
        server={resource.name: getattr(settings, f"max_{resource.name}") for resource in QUOTA_RESOURCES},
        tenant={resource.name: settings.of_tenant(resource.name) for resource in QUOTA_RESOURCES},
        tenant_blob_bytes=settings.of_tenant("blob_bytes"),
        tenant_blobs=settings.of_tenant("blobs"),
        cache_capacity=settings.program_cache,
        cache_bytes=settings.program_cache_bytes,
        handle_ttl_s=settings.handle_ttl_s,
        has_known_calls="known-calls" not in disabled_paths(settings.disabled_fast_paths),
    )


def limits_of(settings: Settings, loaded: LoadedPrograms) -> Limits:
    """What graphs may be."""
    return Limits(
        nodes=settings.max_nodes,
        inlined_nodes=settings.max_inlined_nodes,
        inlined_bytes=settings.max_inlined_bytes,
        call_depth=settings.max_call_depth,
        selections=settings.max_selections,
        graph_bytes=settings.max_graph_bytes,
        trusted=settings.trust == "full",
        node_outputs=settings.max_node_outputs,
        constant_bytes=settings.max_constant_bytes,
        rank=settings.max_rank,
        unpacking=settings.max_unpacking,
        engine_bytes=loaded.pool.memory_limit,
    )


def operations_of(settings: Settings) -> OperationsSettings:
    """What is measured, traced and logged."""
    return OperationsSettings(
        version=__version__,
        metrics_host=settings.metrics_host,
        metrics_port=settings.metrics_port,
        otel_endpoint=settings.otel_endpoint,
        audit_log=settings.audit_log,
    )


def sources_of(settings: Settings, loaded: LoadedPrograms, tenants: Tenants, admission: Admission) -> Sources:
    """All that there is to watch."""
    limits = {resource.name: settings.of_tenant(resource.name) for resource in TENANT_RESOURCES}

    def caches() -> Sequence[CacheStatus]:
        entries, held_bytes, most = tenants.cached()
        engines = len(loaded.pool.engines)
        return (
            CacheStatus("programs", entries, held_bytes, most, settings.program_cache_bytes),
            CacheStatus(
                "loaded",
                len(loaded),
                loaded.held_bytes,
                settings.program_cache * engines,
                settings.program_cache_bytes * engines,
            ),
        )

    def quarantined() -> Sequence[QuarantinedStatus]:
        return [
            QuarantinedStatus(found.suspect.graph[:_DIGEST_SHOWN], found.why, found.left_s)
            for found in loaded.conduct.quarantined()
        ]

    return Sources(
        engines=loaded.pool,
        workers=loaded.pool.workers,
        tenants=tenants,
        queue=lambda: QueueStatus(admission.in_flight, settings.max_concurrent_requests),
        caches=caches,
        quarantined=quarantined,
        limits=limits,
        tensorflow_version=lambda: loaded.pool.greeting.tensorflow_version,
        version=__version__,
    )


def _max_engines(settings: Settings, default: int) -> int:
    """Returns the number of engines of all tenants: as the setting says, or the default, but enough for one tenant."""
    return (
        settings.max_engines if settings.max_engines != "auto" else max(default, _LEAST_ENGINES, settings.engines + 1)
    )


def _memory_limit(settings: Settings) -> int:
    """Bytes of each engine; 0: any."""
    given = settings.memory_limit
    # A share for each process of one tenant: its engines for programs, one for sessions or a trial, and a compile
    # worker. Processes of several tenants can take more than there is: shares for all tenants would leave a single one
    # with next to nothing. Where memory runs out the kernel ends the largest engine, never the front end (see
    # `engine.process`).
    return share_of_memory(settings.engines + 2) if given == "auto" else int(given)
