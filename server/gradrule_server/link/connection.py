"""The front end's side of the socket to an engine: sends requests and matches answers by id, on an asyncio loop.

`request_scheduler` decides when each request is sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from google.protobuf.message import DecodeError

from gradrule_server.link.arena import Arenas, ArenaTransfers
from gradrule_server.link.batching import Batch, Batches, BatchKey
from gradrule_server.link.framing import HEADER_BYTES, Kind, pack_header, unpack_header, unpack_place
from gradrule_server.link.messages import read_fault
from gradrule_server.link.request_scheduler import ConnectionLost, EngineRequest, RequestScheduler
from gradrule_server.link.shared_memory import ClientMemory, MemoryChannel, shared_memory_lost
from gradrule_server.link.v1 import link_pb2
from gradrule_server.recovery.crash_history import OutcomeRecorder

if TYPE_CHECKING:
    from gradrule_server.link.process import EngineProcess

_log = logging.getLogger(__name__)

# No valid message is longer: even its tensors alone would be less.
_MAX_FRAME_BYTES = 2**31
# Kinds of frames that are no answer for the caller.
_WITHOUT_SUFFIX = frozenset({Kind.FAULT, Kind.QUESTION})
# An engine asks the next question after it has read the answer to the last one, so hardly anything is unread then.
_MAX_UNREAD_BYTES = 1 << 20
# Up to this size, joining the parts of a frame is cheaper than a system call with several parts.
_MAX_JOINED_BYTES = 16 << 10


class MeasuredMemory:
    """The memory of an engine, as the engine has measured it.

    Attributes:
        used: What is in use, bytes; 0: not known yet.
        programs: What all programs take, bytes.
    """

    def __init__(self) -> None:
        self.used = self.programs = 0
        self._sizes: dict[str, int] = {}

    def add(self, key: str) -> None:
        """Adds a program that the engine is going to load. `key`: its key in the engine."""
        self._sizes[key] = 0

    def apply(self, notice: link_pb2.MemoryNotice) -> None:
        """Applies a notice of the engine. It may come after its program was unloaded, and then counts no program."""
        self.used = notice.used_bytes
        if notice.key in self._sizes:
            self.programs += notice.program_bytes - self._sizes[notice.key]
            self._sizes[notice.key] = notice.program_bytes

    def size(self, key: str) -> int:
        """Returns what a program takes, bytes; 0: not known. `key`: its key in the engine."""
        return self._sizes.get(key, 0)

    def forget(self, key: str) -> None:
        """Subtracts a program that the engine unloads. The engine reports later what it has freed."""
        size = self._sizes.pop(key, 0)
        self.programs -= size
        self.used = max(0, self.used - size)


class Connection(RequestScheduler, asyncio.Protocol):
    """Exchanges frames with an engine. Everything happens on the loop that made it.

    Args:
        threads: The number of threads of the engine.
        arenas: Hold large payloads, if there are any. They end with the connection.
        max_batch_size: Most examples that the engine may run together; 1: it runs requests one by one.
        max_batch_delay_s: How long a request may wait for others although a thread is free, seconds.
        memories: The socket that passes on the memory of clients.
    """

    def __init__(
        self,
        threads: int,
        arenas: Arenas | None = None,
        max_batch_size: int = 1,
        max_batch_delay_s: float = 0.0,
        memories: socket.socket | None = None,
    ) -> None:
        super().__init__(asyncio.get_running_loop(), threads, Batches(max_batch_size, max_batch_delay_s))
        self.memory = MeasuredMemory()
        self._transfers = None if arenas is None else ArenaTransfers(arenas, self.loop, partial(self.notify, Kind.TRIM))
        self.memories = None if memories is None else MemoryChannel(memories, partial(self.notify, Kind.DETACH))
        """Passes on memory of clients, if the system can share memory."""
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._closed = asyncio.Event()
        self.process: EngineProcess | None = None
        """The process at the other end, once it serves an engine."""
        self.lost: tuple[EngineRequest, ...] = ()
        """The requests that were running when the connection closed."""
        self.lost_batches: tuple[Batch, ...] = ()
        """The batches that were running when the connection closed, even if some of their requests were answered."""
        self.on_unbatched: Callable[[Iterable[str]], None] | None = None
        """Called with the keys of programs whose calls must not run together any more."""
        self.on_lost: Callable[[], None] | None = None
        """Called when the connection has closed, after all requests have failed."""
        self.last_heard = self.loop.time()
        """Loop time when the engine last sent anything."""
        self.greeting: asyncio.Future[link_pb2.Greeting] = self.loop.create_future()

    @property
    def lost_one(self) -> bool:
        """Whether a single request was running when the connection closed."""
        return len(self.lost) == 1 and all(batch is self.lost[0].batch for batch in self.lost_batches)

    @property
    def is_closed(self) -> bool:
        """Whether the connection has closed."""
        return self._closed.is_set()

    async def wait_closed(self) -> None:
        """Waits until the connection has closed."""
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
        """Sends a request as soon as a thread is free for it. A FAULT becomes the `GradruleError` of its answer.

        Args:
            kind: The kind of its frame.
            payload: Its payload, whole or in parts.
            recorder: Records what the request does to the engine.
            suffix: Appended to the payload of the answer.
            batch_key: Requests of one key may run together.
            shared_bytes: What the request uses of a client's memory, bytes.

        Raises:
            ConnectionLost: The connection has closed.
        """
        if self._transport is None or self._closed.is_set():
            raise ConnectionLost(started=False)
        parts = (payload,) if isinstance(payload, bytes) else payload
        request = EngineRequest(self, next(self._ids), kind, parts, recorder, suffix, batch_key)
        if shared_bytes:
            request.shared_bytes = shared_bytes
        if self._busy < self.threads and self._can_start(request):
            self._start(request)
        else:
            self._waiting[request.id] = request
            self._batches.add(request)
            self._set_hold_timer()
        return request

    def attach(self, memory: ClientMemory) -> None:
        """Passes the memory of a client on, before a request that uses it. Raises SHARED_MEMORY_LOST."""
        if self.memories is None or self.is_closed:
            raise shared_memory_lost()
        self.memories.attach(memory)

    def answer_question(self, request: EngineRequest, payload: bytes) -> None:
        """Answers the question that the engine asked while it works on a request."""
        request.has_open_question = False
        if not (self.is_closed or request.ended):
            self._write_one(Kind.ANSWER, request.id, payload)

    def notify(self, kind: Kind, payload: bytes) -> None:
        """Sends a frame that has no answer."""
        if not self.is_closed:
            self._write_one(kind, 0, payload)

    def flush(self) -> None:
        """Sends the frames that were collected in this turn of the loop."""
        if self._unsent and self._transport is not None:
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()

    def close(self) -> None:
        """Closes the socket, so that the engine ends."""
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
                # Usually exactly one whole frame arrives.
                self._buffer += data[self._read_frames(data) :]
        except (ValueError, DecodeError, OSError, MemoryError) as cause:
            # The start of the next frame is unknown now. All requests fail once the transport has closed.
            _log.error("what an engine sent cannot be read: %s; its connection is closed", cause or "no memory")
            self._buffer = bytearray()
            if self._transport is not None:
                self._transport.abort()

    def _read_frames(self, buffer: bytes | bytearray) -> int:
        """Handles all complete frames. Returns the position of the first incomplete one.

        Raises `ValueError` or `DecodeError` for malformed frames.
        """
        position, view = 0, memoryview(buffer)
        with view:
            while len(buffer) - position >= HEADER_BYTES:
                length, kind, request_id = unpack_header(buffer, position)
                if length > _MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {length} bytes")
                start = position + HEADER_BYTES
                end = start + length
                if len(buffer) < end:
                    break
                self._handle_frame(kind, request_id, view[start:end])
                position = end
        return position

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        self._unsent.clear()
        self.lost = tuple(self._running.values())
        self.lost_batches = tuple(self._sent_batches.values())
        for requests, started in ((self._running, True), (self._waiting, False)):
            for request in requests.values():
                request.end()
                if not request.answer.done():
                    request.answer.set_exception(ConnectionLost(started=started))
            requests.clear()
        if not self.greeting.done():
            self.greeting.set_exception(ConnectionLost(started=True))
        # Retrieve the exception: otherwise asyncio logs an error if no task waits for the greeting.
        if not self.greeting.cancelled():
            self.greeting.exception()
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        if self._transfers is not None:
            self._transfers.close()
        if self.memories is not None:
            self.memories.close()
        if self.on_lost is not None:
            self.on_lost()

    def _fail_batch(self, number: int, fault: memoryview) -> None:
        """Fails the unanswered requests of a batch that the engine could not accept."""
        batch = self._sent_batches[number]
        for request in batch.requests:
            if not request.ended:
                self._handle_frame(Kind.FAULT, request.id, fault)
        self._batches.apply(link_pb2.BatchNotice(key=batch.key.program))
        self._end_batch(number)

    def _write_one(self, kind: Kind, request_id: int, payload: bytes) -> None:
        """Sends a frame whose payload is one part."""
        self._write(kind, request_id, (payload,), len(payload))

    def _write(self, kind: Kind, request_id: int, payload: Sequence[bytes], size: int) -> None:
        """Sends a frame. size: of the payload, bytes."""
        if self._transport is None:
            return
        header = pack_header(kind, request_id, size)
        if size > _MAX_JOINED_BYTES:
            self.flush()
            self._transport.writelines([header, *payload])
        elif self._unsent:
            self._unsent += (header, *payload)
        elif self._busy > 1:
            # More frames are likely in this turn of the loop. One system call then sends all and wakes the engine once.
            self._unsent += (header, *payload)
            self.loop.call_soon(self.flush)
        else:
            self._transport.write(b"".join((header, *payload)))

    def _check_question(self, request: EngineRequest) -> None:
        """Raises `ValueError` if the engine asks without reading the answers, which would pile up here."""
        if request.has_open_question:
            raise ValueError("a question before the last one was answered")
        unread = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if unread > _MAX_UNREAD_BYTES:
            raise ValueError(f"a question while {unread} bytes of answers are not read")

    def _handle_frame(self, kind: Kind, request_id: int, view: memoryview) -> None:
        """Handles a frame. `view`: its payload, which is valid during this call only."""
        if kind is Kind.GREETING:
            if not self.greeting.done():
                self.greeting.set_result(link_pb2.Greeting.FromString(bytes(view)))
            return
        if kind is Kind.BATCH_NOTICE:
            notice = link_pb2.BatchNotice.FromString(bytes(view))
            self._batches.apply(notice)
            if notice.outcome == link_pb2.BatchNotice.OUTCOME_REFUSED and self.on_unbatched is not None:
                self.on_unbatched([notice.key])
            self._end_batch(request_id)
            return
        if kind is Kind.MEMORY_NOTICE:
            self.memory.apply(link_pb2.MemoryNotice.FromString(bytes(view)))
            return
        if kind is Kind.FAULT and request_id in self._sent_batches:
            self._fail_batch(request_id, view)
            return
        request = self._running.get(request_id)
        if request is None:
            return
        if kind is Kind.PLACED and self._transfers is not None:
            kind, chunk = unpack_place(view)
            payload = self._transfers.read(chunk, request.suffix, is_wanted=not request.answer.done())
            self._write_one(Kind.ACK, request_id, b"")
        elif kind in _WITHOUT_SUFFIX:
            payload = bytes(view)
        else:
            payload = b"".join((view, request.suffix))
        if kind is Kind.QUESTION:
            # An abandoned request gets no answer: its process is ended soon.
            if request.on_question is not None and not request.answer.done():
                self._check_question(request)
                request.has_open_question = True
                request.on_question(payload)
            return
        # A malformed fault raises here, before the request is removed: so the request fails with the connection.
        fault = read_fault(payload) if kind is Kind.FAULT and not request.answer.done() else None
        self._end_request(request, is_fault=kind is Kind.FAULT)
        if request.answer.done():
            return  # The caller gave up: its deadline passed, or it cancelled.
        if fault is not None:
            request.answer.set_exception(fault)
        else:
            request.answer.set_result(payload)
