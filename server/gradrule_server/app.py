"""The server's life from start to drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading

from gradrule.common import op_definitions
from gradrule_server import assembly
from gradrule_server.front.handlers import Door, Times
from gradrule_server.front.heap import keep_freed_memory
from gradrule_server.front.identity import Identity
from gradrule_server.front.server import Front
from gradrule_server.front.shared_memory import SharedMemories
from gradrule_server.front.sockets import allow_connections
from gradrule_server.front.tenants import Tenants
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.operations import Operations
from gradrule_server.periodic import PeriodicChecks
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.data_folder import BLOBS
from gradrule_server.registry.rules import ReadOnlyRules
from gradrule_server.registry.store import Store
from gradrule_server.settings import Settings, is_loopback

_log = logging.getLogger(__name__)

EXIT_FAILED = 3
"""Exit code of a server that ended by itself after it had started; its supervisor should start it again."""

_STOP_S = 15.0

# How soon a token that was made, or taken back, is noticed.
_CHECK_EVERY_S = 0.25


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then drains; SIGHUP reads credentials and certificates again.

    `EngineRefused`, `StoreError`, `TokenFileError`, `JwtKeyError`, `CertificateError`, `TracingRefused` or `OSError`
    where it cannot start. `AcceptLoopEnded` where gRPC accepts no more calls: engines are stopped by then.
    """
    keep_freed_memory()
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    credentials, certificates = assembly.credentials_of(settings), assembly.certificates_of(settings)

    def read_again() -> None:
        credentials.refresh()
        if certificates is not None:
            certificates.refresh()

    # Files of credentials may be large: the event loop does not wait for them.
    loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, read_again))
    operations = Operations(assembly.operations_of(settings))
    # Whatever fails, in starting or in stopping, all that comes after it on the way down is stopped too.
    async with contextlib.AsyncExitStack() as stops:
        store = Store(settings.data_dir)
        stops.callback(store.close)
        stops.enter_context(PeriodicChecks(_CHECK_EVERY_S, store.check_files, read_again))
        stops.push_async_callback(operations.stop)
        allow_connections(settings.max_connections)
        watch = assembly.watch_of(settings)
        front = Front(assembly.connections_of(settings), watch)
        blobs = BlobStore(settings.data_dir / BLOBS, settings.max_blob_bytes, settings.max_blobs)
        pool = assembly.pool_of(settings, blobs, front.set_ready)
        loaded = assembly.loaded_of(settings, pool, blobs, operations.record_quarantine)
        limits = assembly.limits_of(settings, loaded)
        read_only = ReadOnlyRules.from_op_types(op_definitions.gradients())
        tenants = Tenants(assembly.shared_of(settings, store, blobs, loaded, limits), read_only)
        admission = assembly.admission_of(settings)
        times = Times(settings.default_deadline_s, settings.max_deadline_s, settings.stall_s)
        door = Door(Identity(credentials), tenants, admission, times, operations.observer, limits, watch)
        memories = SharedMemories(tenants, settings.max_shared_bytes)
        front.add_services(
            door, memories, with_reflection=settings.reflection, status=operations.status if settings.admin else None
        )
        await operations.start(assembly.sources_of(settings, loaded, tenants, admission))
        port = await front.start(f"{settings.host}:{settings.port}", certificates)
        memories.start()
        accepting = asyncio.ensure_future(front.run_accept_loop())
        accepting.add_done_callback(lambda _: stopping.set())
        stops.push_async_callback(pool.stop)
        stops.callback(memories.close)
        stops.push_async_callback(front.drain, settings.drain_s)
        stops.callback(door.drain)
        await _start_engines(pool, stopping)
        if not stopping.is_set():
            tenants.set_read_only(read_only.with_op_rules(pool.greeting.gradients))
            _tell_what_is_odd(settings, pool.greeting, tenants)
            _forget_long_lived_objects()
            print(f"gradrule: listening on {settings.host}:{port}", flush=True)
            await stopping.wait()
        if accepting.done() and (failure := accepting.exception()) is not None:
            _log.error("gRPC accepts no more calls (%s); the server exits with %d", failure, EXIT_FAILED)
            _exit_at_the_latest_after(_STOP_S)
            # No new caller is answered any more, so the sooner a supervisor starts the server again the better.
            await front.drain(0)
            raise failure


def _forget_long_lived_objects() -> None:
    """Keeps what there is now out of garbage collections, which become cheap, and frequent.

    Python collects everything only once a quarter more objects have come. Until then calls that were reset stay, for
    grpc.aio leaves them in reference cycles: each is small, but holds some 20 KiB of gRPC's memory.
    """
    gc.collect()
    gc.freeze()


def _exit_at_the_latest_after(seconds: float) -> None:
    """Ends the process even where stopping hangs; engines notice that their front end is gone."""
    timer = threading.Timer(seconds, os._exit, (EXIT_FAILED,))
    timer.daemon = True
    timer.start()


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


def _tell_what_is_odd(settings: Settings, greeting: link_pb2.Greeting, tenants: Tenants) -> None:
    """Warns of what whoever runs the server may not want."""
    for name in tenants.default.rules.clashes:
        _log.warning("the kept rule %r hides a rule of this release; the latter is builtin/%s", name, name)
    if greeting.op_table_digest != op_definitions.digest():
        _log.warning("TensorFlow %s defines other ops than the table that ships", greeting.tensorflow_version)
    _log.info("the sandbox of engines holds: %s", ", ".join(greeting.sandbox))
    if greeting.sandbox_missing:
        _log.warning("the sandbox of engines lacks %s", ", ".join(greeting.sandbox_missing))
    if settings.is_open and not is_loopback(settings.host):
        _log.warning("whoever reaches %s may run graphs: the server asks for no credentials", settings.host)
