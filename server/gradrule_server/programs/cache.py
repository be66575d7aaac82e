"""Caches compiled programs for later calls; limited in number and bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from gradrule_server.link.messages import CallShape
from gradrule_server.operations.request_record import record_cache_lookup
from gradrule_server.programs.compiler import RunnableProgram


class StoredKey(NamedTuple):
    """Key of a stored program as calls of one shape need it."""

    name: str
    call: CallShape


class InlineKey(NamedTuple):
    """Key of a program that calls hold. `spec`: Digest of its bytes. `revision`: of the registry that has its rules."""

    spec: bytes
    revision: int
    call: CallShape


class SessionKey(NamedTuple):
    """Key of a program that a session runs. `spec`: its spec without the graph, which is the session's."""

    session: str
    spec: bytes
    call: CallShape


ProgramKey: TypeAlias = StoredKey | InlineKey | SessionKey


class ProgramCache:
    """The programs that were used last by calls and sessions of one tenant."""

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._programs: OrderedDict[ProgramKey, RunnableProgram] = OrderedDict()
        self._held_bytes: int | None = 0
        self.on_removed: Callable[[StoredKey], None] = lambda key: None
        """Called with the key of each stored program that was dropped."""

    @property
    def held_bytes(self) -> int:
        """The approximate size of all programs, bytes. Each file of values counts once."""
        if self._held_bytes is None:
            files = {file.name: file.size for program in self._programs.values() for file in program.loadable.files}
            self._held_bytes = sum(program.size for program in self._programs.values()) + sum(files.values())
        return self._held_bytes

    def __len__(self) -> int:
        """Returns the number of programs."""
        return len(self._programs)

    def get(self, key: ProgramKey, *, is_counted: bool = True) -> RunnableProgram | None:
        """Returns a program and marks it as used; None if it is not cached. `is_counted`: whether metrics count it."""
        found = self._programs.get(key)
        if is_counted:
            record_cache_lookup("programs", is_hit=found is not None)
        if found is None:
            return None
        self._programs.move_to_end(key)
        return found

    def mark_used(self, key: ProgramKey) -> None:
        """Marks a cached program as used."""
        self._programs.move_to_end(key)

    def recent(self) -> Iterator[tuple[ProgramKey, RunnableProgram]]:
        """Returns the programs, most recently used first."""
        return reversed(self._programs.items())

    def put(self, key: ProgramKey, program: RunnableProgram, *, is_used: bool = True) -> None:
        """Adds a program and drops the least recently used ones; the last program stays, whatever its size.

        is_used: Whether a call uses it; if not, it is dropped before all that were used, and one that is there stays.
        """
        if not is_used and key in self._programs:
            return
        self._remove([key] if key in self._programs else [])
        self._programs[key] = program
        if not is_used:
            self._programs.move_to_end(key, last=False)
        self._held_bytes = None
        while len(self._programs) > 1 and (
            len(self._programs) > self._capacity or self.held_bytes > self._capacity_bytes
        ):
            self._remove([next(iter(self._programs))])

    def drop_oldest(self) -> None:
        """Drops the least recently used program, if there is one."""
        self._remove([next(iter(self._programs))] if self._programs else [])

    def remove_stored(self, name: str) -> None:
        """Removes a stored program that was deleted."""
        self._remove([key for key in self._programs if isinstance(key, StoredKey) and key.name == name])

    def remove_session(self, session: str) -> None:
        """Removes the programs of a session that has ended."""
        self._remove([key for key in self._programs if isinstance(key, SessionKey) and key.session == session])

    def _remove(self, keys: list[ProgramKey]) -> None:
        for key in keys:
            del self._programs[key]
            self._held_bytes = None
            if isinstance(key, StoredKey):
                self.on_removed(key)
