"""Putting the server together, and its life from start to drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from gradrule import _opdefs
from gradrule_server import graphs
from gradrule_server.front.handlers import Door
from gradrule_server.front.server import Front
from gradrule_server.link.engine import Engine
from gradrule_server.programs.handles import HandleHouse
from gradrule_server.programs.house import ProgramHouse
from gradrule_server.programs.sessions import SessionHouse
from gradrule_server.registry.blobs import BlobStore
from gradrule_server.registry.programs import ProgramRegistry
from gradrule_server.registry.rules import RuleRegistry
from gradrule_server.registry.store import Store
from gradrule_server.settings import Settings

_log = logging.getLogger(__name__)


async def serve(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT, then drains. `EngineRefused`, `StoreError` or `OSError` where it cannot start."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)

    store = Store(settings.data_dir)
    try:
        front = Front(settings.max_message_bytes)
        health_updates: set[asyncio.Task[None]] = set()

        def tell_health(ready: bool) -> None:
            update = asyncio.ensure_future(front.set_ready(ready))
            health_updates.add(update)
            update.add_done_callback(health_updates.discard)

        blobs = BlobStore(settings.data_dir / "blobs", settings.max_blob_bytes)
        engine = Engine(settings.device, settings.engine_threads, tell_health, blob_folder=blobs.folder)
        limits = graphs.Limits(
            nodes=settings.max_nodes,
            inlined_nodes=settings.max_inlined_nodes,
            call_depth=settings.max_call_depth,
            graph_bytes=settings.max_graph_bytes,
            trusted=settings.trust == "full",
            node_outputs=settings.max_node_outputs,
            constant_bytes=settings.max_constant_bytes,
            unpacking=settings.max_unpacking,
            engine_bytes=settings.memory_limit,
        )
        rules = RuleRegistry(store, _opdefs.gradients(), max_rules=settings.max_rules, bounds=limits)
        house = ProgramHouse(
            rules,
            ProgramRegistry(store, blobs, max_programs=settings.max_programs),
            engine,
            limits,
            blobs,
            capacity=settings.program_cache,
            capacity_bytes=settings.program_cache_bytes,
        )
        handles = HandleHouse(
            house,
            engine,
            max_bytes=settings.max_handle_bytes,
            max_handles=settings.max_handles,
            ttl_s=settings.handle_ttl_s,
        )
        sessions = SessionHouse(
            house,
            engine,
            blobs,
            limits,
            max_sessions=settings.max_sessions,
            max_bytes=settings.max_session_bytes,
        )
        door = Door(settings.max_concurrent_requests, settings.default_deadline_s, settings.max_deadline_s, limits)
        front.add_services(rules, house, handles, sessions, blobs, door, with_reflection=settings.reflection)
        port = await front.start(f"{settings.host}:{settings.port}")
        try:
            await _start_engine(engine, stopping)
            if not stopping.is_set():
                rules.set_op_rules(engine.greeting.gradients)
                for name in rules.clashes:
                    _log.warning("the kept rule %r hides a rule of this release; the latter is builtin/%s", name, name)
                if engine.greeting.op_table_digest != _opdefs.digest():
                    _log.warning(
                        "TensorFlow %s defines other ops than the table that ships", engine.greeting.tensorflow_version
                    )
                print(f"gradrule: listening on {settings.host}:{port}", flush=True)
                await stopping.wait()
        finally:
            door.drain()
            await front.drain(settings.drain_s)
            await engine.stop()
    finally:
        store.close()


async def _start_engine(engine: Engine, stopping: asyncio.Event) -> None:
    """Waits for the engine, or for the order to stop."""
    starting = asyncio.ensure_future(engine.start())
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
