"""Caches compiled programs for later calls; limited in number and bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from gradrule_server.link.batching import BatchKey
from gradrule_server.link.messages import CallShape
from gradrule_server.link.v1 import link_pb2
from gradrule_server.operations.request_record import record_cache_lookup
from gradrule_server.programs.call_structure import CallStructure
from gradrule_server.programs.compiler import RunnableProgram
from gradrule_server.programs.engine_cache import Load
from gradrule_server.recovery.crash_history import HistoryRecorder

_MAX_DIGESTS = 1024
# Structures of calls, of at most 16 KiB each and mostly of a hundred bytes.
_MAX_CALLS = 1024


class StoredKey(NamedTuple):
    """Key of a stored program as calls of one shape need it."""

    name: str
    call: CallShape


class InlineKey(NamedTuple):
    """Key of a program that calls hold. `revision`: of the registry in which its rules were found."""

    spec_hash: bytes
    revision: int
    call: CallShape


class SessionKey(NamedTuple):
    """Key of a program that a session runs. `spec`: its spec without the graph, which is the session's."""

    session: str
    spec: bytes
    call: CallShape


ProgramKey: TypeAlias = StoredKey | InlineKey | SessionKey


@dataclass(slots=True, eq=False)
class KnownCall:
    """What running a stored program for calls of one structure needs.

    Attributes:
        key: The program's key in the cache.
        program: The program.
        settings: Bytes of a `RunRequest` with params and blob folder, without the call.
        recorder: Records what the program does to engines.
        may_batch: Whether such calls may run together with others.
        used_at: Loop time at which the use was last recorded.
        load: The program in the engine that ran the last call; `head` and `batch_key` belong to it.
        head: Bytes of a `RunRequest` without the call.
        batch_key: Key of the calls that it may run together with; None: it runs alone.
        request_size: Bytes of the last request.
        prefix: Tag and length before a request of `request_size` bytes.
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

    def set_load(self, load: Load) -> None:
        """Sets the engine that runs the next calls."""
        self.load = load
        self.head = self.settings + link_pb2.RunRequest(key=load.engine_key).SerializeToString()
        self.batch_key = BatchKey(load.engine_key, self.settings) if self.may_batch else None


class ProgramCache:
    """The programs that were used last, and what known calls of them need."""

    def __init__(self, capacity: int, capacity_bytes: int) -> None:
        self._capacity = capacity
        self._capacity_bytes = capacity_bytes
        self._programs: OrderedDict[ProgramKey, tuple[RunnableProgram, int]] = OrderedDict()
        self._calls: OrderedDict[CallStructure, KnownCall] = OrderedDict()
        self._structures: dict[StoredKey, set[CallStructure]] = {}
        self._bytes = 0
        self._revision = 0

    @property
    def held_bytes(self) -> int:
        """The approximate size of all programs, bytes."""
        return self._bytes

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
        return found[0]

    def get_call(self, structure: CallStructure) -> KnownCall | None:
        """Returns what calls of a structure need; None if they are unknown or their program was dropped."""
        return self._calls.get(structure)

    def put_call(self, structure: CallStructure, call: KnownCall) -> None:
        """Adds what calls of a structure need, until their program is dropped; drops the least recently used calls."""
        self._remove_call(structure)
        self._calls[structure] = call
        self._structures.setdefault(call.key, set()).add(structure)
        if len(self._calls) > _MAX_CALLS:
            self._remove_call(next(iter(self._calls)))

    def mark_call_used(self, structure: CallStructure, call: KnownCall) -> None:
        """Marks calls of a structure, and their program, as used."""
        self._programs.move_to_end(call.key)
        self._calls.move_to_end(structure)

    def recent(self) -> Iterator[tuple[ProgramKey, RunnableProgram]]:
        """Returns the programs, most recently used first."""
        return ((key, program) for key, (program, _) in reversed(self._programs.items()))

    def put(self, key: ProgramKey, program: RunnableProgram, *, is_used: bool = True) -> None:
        """Adds a program and drops the least recently used ones; the last program stays, whatever its size.

        is_used: Whether a call uses it; if not, it is dropped before all that were used, and one that is there stays.
        """
        if not is_used and key in self._programs:
            return
        if isinstance(key, InlineKey):
            if key.revision < self._revision:
                return
            if key.revision > self._revision:
                # Names mean other rules now, so no call finds programs of older revisions.
                self._revision = key.revision
                self._remove([old for old in self._programs if isinstance(old, InlineKey)])
        self._remove([key] if key in self._programs else [])
        size = program.size
        self._programs[key] = (program, size)
        if not is_used:
            self._programs.move_to_end(key, last=False)
        self._bytes += size
        while len(self._programs) > 1 and (len(self._programs) > self._capacity or self._bytes > self._capacity_bytes):
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
            _, size = self._programs.pop(key)
            self._bytes -= size
            if isinstance(key, StoredKey):
                for structure in list(self._structures.get(key, ())):
                    self._remove_call(structure)

    def _remove_call(self, structure: CallStructure) -> None:
        call = self._calls.pop(structure, None)
        if call is not None:
            same = self._structures[call.key]
            same.remove(structure)
            if not same:
                del self._structures[call.key]


class SpecDigests:
    """Remembers the digests of specs by the digest of their bytes.

    Equal specs can have different bytes, because maps have no order; only a compile worker can compare them.
    """

    def __init__(self) -> None:
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, bytes_digest: bytes) -> bytes:
        """Returns the digest of the spec whose bytes have a digest; `bytes_digest` itself if it is unknown."""
        return self._digests.get(bytes_digest, bytes_digest)

    def put(self, bytes_digest: bytes, digest: bytes) -> None:
        """Adds a digest; drops the oldest ones."""
        if bytes_digest == digest:
            return
        self._digests[bytes_digest] = digest
        while len(self._digests) > _MAX_DIGESTS:
            self._digests.popitem(last=False)
