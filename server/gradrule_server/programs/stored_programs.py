"""Stores programs by name, and finds them for calls in the cache or in the registry."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from dataclasses import replace
from typing import NamedTuple

from gradrule.v1 import errors_pb2, program_pb2
from gradrule_server.errors import GradruleError
from gradrule_server.link.engine import Engine
from gradrule_server.link.messages import CallShape
from gradrule_server.link.v1 import link_pb2
from gradrule_server.programs.cache import ProgramCache, StoredKey
from gradrule_server.programs.compile_tasks import CompileTasks
from gradrule_server.programs.compiler import Compiler, RunnableProgram
from gradrule_server.programs.preparer import RegistryLookup
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.registry.programs import PROGRAM_PREFIX, ProgramRegistry, StoredProgram
from gradrule_server.registry.rules import RuleRegistry

_BASE = CallShape()


class _NewProgram(NamedTuple):
    """What is compiled to be stored. `revision`: of the registry in which its rules are found."""

    spec_hash: bytes
    revision: int


class StoredPrograms:
    """The stored programs of one tenant."""

    def __init__(
        self,
        programs: ProgramRegistry,
        rules: RuleRegistry,
        compiler: Compiler,
        cache: ProgramCache,
        tasks: CompileTasks,
    ) -> None:
        self._tasks = tasks
        self._programs = programs
        self._rules = rules
        self._compiler = compiler
        self._cache = cache
        self._forgotten = 0
        self._deletions: set[asyncio.Task[None]] = set()

    async def create(self, spec: bytes, program_id: str, recovery: CallRecovery[Engine]) -> program_pb2.Program:
        """Compiles and stores a program. `spec`: Bytes of a `ProgramSpec`. `program_id`: Empty: one is derived."""

        async def compile(
            recovery: CallRecovery[Engine],
        ) -> tuple[RegistryLookup, RunnableProgram, link_pb2.PreparedProgram]:
            lookup = RegistryLookup(self._rules)
            return lookup, *await self._compiler.compile(spec, lookup, _BASE, recovery, is_kept=True)

        key = _NewProgram(hashlib.sha256(spec).digest(), self._rules.revision)
        lookup, program, prepared = await self._tasks.run(key, recovery, compile, len(spec))

        # In a thread, since it may hold a large graph.
        source = await asyncio.to_thread(program_pb2.ProgramSpec.FromString, prepared.kept_spec)

        def store() -> StoredProgram:
            return self._programs.create(
                program_id or None,
                source,
                lookup.snapshot(prepared.rule_names),
                program.compiled.message,
                prepared.override_values,
            )

        forgotten = self._forgotten
        async with self._programs.acquired_blobs(source):
            stored = await asyncio.to_thread(store)
        # It may be deleted before this task goes on. Then its next call finds that out.
        if self._forgotten == forgotten:
            self._cache.put(StoredKey(stored.program.name, _BASE), _described(program, stored))
        return stored.program

    async def find(
        self, name: str, call: CallShape, recovery: CallRecovery[Engine], *, is_used: bool = True
    ) -> tuple[StoredKey, RunnableProgram, bool]:
        """Returns the program for a call of this shape, its key in the cache, and whether it was compiled just now.

        is_used: Whether a call uses it, see `ProgramCache.put`.
        """
        full = _full_name(name)
        key = StoredKey(full, _BASE)
        base, is_new = await self._find(key, recovery, is_used)
        variant = replace(call, feeds=call.feeds - base.compiled.placeholders)
        if variant == _BASE:
            return key, base, is_new
        key = StoredKey(full, variant)
        return key, *await self._find(key, recovery, is_used)

    async def get(self, name: str) -> program_pb2.Program:
        """Returns the description of a program, from memory while the database is away. Raises PROGRAM_NOT_FOUND."""
        try:
            return (await asyncio.to_thread(self._programs.get, name)).program
        except GradruleError as cause:
            held = self._cache.get(StoredKey(_full_name(name), _BASE), is_counted=False)
            # Calls of this program go on too.
            if cause.reason != errors_pb2.ERROR_REASON_UNAVAILABLE or held is None:
                raise
            return held.compiled.message

    async def list(self, page_size: int, page_token: str) -> tuple[list[program_pb2.Program], str]:
        """Returns a page of programs, and the token of the next page."""
        stored, token = await asyncio.to_thread(self._programs.list, page_size, page_token)
        return [item.program for item in stored], token

    async def delete(self, name: str) -> None:
        """Deletes a program. Raises PROGRAM_NOT_FOUND."""
        # A cancelled call must not leave a deleted program in the cache.
        deletion = asyncio.ensure_future(self._delete(name))
        self._deletions.add(deletion)
        deletion.add_done_callback(self._deletions.discard)
        await asyncio.shield(deletion)

    async def _delete(self, name: str) -> None:
        full = _full_name(name)
        await asyncio.to_thread(self._programs.delete, full)
        self.forget(full)

    def forget(self, name: str) -> None:
        """Drops a program from the cache that this or another server has deleted or replaced. `name`: full name."""
        self._forgotten += 1
        self._cache.remove(lambda key: isinstance(key, StoredKey) and key.name == name)
        self._tasks.forget(lambda key: isinstance(key, StoredKey) and key.name == name)

    def _content(self, stored: StoredProgram) -> tuple[bytes, bytes]:
        spec, snapshot = self._programs.content(stored)
        return spec.SerializeToString(), snapshot

    async def _find(
        self, key: StoredKey, recovery: CallRecovery[Engine], is_used: bool
    ) -> tuple[RunnableProgram, bool]:
        async def compile(recovery: CallRecovery[Engine]) -> RunnableProgram:
            stored = await asyncio.to_thread(self._programs.get, key.name)
            graph_bytes = await asyncio.to_thread(self._programs.graph_bytes, stored)
            read = functools.partial(self._content, stored)
            return _described(await self._compiler.compile_stored(graph_bytes, read, key.call, recovery), stored)

        return await self._tasks.find(key, recovery, compile, is_used=is_used)


def _described(program: RunnableProgram, stored: StoredProgram) -> RunnableProgram:
    """Returns the program with the description that the registry has: with its name and creation time."""
    return replace(program, compiled=replace(program.compiled, program=stored.program.SerializeToString()))


def _full_name(name: str) -> str:
    return name if name.startswith(PROGRAM_PREFIX) else PROGRAM_PREFIX + name
