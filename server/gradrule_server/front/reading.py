"""The one message of a call that gRPC is not asked to read by itself.

gRPC would take it in as a whole before anybody knows of the call: here the call is counted and timed first.
"""

from __future__ import annotations

import asyncio
from typing import cast

import grpc

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.admission import Admission, Share
from gradrule_server.front.calls import Context
from gradrule_server.front.rounds import Rounds

# A message that takes longer counts for as much as it may have, since nobody can tell how much of it is there.
_QUICK_S = 1.0


async def read_one(context: Context, seconds: float) -> bytes | None:
    """The next message; None where there is none. `TimeoutError` where it is not all there in time.

    A read that is given up goes on until the call ends: gRPC would lose what comes for one that was cancelled.
    """
    reading: asyncio.Future[bytes | object] = asyncio.ensure_future(context.read())
    reading.add_done_callback(_retrieved)
    done, _ = await asyncio.wait({reading}, timeout=seconds)
    if not done:
        raise TimeoutError
    raw = reading.result()
    return None if raw is grpc.aio.EOF else cast(bytes, raw)


class _Arrival:
    """A request that is being read."""

    __slots__ = ("_admission", "_looks", "_share", "counted", "refusal", "task")

    def __init__(self, admission: Admission, share: Share) -> None:
        self._admission = admission
        self._share = share
        self._looks = 0
        self.counted = 0
        self.refusal: GradruleError | None = None
        self.task = cast("asyncio.Task[object]", asyncio.current_task())

    def look(self) -> None:
        """Counts it at the second look: a whole round lies before it."""
        self._looks += 1
        if self._looks != 2:
            return
        try:
            self._admission.grow(self._share, self._admission.message)
        except GradruleError as refusal:
            self.refusal = refusal
            self.task.cancel()
        else:
            self.counted = self._admission.message


class Arrivals:
    """Requests that are being read, those that come slowly counted as the largest may be."""

    def __init__(self, admission: Admission, quick_s: float = _QUICK_S) -> None:
        self._admission = admission
        self._rounds = Rounds(quick_s)

    async def read(self, context: Context, share: Share) -> bytes:
        """A call's message, counted in. MALFORMED_REQUEST where there is none; OVERLOADED where there is no room."""
        arrival = _Arrival(self._admission, share)
        self._rounds.add(arrival)
        try:
            raw: object = await context.read()
        except asyncio.CancelledError:
            if arrival.refusal is None:
                raise
            arrival.task.uncancel()
            raise arrival.refusal from None
        finally:
            self._rounds.discard(arrival)
            if arrival.counted:
                self._admission.adjust(share, -arrival.counted)
        if raw is grpc.aio.EOF:
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the call holds no message")
        data = cast(bytes, raw)
        self._admission.grow(share, len(data))
        return data


def _retrieved(reading: asyncio.Future[bytes | object]) -> None:
    if not reading.cancelled():
        reading.exception()
