"""Frames between front end and engine: a fixed header, then one message of `link.v1`.

Header, little-endian: payload length in bytes (u64), kind (u32), request id (u64). An answer carries its request's id.
"""

from __future__ import annotations

import enum
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

LINK_VERSION = 2

_HEADER = struct.Struct("<QIQ")
HEADER_BYTES = _HEADER.size


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


@dataclass(frozen=True, slots=True)
class Frame:
    """One message with its kind and request id."""

    kind: Kind
    request_id: int
    payload: bytes


def pack_header(kind: Kind, request_id: int, length: int) -> bytes:
    """The header of a frame whose payload has `length` bytes."""
    return _HEADER.pack(length, kind, request_id)


def unpack_header(header: bytes | bytearray | memoryview) -> tuple[int, Kind, int]:
    """Payload length, kind and request id."""
    length, kind, request_id = _HEADER.unpack(header)
    return length, Kind(kind), request_id


class FrameSocket:
    """Blocking frames over a connected stream socket; any number of threads may read and write."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
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
        return None if payload is None else Frame(kind, request_id, bytes(payload))

    def send(self, kind: Kind, request_id: int, payload: bytes) -> None:
        """Writes one frame; frames of several threads do not mix."""
        with self._write_lock:
            self._sock.sendall(pack_header(kind, request_id, len(payload)))
            self._sock.sendall(payload)

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
            if frame.kind is Kind.PING:
                frames.send(Kind.PONG, frame.request_id, b"")
            else:
                handle(frame)

    workers = [threading.Thread(target=work, name=f"engine-{index}", daemon=True) for index in range(threads + 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
