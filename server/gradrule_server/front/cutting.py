"""Connections of clients that do not read: closing them is the only way to get back what waits to be sent on them.

gRPC for Python cannot cancel a call from the server's side, and no status ends one while a message of it waits: the
status would come behind the message. What the message takes is let go with the connection alone.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from urllib.parse import unquote

from gradrule_server.front.calls import Context

_log = logging.getLogger(__name__)

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_DESCRIPTORS = "/dev/fd"


def cut(peer: str) -> bool:
    """Closes the connection to a client, which ends all calls on it; whether there was one.

    peer: as gRPC tells it: `ipv4:192.0.2.1:1234`, `ipv6:[2001:db8::1]:1234` with its brackets escaped or not.
    """
    wanted = _parsed(peer)
    if wanted is None:
        return False
    found = False
    for name in os.listdir(_DESCRIPTORS):
        try:
            # One of our own: gRPC may close its at any time, and the number may then mean another file.
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with connection:
            if _peer_of(connection) == wanted:
                _shut(connection)
                found = True
    if found:
        _log.info("the connection of %s was closed: its client does not read", peer)
    return found


class Unread:
    """A unary answer that its client is to read, within so many seconds."""

    __slots__ = ("_every_s", "_left_s", "_peer")

    def __init__(self, context: Context, seconds: float, every_s: float) -> None:
        # Asked for here: gRPC crashes where it is asked for the peer of a call that is over.
        self._peer = context.peer()
        self._left_s = seconds
        self._every_s = every_s

    def look(self) -> None:
        was_left, self._left_s = self._left_s, self._left_s - self._every_s
        if was_left >= 0 > self._left_s:
            cut(self._peer)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as cause:
        # The client has left by itself.
        _log.debug("a connection was closed already: %s", cause)


def _peer_of(connection: socket.socket) -> tuple[_Address, int] | None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host, port = connection.getpeername()[:2]
    except OSError:
        return None
    return _plain(host), port


def _parsed(peer: str) -> tuple[_Address, int] | None:
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> _Address:
    """An address in the one form that both sides use: a socket for both families tells IPv4 within IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped
