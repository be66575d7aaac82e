"""The TCP connections of this process, found among its own descriptors: gRPC for Python tells nothing of them."""

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
# What the process needs besides connections: engines, the registry, blobs that are read and written.
_OWN_DESCRIPTORS = 1024
# Of Linux' `struct tcp_info`: tcpi_bytes_acked and tcpi_bytes_received.
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_COUNTS = struct.Struct("<QQ")
_COUNTS_AT = 120


@dataclass(frozen=True, slots=True)
class Socket:
    """A connection of a client's. sent, received: bytes so far, both 0 where the system does not tell."""

    descriptor: int
    inode: int
    sent: int
    received: int

    def shut(self) -> None:
        """Ends the connection, which ends all calls on it."""
        with contextlib.suppress(OSError), _opened(self.descriptor) as connection:
            # Descriptors are reused: this may be another file by now.
            if os.fstat(connection.fileno()).st_ino == self.inode:
                connection.shutdown(socket.SHUT_RDWR)


class Sockets:
    """Finds the connections to one port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._peers: dict[tuple[int, int], Peer | None] = {}

    def found(self) -> dict[Peer, Socket]:
        """All connections that are open now."""
        seen: dict[tuple[int, int], Peer | None] = {}
        found: dict[Peer, Socket] = {}
        for descriptor in descriptors():
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISSOCK(status.st_mode):
                    continue
                key = descriptor, status.st_ino
                peer = self._peers[key] if key in self._peers else self._peer_of(descriptor)
                seen[key] = peer
                if peer is not None:
                    found[peer] = Socket(*key, *_counts(descriptor))
            except OSError:
                # gRPC closes its descriptors at any time.
                continue
        self._peers = seen
        return found

    def _peer_of(self, descriptor: int) -> Peer | None:
        with _opened(descriptor) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            return peer_of(connection) if connection.getsockname()[1] == self._port else None


def allow_connections(count: int) -> None:
    """Raises the process's own limit of descriptors, which is 1024 on many systems, so that so many clients fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OWN_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        _log.warning("%d files may be open (ulimit -n), but --max-connections %d needs %d", allowed, count, wanted)


def descriptors() -> Iterator[int]:
    """The descriptors of this process."""
    return map(int, os.listdir(_DESCRIPTORS))


def peer_of(connection: socket.socket) -> Peer | None:
    """Who is at the other end; None where nobody is."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port = connection.getpeername()[:2]
    except OSError:
        return None
    return _plain(host), port


def parsed_peer(peer: str) -> Peer | None:
    """A peer as gRPC tells it: `ipv4:192.0.2.1:1234`, `ipv6:[2001:db8::1]:1234` with its brackets escaped or not."""
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


@contextlib.contextmanager
def _opened(descriptor: int) -> Iterator[socket.socket]:
    """A copy of a descriptor: gRPC may close its own at any time."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        yield connection


def _counts(descriptor: int) -> tuple[int, int]:
    if _TCP_INFO is None:
        return 0, 0
    # Told what it is, Python asks the kernel nothing about it: that were three system calls for each connection.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _COUNTS_AT + _COUNTS.size)
    return _COUNTS.unpack_from(info, _COUNTS_AT) if len(info) >= _COUNTS_AT + _COUNTS.size else (0, 0)


def _plain(host: str) -> Address:
    """An address in the one form that both sides use: a socket for both families tells IPv4 within IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped
