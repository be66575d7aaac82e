"""Clients that read slowly or not at all."""

from __future__ import annotations

import asyncio

import pytest

from gradrule_server.front.unread_answers import WatchedWriter

MIB = 1 << 20


class Client:
    """Reads `bytes_per_s`; whether it was found not to read."""

    def __init__(self, bytes_per_s: float, stall_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.is_stalled = False
        self.writer = WatchedWriter(self._read, stall_s, self._stalled)

    async def _read(self, data: bytes) -> None:
        await asyncio.sleep(len(data) / self.bytes_per_s)

    def _stalled(self) -> None:
        self.is_stalled = True


@pytest.mark.parametrize(("size", "stalls"), [(MIB, False), (1000, True)])
async def test_large_message_gets_more_time(size: int, stalls: bool) -> None:
    client = Client(bytes_per_s=size / 0.5, stall_s=0.1)
    await client.writer.write(bytes(size))
    assert client.is_stalled is stalls
    client.writer.close()


async def test_small_message_after_a_large_one_gets_no_more_time() -> None:
    client = Client(bytes_per_s=1e9, stall_s=0.1)
    await client.writer.write(bytes(10 * MIB))
    client.bytes_per_s = 1000.0
    await client.writer.write(bytes(1000))
    assert client.is_stalled
    client.writer.close()
