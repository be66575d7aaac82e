"""An engine without a process: what it is sent is noted, and it answers what the test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from gradrule_server.link.connection import Connection
from gradrule_server.link.engine import Engine
from gradrule_server.link.framing import HEADER_BYTES, Kind, pack_header, unpack_header


class Transport(asyncio.Transport):
    """Notes the frames that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[Kind, int, bytes]] = []

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        frame = b"".join(list_of_data)
        _, kind, request_id = unpack_header(frame[:HEADER_BYTES])
        self.sent.append((kind, request_id, frame[HEADER_BYTES:]))

    def payloads(self) -> list[bytes]:
        return [payload for _, _, payload in self.sent]


def connected(threads: int) -> tuple[Connection, Transport]:
    """A connection to an engine of so many threads."""
    connection, transport = Connection(threads), Transport()
    connection.connection_made(transport)
    return connection, transport


class FakeProcess:
    """A process that dies when it is told to."""

    pid = 4711

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.is_killed = False

    def kill(self) -> None:
        if not self.is_killed:
            self.is_killed = True
            self.connection.connection_lost(None)

    def how_it_ended(self) -> str:
        return "signal 9"


class FakeEngine(Engine):
    """The front end's engine, with a `FakeProcess`."""

    def __init__(self, threads: int = 4) -> None:
        super().__init__("cpu", threads)
        self.process: FakeProcess
        self.transport: Transport
        self.start_another(threads)

    def start_another(self, threads: int = 4) -> None:
        """A new process, as if the supervisor had started it."""
        connection, self.transport = connected(threads)
        self.process = FakeProcess(connection)
        self._engine = self.process  # type: ignore[assignment]  # it has all that is asked of a process here
        self.generation += 1
        self._up.set()

    def sent(self, kind: Kind) -> list[bytes]:
        """Payloads of the frames of a kind, in order."""
        return [payload for found, _, payload in self.transport.sent if found is kind]

    async def next(self, kind: Kind, count: int = 1) -> bytes:
        """The payload of the frame of a kind that is the `count`-th, as soon as it is there."""
        async with asyncio.timeout(10):
            while len(self.sent(kind)) < count:
                await asyncio.sleep(0.001)
        return self.sent(kind)[count - 1]

    def answer(self, sent: bytes, kind: Kind, payload: bytes = b"") -> None:
        """Answers the request that was sent with these bytes."""
        request_id = next(number for _, number, found in self.transport.sent if found == sent)
        self.process.connection.data_received(pack_header(kind, request_id, len(payload)) + payload)
