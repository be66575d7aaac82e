"""Sends messages as fast as flow control allows, without finishing them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence

from tests.battery import wire

_CHUNK = 16_000
_DEFAULT_WINDOW = 65_535


class Windows:
    """Tracks how much the server lets a connection send, from its frames."""

    def __init__(self) -> None:
        self._connection = _DEFAULT_WINDOW
        self._initial = _DEFAULT_WINDOW
        self._streams: dict[int, int] = defaultdict(int)
        self._changed = asyncio.Event()

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads frames until the connection ends; answers PINGs."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                kind, flags, stream, payload = await wire.read_frame(reader)
                if kind == wire.SETTINGS and not flags & wire.ACK:
                    for start in range(0, len(payload), 6):
                        if int.from_bytes(payload[start : start + 2], "big") == wire.INITIAL_WINDOW_SIZE:
                            self._initial = int.from_bytes(payload[start + 2 : start + 6], "big")
                    writer.write(wire.frame(wire.SETTINGS, wire.ACK))
                elif kind == wire.PING and not flags & wire.ACK:
                    writer.write(wire.frame(wire.PING, wire.ACK, payload=payload))
                elif kind == wire.WINDOW_UPDATE:
                    more = int.from_bytes(payload, "big")
                    if stream:
                        self._streams[stream] += more
                    else:
                        self._connection += more
                self._changed.set()
        # Wake up waiting tasks: no change will follow.
        self._changed.set()

    def take(self, stream: int, most: int) -> int:
        """Returns how many bytes may be sent on a stream now, and reserves them."""
        size = max(0, min(most, self._connection, self._initial + self._streams[stream]))
        self._connection -= size
        self._streams[stream] -= size
        return size

    def expect_change(self) -> None:
        """Lets `change` wait for the server's next frame from now on."""
        self._changed.clear()

    async def change(self) -> None:
        """Waits until the server has sent a frame or ended the connection since `expect_change`."""
        await self._changed.wait()


async def send_unfinished(
    target: str, path: str, *, streams: int, size: int, hold_s: float, more: Sequence[wire.Header] = ()
) -> tuple[int, bool]:
    """Begins a message of so many bytes on each of some streams of one connection, sends all but its last byte, and
    waits. Returns the bytes that were sent, and whether the server closed the connection before the time was over.
    """
    sent, has_closed = 0, False
    windows = Windows()
    async with wire.connected(target) as (reader, writer):
        writer.write(wire.PREFACE + wire.settings())
        following = asyncio.ensure_future(windows.follow(reader, writer))
        left = {}
        for stream in range(1, 2 * streams, 2):
            writer.write(wire.frame(wire.HEADERS, wire.END_HEADERS, stream, wire.headers(path, more)))
            writer.write(wire.frame(wire.DATA, 0, stream, wire.message(bytes(size))[:5]))
            windows.take(stream, 5)
            left[stream] = size - 1
        try:
            async with asyncio.timeout(hold_s):
                while not following.done():
                    before = sent
                    # Before reading the windows, so that no frame in between is missed.
                    windows.expect_change()
                    for stream, unsent in left.items():
                        part = windows.take(stream, min(unsent, _CHUNK))
                        if part:
                            writer.write(wire.frame(wire.DATA, 0, stream, bytes(part)))
                            left[stream] = unsent - part
                            sent += part
                    await writer.drain()
                    if sent == before:
                        await windows.change()
            has_closed = True
        except OSError:
            has_closed = True
        except TimeoutError:
            pass
        following.cancel()
    return sent, has_closed
