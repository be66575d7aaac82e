"""Chooses how a call of `Evaluate` travels: alone, over the client's stream, or in chunks."""

from __future__ import annotations

import time

from gradrule.common import fast_paths

MAX_WHOLE_BYTES = 64 << 20
"""Longer requests are sent in chunks: servers bound the length of a message, at 64 MiB unless set otherwise."""

_MAX_STREAMED_BYTES = 512 << 10
# A stream is worth opening for calls that are repeated, each within this time after the one before.
_CALLS_BEFORE = 3
REPEATED_WITHIN_S = 60.0
"""An open stream without requests for so long is closed, unless a forward handle may live on it."""
# A server runs no more requests of one stream at a time; further ones would wait.
_MAX_UNDER_WAY = 32
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0

TRIES = 4
"""How often a call in chunks is sent where streams are lost, as often as gRPC sends other calls."""


class Routes:
    """What a client has learned of its server.

    use_stream: whether calls that are repeated may go over a stream.
    """

    def __init__(self, *, use_stream: bool) -> None:
        self._use_stream = use_stream and fast_paths.is_enabled("streams")
        self._calls = 0
        self._called_at = 0.0
        self._pause_s = 0.0
        self._not_before = 0.0
        self._max_whole_bytes = MAX_WHOLE_BYTES

    def must_chunk(self, size: int) -> bool:
        """Whether a request of so many bytes is too long for one message."""
        return size > self._max_whole_bytes

    def may_stream(self, size: int, under_way: int, *, is_open: bool) -> bool:
        """Whether a request of so many bytes, with so many under way, goes over the stream."""
        if not self._use_stream or size > _MAX_STREAMED_BYTES:
            return False
        now = time.monotonic()
        if now - self._called_at > REPEATED_WITHIN_S:
            self._calls = 0
        self._called_at = now
        self._calls += 1
        if self._calls <= _CALLS_BEFORE or under_way >= _MAX_UNDER_WAY:
            return False
        return is_open or now >= self._not_before

    def note_answered(self) -> None:
        """Notes that a stream works."""
        self._pause_s = 0.0

    def note_lost(self) -> None:
        """Notes that a stream was lost: none is opened for a while, the longer the more often that happens."""
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._not_before = time.monotonic() + self._pause_s

    def note_too_long(self, size: int) -> None:
        """Notes that the server takes no message of so many bytes."""
        self._max_whole_bytes = min(self._max_whole_bytes, size - 1)


def pause_before(attempt: int) -> float:
    """Seconds before a call in chunks is sent again; attempt: 1 for the second time."""
    return min(0.05 * (1 << attempt - 1), 1.0)
