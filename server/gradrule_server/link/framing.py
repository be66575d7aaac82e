"""Frames between front end and engine: a fixed header, then one message of `link.v1`.

Header, little-endian: payload length in bytes (u64), kind (u32), request id (u64). An answer has the id of its request.
A large payload lies in its sender's arena (see `arena`), and a PLACED frame says where. The payload of a request may be
overwritten once the request is answered, that of an answer once the front end has sent ACK.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gradrule_server.link.arena import MIN_PLACED_BYTES, Arenas, Chunk

_log = logging.getLogger(__name__)

LINK_VERSION = 6

_HEADER = struct.Struct("<QIQ")
HEADER_BYTES = _HEADER.size
# The kind of the frame that it replaces, and the offset and length of its payload.
_PLACE = struct.Struct("<IQQ")
_PIECE_BYTES = 64 * 1024

_READABLE, _NOTHING = select.EPOLLIN | select.EPOLLONESHOT, select.EPOLLONESHOT

Buffer: TypeAlias = bytes | memoryview
"""Bytes; a view is of single bytes, one after the other."""


class Kind(enum.IntEnum):
    """The kind of a frame. link.proto says which message each kind holds."""

    GREETING = 1
    COMPILE = 2
    COMPILED = 3
    RUN = 4
    RAN = 5
    UNLOAD = 6
    FAULT = 7
    FORWARD = 8
    PULL_BACK = 9
    RELEASE = 10
    SESSION = 11
    END_SESSION = 12
    PING = 13
    PONG = 14
    PLACED = 15
    ACK = 16
    TRIM = 17
    PREPARE = 18
    PREPARED = 19
    QUESTION = 20
    ANSWER = 21
    RUN_BATCH = 22
    BATCH_NOTICE = 23
    DETACH = 24
    MEMORY_NOTICE = 31


# A dict is faster than the enum's own lookup.
_KINDS = {int(kind): kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Frame:
    """One message with its kind and request id."""

    kind: Kind
    request_id: int
    payload: bytes | memoryview
    """A view if it is large: of the arena if it lies there."""


class NoRoom(MemoryError):
    """There is no memory for the payload of a frame. The payload was skipped, so the next frame can be received."""

    def __init__(self, request_id: int) -> None:
        super().__init__()
        self.request_id = request_id


def pack_header(kind: Kind, request_id: int, length: int) -> bytes:
    """Returns the header of a frame. length: of its payload, bytes."""
    return _HEADER.pack(length, kind, request_id)


def unpack_header(data: bytes | bytearray | memoryview, position: int = 0) -> tuple[int, Kind, int]:
    """Returns payload length, kind and request id from the header at a position."""
    length, kind, request_id = _HEADER.unpack_from(data, position)
    return length, _KINDS.get(kind) or Kind(kind), request_id


def pack_place(kind: Kind, chunk: Chunk) -> bytes:
    """Returns the payload of a PLACED frame."""
    return _PLACE.pack(kind, *chunk)


def unpack_place(payload: bytes | memoryview) -> tuple[Kind, Chunk]:
    """Reads the payload of a PLACED frame. Raises `ValueError` if it is malformed."""
    if len(payload) != _PLACE.size:
        raise ValueError(f"a place takes {_PLACE.size} bytes, not {len(payload)}")
    kind, offset, length = _PLACE.unpack(payload)
    return Kind(kind), Chunk(offset, length)


class FrameSocket:
    """Sends and receives frames over a stream socket, blocking. Thread-safe."""

    def __init__(self, sock: socket.socket, arenas: Arenas | None = None) -> None:
        self._sock = sock
        self._arenas = arenas
        self._placed: dict[int, Chunk] = {}
        self._read_lock = threading.Lock()
        self._write_lock = threading.Lock()
        # Allocated now, so that frames can be skipped when there is no memory left.
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._piece = memoryview(bytearray(_PIECE_BYTES))

    def receive(self) -> Frame | None:
        """Waits for the next frame; None if the other end has closed. Raises `NoRoom` if there is no memory for it."""
        with self._read_lock:
            if not self._fill(self._header):
                return None
            length, kind, request_id = unpack_header(self._header)
            room = _room(length)
            if not (self._skip(length) if room is None else self._fill(room)):
                return None
        try:
            if room is None:
                raise MemoryError
            if kind is Kind.PLACED and self._arenas is not None:
                kind, chunk = unpack_place(room)
                return Frame(kind, request_id, self._arenas.incoming.view(chunk))
            return Frame(kind, request_id, room.toreadonly() if length >= MIN_PLACED_BYTES else bytes(room))
        except MemoryError:
            raise NoRoom(request_id) from None

    def send(self, kind: Kind, request_id: int, payload: Buffer | Sequence[Buffer]) -> None:
        """Writes one frame, whose payload may come in parts; frames of several threads do not mix."""
        parts: Sequence[Buffer] = [payload] if isinstance(payload, (bytes, memoryview)) else payload
        length = sum(map(len, parts))
        if length >= MIN_PLACED_BYTES and self._arenas is not None:
            chunk = self._arenas.outgoing.place(parts)
            if chunk is not None:
                self._placed[request_id] = chunk
                parts = [pack_place(kind, chunk)]
                kind, length = Kind.PLACED, len(parts[0])
        header = pack_header(kind, request_id, length)
        if length < _PIECE_BYTES:
            # One system call costs less than copying a few bytes saves.
            header, parts = b"".join([header, *parts]), ()
        with self._write_lock:
            self._sock.sendall(header)
            for part in parts:
                self._sock.sendall(part)

    def answer_housekeeping(self, frame: Frame) -> bool:
        """Handles frames that concern the link itself. Returns False for all others."""
        if frame.kind is Kind.PING:
            self.send(Kind.PONG, frame.request_id, b"")
        elif frame.kind is Kind.ACK and self._arenas is not None:
            chunk = self._placed.pop(frame.request_id, None)
            if chunk is not None:
                self._arenas.outgoing.release(chunk)
        elif frame.kind is Kind.TRIM and self._arenas is not None:
            try:
                self._arenas.outgoing.trim()
            except OSError as cause:
                # The memory may be returned at the next TRIM.
                _log.warning("an arena keeps its memory: %s", cause)
        else:
            return False
        return True

    def fileno(self) -> int:
        """Returns the descriptor of the socket."""
        return self._sock.fileno()

    def close(self) -> None:
        """Shuts the socket down. Threads that wait for a frame get None."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _fill(self, view: memoryview) -> bool:
        """Fills the view. Returns False if the other end has closed before."""
        while view:
            count = self._sock.recv_into(view)
            if count == 0:
                return False
            view = view[count:]
        return True

    def _skip(self, size: int) -> bool:
        while size:
            piece = min(size, _PIECE_BYTES)
            if not self._fill(self._piece[:piece]):
                return False
            size -= piece
        return True


MainCalls: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
"""Functions that the main thread calls; None makes it return."""


class _ReadingTurn:
    """Says which of several threads reads a socket, and wakes one of the others when something comes meanwhile.

    The thread that read a frame stays the reader while it handles the frame, unless the next frame comes before it is
    done: then a waiting thread becomes the reader. So while calls come one at a time, one thread does everything, and
    no other one is woken.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # None: any thread may become the reader.
        self._reader: object | None = None
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(fd, _READABLE)
        self._ended = False

    def take(self, thread: object) -> bool:
        """Waits until this thread is the reader; returns False once reading has ended."""
        while True:
            # The kernel wakes a single thread, and no further one before the descriptor is armed again.
            self._epoll.poll()
            with self._lock:
                if self._ended:
                    self._epoll.modify(self._fd, _READABLE)
                    return False
                if self._reader is None:
                    self._reader = thread
                    return True

    def offer(self) -> None:
        """Lets a waiting thread become the reader as soon as something can be read. For the reader alone."""
        self._reader = None
        self._epoll.modify(self._fd, _READABLE)

    def take_back(self, thread: object) -> bool:
        """Returns whether this thread, which offered its turn, is the reader again."""
        with self._lock:
            if self._reader is not None:
                return False
            self._reader = thread
        self._epoll.modify(self._fd, _NOTHING)
        return True

    def end(self) -> None:
        """Wakes all threads for the last time. The socket has closed, so it stays readable."""
        with self._lock, contextlib.suppress(OSError):
            self._ended = True
            self._epoll.modify(self._fd, _READABLE)


def serve_frames(
    frames: FrameSocket,
    handle: Callable[[Frame], None],
    refuse: Callable[[int], None],
    threads: int,
    calls: MainCalls | None = None,
) -> None:
    """Reads frames on `threads` threads, and one more, until the other end closes.

    The thread that reads a frame also handles it, while another thread reads the next frames. The other end sends at
    most `threads` requests at a time, so one thread is always left to answer a PING. An exception of `handle` or
    `refuse` ends all reading, and is raised here. Requests that still run at the end are not waited for: they may never
    end.

    Args:
        frames: Where frames come from.
        handle: Handles a frame.
        refuse: Answers the request of this id, for which there is no memory.
        threads: Most requests at a time.
        calls: Functions that this thread calls meanwhile.
    """
    failures: list[BaseException] = []
    calls = calls or queue.SimpleQueue()

    turn = _ReadingTurn(frames.fileno())

    def work() -> None:
        thread = object()
        try:
            while turn.take(thread):
                while _serve_next(frames, handle, refuse, turn.offer):
                    if not turn.take_back(thread):
                        break
                else:
                    return
        except ConnectionError:
            # The other end closed in the middle of something.
            frames.close()
        except BaseException as failure:
            # The start of the next frame may be unknown now, so no thread may read on.
            failures.append(failure)
            frames.close()
        finally:
            turn.end()
            calls.put(None)

    for index in range(threads + 1):
        threading.Thread(target=work, name=f"engine-{index}", daemon=True).start()
    while (call := calls.get()) is not None:
        call()
    if failures:
        raise failures[0]


def _serve_next(
    frames: FrameSocket, handle: Callable[[Frame], None], refuse: Callable[[int], None], received: Callable[[], None]
) -> bool:
    """Reads and handles one frame. Returns False if the other end has closed.

    A separate function, so that no local variable keeps a frame alive while the thread waits for the next one.
    `received`: called when the frame was read, before it is handled.
    """
    try:
        frame = frames.receive()
    except NoRoom as fault:
        refused = fault.request_id
        received()
    else:
        if frame is None:
            return False
        received()
        try:
            if not frames.answer_housekeeping(frame):
                handle(frame)
            return True
        except MemoryError:
            refused = frame.request_id
    # Refuse after the `except` block: until then the exception keeps all objects of the failed call alive.
    refuse(refused)
    return True


def _room(size: int) -> memoryview | None:
    try:
        return memoryview(bytearray(size))
    except MemoryError:
        return None
