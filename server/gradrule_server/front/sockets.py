"""Finds and closes the TCP connections of this process by its descriptors: gRPC for Python does not expose them."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import resource
import socket
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import unquote

Address: TypeAlias = "ipaddress.IPv4Address | ipaddress.IPv6Address"
Peer: TypeAlias = tuple[Address, int]
"""Address and port of a client."""

_log = logging.getLogger(__name__)

_DESCRIPTORS = "/dev/fd"
# Descriptors for everything else: engines, the registry, blobs that are read and written.
_OWN_DESCRIPTORS = 1024
# Fields tcpi_bytes_acked and tcpi_bytes_received of Linux' `struct tcp_info`.
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_COUNTS = struct.Struct("<QQ")
_COUNTS_AT = 120


@dataclass(frozen=True, slots=True)
class Socket:
    """The socket of a client's connection. `sent`, `received`: bytes so far; 0 where the system does not say."""

    descriptor: int
    inode: int
    sent: int
    received: int

    def shut_down(self) -> None:
        """Closes the connection, which ends all calls on it."""
        with contextlib.suppress(OSError), _opened(self.descriptor) as connection:
            # gRPC may have closed the descriptor, which may be another file by now.
            if os.fstat(connection.fileno()).st_ino == self.inode:
                connection.shutdown(socket.SHUT_RDWR)


class Sockets:
    """Finds the connections to one port of this process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._peers: dict[tuple[int, int], Peer | None] = {}

    def find(self) -> dict[Peer, Socket]:
        """Returns all open connections by client."""
        seen: dict[tuple[int, int], Peer | None] = {}
        found: dict[Peer, Socket] = {}
        for descriptor in list_descriptors():
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                key = descriptor, status.st_ino
                peer = self._peers[key] if key in self._peers else self._read_peer(descriptor)
                seen[key] = peer
                if peer is not None:
                    found[peer] = Socket(*key, *_counts(descriptor))
            except OSError:
                # gRPC closes its descriptors at any time.
                continue
        self._peers = seen
        return found

    def _read_peer(self, descriptor: int) -> Peer | None:
        with _opened(descriptor) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return get_peer(connection) if connection.getsockname()[1] == self._port else None


def allow_connections(count: int) -> None:
    """Raises the limit of open files of this process, often 1024, so that `count` clients fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OWN_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning("%d files may be open (ulimit -n), but --max-connections %d needs %d", allowed, count, wanted)


def list_descriptors() -> Iterator[int]:
    """Yields the descriptors of this process."""
    return map(int, os.listdir(_DESCRIPTORS))


def close_connection(peer: str) -> bool:
    """Closes the connection to a client, which ends all calls on it; returns whether it was open.

    `peer`: as gRPC gives it.
    """
    wanted = parse_peer(peer)
    if wanted is None:
        return False
    was_open = False
    for descriptor in list_descriptors():
        try:
            with _opened(descriptor) as connection:
                if get_peer(connection) == wanted:
                    was_open = True
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            # Not a socket, or gRPC or the client has closed it.
            continue
    if was_open:
        _log.info("the connection of %s was closed: its client does not read", peer)
    return was_open


def get_peer(connection: socket.socket) -> Peer | None:
    """Returns the client of a connection; None where the socket is not connected."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port = connection.getpeername()[:2]
    except OSError:
        return None
    return _parse_address(host), port


def parse_peer(peer: str) -> Peer | None:
    """Parses a peer as gRPC gives it: `ipv4:192.0.2.1:1234`, `ipv6:[2001:db8::1]:1234`, brackets escaped or not."""
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return _parse_address(host.strip("[]")), int(port)
    except ValueError:
        return None


@contextlib.contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket]:
    """Opens a copy of a descriptor, since gRPC may close its own at any time."""
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        # Not a socket: Python leaves the descriptor open then.
        os.close(copy)
        raise
    with connection:
        yield connection


def _counts(descriptor: int) -> tuple[int, int]:
    if _TCP_INFO is None:
        return 0, 0
    # With family, type and protocol given, Python does not ask the kernel for them: that saves three system calls.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _COUNTS_AT + _COUNTS.size)
    return _COUNTS.unpack_from(info, _COUNTS_AT) if len(info) >= _COUNTS_AT + _COUNTS.size else (0, 0)


def _parse_address(host: str) -> Address:
    """Parses an address; converts IPv4 addresses within IPv6, which sockets for both families report, to IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped
