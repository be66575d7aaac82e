"""Limits what clients hold before and while they send: connections by address, and bytes of unfinished messages.

gRPC reads a message as a whole before it gives any of it to Python, however large the message says it is, and never
ends a connection on which nothing useful happens. So the server looks at its own sockets: how many there are from each
address, on which of them nobody has authenticated, and how many bytes came that are not part of a message yet.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from gradrule_server.front.heap import HeapTrimmer
from gradrule_server.front.sockets import Address, Peer, Socket, Sockets, parsed_peer
from gradrule_server.front.stalls import patience
from gradrule_server.operations.rate_limiter import RateLimiter

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Seconds between two looks, and where much is going on that has no credential.
_EVERY_S = 1.0
_SOON_S = 0.2
_MANY_STRANGERS = 64
# Of the connections that there may be: with more, addresses may have fewer connections without a credential.
_CROWDED = 0.75
_CROWDED_SHARE = 8
_IPV6_NETWORK_BITS = 64

# What nobody may exceed who has not authenticated: requests for health and reflection are a few bytes.
_UNAUTHENTICATED_BYTES = 1 << 20
# Less than this may be what gRPC reads ahead.
_READ_AHEAD_BYTES = 64 << 10
# What comes on a connection besides messages: frames, TLS records, headers, acknowledgements.
_OVERHEAD = 1.02
_OVERHEAD_OF_MESSAGE = 16 << 10
_OVERHEAD_OF_SENT = 0.01
_OVERHEAD_OF_LOOK = 1 << 10

_LINES_PER_SECOND = 1.0
_LINES_AT_ONCE = 20


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What clients may hold.

    connections: of all clients. unauthenticated: connections of one address on which nobody authenticated.
    unauthenticated_s: seconds for which such a connection may be without a call. connection_bytes, address_bytes: of
    unfinished messages. stall_s: seconds for a message to make progress, see `stalls.patience`.
    """

    connections: int = 4096
    unauthenticated: int = 128
    unauthenticated_s: float = 60.0
    connection_bytes: int = 2 << 30
    address_bytes: int = 2 << 30
    stall_s: float = 60.0


class Connection:
    """What is known of one connection.

    address: of its client, or the network of an IPv6 address. unfinished: bytes that came and are not part of a whole
    message yet, as far as one can tell.
    """

    __slots__ = (
        "_delivered",
        "_delivered_before",
        "_messages",
        "_received_before",
        "_sent_before",
        "address",
        "behind_since",
        "calls",
        "delivered_then",
        "is_authenticated",
        "reads",
        "socket",
        "unfinished",
        "used_at",
    )

    def __init__(self, now: float, address: Address | None = None) -> None:
        self.address = None if address is None else _network(address)
        self.is_authenticated = False
        self.used_at = now
        self.calls = 0
        self.reads = 0
        self.unfinished = 0
        self.behind_since: float | None = None
        self.delivered_then = 0
        self.socket: Socket | None = None
        self._delivered = self._delivered_before = 0
        self._messages = 0
        self._received_before = self._sent_before = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Within it a call is open that needs no credential."""
        self.calls += 1
        self.used_at = time.monotonic()
        try:
            yield
        finally:
            self.calls -= 1
            self.used_at = time.monotonic()

    def begin_read(self) -> None:
        """Notes that a message may come in from now on."""
        self.reads += 1

    def end_read(self, message: object) -> None:
        """Notes that a message is there, or that the call has ended."""
        self.reads -= 1
        self._delivered += len(message) if isinstance(message, bytes) else 0
        self._messages += 1
        if not self.reads:
            self.unfinished = 0

    async def messages(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The messages of a call, each counted."""
        while True:
            raw = None
            self.begin_read()
            try:
                raw = await not_cancelled(anext(requests, None))
            finally:
                self.end_read(raw)
            if raw is None:
                return
            yield raw

    def see(self, found: Socket, now: float) -> None:
        """Takes in what the socket has sent and received by now."""
        delivered = self._delivered - self._delivered_before
        overhead = self._messages * _OVERHEAD_OF_MESSAGE + _OVERHEAD_OF_LOOK
        overhead += int((found.sent - self._sent_before) * _OVERHEAD_OF_SENT)
        grown = found.received - self._received_before - int(delivered * _OVERHEAD) - overhead
        self.unfinished = max(0, self.unfinished + grown) if self.reads else 0
        self.socket = found
        self._received_before, self._sent_before = found.received, found.sent
        self._delivered_before, self._messages = self._delivered, 0
        if self.unfinished <= _READ_AHEAD_BYTES:
            self.behind_since = None
        elif self.behind_since is None or self._delivered - self.delivered_then >= self.unfinished:
            self.behind_since, self.delivered_then = now, self._delivered


async def not_cancelled(read: Awaitable[T]) -> T:
    """Waits for a read of gRPC's. Who waits may be cancelled, the read goes on and ends with its call.

    grpc.aio never frees some hundred bytes that belong to a read that is cancelled.
    """
    reading = asyncio.ensure_future(read)
    reading.add_done_callback(_retrieve)
    return await asyncio.shield(reading)


def _retrieve(reading: asyncio.Future[T]) -> None:
    """Takes note of how a read ended that nobody waits for any more: asyncio would log its exception."""
    if not reading.cancelled():
        reading.exception()


@dataclass
class _Cuts:
    """Connections that are closed, with the reasons."""

    of: dict[tuple[Address, str], list[Connection]] = field(default_factory=lambda: defaultdict(list))
    seen: set[int] = field(default_factory=set)

    def add(self, address: Address, reason: str, connection: Connection) -> None:
        if id(connection) not in self.seen:
            self.seen.add(id(connection))
            self.of[address, reason].append(connection)


class ConnectionWatch:
    """Looks at all connections every second, and closes those that exceed the limits."""

    def __init__(self, limits: ConnectionLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or ConnectionLimits()
        self._clock = clock
        self._all: dict[Peer, Connection] = {}
        self._by_name: dict[str, Connection] = {}
        self._heap = HeapTrimmer()
        self._lines = RateLimiter(_LINES_PER_SECOND, _LINES_AT_ONCE)
        self._watching: asyncio.Task[None] | None = None

    def of(self, peer: str) -> Connection:
        """The connection of a call. peer: as gRPC tells it."""
        found = self._by_name.get(peer)
        if found is None:
            parsed = parsed_peer(peer)
            if parsed is None:
                return Connection(self._clock())
            found = self._all.get(parsed)
            if found is None:
                found = self._all[parsed] = Connection(self._clock(), parsed[0])
            self._by_name[peer] = found
        return found

    def start(self, port: int) -> None:
        """Looks at the connections to this port from now on."""
        self._watching = asyncio.create_task(self._watch(Sockets(port)), name="connections")
        self._watching.add_done_callback(_report_failure)

    async def stop(self) -> None:
        """Looks no more."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self, sockets: Sockets) -> None:
        loop = asyncio.get_running_loop()
        # Other work fills the loop's own threads at times.
        with ThreadPoolExecutor(1, "connections") as thread:
            while True:
                await asyncio.sleep(_SOON_S if self._is_busy() else _EVERY_S)
                begun = self._clock()
                try:
                    found = await loop.run_in_executor(thread, sockets.found)
                    self.look(found, begun)
                    await loop.run_in_executor(thread, self._heap.trim_if_due, self._clock())
                except OSError as cause:
                    # Both read files of /proc, for which there may be no descriptor left.
                    _log.warning("connections cannot be looked at now: %s", cause)

    def _is_busy(self) -> bool:
        """Whether many connections or much memory may be taken until the next look."""
        strangers = [each for each in self._all.values() if not each.is_authenticated]
        return (
            len(strangers) > _MANY_STRANGERS
            or any(each.reads for each in strangers)
            or any(each.unfinished > _UNAUTHENTICATED_BYTES for each in self._all.values())
        )

    def look(self, found: dict[Peer, Socket], begun: float) -> None:
        """Takes in the sockets that there were at a time, and closes those that exceed the limits."""
        now = self._clock()
        self._forget_closed(found, begun)
        for peer, each in found.items():
            known = self._all.get(peer)
            if known is None or (known.socket is not None and known.socket.inode != each.inode):
                known = self._renewed(peer, known)
            known.see(each, now)
        cuts = _Cuts()
        by_address: dict[Address, list[Connection]] = defaultdict(list)
        for connection in self._all.values():
            if connection.socket is not None and connection.address is not None:
                by_address[connection.address].append(connection)
        for address, connections in by_address.items():
            self._limit_unauthenticated(address, connections, now, cuts)
            self._limit_unfinished(address, connections, now, cuts)
        self._cut(cuts)

    def _forget_closed(self, found: Iterable[Peer], begun: float) -> None:
        for peer in self._all.keys() - set(found):
            connection = self._all[peer]
            if connection.socket is not None or connection.used_at < begun - _EVERY_S:
                del self._all[peer]
        live = {id(connection) for connection in self._all.values()}
        self._by_name = {name: each for name, each in self._by_name.items() if id(each) in live}

    def _renewed(self, peer: Peer, replaced: Connection | None) -> Connection:
        fresh = self._all[peer] = Connection(self._clock(), peer[0])
        if replaced is not None:
            # Calls may have come on the new connection before it was seen here.
            fresh.is_authenticated = replaced.is_authenticated
            self._by_name = {name: each for name, each in self._by_name.items() if each is not replaced}
        return fresh

    def _limit_unauthenticated(self, address: Address, connections: list[Connection], now: float, cuts: _Cuts) -> None:
        limits = self._limits
        strangers = [each for each in connections if not each.is_authenticated]
        for each in strangers:
            if not each.calls and now - each.used_at > limits.unauthenticated_s:
                cuts.add(address, "nobody authenticated on it (--unauthenticated-idle-s)", each)
        most = limits.unauthenticated
        if len(self._all) > _CROWDED * limits.connections:
            most = max(1, most // _CROWDED_SHARE)
        if len(strangers) > most:
            for each in sorted(strangers, key=lambda each: each.used_at)[: len(strangers) - most]:
                cuts.add(address, "too many without a credential (--max-unauthenticated-connections)", each)

    def _limit_unfinished(self, address: Address, connections: list[Connection], now: float, cuts: _Cuts) -> None:
        limits = self._limits
        for each in connections:
            most = limits.connection_bytes if each.is_authenticated else _UNAUTHENTICATED_BYTES
            if each.unfinished > most:
                cuts.add(address, "its unfinished messages take too much memory", each)
            elif each.behind_since is not None and now - each.behind_since > patience(limits.stall_s, each.unfinished):
                cuts.add(address, "its message was not finished in time (--stall-s)", each)
        total = sum(each.unfinished for each in connections)
        for each in sorted(connections, key=lambda each: each.unfinished, reverse=True):
            if total <= limits.address_bytes:
                break
            cuts.add(address, "unfinished messages of its address take too much memory", each)
            total -= each.unfinished

    def _cut(self, cuts: _Cuts) -> None:
        for (address, reason), connections in cuts.of.items():
            for connection in connections:
                if connection.socket is not None:
                    connection.socket.shut()
            if self._lines.allow():
                _log.info("connections of %s that were closed: %d; why: %s", address, len(connections), reason)


def _network(address: Address) -> Address:
    """What one client may have many addresses of: IPv6 gives each a network."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    return ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False).network_address


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (cause := task.exception()) is not None:
        _log.error("connections are not limited any more", exc_info=cause)
