"""Closes connections of clients that hold too many of them, or too many bytes of unfinished messages.

gRPC reads a whole message of any size before Python gets it, and never closes an idle connection. So the server checks
its own sockets: how many connections each address has, which of them are not authenticated, and how many bytes have
arrived that are not part of a finished message yet.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import grpc

from gradrule_server.concurrency import start_logged_task
from gradrule_server.front.sockets import Address, Peer, Socket, Sockets, parse_peer
from gradrule_server.link.operating_system import HeapTrimmer
from gradrule_server.operations.log_writing import RateLimiter

if TYPE_CHECKING:
    from gradrule_server.front.calls import Context

_log = logging.getLogger(__name__)

# Seconds between two checks; the shorter time applies while connections that are not authenticated are busy.
_CHECK_EVERY_S = 1.0
_CHECK_BUSY_EVERY_S = 0.2
_MANY_UNAUTHENTICATED = 64
# Above this share of all connections, each address may have only 1/8 of the usual unauthenticated connections.
_CROWDED = 0.75
_CROWDED_DIVISOR = 8
_IPV6_NETWORK_BITS = 64

# Limit of unfinished bytes on unauthenticated connections: requests for health and reflection are a few bytes.
_UNAUTHENTICATED_BYTES = 1 << 20
# gRPC may read this much ahead.
_READ_AHEAD_BYTES = 64 << 10
# What arrives besides messages: frames, TLS records, headers, acknowledgements.
_OVERHEAD = 1.02
_OVERHEAD_PER_MESSAGE = 16 << 10
_OVERHEAD_PER_SENT_BYTE = 0.01
_OVERHEAD_PER_CHECK = 1 << 10

_LINES_PER_SECOND = 1.0
_LINES_AT_ONCE = 20
# Rate at which a client must read an answer and send a message.
_MIN_BYTES_PER_S = 1 << 20


def read_timeout(stall_s: float, size: int) -> float:
    """Returns the seconds that a client has to read or to send `size` bytes."""
    return stall_s + size / _MIN_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of what clients may hold.

    Attributes:
        connections: of all clients.
        unauthenticated: unauthenticated connections of one address.
        unauthenticated_s: seconds that an unauthenticated connection may be without a call.
        connection_bytes: bytes of unfinished messages of one connection.
        address_bytes: bytes of unfinished messages of one address.
        stall_s: seconds that a message has to make progress, see `read_timeout`.
    """

    connections: int = 4096
    unauthenticated: int = 128
    unauthenticated_s: float = 60.0
    connection_bytes: int = 2 << 30
    address_bytes: int = 2 << 30
    stall_s: float = 60.0


class Connection:
    """State of one connection.

    Attributes:
        address: of its client; the network of an IPv6 address.
        reads: number of messages that may arrive now.
        unfinished: estimate of the bytes that have arrived and are not part of a finished message yet.
    """

    __slots__ = (
        "_delivered",
        "_delivered_before",
        "_messages",
        "_received_before",
        "_sent_before",
        "address",
        "calls",
        "delivered_at_stall_start",
        "is_authenticated",
        "reads",
        "socket",
        "stalled_since",
        "unfinished",
        "used_at",
    )

    def __init__(self, now: float, address: Address | None = None) -> None:
        self.address = None if address is None else _to_network(address)
        self.is_authenticated = False
        self.used_at = now
        self.calls = 0
        self.reads = 0
        self.unfinished = 0
        self.stalled_since: float | None = None
        self.delivered_at_stall_start = 0
        self.socket: Socket | None = None
        self._delivered = self._delivered_before = 0
        self._messages = 0
        self._received_before = self._sent_before = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Context in which a call that needs no credential is open."""
        self.calls += 1
        self.used_at = time.monotonic()
        try:
            yield
        finally:
            self.calls -= 1
            self.used_at = time.monotonic()

    def finish_read(self, message: object) -> None:
        """Notes that one of `reads` has ended, with a message or with the call."""
        self.reads -= 1
        self._delivered += len(message) if isinstance(message, bytes) else 0
        self._messages += 1
        if not self.reads:
            self.unfinished = 0

    async def read(self, context: Context) -> bytes | None:
        """Returns the next message of a call and counts it; None once the client has sent its last.

        If the caller is cancelled, gRPC reads until the call ends: grpc.aio leaks some hundred bytes for each cancelled
        read.
        """
        reading: asyncio.Future[object] = asyncio.ensure_future(context.read())
        raw: object = grpc.aio.EOF
        self.reads += 1
        try:
            raw = await asyncio.shield(reading)
        except asyncio.CancelledError:
            reading.add_done_callback(retrieve)
            raise
        finally:
            self.finish_read(raw)
        return None if raw is grpc.aio.EOF else cast(bytes, raw)

    def update(self, found: Socket, now: float) -> None:
        """Updates the estimate of unfinished bytes from what the socket has sent and received so far."""
        delivered = self._delivered - self._delivered_before
        overhead = self._messages * _OVERHEAD_PER_MESSAGE + _OVERHEAD_PER_CHECK
        overhead += int((found.sent - self._sent_before) * _OVERHEAD_PER_SENT_BYTE)
        grown = found.received - self._received_before - int(delivered * _OVERHEAD) - overhead
        self.unfinished = max(0, self.unfinished + grown) if self.reads else 0
        self.socket = found
        self._received_before, self._sent_before = found.received, found.sent
        self._delivered_before, self._messages = self._delivered, 0
        if self.unfinished <= _READ_AHEAD_BYTES:
            self.stalled_since = None
        elif self.stalled_since is None or self._delivered - self.delivered_at_stall_start >= self.unfinished:
            self.stalled_since, self.delivered_at_stall_start = now, self._delivered


def retrieve(reading: asyncio.Future[Any]) -> None:
    """Retrieves the result of an abandoned read, since asyncio would log its exception."""
    if not reading.cancelled():
        reading.exception()


@dataclass
class _Closing:
    """Connections to close, by address and reason."""

    by_reason: dict[tuple[Address, str], list[Connection]] = field(default_factory=lambda: defaultdict(list))
    ids: set[int] = field(default_factory=set)

    def add(self, address: Address, reason: str, connection: Connection) -> None:
        if id(connection) not in self.ids:
            self.ids.add(id(connection))
            self.by_reason[address, reason].append(connection)


class ConnectionWatch:
    """Checks all connections at intervals, and closes those that exceed the limits."""

    def __init__(
        self,
        limits: ConnectionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        check_every_s: float = _CHECK_EVERY_S,
    ) -> None:
        self._limits = limits or ConnectionLimits()
        self._clock = clock
        self._check_every_s = check_every_s
        self._all: dict[Peer, Connection] = {}
        self._by_name: dict[str, Connection] = {}
        self._heap = HeapTrimmer()
        self._lines = RateLimiter(_LINES_PER_SECOND, _LINES_AT_ONCE)
        self._watching: asyncio.Task[None] | None = None

    def get(self, peer: str) -> Connection:
        """Returns the connection of a call. `peer`: as gRPC gives it."""
        found = self._by_name.get(peer)
        if found is None:
            parsed = parse_peer(peer)
            if parsed is None:
                return Connection(self._clock())
            found = self._all.get(parsed)
            if found is None:
                found = self._all[parsed] = Connection(self._clock(), parsed[0])
            self._by_name[peer] = found
        return found

    def start(self, port: int) -> None:
        """Starts to check the connections to a port of this process."""
        self._watching = start_logged_task(
            self._watch(Sockets(port)), "connections", _log.error, "connections are not limited any more"
        )

    async def stop(self) -> None:
        """Stops the checks."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self, sockets: Sockets) -> None:
        loop = asyncio.get_running_loop()
        # A thread of its own, since other work may occupy all of the event loop's threads.
        with ThreadPoolExecutor(1, "connections") as thread:
            while True:
                await asyncio.sleep(
                    min(_CHECK_BUSY_EVERY_S, self._check_every_s) if self._is_busy() else self._check_every_s
                )
                started = self._clock()
                try:
                    found = await loop.run_in_executor(thread, sockets.find)
                    self.check(found, started)
                    await loop.run_in_executor(thread, self._heap.trim_if_due, self._clock())
                except OSError as cause:
                    # Both read files of /proc, which fails where no descriptor is left.
                    _log.warning("connections cannot be checked now: %s", cause)

    def _is_busy(self) -> bool:
        """Returns whether clients may take many connections or much memory before the next check."""
        unauthenticated = [each for each in self._all.values() if not each.is_authenticated]
        return (
            len(unauthenticated) > _MANY_UNAUTHENTICATED
            or any(each.reads for each in unauthenticated)
            or any(each.unfinished > _UNAUTHENTICATED_BYTES for each in self._all.values())
        )

    def check(self, found: dict[Peer, Socket], started: float) -> None:
        """Closes connections that exceed the limits.

        Args:
            found: all open sockets.
            started: when the search for them started, seconds of the clock.
        """
        now = self._clock()
        self._forget_closed(found, started)
        for peer, each in found.items():
            known = self._all.get(peer)
            if known is None or (known.socket is not None and known.socket.inode != each.inode):
                known = self._replace(peer, known)
            known.update(each, now)
        closing = _Closing()
        by_address: dict[Address, list[Connection]] = defaultdict(list)
        for connection in self._all.values():
            if connection.socket is not None and connection.address is not None:
                by_address[connection.address].append(connection)
        for address, connections in by_address.items():
            self._limit_unauthenticated(address, connections, now, closing)
            self._limit_unfinished(address, connections, now, closing)
        self._close(closing)

    def _forget_closed(self, found: Iterable[Peer], started: float) -> None:
        for peer in self._all.keys() - set(found):
            connection = self._all[peer]
            if connection.socket is not None or connection.used_at < started - self._check_every_s:
                del self._all[peer]
        live = {id(connection) for connection in self._all.values()}
        self._by_name = {name: each for name, each in self._by_name.items() if id(each) in live}

    def _replace(self, peer: Peer, replaced: Connection | None) -> Connection:
        fresh = self._all[peer] = Connection(self._clock(), peer[0])
        if replaced is not None:
            # Calls may have arrived on the new connection before this check.
            fresh.is_authenticated = replaced.is_authenticated
            self._by_name = {name: each for name, each in self._by_name.items() if each is not replaced}
        return fresh

    def _limit_unauthenticated(
        self, address: Address, connections: list[Connection], now: float, closing: _Closing
    ) -> None:
        limits = self._limits
        unauthenticated = [each for each in connections if not each.is_authenticated]
        for each in unauthenticated:
            if not each.calls and now - each.used_at > limits.unauthenticated_s:
                closing.add(address, "nobody authenticated on it (--unauthenticated-idle-s)", each)
        most = limits.unauthenticated
        if len(self._all) > _CROWDED * limits.connections:
            most = max(1, most // _CROWDED_DIVISOR)
        if len(unauthenticated) > most:
            for each in sorted(unauthenticated, key=lambda each: each.used_at)[: len(unauthenticated) - most]:
                closing.add(address, "too many without a credential (--max-unauthenticated-connections)", each)

    def _limit_unfinished(self, address: Address, connections: list[Connection], now: float, closing: _Closing) -> None:
        limits = self._limits
        for each in connections:
            most = limits.connection_bytes if each.is_authenticated else _UNAUTHENTICATED_BYTES
            if each.unfinished > most:
                closing.add(address, "its unfinished messages take too much memory", each)
            elif each.stalled_since is not None and now - each.stalled_since > read_timeout(
                limits.stall_s, each.unfinished
            ):
                closing.add(address, "its message was not finished in time (--stall-s)", each)
        total = sum(each.unfinished for each in connections)
        for each in sorted(connections, key=lambda each: each.unfinished, reverse=True):
            if total <= limits.address_bytes:
                break
            closing.add(address, "unfinished messages of its address take too much memory", each)
            total -= each.unfinished

    def _close(self, closing: _Closing) -> None:
        for (address, reason), connections in closing.by_reason.items():
            for connection in connections:
                if connection.socket is not None:
                    connection.socket.shut_down()
            if self._lines.allow():
                _log.info("connections of %s that were closed: %d; why: %s", address, len(connections), reason)


def _to_network(address: Address) -> Address:
    """Returns the network of an IPv6 address, since one client may have all its addresses; IPv4 addresses stay."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    return ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False).network_address
