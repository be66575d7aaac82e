"""The front end's end of the socket to an engine: requests out, answers matched by id, on an asyncio loop.

What waits, waits here: an engine is never sent more than its threads take up at once. So whatever was sent runs, and
whatever was not can be dropped without the engine's knowing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from google.protobuf.message import DecodeError

from gradrule_server.link.arena import LEAST_PLACED_BYTES, Chunk
from gradrule_server.link.batching import Batch, Batches, BatchKey, JitState, pack_batch
from gradrule_server.link.engine_request import ConnectionLost, EngineRequest
from gradrule_server.link.framing import (
    HEADER_BYTES,
    Arenas,
    Kind,
    pack_header,
    pack_place,
    unpack_header,
    unpack_place,
)
from gradrule_server.link.messages import read_fault
from gradrule_server.link.shared_memory import ClientMemory, MemoryChannel, shared_memory_lost
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.crash_history import OutcomeRecorder

if TYPE_CHECKING:
    from gradrule_server.link.process import EngineProcess

_log = logging.getLogger(__name__)

# No message is longer; an engine sends none of which even the tensors are.
_MOST_FRAME_BYTES = 2**31
# Not what a caller gets.
_WITHOUT_SUFFIX = frozenset({Kind.FAULT, Kind.ASK})
# Arenas keep their memory for the next large message, which is twice as fast then; but not for long.
_TRIM_AFTER_S = 2.0
# A process asks once it has read the answer to its last question, so next to nothing waits to be written then.
_MOST_UNREAD_BYTES = 1 << 20
# Copying parts into one is cheaper than a system call with several, up to here.
_MOST_JOINED_BYTES = 16 << 10


class Connection(asyncio.Protocol):
    """Frames over a stream to an engine of so many threads. Everything happens on the loop that made it.

    `arenas`: where large payloads lie, if there are any; they end with the connection. `memories`: socket by which
    memory of clients is passed on. `max_batch_size`: examples that
    the engine may run together. `max_batch_delay_s`: how long a request may wait for that although a thread is free.
    """

    def __init__(
        self,
        threads: int,
        arenas: Arenas | None = None,
        max_batch_size: int = 1,
        max_batch_delay_s: float = 0.0,
        memories: socket.socket | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        """The loop that everything happens on."""
        self._threads = threads
        self._batches = Batches(max_batch_size, max_batch_delay_s)
        self.jit = JitState()
        """What the engine does with XLA."""
        self._busy = 0
        self._runs: dict[int, Batch] = {}
        self._holding: asyncio.TimerHandle | None = None
        self._arenas = arenas
        self._arenas_used_at = 0.0
        self.memories = None if memories is None else MemoryChannel(memories, partial(self.tell, Kind.DETACH))
        """Passes on memory of clients, where the system can share any."""
        self._trimming: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._ids = itertools.count(1)
        self._waiting: dict[int, EngineRequest] = {}
        self._running: dict[int, EngineRequest] = {}
        self._compiling = False
        self.compiling_since = 0.0
        """Loop time at which the last program began to be compiled."""
        self._closed = asyncio.Event()
        self.process: EngineProcess | None = None
        """The process at the other end, once it serves: whoever has a request of its can learn how it ended."""
        self.lost: tuple[EngineRequest, ...] = ()
        """Requests that ran when the other end went."""
        self.lost_batches: tuple[Batch, ...] = ()
        """Requests that were sent together and that the engine was not done with then, though it may have answered."""
        self.on_lost: Callable[[], None] | None = None
        """Called once the other end is gone, after all answers were told so."""
        self.last_heard = self.loop.time()
        """Loop time at which the engine last sent anything."""
        self.greeting: asyncio.Future[link_pb2.Greeting] = self.loop.create_future()

    @property
    def present(self) -> frozenset[Hashable | None]:
        """The suspects of the requests that ran when the other end went; None for requests without an recorder."""
        works = [*self.lost, *(batch.works[0] for batch in self.lost_batches)]
        return frozenset(None if work.recorder is None else work.recorder.workload for work in works)

    @property
    def lost_one(self) -> bool:
        """Whether a single request ran when the other end went."""
        return len(self.lost) == 1 and all(batch is self.lost[0].batch for batch in self.lost_batches)

    @property
    def threads(self) -> int:
        """How many requests the engine takes up at a time."""
        return self._threads

    @property
    def has_room(self) -> bool:
        """Whether one more request would not have to wait."""
        return len(self._running) + len(self._waiting) < self._threads

    @property
    def running(self) -> int:
        """Requests that the engine has been sent and not answered."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a thread."""
        return len(self._waiting)

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being compiled."""
        return self._compiling

    @property
    def is_closed(self) -> bool:
        """Whether the other end is gone."""
        return self._closed.is_set()

    @property
    def has_given_up(self) -> bool:
        """Whether a request runs that nobody waits for any more."""
        return any(work.is_given_up for work in self._running.values())

    async def wait_closed(self) -> None:
        """Waits until the other end is gone."""
        await self._closed.wait()

    def submit(
        self,
        kind: Kind,
        payload: bytes | Sequence[bytes],
        recorder: OutcomeRecorder | None = None,
        suffix: bytes = b"",
        batch_key: BatchKey | None = None,
        shared_bytes: int = 0,
    ) -> EngineRequest:
        """Sends a request, as soon as a thread is free for it; a FAULT becomes its answer's `GradruleError`.

        `payload`: whole, or in parts. `suffix`: appended to the answer. `batch_key`: which others it may run with.
        `shared_bytes`: what the request uses of a client's memory, bytes.
        """
        if self._transport is None or self._closed.is_set():
            raise ConnectionLost(started=False)
        parts = (payload,) if isinstance(payload, bytes) else payload
        work = EngineRequest(self, next(self._ids), kind, parts, recorder, suffix, batch_key)
        if shared_bytes:
            work.shared_bytes = shared_bytes
        if self._busy < self._threads and self._can_start(work):
            self._start(work)
        else:
            self._waiting[work.id] = work
            self._batches.add(work)
            self._start_held_in_time()
        return work

    def attach(self, memory: ClientMemory) -> None:
        """Passes memory of a client on, before a request that uses it. SHARED_MEMORY_LOST where that fails."""
        if self.memories is None or self.is_closed:
            raise shared_memory_lost()
        self.memories.attach(memory)

    def is_waiting(self, work: EngineRequest) -> bool:
        """Whether a request has not been sent yet."""
        return work.id in self._waiting

    def drop(self, work: EngineRequest) -> bool:
        """Takes back a request that still waits; False where it has been sent."""
        if self._waiting.pop(work.id, None) is None:
            return False
        self._batches.remove(work)
        work.answer.cancel()
        work.end()
        return True

    def answer_question(self, work: EngineRequest, payload: bytes) -> None:
        """Sends the answer to what the other end asked while it works on a request."""
        work.is_asking = False
        if not (self.is_closed or work.ended):
            self._write_one(Kind.TOLD, work.id, payload)

    def tell(self, kind: Kind, payload: bytes) -> None:
        """Sends a frame that has no answer."""
        if not self.is_closed:
            self._write_one(kind, 0, payload)

    def flush(self) -> None:
        """Sends the frames that were held back in this turn of the loop."""
        if self._unsent and self._transport is not None:
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()

    def close(self) -> None:
        """Closes the socket, upon which the engine ends."""
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.last_heard = self.loop.time()
        try:
            if self._buffer:
                self._buffer += data
                del self._buffer[: self._read_frames(self._buffer)]
            else:
                # Most often what comes is one whole frame.
                self._buffer += data[self._read_frames(data) :]
        except (ValueError, DecodeError, OSError, MemoryError) as cause:
            # Nobody can tell any more where a frame begins. All that wait are told once the transport has closed.
            _log.error("what an engine sent cannot be read: %s; its connection is closed", cause or "no memory")
            self._buffer = bytearray()
            if self._transport is not None:
                self._transport.abort()

    def _read_frames(self, buffer: bytes | bytearray) -> int:
        """Delivers what has arrived as a whole; returns where the first incomplete frame begins.

        `ValueError`, `DecodeError` where it is none of the link's.
        """
        position, view = 0, memoryview(buffer)
        with view:
            while len(buffer) - position >= HEADER_BYTES:
                length, kind, request_id = unpack_header(buffer, position)
                if length > _MOST_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes")
                start = position + HEADER_BYTES
                end = start + length
                if len(buffer) < end:
                    break
                self._deliver(kind, request_id, view[start:end])
                position = end
        return position

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        self._unsent.clear()
        self.lost = tuple(self._running.values())
        self.lost_batches = tuple(self._runs.values())
        for works, started in ((self._running, True), (self._waiting, False)):
            for work in works.values():
                work.end()
                if not work.answer.done():
                    work.answer.set_exception(ConnectionLost(started=started))
            works.clear()
        if not self.greeting.done():
            self.greeting.set_exception(ConnectionLost(started=True))
        # A greeting that nobody waits for must not be reported as an exception that was never retrieved.
        if not self.greeting.cancelled():
            self.greeting.exception()
        for timer in (self._trimming, self._holding):
            if timer is not None:
                timer.cancel()
        if self._arenas is not None:
            self._arenas.close()
        if self.memories is not None:
            self.memories.close()
        if self.on_lost is not None:
            self.on_lost()

    def _can_start(self, work: EngineRequest) -> bool:
        # An engine compiles one program at a time, and the others would keep its threads from running.
        if self._busy >= self._threads or (work.kind is Kind.COMPILE and self._compiling):
            return False
        held_until = self._batches.held_until(work)
        return not held_until or self.loop.time() >= held_until

    def _start_held_in_time(self) -> None:
        """Sees to it that requests which wait although a thread is free do not wait longer than they may."""
        if self._holding is not None or self._busy >= self._threads:
            return
        due = min(filter(None, map(self._batches.held_until, self._waiting.values())), default=None)
        if due is not None:
            self._holding = self.loop.call_at(due, self._start_held)

    def _start_held(self) -> None:
        self._holding = None
        self._start_waiting()

    def _start(self, work: EngineRequest) -> None:
        batches = self._batches
        others = batches.companions(work) if self._waiting else ()
        self._busy += 1
        batches.started(work, 1 + len(others))
        if others:
            self._start_together([work, *others])
            return
        self._running[work.id] = work
        work.started_at = self.loop.time()
        if work.kind is Kind.COMPILE:
            self._compiling = True
            self.compiling_since = work.started_at
        size = sum(map(len, work.payload))
        work.chunk = self._placed(work.payload, size)
        if work.chunk is None:
            self._write(work.kind, work.id, work.payload, size)
        else:
            self._write_one(Kind.PLACED, work.id, pack_place(work.kind, work.chunk))
        work.payload = ()

    def _start_together(self, works: list[EngineRequest]) -> None:
        number, now = next(self._ids), self.loop.time()
        batch = self._runs[number] = Batch(works)
        parts = pack_batch(self._batches.most, [(work.id, work.payload) for work in works])
        for work in works:
            if self._waiting.pop(work.id, None) is not None:
                self._batches.remove(work)
            self._running[work.id] = work
            work.started_at, work.batch, work.payload = now, batch, ()
        size = sum(map(len, parts))
        batch.chunk = self._placed(parts, size)
        if batch.chunk is None:
            self._write(Kind.RUN_BATCH, number, parts, size)
        else:
            self._write_one(Kind.PLACED, number, pack_place(Kind.RUN_BATCH, batch.chunk))

    def _end_run(self, number: int) -> None:
        """The engine is done with requests that were sent together, and with the thread that it took for them."""
        batch = self._runs.pop(number, None)
        if batch is None:
            return
        if batch.chunk is not None and self._arenas is not None:
            self._arenas.outgoing.release(batch.chunk)
        self._busy -= 1
        self._batches.ended(batch.works[0], len(batch.works))
        self._start_waiting()

    def _fail_run(self, number: int, fault: memoryview) -> None:
        """The engine could not take up requests that were sent together, or not all: the rest get its fault."""
        batch = self._runs[number]
        for work in batch.works:
            if not work.ended:
                self._deliver(Kind.FAULT, work.id, fault)
        self._batches.learn(link_pb2.BatchNotice(key=batch.key.program))
        self._end_run(number)

    def _start_waiting(self) -> None:
        while self._busy < self._threads:
            work = next((work for work in self._waiting.values() if self._can_start(work)), None)
            if work is None:
                break
            del self._waiting[work.id]
            self._batches.remove(work)
            self._start(work)
        self._start_held_in_time()

    def _write_one(self, kind: Kind, request_id: int, payload: bytes) -> None:
        """Sends a frame whose payload is in one part."""
        self._write(kind, request_id, (payload,), len(payload))

    def _write(self, kind: Kind, request_id: int, payload: Sequence[bytes], size: int) -> None:
        """Sends a frame. size: of the payload."""
        if self._transport is None:
            return
        header = pack_header(kind, request_id, size)
        if size > _MOST_JOINED_BYTES:
            self.flush()
            self._transport.writelines([header, *payload])
        elif self._unsent:
            self._unsent += (header, *payload)
        elif self._busy > 1:
            # More is likely to follow in this turn of the loop. Then one system call sends all of it, and the engine is
            # woken up once.
            self._unsent += (header, *payload)
            self.loop.call_soon(self.flush)
        else:
            self._transport.write(b"".join((header, *payload)))

    def _placed(self, payload: Sequence[bytes], size: int) -> Chunk | None:
        """Puts a payload into an arena, if it is large; None where it goes through the socket. size: of the payload."""
        if size < LEAST_PLACED_BYTES or self._arenas is None:
            return None
        self._arenas_were_used()
        return self._arenas.outgoing.place(payload)

    def _check_question(self, work: EngineRequest) -> None:
        """Raises `ValueError` where a process asks without waiting for answers, which would pile up here."""
        if work.is_asking:
            raise ValueError("a question before the last one was answered")
        unread = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unread > _MOST_UNREAD_BYTES:
            raise ValueError(f"a question while {unread} bytes of answers are not read")

    def _taken(self, arenas: Arenas, request_id: int, chunk: Chunk, suffix: bytes, *, wanted: bool) -> bytes:
        """The payload that the engine has placed, if anybody still wants it. `ValueError` where it lies nowhere."""
        payload = arenas.incoming.read(chunk, suffix) if wanted else b""
        self._write_one(Kind.TAKEN, request_id, b"")
        self._arenas_were_used()
        return payload

    def _arenas_were_used(self) -> None:
        self._arenas_used_at = self.loop.time()
        if self._trimming is None:
            self._trimming = self.loop.call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        loop = self.loop
        due = self._arenas_used_at + _TRIM_AFTER_S
        if loop.time() < due:
            self._trimming = loop.call_at(due, self._trim)
            return
        self._trimming = None
        if self._arenas is not None and not self.is_closed:
            loop.run_in_executor(None, self._arenas.outgoing.trim)
            self._write_one(Kind.TRIM, 0, b"")

    def _deliver(self, kind: Kind, request_id: int, view: memoryview) -> None:
        """Hands an answer to who waits for it. `view`: of the frame's payload, which is gone afterwards."""
        if kind is Kind.GREETING:
            if not self.greeting.done():
                self.greeting.set_result(link_pb2.Greeting.FromString(bytes(view)))
            return
        if kind is Kind.BATCH_NOTICE:
            self._batches.learn(link_pb2.BatchNotice.FromString(bytes(view)))
            self._end_run(request_id)
            return
        if kind is Kind.JIT_NOTICE:
            self.jit.apply(link_pb2.JitNotice.FromString(bytes(view)))
            return
        if kind is Kind.FAULT and request_id in self._runs:
            self._fail_run(request_id, view)
            return
        work = self._running.get(request_id)
        if work is None:
            return
        if kind is Kind.PLACED and self._arenas is not None:
            kind, chunk = unpack_place(view)
            payload = self._taken(self._arenas, request_id, chunk, work.suffix, wanted=not work.answer.done())
        elif kind in _WITHOUT_SUFFIX:
            payload = bytes(view)
        else:
            payload = b"".join((view, work.suffix))
        if kind is Kind.ASK:
            # Nobody answers for a request that is given up: its process is ended soon.
            if work.on_ask is not None and not work.answer.done():
                self._check_question(work)
                work.is_asking = True
                work.on_ask(payload)
            return
        if work.chunk is not None and self._arenas is not None:
            self._arenas.outgoing.release(work.chunk)
        # What makes no sense raises here, where the work still ends with the connection.
        fault = read_fault(payload) if kind is Kind.FAULT and not work.answer.done() else None
        del self._running[request_id]
        work.end()
        if work.batch is None:
            self._busy -= 1
            self._batches.ended(work, 1)
        if work.recorder is not None and work.started_at is not None and kind is not Kind.FAULT:
            work.recorder.record_completion(self.loop.time() - work.started_at)
        if work.kind is Kind.COMPILE:
            self._compiling = False
        if self._waiting and work.batch is None:
            self._start_waiting()
        if work.answer.done():
            return  # The caller gave up: its deadline passed, or it cancelled.
        if fault is not None:
            work.answer.set_exception(fault)
        else:
            work.answer.set_result(payload)
