"""Writes and reads HTTP/2 frames by hand, for clients that send what no library sends."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0x0, 0x1, 0x3, 0x4, 0x6, 0x8, 0x9
PRIORITY, PUSH_PROMISE, GOAWAY = 0x2, 0x5, 0x7
END_STREAM, END_HEADERS, ACK, PADDED, PRIORITIZED = 0x1, 0x4, 0x1, 0x8, 0x20
CANCEL = 0x8
INITIAL_WINDOW_SIZE = 0x4

Header = tuple[bytes, bytes]


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Makes one frame."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def headers(path: str | bytes, more: Sequence[Header] = (), /, **replaced: bytes | None) -> bytes:
    """Makes the header block of a call, without indexing and compression.

    replaced: other values of the headers that each call has (`method`, `authority`, `content_type`, …); None: left out.
    """
    plain: dict[str, bytes | None] = {
        "method": b"POST",
        "scheme": b"http",
        "path": path.encode() if isinstance(path, str) else path,
        "authority": b"localhost",
        "content_type": b"application/grpc",
        "te": b"trailers",
    }
    kept = [(_NAMES[name], value) for name, value in (plain | replaced).items() if value is not None]
    return b"".join(literal(name, value) for name, value in (*kept, *more))


_NAMES: Mapping[str, bytes] = {
    "method": b":method",
    "scheme": b":scheme",
    "path": b":path",
    "authority": b":authority",
    "content_type": b"content-type",
    "te": b"te",
}


def call(block: bytes, body: bytes | None = None, stream: int = 1) -> bytes:
    """Makes the frames of a call with this header block. body: the payload of its DATA frame; None: none is sent."""
    if body is None:
        return frame(HEADERS, END_HEADERS | END_STREAM, stream, block)
    return frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, END_STREAM, stream, body)


def literal(name: bytes, value: bytes) -> bytes:
    """Makes a header field without indexing, with a new name."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    """Encodes an integer with a prefix of seven bits."""
    if size < 127:
        return bytes((size,))
    found = bytearray((127,))
    size -= 127
    while size >= 128:
        found.append(size & 127 | 128)
        size >>= 7
    found.append(size)
    return bytes(found)


def message(data: bytes) -> bytes:
    """Makes a gRPC message as in DATA frames."""
    return b"\x00" + struct.pack(">I", len(data)) + data


def settings(*pairs: tuple[int, int]) -> bytes:
    """Makes a SETTINGS frame."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", key, value) for key, value in pairs))


@dataclass
class Answer:
    """Holds the server's answer to one call.

    status: of gRPC, None if there was none. resets: error codes of RST_STREAM and GOAWAY frames.
    """

    http_status: int | None = None
    status: int | None = None
    message: str = ""
    resets: list[int] = field(default_factory=list)
    has_closed: bool = False

    def add_headers(self, found: Sequence[tuple[bytes, bytes]]) -> None:
        """Adds a block of headers or trailers."""
        for name, value in found:
            if name == b":status":
                self.http_status = int(value)
            elif name == b"grpc-status":
                self.status = int(value)
            elif name == b"grpc-message":
                self.message = value.decode("latin-1")

    @property
    def is_refused(self) -> bool:
        """Returns whether the server refused by a status, a reset or by closing the connection."""
        return self.status not in (None, 0) or bool(self.resets) or self.has_closed


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, int, bytes]:
    """Reads the next frame: type, flags, stream, payload. Raises `EOFError` when the connection has ended."""
    head = await reader.readexactly(9)
    payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
    return head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF, payload


class ConnectionLog:
    """Collects what a server sends on one connection: an answer per stream, and which streams have ended.

    faults: invalid HTTP/2.
    """

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}
        self.ended: set[int] = set()
        self.faults: list[str] = []
        self._decoder = hpack.Decoder()
        self._changed = asyncio.Event()

    def answer_on(self, stream: int) -> Answer:
        """Returns the answer on a stream so far."""
        return self.answers.setdefault(stream, Answer())

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Reads until the server closes the connection."""
        try:
            while True:
                self._take(*await read_frame(reader))
                self._changed.set()
        except (EOFError, OSError):
            for answer in self.answers.values():
                answer.has_closed = True
        self._changed.set()

    async def has_ended(self, count: int) -> None:
        """Waits until that many streams have ended."""
        while len(self.ended) < count:
            self._changed.clear()
            await self._changed.wait()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == HEADERS:
            try:
                # Header blocks of all streams change the decoder's table.
                self.answer_on(stream).add_headers(self._decoder.decode(payload, raw=True))
            except (hpack.HPACKError, ValueError) as cause:
                self.faults.append(f"headers of stream {stream} cannot be read: {cause!r}")
        elif kind == GOAWAY:
            for answer in self.answers.values():
                answer.resets.append(int.from_bytes(payload[4:8], "big"))
        elif kind == RST_STREAM:
            self.answer_on(stream).resets.append(int.from_bytes(payload, "big"))
            self.ended.add(stream)
        if kind in (HEADERS, DATA) and flags & END_STREAM:
            self.ended.add(stream)
            if self.answer_on(stream).status is None:
                self.faults.append(f"stream {stream} ended without a status")


async def read_answer(reader: asyncio.StreamReader, stream: int = 1, seconds: float = 20.0) -> Answer:
    """Reads a stream until it or the connection ends. Raises `TimeoutError`."""
    heard = ConnectionLog()
    hearing = asyncio.ensure_future(heard.listen(reader))
    answer = heard.answer_on(stream)
    ended = asyncio.ensure_future(heard.has_ended(1))
    try:
        done, _ = await asyncio.wait({hearing, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise TimeoutError
    finally:
        hearing.cancel()
        ended.cancel()
        # Only one task may read at a time.
        await asyncio.gather(hearing, ended, return_exceptions=True)
    return answer


async def answer(target: str, block: bytes, body: bytes | None = b"\x00\x00\x00\x00\x00") -> Answer:
    """Sends one call on its own connection; an empty message unless `body` says otherwise."""
    async with connected(target) as (reader, writer):
        writer.write(PREFACE + settings() + call(block, body))
        return await read_answer(reader)


@contextlib.asynccontextmanager
async def connected(target: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens a TCP connection without sending anything; closes it at the end."""
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def flood(writer: asyncio.StreamWriter, data: bytes, times: int) -> int:
    """Writes the same bytes repeatedly until the other side closes; returns the number of writes."""
    for number in range(times):
        try:
            writer.write(data)
            await writer.drain()
        except OSError:
            return number
    return times


async def read_until_closed(reader: asyncio.StreamReader, seconds: float) -> bool:
    """Reads everything; returns whether the other side closed within the time."""
    try:
        async with asyncio.timeout(seconds):
            while await reader.read(65_536):
                pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
