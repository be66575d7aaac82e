"""Starts the server, runs it until a signal arrives, and drains it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from gradrule.common import op_definitions
from gradrule_server import assembly
from gradrule_server.concurrency import PeriodicChecks, run_in_own_thread
from gradrule_server.front.authentication import CallerAuthenticator
from gradrule_server.front.http_gateway import HttpGateway
from gradrule_server.front.request_pipeline import RequestPipeline
from gradrule_server.front.server import AcceptLoopEnded, GrpcServer, channel_options
from gradrule_server.front.shared_memory import SharedMemoryServer
from gradrule_server.front.sockets import allow_connections
from gradrule_server.front.tenants import SharedResources, Tenants
from gradrule_server.link.operating_system import keep_freed_memory
from gradrule_server.link.v1 import link_pb2
from gradrule_server.registry.database import open_database
from gradrule_server.registry.rule_entries import ReadOnlyRules
from gradrule_server.registry.store import Store
from gradrule_server.settings import Settings

_log = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_FAILED = 3
"""Exit code of a server that failed after it had started; its supervisor should start it again."""

_STOP_S = 15.0

# Interval at which changes of the token file are noticed.
_CHECK_EVERY_S = 0.25
# Interval at which changes of other servers are applied; docs/guide/clusters.md states 2 s.
_APPLY_CHANGES_EVERY_S = 0.5
_MAINTAIN_BLOBS_EVERY_S = 10.0
# An object store that hangs must not delay the end of the server.
_MAINTAIN_BLOBS_WAIT_S = 2.0


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then drains. SIGHUP reloads credentials and certificates.

    Raises:
        CannotStartError, OSError: If the server cannot start, or its HTTP gateway.
        GradruleError: If the registry's database goes away while the server starts.
        AcceptLoopEnded: If gRPC accepts no more calls; engines are stopped by then.
    """
    keep_freed_memory()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    # The exit stack stops every part even if starting or stopping another part fails.
    async with contextlib.AsyncExitStack() as stops:
        server = await _unless_stopped(_start(settings, stops), stopping)
        if server is not None:
            try:
                await _unless_stopped(server.run_accept_loop(), stopping)
            except AcceptLoopEnded as failure:
                _log.error("gRPC accepts no more calls (%s); the server exits with %d", failure, EXIT_FAILED)
                _exit_after(_STOP_S)
                # Nobody can call this server any more: stop without waiting, so that a supervisor can restart it soon.
                await server.drain(0)
                raise


async def _start(settings: Settings, stops: contextlib.AsyncExitStack) -> GrpcServer:
    """Starts all parts of the server, and registers how each is stopped, in the reverse order. Raises as `serve`."""
    loop = asyncio.get_running_loop()
    credentials, certificates = assembly.create_authenticator(settings), assembly.load_certificates(settings)

    def reload() -> None:
        credentials.refresh()
        if certificates is not None:
            certificates.refresh()

    # Files of credentials may be large, so a thread reads them.
    loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, reload))
    operations = assembly.create_operations(settings)
    # A database that starts too is waited for, in a thread, so that signals are noticed.
    database = await run_in_own_thread("open-registry", lambda: open_database(settings.registry, settings.data_dir))
    store = Store(database)
    stops.callback(store.close)
    if store.is_shared:
        # On a thread of its own: a database that is away must not delay the check of credentials.
        stops.enter_context(PeriodicChecks(_APPLY_CHANGES_EVERY_S, store.database.check))
        stops.enter_context(PeriodicChecks(_CHECK_EVERY_S, reload))
    else:
        stops.enter_context(PeriodicChecks(_CHECK_EVERY_S, store.database.check, reload))
    stops.push_async_callback(operations.stop)
    allow_connections(settings.max_connections)
    watch = assembly.create_connection_watch(settings)
    grpc_server = GrpcServer(channel_options(settings), watch)
    # Large registries are read, and objects may be counted: both may take long.
    blobs = await run_in_own_thread("open-blobs", lambda: assembly.create_blob_store(settings, store))
    if blobs.shared is not None:
        maintain = blobs.shared.maintain
        stops.enter_context(PeriodicChecks(_MAINTAIN_BLOBS_EVERY_S, maintain, wait_s=_MAINTAIN_BLOBS_WAIT_S))
    pool = assembly.create_engine_pool(settings, blobs, grpc_server.set_ready)
    loaded = assembly.create_loaded_programs(settings, pool, blobs, operations.record_quarantine)
    limits = assembly.graph_limits(settings, loaded)
    read_only = ReadOnlyRules.from_op_types(op_definitions.gradients())
    resources = SharedResources(store, blobs, loaded, limits, settings)
    tenants = await run_in_own_thread("open-tenants", lambda: Tenants(resources, read_only, loop))
    if store.is_shared:
        stops.enter_context(PeriodicChecks(_APPLY_CHANGES_EVERY_S, tenants.apply_changes))
    admission, times = assembly.create_admission(settings), assembly.call_times(settings)
    pipeline = RequestPipeline(
        CallerAuthenticator(credentials), tenants, admission, times, operations.observer, limits, watch
    )
    shared_memory = SharedMemoryServer(tenants, settings.server_limit("shared_bytes"))
    grpc_server.add_services(
        pipeline,
        shared_memory,
        with_reflection=settings.reflection,
        status=operations.status if settings.admin else None,
    )
    warm_up = assembly.create_warm_up(settings, pool, tenants)
    gateway_ends: Counter[str] = Counter()
    started = asyncio.Event()
    await operations.start(
        assembly.create_sources(settings, loaded, tenants, admission, store, blobs, gateway_ends),
        # The HTTP gateway starts after the first engine.
        is_ready=lambda: grpc_server.is_ready and started.is_set(),
    )
    port = await grpc_server.start(settings.address(settings.port), certificates)
    shared_memory.start()
    stops.push_async_callback(pool.stop)
    stops.push_async_callback(warm_up.stop)
    stops.callback(tenants.stop_compiling)
    stops.push_async_callback(shared_memory.close)
    stops.push_async_callback(grpc_server.drain, settings.drain_s)
    stops.callback(pipeline.drain)
    await pool.start()
    tenants.set_read_only(read_only.with_op_rules(pool.greeting.gradients))
    _log_warnings(settings, pool.greeting, tenants)
    _freeze_existing_objects()
    warm_up.start()
    if settings.http_port is not None:
        gateway = HttpGateway(settings, port, gateway_ends)
        # Stops first: its requests are calls of this server.
        stops.push_async_callback(gateway.stop)
        print(f"gradrule: HTTP at {await gateway.start()}", flush=True)
    # Before the gateway drains: load balancers should send no calls meanwhile.
    stops.callback(grpc_server.end_health)
    started.set()
    print(f"gradrule: listening on {settings.address(port)}", flush=True)
    return grpc_server


def _freeze_existing_objects() -> None:
    """Excludes all existing objects from garbage collection, so that collections become cheap and frequent.

    Python runs a full collection only after the number of objects has grown by a quarter. Until then, reset calls stay
    in memory, because grpc.aio leaves them in reference cycles; each holds about 20 KiB of gRPC's memory.
    """
    gc.collect()
    gc.freeze()


def _exit_after(seconds: float) -> None:
    """Ends the process after a time even if stopping hangs; engines end when their front end is gone."""
    timer = threading.Timer(seconds, os._exit, (EXIT_FAILED,))
    timer.daemon = True
    timer.start()


async def _unless_stopped(work: Coroutine[Any, Any, T], stopping: asyncio.Event) -> T | None:
    """Returns what a coroutine returns; cancels it and returns None if the server is to stop meanwhile."""
    working = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if working.done():
        return await working
    working.cancel()
    await asyncio.wait({working})
    return None


def _log_warnings(settings: Settings, greeting: link_pb2.Greeting, tenants: Tenants) -> None:
    """Logs what the operator should know about rules, TensorFlow, the sandbox and credentials."""
    for name in tenants.default.rules.clashes:
        _log.warning(
            "the stored rule %r hides a built-in rule of this release, which is available as builtin/%s", name, name
        )
    if greeting.op_table_digest != op_definitions.digest():
        _log.warning(
            "TensorFlow %s defines other ops than the table that is part of gradrule", greeting.tensorflow_version
        )
    _log.info("the sandbox of engines enforces: %s", ", ".join(greeting.sandbox))
    if greeting.sandbox_missing:
        _log.warning("the sandbox of engines lacks %s", ", ".join(greeting.sandbox_missing))
    if settings.is_open and not settings.is_local:
        _log.warning(
            "the server listens on %s and asks for no credentials: everybody who can reach it may run graphs",
            settings.host,
        )
