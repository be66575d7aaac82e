"""Requests of a stream that arrive in several messages: their bytes are kept, and counted, until all are there."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.calls import Caller
from gradrule_server.front.handlers import Door

# A request without a timeout of its own must have arrived by then; from then on it has the default deadline.
_DEFAULT_S = 60.0
# Smaller chunks are copied into one buffer: objects of their own would take far more memory than is counted.
_MIN_PIECE_BYTES = 64 << 10
# Refused requests whose further chunks are recognized; of more, those that were refused first are forgotten.
_MAX_REFUSED = 1024


class _Arriving:
    """A request of which chunks have come."""

    __slots__ = ("ends_at", "pieces", "size", "timer")

    def __init__(self, ends_at: float | None, timer: asyncio.TimerHandle) -> None:
        self.ends_at = ends_at
        self.timer = timer
        self.pieces: list[bytes | bytearray] = []
        self.size = 0

    def add(self, chunk: bytes) -> None:
        """Keeps a chunk."""
        self.size += len(chunk)
        if len(chunk) >= _MIN_PIECE_BYTES:
            self.pieces.append(chunk)
        elif self.pieces and isinstance(self.pieces[-1], bytearray):
            self.pieces[-1] += chunk
        else:
            self.pieces.append(bytearray(chunk))


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
        # Requests that were answered with an error before they were there as a whole.
        self._refused: OrderedDict[int, None] = OrderedDict()

    @property
    def has_any(self) -> bool:
        """Whether requests are arriving in chunks, or were refused before all of them had come."""
        return bool(self._arriving or self._refused)

    def size(self, number: int) -> int:
        """Returns how many bytes of a request have come."""
        arriving = self._arriving.get(number)
        return 0 if arriving is None else arriving.size

    def forget_refused(self, number: int) -> bool:
        """Forgets that a request was refused; returns whether it was."""
        if number not in self._refused:
            return False
        del self._refused[number]
        return True

    def add(self, number: int, chunk: bytes, remaining: float | None) -> GradruleError | None:
        """Keeps a chunk, or returns the error with which its request is to be answered.

        Drops the chunks of a request that was refused. remaining: seconds that the client gives the request, as its
        first chunk tells.
        """
        if number in self._refused:
            return None
        arriving = self._arriving.get(number)
        if arriving is None:
            if len(self._arriving) >= self._most:
                self._refuse(number)
                return error(
                    errors_pb2.ERROR_REASON_OVERLOADED,
                    f"{self._most} requests of the stream are arriving in chunks already; send one after the other",
                )
            arriving = self._arriving[number] = self._begin(number, remaining)
        try:
            self._door.take_in(self._caller, len(chunk))
        except GradruleError as refusal:
            self._refuse(number)
            return refusal
        arriving.add(chunk)
        return None

    def complete(self, number: int) -> None:
        """Notes that all chunks of a request have come: from now on it cannot be late."""
        self._arriving[number].timer.cancel()

    async def joined(self, number: int, rest: bytes) -> tuple[bytes, float | None]:
        """Returns the bytes of a request that is all there, which count no longer, and the seconds it has left."""
        arriving = self._arriving[number]
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
        self.forget_refused(number)
        arriving = self._arriving.pop(number, None)
        if arriving is None:
            return False
        arriving.timer.cancel()
        self._door.let_go(self._caller, arriving.size)
        arriving.pieces.clear()
        return True

    def drop_all(self) -> None:
        """Forgets all requests."""
        for number in list(self._arriving):
            self.drop(number)

    def _begin(self, number: int, remaining: float | None) -> _Arriving:
        loop = asyncio.get_running_loop()
        seconds = _DEFAULT_S if remaining is None else min(max(remaining, 0.0), self._door.max_deadline_s)
        timer = loop.call_later(seconds, self._late, number, seconds)
        return _Arriving(None if remaining is None else loop.time() + seconds, timer)

    def _late(self, number: int, seconds: float) -> None:
        self._refuse(number)
        message = f"not all chunks of the request have come within {seconds:.3g} s"
        self._on_late(number, error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, message))

    def _refuse(self, number: int) -> None:
        """Drops a request and all of its chunks that are still to come."""
        self.drop(number)
        self._refused[number] = None
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
