"""HTTP/2 frames by hand, for clients that do with them what no library does."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0x0, 0x1, 0x3, 0x4, 0x6, 0x8, 0x9
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
CANCEL = 0x8
INITIAL_WINDOW_SIZE = 0x4

Header = tuple[bytes, bytes]


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def headers(path: str, more: Sequence[Header] = ()) -> bytes:
    """The header block of a call, nothing indexed, nothing compressed."""
    plain = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode()),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]
    return b"".join(literal(name, value) for name, value in (*plain, *more))


def literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing, with a new name."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    """An integer with a prefix of seven bits."""
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
    """A message of gRPC's, as it lies in DATA frames."""
    return b"\x00" + struct.pack(">I", len(data)) + data


def settings(*pairs: tuple[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", key, value) for key, value in pairs))


@contextlib.asynccontextmanager
async def connected(target: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A TCP connection on which nothing has been sent; closed at the end."""
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def flood(writer: asyncio.StreamWriter, data: bytes, times: int) -> int:
    """Writes the same bytes again and again until the other side closes; how many times it was."""
    for number in range(times):
        try:
            writer.write(data)
            await writer.drain()
        except OSError:
            return number
    return times


async def drained(reader: asyncio.StreamReader, seconds: float) -> bool:
    """Reads whatever comes; whether the other side closed within the time."""
    try:
        async with asyncio.timeout(seconds):
            while await reader.read(65_536):
                pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
