"""The front end's end of the socket to an engine: requests out, answers matched by id, on an asyncio loop.

What waits, waits here: an engine is never sent more than its threads take up at once. So whatever was sent runs, and
whatever was not can be dropped without the engine's knowing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, OrderedDict
from typing import cast

from gradrule_server.link.faults import error_of
from gradrule_server.link.framing import HEADER_BYTES, Kind, pack_header, unpack_header
from gradrule_server.link.owner import OWNER
from gradrule_server.link.v1 import link_pb2

_MAX_TURNS = 1024


class EngineGone(Exception):
    """The engine closed its end, or died, before it answered. `started`: it had been sent the request."""

    def __init__(self, *, started: bool) -> None:
        super().__init__()
        self.started = started


class Work:
    """A request to an engine: it waits, then runs, then `answer` has the payload of its answer, or what went wrong."""

    __slots__ = ("_ended", "_timer", "answer", "connection", "id", "kind", "owner", "payload")

    def __init__(self, connection: Connection, request_id: int, kind: Kind, payload: bytes) -> None:
        self.connection = connection
        self.id = request_id
        self.kind = kind
        self.owner = OWNER.get()
        self.payload = payload
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ended(self) -> bool:
        """The engine is done with it, or never saw it and never will. (`answer` may be cancelled long before.)"""
        return self._ended

    def watch(self, timer: asyncio.TimerHandle | None) -> None:
        """Sets the timer that goes off if the work does not end; it takes the place of the one set before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def end(self) -> None:
        """The engine is done with it."""
        self._ended = True
        self.watch(None)


class Connection(asyncio.Protocol):
    """Frames over a stream to an engine of so many threads. Everything happens on the loop that made it."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._ids = itertools.count(1)
        self._waiting: dict[int, Work] = {}
        self._running: dict[int, Work] = {}
        # Owners whose work was taken up, the latest last.
        self._turns: OrderedDict[str, None] = OrderedDict()
        self._compiling = False
        self._closed = False
        self.greeting: asyncio.Future[link_pb2.Greeting] = asyncio.get_running_loop().create_future()

    def submit(self, kind: Kind, payload: bytes) -> Work:
        """Sends a request, as soon as a thread is free for it; a FAULT becomes its answer's `GradruleError`."""
        if self._closed or self._transport is None:
            raise EngineGone(started=False)
        work = Work(self, next(self._ids), kind, payload)
        if self._can_start(kind):
            self._start(work)
        else:
            self._waiting[work.id] = work
        return work

    def drop(self, work: Work) -> bool:
        """Takes back a request that still waits; False where it has been sent."""
        if self._waiting.pop(work.id, None) is None:
            return False
        work.answer.cancel()
        work.end()
        return True

    def tell(self, kind: Kind, payload: bytes) -> None:
        """Sends a frame that has no answer."""
        if not self._closed:
            self._write(kind, 0, payload)

    def close(self) -> None:
        """Closes the socket, upon which the engine ends."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        position = 0
        while len(buffer) - position >= HEADER_BYTES:
            length, kind, request_id = unpack_header(memoryview(buffer)[position : position + HEADER_BYTES])
            end = position + HEADER_BYTES + length
            if len(buffer) < end:
                break
            self._deliver(kind, request_id, bytes(memoryview(buffer)[position + HEADER_BYTES : end]))
            position = end
        if position:
            del buffer[:position]

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        for works, started in ((self._running, True), (self._waiting, False)):
            for work in works.values():
                work.end()
                if not work.answer.done():
                    work.answer.set_exception(EngineGone(started=started))
            works.clear()
        if not self.greeting.done():
            self.greeting.set_exception(EngineGone(started=True))
        # A greeting that nobody waits for must not be reported as an exception that was never retrieved.
        if not self.greeting.cancelled():
            self.greeting.exception()

    def _can_start(self, kind: Kind) -> bool:
        # An engine compiles one program at a time, and the others would keep its threads from running.
        return len(self._running) < self._threads and not (kind is Kind.COMPILE and self._compiling)

    def _start(self, work: Work) -> None:
        self._running[work.id] = work
        self._turns[work.owner] = None
        self._turns.move_to_end(work.owner)
        while len(self._turns) > _MAX_TURNS:
            self._turns.popitem(last=False)
        self._compiling |= work.kind is Kind.COMPILE
        self._write(work.kind, work.id, work.payload)
        work.payload = b""

    def _start_waiting(self) -> None:
        while len(self._running) < self._threads:
            work = self._next()
            if work is None:
                return
            del self._waiting[work.id]
            self._start(work)

    def _next(self) -> Work | None:
        """What is taken up next: nobody waits behind all that another owner has sent.

        That of the owner with the least under way; among such, of the one whose turn was longest ago.
        """
        under_way = Counter(work.owner for work in self._running.values())
        turns = {owner: number for number, owner in enumerate(self._turns, 1)}
        can_start = (work for work in self._waiting.values() if self._can_start(work.kind))
        return min(can_start, key=lambda work: (under_way[work.owner], turns.get(work.owner, 0)), default=None)

    def _write(self, kind: Kind, request_id: int, payload: bytes) -> None:
        if self._transport is not None:
            self._transport.writelines([pack_header(kind, request_id, len(payload)), payload])

    def _deliver(self, kind: Kind, request_id: int, payload: bytes) -> None:
        if kind is Kind.GREETING:
            if not self.greeting.done():
                self.greeting.set_result(link_pb2.Greeting.FromString(payload))
            return
        work = self._running.pop(request_id, None)
        if work is None:
            return
        work.end()
        if work.kind is Kind.COMPILE:
            self._compiling = False
        if self._waiting:
            self._start_waiting()
        if work.answer.done():
            return  # The caller gave up: its deadline passed, or it cancelled.
        if kind is Kind.FAULT:
            work.answer.set_exception(error_of(link_pb2.Fault.FromString(payload)))
        else:
            work.answer.set_result(payload)
