"""Loads the stored programs that were used last before a restart, so that their next calls compile nothing.

A file in the data folder lists those programs. It is written at intervals, if the list has changed, and at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from google.protobuf import json_format

from gradrule_server.concurrency import RepeatedWarning, start_logged_task
from gradrule_server.errors import GradruleError
from gradrule_server.link.messages import CallShape, read_call_shape, shape_message
from gradrule_server.link.pool import EnginePool
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.cache import StoredKey
from gradrule_server.programs.loaded import Loadable
from gradrule_server.programs.service import ProgramService
from gradrule_server.registry.data_folder import write_atomically

_log = logging.getLogger(__name__)

FILE_NAME = "gradrule.recent"

# The most that is loaded: programs, nodes of one program, nodes of all programs, and bytes of all requests to engines,
# which the front end keeps.
_MAX_PROGRAMS = 32
_MAX_NODES = 20_000
_MAX_TOTAL_NODES = 50_000
_MAX_TOTAL_BYTES = 256 << 20
_MAX_LOADING_S = 60.0
_MAX_PROGRAM_S = 60.0
_RECORD_INTERVAL_S = 30.0
_POLL_INTERVAL_S = 0.05

T = TypeVar("T")


class RecentProgram(NamedTuple):
    """A stored program of a tenant, as calls of one structure need it."""

    tenant: str
    name: str
    call: CallShape


class WarmUp:
    """Records which stored programs are used, and loads them after a restart. Belongs to one asyncio loop.

    Args:
        file: Lists the programs.
        pool: The engines.
        recent_services: Returns the services of the loaded tenants, most recently used first.
        load_service: Loads the service of a tenant.
    """

    def __init__(
        self,
        file: Path,
        pool: EnginePool,
        recent_services: Callable[[], Sequence[ProgramService]],
        load_service: Callable[[str], Awaitable[ProgramService]],
    ) -> None:
        self._file = file
        self._pool = pool
        self._recent_services = recent_services
        self._load_service = load_service
        self._pending: list[RecentProgram] = []
        self._recorded: list[RecentProgram] = []
        self._task: asyncio.Task[None] | None = None
        # Reads or writes the file, in a thread that cannot be cancelled.
        self._access: asyncio.Task[None] | None = None
        self._warning = RepeatedWarning(_log)

    def start(self) -> None:
        """Starts loading; calls are served meanwhile."""
        self._task = start_logged_task(
            self._run(), "warm-up", _log.error, "recently used programs are not recorded any more"
        )

    async def stop(self) -> None:
        """Stops, and writes the list."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if self._access is not None:
                await asyncio.wait({self._access})
            await self._record()

    async def _run(self) -> None:
        # The file is gone while programs are loaded: a program that ends the server does not do so at each start.
        await self._to_end(self._take())
        if self._pending:
            await self._load()
        while True:
            await self._to_end(self._record())
            await asyncio.sleep(_RECORD_INTERVAL_S)

    async def _to_end(self, access: Coroutine[Any, Any, None]) -> None:
        """Reads or writes the file; completes also when the caller is cancelled."""
        self._access = asyncio.create_task(access, name="warm-up-file")
        await asyncio.shield(self._access)

    async def _take(self) -> None:
        self._pending = await asyncio.to_thread(_take, self._file)

    async def _load(self) -> None:
        """Loads pending programs one by one; starts no further one after 60 s."""
        loop = asyncio.get_running_loop()
        started, total, loaded = loop.time(), len(self._pending), 0
        while self._pending and loop.time() < started + _MAX_LOADING_S:
            if self._is_busy(self._pending[0].tenant):
                # Calls come first: an engine compiles one program at a time.
                await asyncio.sleep(_POLL_INTERVAL_S)
                continue
            # What fails is not listed again until a call uses it.
            program = self._pending.pop(0)
            if self._may_load(program.tenant):
                try:
                    service = await self._load_service(program.tenant)
                    await service.load_stored(program.name, program.call, loop.time() + _MAX_PROGRAM_S)
                    loaded += 1
                except GradruleError as cause:
                    _log.debug("recently used %s was not loaded: %s", program.name, cause)
                except Exception:
                    _log.exception("recently used %s was not loaded", program.name)
        self._pending.clear()
        _log.info("loaded %d of %d recently used programs in %.1f s", loaded, total, loop.time() - started)

    def _is_busy(self, tenant: str) -> bool:
        """Returns whether calls of the tenant compile programs, or calls of any tenant wait for workers or engines."""
        compiling = any(engine.is_compiling for engine in self._pool.engines_for(tenant))
        return compiling or self._pool.workers.waiting > 0 or self._pool.waiting_tenants > 0

    def _may_load(self, tenant: str) -> bool:
        """Returns whether the tenant has an engine, or may get one for programs that its calls may never use.

        Such engines are at most half of all engines, so that the others are left to tenants that call.
        """
        engines = self._pool.engines
        if self._pool.serves(tenant) or any(engine.owner is None for engine in engines):
            return True
        return len(engines) < self._pool.max_engines // 2 and not self._pool.is_full()

    async def _record(self) -> None:
        """Writes the list if it has changed."""
        found = list(dict.fromkeys([*self._recent(), *self._pending]))
        if found == self._recorded:
            return
        try:
            await asyncio.to_thread(write_atomically, self._file, _to_json(found))
        except OSError as cause:
            self._warning.report(f"the list of recently used programs cannot be written: {cause}")
            return
        self._recorded = found
        self._warning.report(None)

    def _recent(self) -> Iterator[RecentProgram]:
        """Returns the programs to load after a restart: of each tenant in turn, most recently used first."""
        tenants = [_stored_programs(service) for service in self._recent_services()]
        programs = (item for turn in itertools.zip_longest(*tenants) for item in turn if item is not None)
        nodes_left, bytes_left = _MAX_TOTAL_NODES, _MAX_TOTAL_BYTES
        for program, loadable in itertools.islice(programs, _MAX_PROGRAMS):
            if loadable.nodes <= min(_MAX_NODES, nodes_left) and len(loadable.request) <= bytes_left:
                nodes_left -= loadable.nodes
                bytes_left -= len(loadable.request)
                yield program


def _stored_programs(service: ProgramService) -> Iterator[tuple[RecentProgram, Loadable]]:
    for key, program in service.cache.recent():
        if isinstance(key, StoredKey):
            yield RecentProgram(service.owner, key.name, key.call), program.loadable


def _to_json(programs: Sequence[RecentProgram]) -> bytes:
    entries = [
        {"tenant": item.tenant, "name": item.name, "call": json_format.MessageToDict(shape_message(item.call))}
        for item in programs
    ]
    return json.dumps({"programs": entries}, indent=1).encode()


def _from_json(content: bytes) -> list[RecentProgram]:
    """Raises `ValueError`, `TypeError`, `KeyError`, `RecursionError` or `json_format.Error` for damaged content."""
    return [
        RecentProgram(
            str(item["tenant"]),
            str(item["name"]),
            read_call_shape(json_format.ParseDict(item["call"], link_pb2.CallShape(), ignore_unknown_fields=True)),
        )
        for item in json.loads(content)["programs"]
    ]


def _take(file: Path) -> list[RecentProgram]:
    """Reads the list and removes the file."""
    try:
        content = file.read_bytes()
        file.unlink()
        return _from_json(content)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError, json_format.Error) as cause:
        _log.warning("%s is ignored, recently used programs are loaded at their next calls: %s", file, cause)
        return []
