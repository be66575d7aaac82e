"""Requests of a stream that arrive in several messages: their bytes are kept, and counted, until all are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Caller
from gradrule_server.front.handlers import Door

# A request without a timeout of its own must have arrived by then; from then on it has the default deadline.
_DEFAULT_S = 60.0


class _Arriving:
    """A request of which chunks have come."""

    __slots__ = ("ends_at", "is_refused", "pieces", "size", "timer")

    def __init__(self, ends_at: float | None, timer: asyncio.TimerHandle) -> None:
        self.ends_at = ends_at
        self.timer = timer
        self.pieces: list[bytes] = []
        self.size = 0
        self.is_refused = False


class RequestChunks:
    """The requests of one stream that are arriving, by id.

    most: how many may arrive at a time. on_late: called with the id of a request that has not arrived in time, and the
    error to answer it with.
    """

    def __init__(self, door: Door, caller: Caller, most: int, on_late: Callable[[int, GradruleError], None]) -> None:
        self._door = door
        self._caller = caller
        self._most = most
        self._on_late = on_late
        self._arriving: dict[int, _Arriving] = {}

    def size(self, number: int) -> int:
        """Returns how many bytes of a request have come."""
        arriving = self._arriving.get(number)
        return 0 if arriving is None else arriving.size

    def is_refused(self, number: int) -> bool:
        """Tells whether a request was answered with an error before it was there as a whole."""
        arriving = self._arriving.get(number)
        return arriving is not None and arriving.is_refused

    def add(self, number: int, chunk: bytes, remaining: float | None) -> GradruleError | None:
        """Keeps a chunk, or returns the error with which its request is to be answered.

        remaining: seconds that the client gives the request, as its first chunk tells.
        """
        arriving = self._arriving.get(number)
        if arriving is None:
            if len(self._arriving) >= self._most:
                return error(
                    errors_pb2.ERROR_REASON_OVERLOADED,
                    f"{self._most} requests of the stream are arriving in chunks already; send one after the other",
                )
            arriving = self._arriving[number] = self._begin(number, remaining)
        if arriving.is_refused:
            return None
        try:
            self._door.take_in(self._caller, len(chunk))
        except GradruleError as refusal:
            self._refuse(arriving)
            return refusal
        arriving.pieces.append(chunk)
        arriving.size += len(chunk)
        return None

    async def joined(self, number: int, rest: bytes) -> tuple[bytes, float | None]:
        """Returns the bytes of a request that is all there, which count no longer, and the seconds it has left."""
        arriving = self._arriving[number]
        arriving.timer.cancel()
        try:
            # It takes long, and must not stop the event loop.
            raw = await asyncio.to_thread(b"".join, (*arriving.pieces, rest))
        finally:
            self.drop(number)
        if arriving.ends_at is None:
            return raw, None
        return raw, max(arriving.ends_at - asyncio.get_running_loop().time(), 0.0)

    def drop(self, number: int) -> bool:
        """Forgets a request; returns whether it was arriving, without an answer yet."""
        arriving = self._arriving.pop(number, None)
        if arriving is None:
            return False
        was_refused = arriving.is_refused
        self._refuse(arriving)
        return not was_refused

    def drop_all(self) -> None:
        """Forgets all requests."""
        for number in list(self._arriving):
            self.drop(number)

    def _begin(self, number: int, remaining: float | None) -> _Arriving:
        loop = asyncio.get_running_loop()
        seconds = _DEFAULT_S if remaining is None else max(remaining, 0.0)
        timer = loop.call_later(seconds, self._late, number, seconds)
        return _Arriving(None if remaining is None else loop.time() + seconds, timer)

    def _late(self, number: int, seconds: float) -> None:
        self._refuse(self._arriving[number])
        message = f"not all chunks of the request have come within {seconds:.3g} s"
        self._on_late(number, error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, message))

    def _refuse(self, arriving: _Arriving) -> None:
        """Lets the bytes of a request go; what else comes of it is dropped."""
        arriving.timer.cancel()
        self._door.let_go(self._caller, arriving.size)
        arriving.pieces.clear()
        arriving.size = 0
        arriving.is_refused = True
