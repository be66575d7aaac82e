"""The table of a tenant's compiled programs, with the plans of their calls; limited in number and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gradrule_server.link.messages import CallShape
from gradrule_server.operations.request_record import record_cache_lookup
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.runner import CallPlan

# Plans of one program. Each new value of a param needs a plan of its own.
_MAX_PLANS = 64
# Headers mostly have a hundred bytes. A longer one is rare, and must not fill the memory.
_MAX_HEADER_BYTES = 16 << 10


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


@dataclass(slots=True, eq=False)
class _Row:
    """A program of the table.

    Attributes:
        program: The program.
        used: Larger than those of programs that were used before; 0: no call has used it.
        plans: The plans of its calls, by the bytes of their header; the oldest first.
    """

    program: RunnableProgram
    used: int
    plans: dict[bytes, CallPlan] = field(default_factory=dict)


class ProgramCache:
    """The programs that were used last by calls and sessions of one tenant."""

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._rows: dict[ProgramKey, _Row] = {}
        self._by_header: dict[bytes, _Row] = {}
        self._uses = itertools.count(1)
        self._held_bytes: int | None = 0
        self._header_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The approximate size of all programs and headers, bytes. Each file of values counts once."""
        if self._held_bytes is None:
            programs = [row.program for row in self._rows.values()]
            files = {file.name: file.size for program in programs for file in program.loadable.files}
            self._held_bytes = sum(program.size for program in programs) + sum(files.values())
        return self._held_bytes + self._header_bytes

    def __len__(self) -> int:
        """Returns the number of programs."""
        return len(self._rows)

    def get(self, key: ProgramKey, *, is_counted: bool = True) -> RunnableProgram | None:
        """Returns a program and marks it as used; None if it is not cached. `is_counted`: whether metrics count it."""
        found = self._rows.get(key)
        if is_counted:
            record_cache_lookup("programs", is_hit=found is not None)
        if found is None:
            return None
        found.used = next(self._uses)
        return found.program

    def find_plan(self, header: bytes) -> CallPlan | None:
        """Returns the plan of the calls with a header, and marks their program as used; None if there is none."""
        row = self._by_header.get(header)
        if row is None:
            return None
        record_cache_lookup("programs", is_hit=True)
        row.used = next(self._uses)
        return row.plans[header]

    def add_plan(self, header: bytes, key: ProgramKey, plan: CallPlan) -> None:
        """Adds the plan of calls with a header, unless their program was dropped or replaced since."""
        row = self._rows.get(key)
        if row is None or row.program is not plan.program or len(header) > _MAX_HEADER_BYTES:
            return
        self._header_bytes += 0 if header in row.plans else len(header)
        row.plans[header] = plan
        self._by_header[header] = row
        if len(row.plans) > _MAX_PLANS:
            self._remove_plan(row, next(iter(row.plans)))

    def recent(self) -> Iterator[tuple[ProgramKey, RunnableProgram]]:
        """Yields the programs, most recently used first."""
        for key, row in sorted(self._rows.items(), key=lambda item: item[1].used, reverse=True):
            yield key, row.program

    def put(self, key: ProgramKey, program: RunnableProgram, *, is_used: bool = True) -> None:
        """Adds a program and drops the least recently used ones; the last program stays, whatever its size.

        is_used: Whether a call uses it; if not, it is dropped before all that were used, and one that is there stays.
        """
        if key in self._rows:
            if not is_used:
                return
            self._remove(key)
        self._rows[key] = _Row(program, next(self._uses) if is_used else 0)
        self._held_bytes = None
        while len(self._rows) > 1 and (len(self._rows) > self._capacity or self.held_bytes > self._capacity_bytes):
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Drops the least recently used program, if there is one."""
        oldest = min(self._rows, key=lambda key: self._rows[key].used, default=None)
        if oldest is not None:
            self._remove(oldest)

    def remove(self, is_meant: Callable[[ProgramKey], bool]) -> None:
        """Removes the programs with certain keys."""
        for key in filter(is_meant, list(self._rows)):
            self._remove(key)

    def _remove(self, key: ProgramKey) -> None:
        row = self._rows.pop(key)
        for header in list(row.plans):
            self._remove_plan(row, header)
        self._held_bytes = None

    def _remove_plan(self, row: _Row, header: bytes) -> None:
        del row.plans[header], self._by_header[header]
        self._header_bytes -= len(header)
