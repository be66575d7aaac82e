"""Calls that need no credential, health and reflection: they read small messages, and none may crowd out another."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, cast

import grpc

from gradrule_server.front.calls import Context
from gradrule_server.front.connections import Connection, ConnectionWatch
from gradrule_server.front.cutting import cut

# Messages that are being read.
_MAX_READING = 256
_MAX_READING_OF_CONNECTION = 16
_REQUEST_S = 5.0


class Evicted(Exception):
    """A call that waited for its message had to make room for another."""


class _Waiting:
    """A message that is being read; `ended` is set where it must make room."""

    __slots__ = ("connection", "ended")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class SmallReads:
    """Reads messages of callers that are not known.

    All are taken: where too many wait for their message, the call ends that has waited longest on the same connection,
    or on the connection that has most, of the address that has most. A message that is there at once never waits.
    """

    def __init__(self, connections: ConnectionWatch, most: int = _MAX_READING) -> None:
        self._connections = connections
        self._most = most
        self._waiting: dict[_Waiting, None] = {}

    async def read(self, context: Context, seconds: float = _REQUEST_S) -> bytes | None:
        """The next message; None where there is none. `TimeoutError` where it is not all there in time; `Evicted`.

        A read that is given up goes on until the call ends: gRPC would lose what comes for one that was cancelled.
        """
        connection = self._connections.of(context.peer())
        self._make_room(connection)
        mine = _Waiting(connection)
        self._waiting[mine] = None
        connection.begin_read()
        reading: asyncio.Future[object] = asyncio.ensure_future(context.read())
        reading.add_done_callback(lambda read: connection.end_read(_message_of(read)))
        try:
            await asyncio.wait((reading, mine.ended), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._waiting[mine]
        if not reading.done():
            raise Evicted if mine.ended.done() else TimeoutError
        raw = reading.result()
        return None if raw is grpc.aio.EOF else cast(bytes, raw)

    def _make_room(self, connection: Connection) -> None:
        waiting = [each for each in self._waiting if not each.ended.done()]
        own = [each for each in waiting if each.connection is connection]
        if len(own) >= _MAX_READING_OF_CONNECTION:
            own[0].ended.set_result(None)
        elif len(waiting) >= self._most:
            ((address, _),) = Counter(each.connection.address for each in waiting).most_common(1)
            of_address = [each for each in waiting if each.connection.address == address]
            ((most, _),) = Counter(each.connection for each in of_address).most_common(1)
            next(each for each in of_address if each.connection is most).ended.set_result(None)


class OpenCalls:
    """Counts calls that stay open: so many of all clients, of an address and of a connection."""

    def __init__(self, most: int, of_address: int, of_connection: int) -> None:
        self._limits = most, of_address, of_connection
        self._open: Counter[object] = Counter()

    @contextmanager
    def taken(self, connection: Connection) -> Iterator[bool]:
        """Within it one more is open if there is room, which is told."""
        keys = (None, ("address", connection.address), connection)
        has_room = all(self._open[key] < limit for key, limit in zip(keys, self._limits, strict=True))
        if has_room:
            self._open.update(keys)
        try:
            yield has_room
        finally:
            if has_room:
                self._open.subtract(keys)
                for key in keys:
                    if not self._open[key]:
                        del self._open[key]


async def write(context: Context, data: bytes, stall_s: float) -> None:
    """Sends a message; closes the connection of a client that does not read it in time."""
    try:
        async with asyncio.timeout(stall_s):
            await context.write(data)
    except TimeoutError:
        cut(context.peer())
        # gRPC cancels this once it has noticed.
        await asyncio.sleep(stall_s)
        raise


async def refuse(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    """Ends a call with a status."""
    await context.abort(code, message)
    raise AssertionError("abort always raises")


def _message_of(reading: asyncio.Future[object]) -> object:
    """What was read, if anything."""
    return None if reading.cancelled() or reading.exception() is not None else reading.result()
