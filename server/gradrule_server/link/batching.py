"""Which requests that wait for an engine are sent to it together, so that it may run them as one.

Requests that wait for a thread are put together. Besides, requests of a program wait, `delay_s` at most, while two runs
of it are under way, and while one is under way that is larger than all who wait: a second run begins when it would be
as large as the first. So runs are few and large where calls are many, and where they are few none waits. What the
engine cannot run as one it runs one by one, and tells, so that it is not tried again.
"""

from __future__ import annotations

import logging
import struct
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from gradrule_server.link.v1 import link_pb2

if TYPE_CHECKING:
    from gradrule_server.link.arena import Chunk
    from gradrule_server.link.engine_request import EngineRequest

_log = logging.getLogger(__name__)

# Number of requests, and the most examples that may run together.
_HEAD = struct.Struct("<II")
# Id and length of a request.
_ENTRY = struct.Struct("<QQ")

# Larger requests gain little from company, and their answers would wait for one another.
_MOST_BYTES = 8 * 1024 * 1024
# Attempts that came to nothing because the requests did not fit together: other shapes, other shared inputs.
_MOST_ATTEMPTS = 16
_MOST_PROGRAMS = 4096
# Runs of a program at a time: while one computes, another is read or answered.
_MOST_RUNS = 2

_UNDECIDED = link_pb2.BatchNotice.OUTCOME_UNSPECIFIED
_PROVEN = link_pb2.BatchNotice.OUTCOME_PROVEN


class BatchKey(NamedTuple):
    """Requests of one key may run together: the program as the engine knows it, and whatever else must be the same."""

    program: str
    rest: Hashable = ()

    @property
    def digest(self) -> str:
        """The program's digest, which its key in any engine begins with."""
        return self.program.partition("/")[0]


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were sent together. The engine is done with them when it sends its BATCH_NOTICE."""

    requests: Sequence[EngineRequest]
    chunk: Chunk | None = None
    """Where their payloads lie, if they are large."""

    @property
    def key(self) -> BatchKey:
        """Which requests they are."""
        key = self.requests[0].batch_key
        assert key is not None
        return key

    @property
    def is_given_up(self) -> bool:
        """Whether nobody waits for any of those that are not answered."""
        return all(work.is_given_up or work.ended for work in self.requests)


@dataclass(slots=True)
class _KeyLoad:
    """The runs of one key that are under way, and how many requests they hold."""

    runs: int = 0
    requests: int = 0


@dataclass(slots=True)
class _Program:
    loads: dict[BatchKey, _KeyLoad] = field(default_factory=dict)
    """By key, where runs are under way. Requests of different keys never run together, so each key counts alone."""
    is_being_tried: bool = False
    is_proven: bool = False
    attempts: int = 0


@dataclass(slots=True)
class Batches:
    """The requests that wait and have a key, and what the engine told of their programs.

    most: examples that may run together; 1: requests are never sent together. delay_s: how long a request waits at most
    although a thread is free.
    """

    most: int = 1
    delay_s: float = 0.0
    _waiting: dict[BatchKey, dict[int, EngineRequest]] = field(default_factory=dict)
    _programs: OrderedDict[str, _Program] = field(default_factory=OrderedDict)

    def add(self, work: EngineRequest) -> None:
        """The request waits from now on."""
        if work.batch_key is not None and self.most > 1:
            self._waiting.setdefault(work.batch_key, {})[work.id] = work

    def remove(self, work: EngineRequest) -> None:
        """The request does not wait any more."""
        same = self._waiting.get(work.batch_key) if work.batch_key is not None else None
        if same is not None:
            same.pop(work.id, None)
            if not same:
                del self._waiting[work.batch_key]  # type: ignore[arg-type]

    def held_until(self, work: EngineRequest) -> float:
        """Returns the loop time until which a request waits although a thread is free; 0: it need not."""
        if work.batch_key is None or self.most == 1:
            return 0.0
        program = self._programs.get(work.batch_key.program)
        if program is None or not program.is_proven:
            return 0.0
        load = program.loads.get(work.batch_key)
        if load is None:
            return 0.0
        # Clients that were answered together come back one by one: the first of them must not run by itself.
        if load.runs < _MOST_RUNS and self._together(work) >= min(load.requests, self.most):
            return 0.0
        return work.submitted_at + self.delay_s

    def _together(self, work: EngineRequest) -> int:
        """Returns how many requests would be sent with this one, which may wait or not, itself included."""
        same = self._waiting.get(work.batch_key, {}) if work.batch_key is not None else {}
        return len(same) + (work.id not in same)

    def started(self, work: EngineRequest, requests: int) -> None:
        """A run of so many requests began: of this one, and of those that were sent with it."""
        if work.batch_key is not None and self.most > 1:
            program = self._program(work.batch_key.program)
            load = program.loads.get(work.batch_key)
            if load is None:
                load = program.loads[work.batch_key] = _KeyLoad()
            load.runs += 1
            load.requests += requests

    def ended(self, work: EngineRequest, requests: int) -> None:
        """A run of so many requests ended."""
        if work.batch_key is not None and self.most > 1:
            program = self._program(work.batch_key.program)
            load = program.loads[work.batch_key]
            load.runs -= 1
            load.requests -= requests
            if not load.runs:
                del program.loads[work.batch_key]

    def companions(self, work: EngineRequest) -> list[EngineRequest]:
        """Returns the waiting requests that are to be sent together with one that is sent now."""
        same = self._waiting.get(work.batch_key) if work.batch_key is not None else None
        if not same:
            return []
        program = self._program(work.batch_key.program)  # type: ignore[union-attr]
        if program.is_being_tried or program.attempts >= _MOST_ATTEMPTS:
            return []
        # The engine tries with two whether they can run together: until then more would only keep one another waiting.
        count = self.most - 1 if program.is_proven else 1
        size = work.size
        chosen: list[EngineRequest] = []
        for other in same.values():
            size += other.size
            if len(chosen) == count or size > _MOST_BYTES:
                break
            chosen.append(other)
        program.is_being_tried = bool(chosen) and not program.is_proven
        return chosen

    def learn(self, notice: link_pb2.BatchNotice) -> None:
        """Notes what the engine tells of a program."""
        program = self._program(notice.key)
        program.is_being_tried = False
        program.is_proven = notice.outcome == _PROVEN
        if notice.outcome == _UNDECIDED:
            program.attempts += 1
        elif notice.outcome == _PROVEN:
            program.attempts = 0
        else:
            program.attempts = _MOST_ATTEMPTS
            _log.info("calls of program %s are not run together: %s", notice.key, notice.reason)

    def _program(self, key: str) -> _Program:
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = _Program()
            if len(self._programs) > _MOST_PROGRAMS:
                idle = next((name for name, program in self._programs.items() if not program.loads), key)
                del self._programs[idle]
        return found


@dataclass(slots=True)
class JitState:
    """The programs of an engine that XLA compiles or runs, by their keys.

    Attributes:
        compiling: Programs that XLA compiles now.
        chosen: Programs of which calls run with XLA.
    """

    compiling: set[str] = field(default_factory=set)
    chosen: set[str] = field(default_factory=set)

    def apply(self, notice: link_pb2.JitNotice) -> None:
        """Applies a notice of the engine."""
        self.compiling.discard(notice.key)
        if notice.outcome == link_pb2.JitNotice.OUTCOME_COMPILING:
            self.compiling.add(notice.key)
        elif notice.outcome == link_pb2.JitNotice.OUTCOME_CHOSEN:
            self.chosen.add(notice.key)
            _log.info("calls of program %s run with XLA", notice.key)
        elif notice.outcome == link_pb2.JitNotice.OUTCOME_UNSPECIFIED:
            self.chosen.discard(notice.key)
        elif notice.outcome == link_pb2.JitNotice.OUTCOME_REFUSED:
            _log.info("program %s runs without XLA: %s", notice.key, notice.reason)


def pack_batch(most: int, requests: Sequence[tuple[int, Sequence[bytes]]]) -> list[bytes]:
    """Returns the payload of a RUN_BATCH frame in parts: requests by id, each the bytes of a `RunRequest` in parts."""
    head = [_HEAD.pack(len(requests), most)]
    head += [_ENTRY.pack(number, sum(map(len, parts))) for number, parts in requests]
    return [b"".join(head), *(part for _, parts in requests for part in parts)]


def unpack_batch(payload: bytes | memoryview) -> tuple[int, list[tuple[int, bytes | memoryview]]]:
    """Returns what `pack_batch` was given; views of a payload that is a view. `ValueError` where it is malformed."""
    try:
        count, most = _HEAD.unpack_from(payload)
        entries = [_ENTRY.unpack_from(payload, _HEAD.size + index * _ENTRY.size) for index in range(count)]
    except struct.error as cause:
        raise ValueError(f"no batch of requests: {cause}") from None
    position = _HEAD.size + count * _ENTRY.size
    if position + sum(length for _, length in entries) != len(payload):
        raise ValueError("a batch of requests has another length than it tells")
    requests: list[tuple[int, bytes | memoryview]] = []
    for number, length in entries:
        requests.append((number, payload[position : position + length]))
        position += length
    return most, requests
