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
from gradrule_server.front.connections import ConnectionWatch, not_cancelled
from gradrule_server.front.rounds import Rounds

# A message that takes longer counts for as much as it may have, since nobody can tell how much of it is there.
_QUICK_S = 1.0


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

    def __init__(self, admission: Admission, connections: ConnectionWatch, quick_s: float = _QUICK_S) -> None:
        self._admission = admission
        self._connections = connections
        self._rounds = Rounds(quick_s)

    async def read(self, context: Context, share: Share) -> bytes:
        """A call's message, counted in. MALFORMED_REQUEST where there is none; OVERLOADED where there is no room."""
        arrival = _Arrival(self._admission, share)
        self._rounds.add(arrival)
        connection = self._connections.of(context.peer())
        connection.begin_read()
        raw: object = grpc.aio.EOF
        try:
            raw = await not_cancelled(context.read())
        except asyncio.CancelledError:
            if arrival.refusal is None:
                raise
            arrival.task.uncancel()
            raise arrival.refusal from None
        finally:
            self._rounds.discard(arrival)
            connection.end_read(raw)
            if arrival.counted:
                self._admission.adjust(share, -arrival.counted)
        if raw is grpc.aio.EOF:
            raise error(errors_pb2.ERROR_REASON_MALFORMED_REQUEST, "the call holds no message")
        data = cast(bytes, raw)
        self._admission.grow(share, len(data))
        return data
