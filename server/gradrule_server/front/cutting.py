"""Connections of clients that do not read: closing them is the only way to get back what waits to be sent on them.

gRPC for Python cannot cancel a call from the server's side, and no status ends one while a message of it waits: the
status would come behind the message. What the message takes is let go with the connection alone.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

from gradrule_server.front.rounds import Rounds
from gradrule_server.front.sockets import descriptors, parsed_peer, peer_of

_log = logging.getLogger(__name__)


def cut(peer: str) -> bool:
    """Closes the connection to a client, which ends all calls on it; whether there was one. peer: as gRPC tells it."""
    wanted = parsed_peer(peer)
    if wanted is None:
        return False
    found = False
    for descriptor in descriptors():
        try:
            # One of our own: gRPC may close its at any time, and the number may then mean another file.
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        with connection:
            if peer_of(connection) == wanted:
                _shut(connection)
                found = True
    if found:
        _log.info("the connection of %s was closed: its client does not read", peer)
    return found


class Unread:
    """A unary answer that its client is to read, within so many seconds.

    peer: as gRPC tells it; gRPC crashes where it is asked for the peer of a call that is over. on_done: called when
    gRPC is done with the call.
    """

    __slots__ = ("_left_s", "_on_done", "_peer", "_rounds")

    def __init__(self, peer: str, seconds: float, rounds: Rounds, on_done: Callable[[], object]) -> None:
        self._peer = peer
        self._left_s = seconds
        self._rounds = rounds
        self._on_done = on_done
        rounds.add(self)

    def look(self) -> None:
        was_left, self._left_s = self._left_s, self._left_s - self._rounds.every_s
        if was_left >= 0 > self._left_s:
            cut(self._peer)

    def done(self, _: object) -> None:
        """gRPC is done with the call."""
        self._rounds.discard(self)
        self._on_done()


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as cause:
        # The client has left by itself.
        _log.debug("a connection was closed already: %s", cause)
