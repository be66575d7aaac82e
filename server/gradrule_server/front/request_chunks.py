"""Requests of a stream that arrive in chunks, each of which is too large for one message, or sent while it is made."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.admission import Admission, InFlight

# Requests of one stream that may arrive in chunks at a time.
_MAX_REQUESTS = 32
# A request without a timeout of its own must arrive within this time; its default deadline starts then.
_DEFAULT_S = 60.0
# Smaller chunks are joined in one buffer: as separate objects they would take far more memory than is counted.
_MIN_PIECE_BYTES = 64 << 10
# Number of refused requests whose further chunks are recognized; the oldest are forgotten first.
_MAX_REFUSED = 1024


class _ChunkedRequest:
    """A request of which some chunks have arrived. `ends_at`: its deadline, loop time; None: the default."""

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
    """The chunked requests of one stream, by request id.

    Args:
        admission: counts the bytes of chunks.
        in_flight: what the tenant of the stream has in flight.
        max_deadline_s: seconds that a request may take to arrive at most.
        on_late: called with the id of a request that has not arrived in time, and the error to answer it with.
    """

    def __init__(
        self,
        admission: Admission,
        in_flight: InFlight,
        max_deadline_s: float,
        on_late: Callable[[int, GradruleError], object],
    ) -> None:
        self._admission = admission
        self._in_flight = in_flight
        self._max_deadline_s = max_deadline_s
        self._on_late = on_late
        self.arriving: dict[int, _ChunkedRequest] = {}
        """The requests of which some chunks have come."""
        # Requests that were answered with an error before all their chunks had arrived.
        self._refused: OrderedDict[int, None] = OrderedDict()

    def add(self, number: int, chunk: bytes, remaining: float | None) -> None:
        """Keeps a chunk; drops chunks of refused requests. OVERLOADED, LIMIT_EXCEEDED, once for each request.

        Args:
            number: id of the request.
            chunk: bytes of the request.
            remaining: seconds that the client gives the request; only read from its first chunk.
        """
        if number in self._refused:
            return
        arriving = self.arriving.get(number)
        try:
            if arriving is None:
                if len(self.arriving) >= _MAX_REQUESTS:
                    message = f"{_MAX_REQUESTS} requests of the stream are arriving in chunks already; "
                    raise error(errors_pb2.ERROR_REASON_OVERLOADED, message + "send one after the other")
                arriving = self.arriving[number] = self._start(number, remaining)
            self._admission.admit_chunk(self._in_flight, len(chunk), arriving.size)
        except GradruleError:
            self._refuse(number)
            raise
        arriving.add(chunk)

    def complete(self, number: int, total: int) -> bool:
        """Notes that the last message of a request has come; returns whether the request is still to be answered.

        `total`: bytes that came before in chunks, as the client counts them. MALFORMED_REQUEST if that is not so.
        """
        if number in self._refused:
            del self._refused[number]
            # Without chunks it is a new request that uses the id again.
            return not total
        arriving = self.arriving.get(number)
        came = 0 if arriving is None else arriving.size
        if came != total:
            self.drop(number)
            message = f"the request's chunks have {total} bytes (total_bytes), of which {came} have come"
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, message)
        if arriving is not None:
            arriving.timer.cancel()
        return True

    async def join(self, number: int, rest: bytes) -> tuple[bytes, float | None]:
        """Returns the bytes of a complete request, no longer counted, and the seconds that it has left."""
        arriving = self.arriving[number]
        try:
            # In a thread, since it takes long for large requests.
            raw = await asyncio.to_thread(b"".join, (*arriving.pieces, rest))
        finally:
            self.drop(number)
        if arriving.ends_at is None:
            return raw, None
        return raw, max(arriving.ends_at - asyncio.get_running_loop().time(), 0.0)

    def drop(self, number: int) -> bool:
        """Forgets a request; returns whether it was arriving, which means that it has no answer yet."""
        self._refused.pop(number, None)
        arriving = self.arriving.pop(number, None)
        if arriving is None:
            return False
        arriving.timer.cancel()
        self._admission.forget_arriving(self._in_flight, arriving.size)
        arriving.pieces.clear()
        return True

    def drop_all(self) -> None:
        """Forgets all requests."""
        for number in list(self.arriving):
            self.drop(number)

    def _start(self, number: int, remaining: float | None) -> _ChunkedRequest:
        loop = asyncio.get_running_loop()
        seconds = _DEFAULT_S if remaining is None else min(max(remaining, 0.0), self._max_deadline_s)
        timer = loop.call_later(seconds, self._refuse_late, number, seconds)
        return _ChunkedRequest(None if remaining is None else loop.time() + seconds, timer)

    def _refuse_late(self, number: int, seconds: float) -> None:
        self._refuse(number)
        message = f"not all chunks of the request have come within {seconds:.3g} s"
        self._on_late(number, error(errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED, message))

    def _refuse(self, number: int) -> None:
        """Drops a request and its chunks that are still to come."""
        self.drop(number)
        self._refused[number] = None
        if len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
