"""Chooses requests that are sent to an engine together, so that it can run them as one batch.

Requests of one key that wait for a thread are sent together. Even if a thread is free, requests wait up to `delay_s`
while two runs of their key are under way, or while one run is under way that is larger than all waiting requests
together. So with many callers there are few large runs, and with few callers no request waits. The engine compares the
first merged runs of a program with single ones. If results differ, it reports that, and calls of the program run alone
from then on.
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
    from gradrule_server.link.request_scheduler import EngineRequest

_log = logging.getLogger(__name__)

# The number of requests, and the most examples that may run together.
_HEAD = struct.Struct("<II")
# The id and length of a request.
_ENTRY = struct.Struct("<QQ")

# Larger requests gain little from a batch, and their answers would wait for one another.
_MAX_BYTES = 8 * 1024 * 1024
# Attempts that failed because the requests did not match: other shapes, other shared inputs.
_MAX_ATTEMPTS = 16
_MAX_PROGRAMS = 4096
# Runs of a key at a time: while one computes, another is parsed or answered.
_MAX_RUNS = 2

_UNDECIDED = link_pb2.BatchNotice.OUTCOME_UNSPECIFIED
_EQUAL = link_pb2.BatchNotice.OUTCOME_EQUAL


class BatchKey(NamedTuple):
    """Requests of one key may run together. `program`: its key in the engine. `rest`: what else must be equal."""

    program: str
    rest: Hashable = ()

    @property
    def digest(self) -> str:
        """The digest of the program, which is the start of its key in every engine."""
        return self.program.partition("/")[0]


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that were sent together. They have ended when the engine sends its BATCH_NOTICE."""

    requests: Sequence[EngineRequest]
    chunk: Chunk | None = None
    """Where their payloads lie in the arena, if they are large."""

    @property
    def key(self) -> BatchKey:
        """The key of all its requests."""
        key = self.requests[0].batch_key
        assert key is not None
        return key

    @property
    def is_given_up(self) -> bool:
        """Whether no caller waits for any of its unanswered requests."""
        return all(request.is_given_up or request.ended for request in self.requests)


@dataclass(slots=True)
class _KeyLoad:
    """The runs of one key that are under way, and how many requests they hold."""

    runs: int = 0
    requests: int = 0


@dataclass(slots=True)
class _Program:
    loads: dict[BatchKey, _KeyLoad] = field(default_factory=dict)
    """By key, where runs are under way. Requests of different keys never run together, so each key counts alone."""
    is_in_test: bool = False
    is_merged: bool = False
    """Whether its first merged runs gave the results of single ones."""
    attempts: int = 0


@dataclass(slots=True)
class Batches:
    """The waiting requests that have a key, and what the engine reported about their programs.

    Attributes:
        most: Most examples that may run together; 1: requests are never sent together.
        delay_s: How long a request may wait although a thread is free, seconds.
    """

    most: int = 1
    delay_s: float = 0.0
    _waiting: dict[BatchKey, dict[int, EngineRequest]] = field(default_factory=dict)
    _programs: OrderedDict[str, _Program] = field(default_factory=OrderedDict)

    def add(self, request: EngineRequest) -> None:
        """Adds a request that waits."""
        if request.batch_key is not None and self.most > 1:
            self._waiting.setdefault(request.batch_key, {})[request.id] = request

    def remove(self, request: EngineRequest) -> None:
        """Removes a request that does not wait any more."""
        same = self._waiting.get(request.batch_key) if request.batch_key is not None else None
        if same is not None:
            same.pop(request.id, None)
            if not same:
                del self._waiting[request.batch_key]  # type: ignore[arg-type]

    def held_until(self, request: EngineRequest) -> float:
        """Returns the loop time until which a request waits although a thread is free; 0: it does not wait."""
        if request.batch_key is None or self.most == 1:
            return 0.0
        program = self._programs.get(request.batch_key.program)
        if program is None or not program.is_merged:
            return 0.0
        load = program.loads.get(request.batch_key)
        if load is None:
            return 0.0
        # Clients that were answered together send their next calls one by one: the first must not run alone.
        if load.runs < _MAX_RUNS and self._together(request) >= min(load.requests, self.most):
            return 0.0
        return request.submitted_at + self.delay_s

    def _together(self, request: EngineRequest) -> int:
        """Returns how many requests would run together if this one were sent now, itself included."""
        same = self._waiting.get(request.batch_key, {}) if request.batch_key is not None else {}
        return len(same) + (request.id not in same)

    def started(self, request: EngineRequest, requests: int) -> None:
        """Counts a run that started: of this request and those sent with it, `requests` in all."""
        if request.batch_key is not None and self.most > 1:
            program = self._program(request.batch_key.program)
            load = program.loads.get(request.batch_key)
            if load is None:
                load = program.loads[request.batch_key] = _KeyLoad()
            load.runs += 1
            load.requests += requests

    def ended(self, request: EngineRequest, requests: int) -> None:
        """Counts a run that ended."""
        if request.batch_key is not None and self.most > 1:
            program = self._program(request.batch_key.program)
            load = program.loads[request.batch_key]
            load.runs -= 1
            load.requests -= requests
            if not load.runs:
                del program.loads[request.batch_key]

    def companions(self, request: EngineRequest) -> list[EngineRequest]:
        """Returns the waiting requests to send together with one that is sent now."""
        same = self._waiting.get(request.batch_key) if request.batch_key is not None else None
        if not same:
            return []
        program = self._program(request.batch_key.program)  # type: ignore[union-attr]
        if program.is_in_test or program.attempts >= _MAX_ATTEMPTS:
            return []
        # The engine compares two requests at a time: more would only wait for one another.
        count = self.most - 1 if program.is_merged else 1
        size = request.size
        chosen: list[EngineRequest] = []
        for other in same.values():
            size += other.size
            if len(chosen) == count or size > _MAX_BYTES:
                break
            chosen.append(other)
        program.is_in_test = bool(chosen) and not program.is_merged
        return chosen

    def apply(self, notice: link_pb2.BatchNotice) -> None:
        """Applies what the engine reports about a program."""
        program = self._program(notice.key)
        program.is_in_test = False
        program.is_merged = notice.outcome == _EQUAL
        if notice.outcome == _UNDECIDED:
            program.attempts += 1
            if program.attempts == _MAX_ATTEMPTS:
                _log.warning("calls of program %s are not run together: their inputs never matched", notice.key)
        elif notice.outcome == _EQUAL:
            program.attempts = 0
        else:
            program.attempts = _MAX_ATTEMPTS
            _log.warning("calls of program %s are not run together: %s", notice.key, notice.reason)

    def _program(self, key: str) -> _Program:
        found = self._programs.get(key)
        if found is None:
            found = self._programs[key] = _Program()
            if len(self._programs) > _MAX_PROGRAMS:
                idle = next((name for name, program in self._programs.items() if not program.loads), key)
                del self._programs[idle]
        return found


def pack_batch(most: int, requests: Sequence[tuple[int, Sequence[bytes]]]) -> list[bytes]:
    """Returns the payload of a RUN_BATCH frame in parts. requests: ids, each with its `RunRequest` in parts."""
    head = [_HEAD.pack(len(requests), most)]
    head += [_ENTRY.pack(number, sum(map(len, parts))) for number, parts in requests]
    return [b"".join(head), *(part for _, parts in requests for part in parts)]


def unpack_batch(payload: bytes | memoryview) -> tuple[int, list[tuple[int, bytes | memoryview]]]:
    """Reads the payload of a RUN_BATCH frame; requests of a view are views. Raises `ValueError` if it is malformed."""
    try:
        count, most = _HEAD.unpack_from(payload)
        entries = [_ENTRY.unpack_from(payload, _HEAD.size + index * _ENTRY.size) for index in range(count)]
    except struct.error as cause:
        raise ValueError(f"no batch of requests: {cause}") from None
    position = _HEAD.size + count * _ENTRY.size
    if position + sum(length for _, length in entries) != len(payload):
        raise ValueError("a batch of requests is not as long as its header says")
    requests: list[tuple[int, bytes | memoryview]] = []
    for number, length in entries:
        requests.append((number, payload[position : position + length]))
        position += length
    return most, requests
