"""Frames between front end and engine: a fixed header, then one message of `link.v1`.

Header, little-endian: payload length in bytes (u64), kind (u32), request id (u64). An answer carries its request's id.
A large payload lies in its sender's arena (see `arena`), and a PLACED frame says where. A request's may be written over
once the request is answered, an answer's once the front end has said TAKEN.
"""

from __future__ import annotations

import enum
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

from gradrule_server.link.arena import LEAST_PLACED_BYTES, Chunk, Incoming, Outgoing, make_arena

LINK_VERSION = 3

_HEADER = struct.Struct("<QIQ")
HEADER_BYTES = _HEADER.size
# The kind that the frame would have, offset and length of its payload.
_PLACE = struct.Struct("<IQQ")


class Kind(enum.IntEnum):
    """What a frame holds; the protos say which message goes with which kind."""

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
    TAKEN = 16
    TRIM = 17


@dataclass(frozen=True, slots=True)
class Frame:
    """One message with its kind and request id."""

    kind: Kind
    request_id: int
    payload: bytes | memoryview
    """A view of the arena where it is large."""


def pack_header(kind: Kind, request_id: int, length: int) -> bytes:
    """The header of a frame whose payload has `length` bytes."""
    return _HEADER.pack(length, kind, request_id)


def unpack_header(header: bytes | bytearray | memoryview) -> tuple[int, Kind, int]:
    """Payload length, kind and request id."""
    length, kind, request_id = _HEADER.unpack(header)
    return length, Kind(kind), request_id


def pack_place(kind: Kind, chunk: Chunk) -> bytes:
    """Payload of a PLACED frame."""
    return _PLACE.pack(kind, *chunk)


def unpack_place(payload: bytes | memoryview) -> tuple[Kind, Chunk]:
    """What a PLACED frame says; `ValueError` where it is malformed."""
    if len(payload) != _PLACE.size:
        raise ValueError(f"a place takes {_PLACE.size} bytes, not {len(payload)}")
    kind, offset, length = _PLACE.unpack(payload)
    return Kind(kind), Chunk(offset, length)


@dataclass(frozen=True, slots=True)
class Arenas:
    """One side's ends of the two arenas of a link."""

    outgoing: Outgoing
    incoming: Incoming

    @classmethod
    def make(cls) -> tuple[Arenas, list[int]]:
        """New ones, with the descriptors for the other side: what it reads, what it writes. `OSError`."""
        outgoing = Outgoing(make_arena())
        try:
            incoming = Incoming(make_arena())
        except OSError:
            outgoing.close()
            raise
        return cls(outgoing, incoming), [outgoing.fd, incoming.fd]

    @classmethod
    def of(cls, outgoing: int, incoming: int) -> Arenas:
        """From descriptors, which it takes over."""
        return cls(Outgoing(outgoing), Incoming(incoming))

    def close(self) -> None:
        """Neither is used any more."""
        self.outgoing.close()
        self.incoming.close()


class FrameSocket:
    """Blocking frames over a connected stream socket; any number of threads may read and write."""

    def __init__(self, sock: socket.socket, arenas: Arenas | None = None) -> None:
        self._sock = sock
        self._arenas = arenas
        self._placed: dict[int, Chunk] = {}
        self._read_lock = threading.Lock()
        self._write_lock = threading.Lock()

    def receive(self) -> Frame | None:
        """The next frame; None once the other end has closed."""
        with self._read_lock:
            header = self._read(HEADER_BYTES)
            if header is None:
                return None
            length, kind, request_id = unpack_header(header)
            payload = self._read(length)
        if payload is None:
            return None
        if kind is Kind.PLACED and self._arenas is not None:
            kind, chunk = unpack_place(bytes(payload))
            return Frame(kind, request_id, self._arenas.incoming.view(chunk))
        return Frame(kind, request_id, bytes(payload))

    def send(self, kind: Kind, request_id: int, payload: bytes) -> None:
        """Writes one frame; frames of several threads do not mix."""
        if self._arenas is not None and len(payload) >= LEAST_PLACED_BYTES:
            chunk = self._arenas.outgoing.place([payload])
            if chunk is not None:
                self._placed[request_id] = chunk
                kind, payload = Kind.PLACED, pack_place(kind, chunk)
        with self._write_lock:
            self._sock.sendall(pack_header(kind, request_id, len(payload)))
            self._sock.sendall(payload)

    @property
    def placed_bytes(self) -> int:
        """What lies in the arena and was not taken yet."""
        return 0 if self._arenas is None else self._arenas.outgoing.used_bytes

    def answer_housekeeping(self, frame: Frame) -> bool:
        """Does what a frame asks for that is about the link itself; False where it is about something else."""
        if frame.kind is Kind.PING:
            self.send(Kind.PONG, frame.request_id, b"")
        elif frame.kind is Kind.TAKEN and self._arenas is not None:
            chunk = self._placed.pop(frame.request_id, None)
            if chunk is not None:
                self._arenas.outgoing.release(chunk)
        elif frame.kind is Kind.TRIM and self._arenas is not None:
            self._arenas.outgoing.trim()
        else:
            return False
        return True

    def _read(self, size: int) -> bytearray | None:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            count = self._sock.recv_into(view)
            if count == 0:
                return None
            view = view[count:]
        return buffer


def serve_frames(frames: FrameSocket, handle: Callable[[Frame], None], threads: int) -> None:
    """Reads frames on `threads` threads, and one more, until the other end closes.

    The thread that reads a frame also handles it while another takes over reading, so no frame changes threads. The
    other end has no more than `threads` requests under way, so one thread is always left that answers a PING.
    """

    def work() -> None:
        while (frame := frames.receive()) is not None:
            if not frames.answer_housekeeping(frame):
                handle(frame)

    workers = [threading.Thread(target=work, name=f"engine-{index}", daemon=True) for index in range(threads + 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
