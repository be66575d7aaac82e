"""Compiled programs as the front end keeps them, so that the next call finds them: bounded in number and bytes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gradrule_server.link.batching import BatchKey
from gradrule_server.link.messages import CallShape
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_cache_lookup
from gradrule_server.programs.call_structure import CallStructure
from gradrule_server.programs.compiled import CompiledProgram
from gradrule_server.programs.loaded import Load, Loadable
from gradrule_server.recovery.crash_history import HistoryRecorder

_MOST_DIGESTS = 1024
# Structures of calls, of at most 16 KiB each and mostly of a hundred bytes.
_MOST_CALLS = 1024


@dataclass(frozen=True, slots=True)
class RunnableProgram:
    """A program that can run, and be loaded again into a new engine."""

    compiled: CompiledProgram
    loadable: Loadable

    @property
    def size(self) -> int:
        """Roughly the bytes that it takes."""
        told = len(self.compiled.program) + len(self.compiled.tail)
        return len(self.loadable.request) + told


class StoredKey(NamedTuple):
    """Key of a kept program as one kind of call needs it."""

    name: str
    call: CallShape


class Inline(NamedTuple):
    """Key of a program that calls bring along. Its rules are those that names meant at `revision` of the registry."""

    spec_hash: bytes
    revision: int
    call: CallShape


class SessionKey(NamedTuple):
    """Key of a program that a session runs. `asked`: its spec, without the graph, which is the session's."""

    session: str
    asked: bytes
    call: CallShape


Key: TypeAlias = StoredKey | Inline | SessionKey


@dataclass(slots=True, eq=False)
class KnownCall:
    """How a stored program is run for calls of one structure.

    settings: of params and blobs, the bytes of a `RunRequest` without its call. may_batch: whether such calls may run
    together with others. used_at: loop time at which the use was last noted. load: where it ran last; `head` and
    `batch_key` belong to that. prefix: what stands before a request of `request_size` bytes.
    """

    key: StoredKey
    program: RunnableProgram
    settings: bytes
    recorder: HistoryRecorder
    may_batch: bool = True
    used_at: float = 0.0
    load: Load | None = None
    head: bytes = b""
    batch_key: BatchKey | None = None
    request_size: int = -1
    prefix: bytes = b""

    def runs_at(self, load: Load) -> None:
        """Notes where it runs from now on."""
        self.load = load
        self.head = self.settings + link_pb2.RunRequest(key=load.engine_key).SerializeToString()
        self.batch_key = BatchKey(load.engine_key, self.settings) if self.may_batch else None


class ProgramCache:
    """The programs used last, and the structures of calls that they ran for."""

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._programs: OrderedDict[Key, tuple[RunnableProgram, int]] = OrderedDict()
        self._calls: OrderedDict[CallStructure, KnownCall] = OrderedDict()
        self._structures: dict[StoredKey, set[CallStructure]] = {}
        self._bytes = 0
        self._revision = 0

    @property
    def held_bytes(self) -> int:
        """Roughly the bytes of all programs."""
        return self._bytes

    def __len__(self) -> int:
        """How many there are."""
        return len(self._programs)

    def get(self, key: Key, *, is_counted: bool = True) -> RunnableProgram | None:
        """The program, if it is there. `is_counted`: whether the look-up counts in metrics."""
        found = self._programs.get(key)
        if is_counted:
            record_cache_lookup("programs", is_hit=found is not None)
        if found is None:
            return None
        self._programs.move_to_end(key)
        return found[0]

    def get_call(self, structure: CallStructure) -> KnownCall | None:
        """How calls of this structure are run, if their program is still there."""
        return self._calls.get(structure)

    def put_call(self, structure: CallStructure, call: KnownCall) -> None:
        """Keeps how calls of this structure are run, as long as their program; of many, those that were used last."""
        self._forget_call(structure)
        self._calls[structure] = call
        self._structures.setdefault(call.key, set()).add(structure)
        if len(self._calls) > _MOST_CALLS:
            self._forget_call(next(iter(self._calls)))

    def used_call(self, structure: CallStructure, call: KnownCall) -> None:
        """Notes that calls of this structure, and so their program, are used."""
        self._programs.move_to_end(call.key)
        self._calls.move_to_end(structure)

    def recent(self) -> Iterator[tuple[Key, RunnableProgram]]:
        """Returns the programs, most recently used first."""
        return ((key, program) for key, (program, _) in reversed(self._programs.items()))

    def put(self, key: Key, program: RunnableProgram, *, is_used: bool = True) -> None:
        """Adds a program and drops those that were used least recently. The last one stays, however large it is.

        is_used: Whether a call uses it; if not, it is dropped before all that were used.
        """
        if isinstance(key, Inline):
            if key.revision < self._revision:
                return
            if key.revision > self._revision:
                # Names mean other rules by now: nobody will ask for these again.
                self._revision = key.revision
                self._remove([old for old in self._programs if isinstance(old, Inline)])
        self._remove([key] if key in self._programs else [])
        size = program.size
        self._programs[key] = (program, size)
        if not is_used:
            self._programs.move_to_end(key, last=False)
        self._bytes += size
        while len(self._programs) > 1 and (len(self._programs) > self._capacity or self._bytes > self._capacity_bytes):
            self._remove([next(iter(self._programs))])

    def drop_oldest(self) -> None:
        """The program that was used least recently goes."""
        self._remove([next(iter(self._programs))] if self._programs else [])

    def forget(self, name: str) -> None:
        """The name belongs to no program any more."""
        self._remove([key for key in self._programs if isinstance(key, StoredKey) and key.name == name])

    def forget_session(self, session: str) -> None:
        """The session has ended."""
        self._remove([key for key in self._programs if isinstance(key, SessionKey) and key.session == session])

    def _remove(self, keys: list[Key]) -> None:
        for key in keys:
            _, size = self._programs.pop(key)
            self._bytes -= size
            if isinstance(key, StoredKey):
                for structure in list(self._structures.get(key, ())):
                    self._forget_call(structure)

    def _forget_call(self, structure: CallStructure) -> None:
        call = self._calls.pop(structure, None)
        if call is not None:
            same = self._structures[call.key]
            same.remove(structure)
            if not same:
                del self._structures[call.key]


class DeletedNames:
    """Tells whoever reads a program by name whether the name was given up meanwhile."""

    def __init__(self) -> None:
        self._watches: list[set[str]] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[set[str]]:
        """The names that were given up since this context was entered."""
        names: set[str] = set()
        self._watches.append(names)
        try:
            yield names
        finally:
            self._watches = [watch for watch in self._watches if watch is not names]

    def given_up(self, name: str) -> None:
        """The name was given up just now."""
        for names in self._watches:
            names.add(name)


class SpecDigests:
    """Digests of specs by the digest of their bytes: a spec can be written in several ways, and is not read here."""

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, raw: bytes) -> bytes:
        """Returns the digest of the spec whose bytes have the digest `raw`; that itself where it is not known."""
        return self._digests.get(raw, raw)

    def put(self, raw: bytes, digest: bytes) -> None:
        """Notes a digest. The oldest are forgotten."""
        if raw == digest:
            return
        self._digests[raw] = digest
        while len(self._digests) > _MOST_DIGESTS:
            self._digests.popitem(last=False)
