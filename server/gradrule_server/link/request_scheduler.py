"""Requests to an engine: decides when each is sent, and which are sent together.

Requests wait here and not in the engine: the engine is never sent more requests than it has threads. So every request
that was sent runs, and a request that was not sent can be dropped without telling the engine.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradrule_server.link.arena import MIN_PLACED_BYTES, ArenaTransfers, Chunk
from gradrule_server.link.batching import Batch, Batches, BatchKey, pack_batch
from gradrule_server.link.framing import Kind, pack_place
from gradrule_server.recovery.crash_history import OutcomeRecorder

if TYPE_CHECKING:
    from gradrule_server.link.connection import Connection


class ConnectionLost(Exception):
    """The connection to the engine closed before the engine answered. `started`: the request had been sent."""

    def __init__(self, *, started: bool) -> None:
        super().__init__()
        self.started = started


class EngineRequest:
    """A request that waits for a thread of an engine or runs there. `answer` becomes the payload of its answer.

    Args:
        connection: To the engine.
        request_id: The id of its frames.
        kind: The kind of its frame.
        payload: Its payload in parts; empty once it was sent.
        recorder: Records what the request does to its engine.
        suffix: Bytes to append to the payload of the answer while that is copied anyway.
        batch_key: Requests of one key may run together; None: the request runs alone.
    """

    # Most requests keep these defaults. As class attributes they cost nothing per request.
    batch: Batch | None = None
    """The requests that it was sent together with."""
    started_at: float | None = None
    """Loop time when it was sent; None: it waits."""
    chunk: Chunk | None = None
    """Where its payload lies in the arena, if it is large and was sent."""
    on_question: Callable[[bytes], None] | None = None
    """Called with each question that the engine asks while it works on the request; see
    `Connection.answer_question`. Raises `DecodeError` or `ValueError` for a malformed question."""
    has_open_question = False
    """Whether the engine waits for the answer to a question."""
    is_given_up = False
    """Whether it was sent, but no caller waits for it any more."""
    shared_bytes = 0
    """What it uses of a client's shared memory, bytes."""
    ended = False
    """Whether the engine is done with it, or will never see it. (`answer` may be cancelled long before.)"""
    _timer: asyncio.TimerHandle | None = None

    def __init__(
        self,
        connection: Connection,
        request_id: int,
        kind: Kind,
        payload: Sequence[bytes],
        recorder: OutcomeRecorder | None,
        suffix: bytes = b"",
        batch_key: BatchKey | None = None,
    ) -> None:
        self.connection = connection
        self.id = request_id
        self.kind = kind
        self.payload = payload
        self.recorder = recorder
        self.suffix = suffix
        self.batch_key = batch_key
        self.submitted_at = connection.loop.time()
        """Loop time."""
        self.answer: asyncio.Future[bytes] = connection.loop.create_future()

    @property
    def size(self) -> int:
        """Bytes of the payload, and of shared memory that the request and its answer use."""
        return sum(map(len, self.payload)) + self.shared_bytes

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        """Sets the timer that fires if the request does not end in time, and cancels the one before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer

    def end(self) -> None:
        """Marks the request as ended."""
        self.ended = True
        if self._timer is not None:
            self.set_timer(None)


class RequestScheduler(abc.ABC):
    """Holds the requests to one engine that wait or run. `Connection` sends them.

    Args:
        loop: The loop on which everything happens.
        threads: How many requests the engine runs at a time.
        batches: Decides which requests run together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int, batches: Batches) -> None:
        self.loop = loop
        self.threads = threads
        self._batches = batches
        # Threads that are taken by requests or batches.
        self._busy = 0
        self._ids = itertools.count(1)
        self._waiting: dict[int, EngineRequest] = {}
        self._running: dict[int, EngineRequest] = {}
        self._sent_batches: dict[int, Batch] = {}
        self._hold_timer: asyncio.TimerHandle | None = None
        self._transfers: ArenaTransfers | None = None
        self._compiling = False
        self.compiling_since = 0.0
        """Loop time when the last compilation started."""
        self.compiled_at = 0.0
        """Loop time when the last compilation ended."""
        self.on_idle: Callable[[], None] | None = None
        """Called when the last request has ended."""

    @abc.abstractmethod
    def _write(self, kind: Kind, request_id: int, payload: Sequence[bytes], size: int) -> None:
        """Sends a frame. size: of the payload, bytes."""

    @abc.abstractmethod
    def _write_one(self, kind: Kind, request_id: int, payload: bytes) -> None:
        """Sends a frame whose payload is one part."""

    @property
    def has_room(self) -> bool:
        """Whether one more request would start at once."""
        return len(self._running) + len(self._waiting) < self.threads

    @property
    def running(self) -> int:
        """The number of requests that were sent and not answered."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a thread."""
        return len(self._waiting)

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being compiled."""
        return self._compiling

    @property
    def has_given_up(self) -> bool:
        """Whether a request runs for which no caller waits any more, and that ends the engine therefore."""
        return any(item.is_given_up and item.kind is not Kind.COMPILE for item in self._running.values())

    @property
    def given_up_compilations(self) -> int:
        """The number of compilations that run although no caller waits for them."""
        return sum(item.is_given_up and item.kind is Kind.COMPILE for item in self._running.values())

    def is_waiting(self, request: EngineRequest) -> bool:
        """Returns whether a request has not been sent yet."""
        return request.id in self._waiting

    def drop(self, request: EngineRequest) -> bool:
        """Drops a request that still waits. Returns False if it was sent already."""
        if self._waiting.pop(request.id, None) is None:
            return False
        self._batches.remove(request)
        request.answer.cancel()
        request.end()
        self._report_idle()
        return True

    def fail_waiting(self) -> None:
        """Fails the requests that were not sent yet, with `ConnectionLost`: they can run elsewhere."""
        for request in list(self._waiting.values()):
            del self._waiting[request.id]
            self._batches.remove(request)
            request.end()
            if not request.answer.done():
                request.answer.set_exception(ConnectionLost(started=False))
        self._report_idle()

    def _can_start(self, request: EngineRequest) -> bool:
        # An engine compiles one program at a time; other compilations would only block its threads.
        if self._busy >= self.threads or (request.kind is Kind.COMPILE and self._compiling):
            return False
        if request.batch_key is None:
            return True
        held_until = self._batches.held_until(request)
        return not held_until or self.loop.time() >= held_until

    def _set_hold_timer(self) -> None:
        """Starts held requests in time: those that wait for others although a thread is free."""
        if self._hold_timer is not None or self._busy >= self.threads:
            return
        due = min(filter(None, map(self._batches.held_until, self._waiting.values())), default=None)
        if due is not None:
            self._hold_timer = self.loop.call_at(due, self._start_held)

    def _start_held(self) -> None:
        self._hold_timer = None
        self._start_waiting()

    def _start(self, request: EngineRequest) -> None:
        """Sends a request, together with others that wait and may run with it."""
        batches = self._batches
        others = batches.companions(request) if self._waiting else ()
        self._busy += 1
        if request.batch_key is not None:
            batches.started(request, 1 + len(others))
        if others:
            self._start_together([request, *others])
            return
        self._running[request.id] = request
        request.started_at = self.loop.time()
        if request.kind is Kind.COMPILE:
            self._compiling = True
            self.compiling_since = request.started_at
        size = sum(map(len, request.payload))
        if size >= MIN_PLACED_BYTES and self._transfers is not None:
            request.chunk = self._transfers.place(request.payload)
        if request.chunk is None:
            self._write(request.kind, request.id, request.payload, size)
        else:
            self._write_one(Kind.PLACED, request.id, pack_place(request.kind, request.chunk))
        request.payload = ()

    def _start_together(self, requests: list[EngineRequest]) -> None:
        """Sends requests in one frame."""
        number, now = next(self._ids), self.loop.time()
        batch = self._sent_batches[number] = Batch(requests)
        parts = pack_batch(self._batches.most, [(request.id, request.payload) for request in requests])
        for request in requests:
            if self._waiting.pop(request.id, None) is not None:
                self._batches.remove(request)
            self._running[request.id] = request
            request.started_at, request.batch, request.payload = now, batch, ()
        size = sum(map(len, parts))
        if size >= MIN_PLACED_BYTES and self._transfers is not None:
            batch.chunk = self._transfers.place(parts)
        if batch.chunk is None:
            self._write(Kind.RUN_BATCH, number, parts, size)
        else:
            self._write_one(Kind.PLACED, number, pack_place(Kind.RUN_BATCH, batch.chunk))

    def _end_batch(self, number: int) -> None:
        """Frees the thread of a batch that the engine is done with."""
        batch = self._sent_batches.pop(number, None)
        if batch is None:
            return
        if batch.chunk is not None and self._transfers is not None:
            self._transfers.release(batch.chunk)
        self._busy -= 1
        self._batches.ended(batch.requests[0], len(batch.requests))
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._busy < self.threads:
            request = next((request for request in self._waiting.values() if self._can_start(request)), None)
            if request is None:
                break
            del self._waiting[request.id]
            self._batches.remove(request)
            self._start(request)
        self._set_hold_timer()

    def _end_request(self, request: EngineRequest, *, is_fault: bool) -> None:
        """Frees what an answered request held, and starts the next one."""
        if request.chunk is not None and self._transfers is not None:
            self._transfers.release(request.chunk)
        del self._running[request.id]
        request.end()
        if request.batch is None:
            self._busy -= 1
            if request.batch_key is not None:
                self._batches.ended(request, 1)
        if request.recorder is not None and request.started_at is not None and not is_fault:
            request.recorder.record_completion(self.loop.time() - request.started_at)
        if request.kind is Kind.COMPILE:
            self._compiling = False
            self.compiled_at = self.loop.time()
        if self._waiting and request.batch is None:
            self._start_waiting()
        self._report_idle()

    def _report_idle(self) -> None:
        if self.on_idle is not None and not self._running and not self._waiting:
            self.on_idle()
