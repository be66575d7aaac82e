"""Programs by name: made and kept until deleted, found again for each call, from the cache or from the store."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

from gradrule.v1 import program_pb2
from gradrule_server.link.engine import Engine
from gradrule_server.link.messages import CallShape
from gradrule_server.programs.cache import DeletedNames, ProgramCache, RunnableProgram, StoredKey
from gradrule_server.programs.compiler import Compiler
from gradrule_server.programs.rule_lookup import RegistryLookup
from gradrule_server.recovery.call_recovery import CallRecovery
from gradrule_server.registry.programs import ProgramRegistry, StoredProgram
from gradrule_server.registry.rules import RuleRegistry

_BASE = CallShape()
_PREFIX = "programs/"


class StoredPrograms:
    """The programs that have names."""

    def __init__(self, programs: ProgramRegistry, rules: RuleRegistry, compiler: Compiler, cache: ProgramCache) -> None:
        self._programs = programs
        self._rules = rules
        self._compiler = compiler
        self._cache = cache
        self._changes = DeletedNames()
        self._deletions: set[asyncio.Task[None]] = set()

    async def create(self, spec: bytes, program_id: str, recovery: CallRecovery[Engine]) -> program_pb2.Program:
        """Compiles and keeps a program; without an id it gets one. `spec`: bytes of a `ProgramSpec`."""
        lookup = RegistryLookup(self._rules)
        program, parts = await self._compiler.compile_to_keep(spec, _BASE, lookup, recovery)

        def keep() -> StoredProgram:
            return self._programs.create(
                program_id or None,
                program_pb2.ProgramSpec.FromString(parts.spec),
                lookup.snapshot(parts.rule_names),
                program.compiled.message,
                parts.override_values,
            )

        with self._changes.watched() as given_up:
            stored = await asyncio.to_thread(keep)
            if stored.program.name not in given_up:
                self._cache.put(StoredKey(stored.program.name, _BASE), program)
        return stored.program

    async def find(
        self, name: str, call: CallShape, recovery: CallRecovery[Engine], *, is_used: bool = True
    ) -> tuple[StoredKey, RunnableProgram, bool]:
        """Returns the program for a call of this shape, its key in the cache, and whether it was compiled just now.

        is_used: Whether a call uses it, see `ProgramCache.put`.
        """
        full = name if name.startswith(_PREFIX) else _PREFIX + name
        key = StoredKey(full, _BASE)
        base, is_new = await self._find(key, recovery, is_used)
        variant = replace(call, feeds=call.feeds - base.compiled.placeholders)
        if variant == _BASE:
            return key, base, is_new
        key = StoredKey(full, variant)
        return key, *await self._find(key, recovery, is_used)

    async def get(self, name: str) -> program_pb2.Program:
        """What is told of a program."""
        return (await asyncio.to_thread(self._programs.get, name)).program

    async def list(self, page_size: int, page_token: str) -> tuple[list[program_pb2.Program], str]:
        """A page of programs, and the next page's token."""
        stored, token = await asyncio.to_thread(self._programs.list, page_size, page_token)
        return [item.program for item in stored], token

    async def delete(self, name: str) -> None:
        """Forgets a program."""
        # A caller that gives up must not leave behind a cache that still knows what the store has forgotten.
        deletion = asyncio.ensure_future(self._delete(name))
        self._deletions.add(deletion)
        deletion.add_done_callback(self._deletions.discard)
        await asyncio.shield(deletion)

    async def _delete(self, name: str) -> None:
        full = name if name.startswith(_PREFIX) else _PREFIX + name
        await asyncio.to_thread(self._programs.delete, full)
        self._changes.given_up(full)
        self._cache.forget(full)

    def _content(self, stored: StoredProgram) -> tuple[bytes, bytes]:
        spec, snapshot = self._programs.content(stored)
        return spec.SerializeToString(), snapshot

    async def _find(
        self, key: StoredKey, recovery: CallRecovery[Engine], is_used: bool
    ) -> tuple[RunnableProgram, bool]:
        found = self._cache.get(key)
        if found is not None:
            return found, False
        with self._changes.watched() as given_up:
            stored = await asyncio.to_thread(self._programs.get, key.name)
            graph_bytes = await asyncio.to_thread(self._programs.graph_bytes, stored)
            program = await self._compiler.compile_stored(
                graph_bytes, functools.partial(self._content, stored), key.call, recovery
            )
            if key.name not in given_up:
                self._cache.put(key, program, is_used=is_used)
        return program, True
