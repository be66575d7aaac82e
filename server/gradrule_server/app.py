"""Putting the server together, and its life from start to drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable

from gradrule import _opdefs
from gradrule_server import graphs
from gradrule_server.front.admission import Admission, Bound
from gradrule_server.front.handlers import Door, Times
from gradrule_server.front.identity import Identity
from gradrule_server.front.server import Connections, Front
from gradrule_server.front.tenants import KINDS, Shared, Tenants
from gradrule_server.front.tls import Certificates
from gradrule_server.identity import Credentials
from gradrule_server.identity.jwts import Jwts
from gradrule_server.identity.tokens import Tokens
from gradrule_server.link.engine import EngineEvent
from gradrule_server.link.memory import share_of_memory
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.process import ProcessOptions
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.conduct import Conduct, Quarantined
from gradrule_server.programs.loaded import LoadedPrograms
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.rules import Shipped
from gradrule_server.registry.store import Store
from gradrule_server.settings import Settings, is_loopback

_log = logging.getLogger(__name__)


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then drains; SIGHUP reads credentials again.

    `EngineRefused`, `StoreError`, `TokenFileError`, `JwtKeyError`, `CertificateError` or `OSError` where it cannot
    start.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    credentials, certificates = _credentials(settings), _certificates(settings)

    def read_again() -> None:
        credentials.refresh()
        if certificates is not None:
            certificates.refresh()

    loop.add_signal_handler(signal.SIGHUP, read_again)
    store = Store(settings.data_dir)
    try:
        front = Front(_connections(settings))
        health_updates: set[asyncio.Task[None]] = set()

        def tell_health(ready: bool) -> None:
            update = asyncio.ensure_future(front.set_ready(ready))
            health_updates.add(update)
            update.add_done_callback(health_updates.discard)

        blobs = BlobStore(settings.data_dir / "blobs", settings.max_blob_bytes)
        pool = _pool(settings, blobs, tell_health)
        shipped = Shipped.of(_opdefs.gradients())
        tenants = Tenants(_shared(settings, store, blobs, _loaded(settings, pool, blobs)), shipped)
        admission = Admission(
            Bound(settings.max_concurrent_requests, settings.max_bytes_in_flight),
            Bound(settings.of_tenant("requests"), settings.of_tenant("bytes_in_flight")),
        )
        times = Times(settings.default_deadline_s, settings.max_deadline_s, settings.stall_s)
        door = Door(Identity(credentials), tenants, admission, times)
        front.add_services(door, with_reflection=settings.reflection)
        port = await front.start(f"{settings.host}:{settings.port}", certificates)
        try:
            await _start_engines(pool, stopping)
            if not stopping.is_set():
                tenants.set_shipped(shipped.with_op_rules(pool.greeting.gradients))
                _tell_what_is_odd(settings, pool.greeting, tenants)
                print(f"gradrule: listening on {settings.host}:{port}", flush=True)
                await stopping.wait()
        finally:
            door.drain()
            await front.drain(settings.drain_s)
            await pool.stop()
    finally:
        store.close()


def _pool(settings: Settings, blobs: BlobStore, on_change: Callable[[bool], None]) -> EnginePool:
    options = ProcessOptions(
        settings.device, settings.engine_threads, blobs.root, _memory_limit(settings), settings.sandbox
    )
    return EnginePool(
        options,
        engines=settings.engines,
        spares=settings.spares,
        heartbeat_s=settings.heartbeat_s,
        on_change=on_change,
    )


def _memory_limit(settings: Settings) -> int:
    """Bytes of each engine; 0: any."""
    given = settings.memory_limit
    return share_of_memory(settings.engines) if given == "auto" else int(given)


def _loaded(settings: Settings, pool: EnginePool, blobs: BlobStore) -> LoadedPrograms:
    def tell_quarantine(found: Quarantined) -> None:
        _log.warning("programs of the graph %s are refused: %s", found.suspect.graph[:16], found.why)
        pool.on_event(EngineEvent("quarantined", -1, 0, detail=found.suspect.graph))

    return LoadedPrograms(
        pool,
        blobs,
        settings.program_cache,
        settings.program_cache_bytes,
        Conduct(settings.quarantine_s, tell_quarantine),
    )


def _credentials(settings: Settings) -> Credentials:
    """What callers are asked for."""
    admins = frozenset(name.strip() for name in settings.admin_tenants.split(",") if name.strip())
    tokens = None if settings.tokens is None else Tokens(settings.tokens)
    jwts = None
    if settings.takes_jwts:
        jwts = Jwts(
            key=settings.jwt_key,
            jwks=settings.jwt_jwks,
            issuer=settings.jwt_issuer,
            audience=settings.jwt_audience,
            claim=settings.jwt_tenant_claim,
            admins=admins,
        )
    return Credentials(tokens, jwts, settings.tls_client_ca is not None, admins)


def _certificates(settings: Settings) -> Certificates | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Certificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def _connections(settings: Settings) -> Connections:
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


def _shared(settings: Settings, store: Store, blobs: BlobStore, loaded: LoadedPrograms) -> Shared:
    """What all tenants share, with the bounds of each."""
    limits = graphs.Limits(
        nodes=settings.max_nodes,
        inlined_nodes=settings.max_inlined_nodes,
        call_depth=settings.max_call_depth,
        graph_bytes=settings.max_graph_bytes,
        trusted=settings.trust == "full",
        node_outputs=settings.max_node_outputs,
        constant_bytes=settings.max_constant_bytes,
        engine_bytes=_memory_limit(settings),
    )
    return Shared(
        store,
        blobs,
        loaded,
        limits,
        server={kind: getattr(settings, f"max_{kind}") for kind in KINDS},
        tenant={kind: settings.of_tenant(kind) for kind in KINDS},
        tenant_blob_bytes=settings.of_tenant("blob_bytes"),
        cache_capacity=settings.program_cache,
        cache_bytes=settings.program_cache_bytes,
        handle_ttl_s=settings.handle_ttl_s,
    )


def _tell_what_is_odd(settings: Settings, greeting: link_pb2.Greeting, tenants: Tenants) -> None:
    """Warns of what whoever runs the server may not want."""
    for name in tenants.default.rules.clashes:
        _log.warning("the kept rule %r hides a rule of this release; the latter is builtin/%s", name, name)
    if greeting.op_table_digest != _opdefs.digest():
        _log.warning("TensorFlow %s defines other ops than the table that ships", greeting.tensorflow_version)
    _log.info("the sandbox of engines holds: %s", ", ".join(greeting.sandbox))
    if greeting.sandbox_missing:
        _log.warning("the sandbox of engines lacks %s", ", ".join(greeting.sandbox_missing))
    if settings.is_open and not is_loopback(settings.host):
        _log.warning("whoever reaches %s may run graphs: the server asks for no credentials", settings.host)


async def _start_engines(pool: EnginePool, stopping: asyncio.Event) -> None:
    """Waits for the first engine, or for the order to stop."""
    starting = asyncio.ensure_future(pool.start())
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if starting.done():
        await starting
    else:
        starting.cancel()
        await asyncio.wait({starting})


def configure_logging(level: str) -> None:
    """Logs to stderr."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
