"""Stores programs by name, and finds them for calls in the cache or in the registry."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import Iterator
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
        self._deleted_names = DeletedNames()
        self._deletions: set[asyncio.Task[None]] = set()

    async def create(self, spec: bytes, program_id: str, recovery: CallRecovery[Engine]) -> program_pb2.Program:
        """Compiles and stores a program. `spec`: Bytes of a `ProgramSpec`. `program_id`: Empty: one is derived."""

        async def compile(
            recovery: CallRecovery[Engine],
        ) -> tuple[RegistryLookup, RunnableProgram, link_pb2.PreparedProgram]:
            lookup = RegistryLookup(self._rules)
            return lookup, *await self._compiler.compile_to_store(spec, _BASE, lookup, recovery)

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

        with self._deleted_names.watch() as deleted:
            async with self._programs.acquired_blobs(source):
                stored = await asyncio.to_thread(store)
            if stored.program.name not in deleted:
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
        self._deleted_names.add(name)
        self._cache.remove(lambda key: isinstance(key, StoredKey) and key.name == name)
        self._tasks.forget(lambda key: isinstance(key, StoredKey) and key.name == name)

    def _content(self, stored: StoredProgram) -> tuple[bytes, bytes]:
        spec, snapshot = self._programs.content(stored)
        return spec.SerializeToString(), snapshot

    async def _find(
        self, key: StoredKey, recovery: CallRecovery[Engine], is_used: bool
    ) -> tuple[RunnableProgram, bool]:
        found = self._cache.get(key)
        if found is not None:
            return found, False

        async def compile(recovery: CallRecovery[Engine]) -> RunnableProgram:
            with self._deleted_names.watch() as deleted:
                stored = await asyncio.to_thread(self._programs.get, key.name)
                graph_bytes = await asyncio.to_thread(self._programs.graph_bytes, stored)
                compiled = await self._compiler.compile_stored(
                    graph_bytes, functools.partial(self._content, stored), key.call, recovery
                )
                program = _described(compiled, stored)
                if key.name not in deleted:
                    self._cache.put(key, program, is_used=is_used)
                return program

        return await self._tasks.run(key, recovery, compile), True


class DeletedNames:
    """Tells tasks that read a program by name whether the program was deleted meanwhile."""

    def __init__(self) -> None:
        self._watches: list[set[str]] = []

    @contextlib.contextmanager
    def watch(self) -> Iterator[set[str]]:
        """Provides the names that were deleted since this context was entered."""
        names: set[str] = set()
        self._watches.append(names)
        try:
            yield names
        finally:
            self._watches = [watch for watch in self._watches if watch is not names]

    def add(self, name: str) -> None:
        """Adds a name that was deleted now."""
        for names in self._watches:
            names.add(name)


def _described(program: RunnableProgram, stored: StoredProgram) -> RunnableProgram:
    """Returns the program with the description that the registry has: with its name and creation time."""
    return replace(program, compiled=replace(program.compiled, program=stored.program.SerializeToString()))


def _full_name(name: str) -> str:
    return name if name.startswith(PROGRAM_PREFIX) else PROGRAM_PREFIX + name
