"""Limits calls that need no credential: how many messages they read, and how many of them are open, at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, cast

import grpc

from gradrule_server.front.calls import Context
from gradrule_server.front.connections import Connection, ConnectionWatch
from gradrule_server.front.sockets import close_connection

# Messages that may be read at a time.
_MAX_READING = 256
_MAX_READING_PER_CONNECTION = 16
_REQUEST_S = 5.0


class Evicted(Exception):
    """A call that waited for its message was ended to make room for another call."""


class _Waiting:
    """A message that is being read; `ended` is set to make room for another one."""

    __slots__ = ("connection", "ended")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class SmallReads:
    """Reads messages of unauthenticated callers.

    Every call is accepted. Where too many wait for their message, the longest-waiting call ends: on the same
    connection, or on the connection with the most waiting calls of the address with the most waiting calls.
    """

    def __init__(self, connections: ConnectionWatch, most: int = _MAX_READING) -> None:
        self._connections = connections
        self._most = most
        self._waiting: dict[_Waiting, None] = {}

    async def read(self, context: Context, seconds: float = _REQUEST_S) -> bytes | None:
        """Returns the next message, or None at the end of the call. Raises `TimeoutError` and `Evicted`.

        An abandoned read continues until the call ends, since gRPC would lose the message of a cancelled read.
        """
        connection = self._connections.get(context.peer())
        self._make_room(connection)
        mine = _Waiting(connection)
        self._waiting[mine] = None
        connection.start_read()
        reading: asyncio.Future[object] = asyncio.ensure_future(context.read())
        reading.add_done_callback(lambda read: connection.finish_read(_message_of(read)))
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
        if len(own) >= _MAX_READING_PER_CONNECTION:
            own[0].ended.set_result(None)
        elif len(waiting) >= self._most:
            ((address, _),) = Counter(each.connection.address for each in waiting).most_common(1)
            of_address = [each for each in waiting if each.connection.address == address]
            ((most, _),) = Counter(each.connection for each in of_address).most_common(1)
            next(each for each in of_address if each.connection is most).ended.set_result(None)


class OpenCalls:
    """Limits the number of calls that are open at a time, of all clients, of one address and of one connection."""

    def __init__(self, most: int, of_address: int, of_connection: int) -> None:
        self._limits = most, of_address, of_connection
        self._open: Counter[object] = Counter()

    @contextmanager
    def open(self, connection: Connection) -> Iterator[bool]:
        """Context in which a call is open; yields False, and counts nothing, where there are too many."""
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
        close_connection(context.peer())
        # gRPC cancels this task once it has noticed that the connection is closed.
        await asyncio.sleep(stall_s)
        raise


async def refuse(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    """Ends a call with a status."""
    await context.abort(code, message)
    raise AssertionError("abort always raises")


def _message_of(reading: asyncio.Future[object]) -> object:
    """Returns the message that was read; None where there is none."""
    return None if reading.cancelled() or reading.exception() is not None else reading.result()
