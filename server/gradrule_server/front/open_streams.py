"""Bidirectional streams: reads and writes their messages, and ends those whose client does not read or may not call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.admission import Admission
from gradrule_server.front.authentication import CallerAuthenticator
from gradrule_server.front.calls import MAX_COMPRESSED_BYTES, Caller, Context, when_done
from gradrule_server.front.connections import Connection, read_timeout
from gradrule_server.front.sockets import close_connection

# The connection of an ended stream is closed after this many times `stall_s`, if its last message is still unread.
_CLOSE_AFTER_STALLS = 2
CHECKS_PER_STALL = 4
"""Number of checks within the time that a message may stay unread."""


class Stream:
    """One bidirectional stream.

    Args:
        caller: whose credential opened the stream.
        context: of gRPC.
        connection: counts bytes of unfinished messages.
        admission: counts bytes of messages that the client has not read.
        authenticator: checks the credential again.
        stall_s: seconds that a message may stay unread, see `read_timeout`.
        recheck_s: seconds between two checks of the credential.
    """

    def __init__(
        self,
        caller: Caller,
        context: Context,
        connection: Connection,
        admission: Admission,
        authenticator: CallerAuthenticator,
        stall_s: float,
        recheck_s: float,
    ) -> None:
        self.caller = caller
        self._context = context
        self._connection = connection
        self._admission = admission
        self._authenticator = authenticator
        self._stall_s = stall_s
        self._check_every_s = min(recheck_s, stall_s / CHECKS_PER_STALL)
        self._loop = asyncio.get_running_loop()
        self._writing = asyncio.Lock()
        # Loop time at which `read` raises UNAVAILABLE; None: no limit.
        self._reads_until: float | None = None
        self._reading: asyncio.Timeout | None = None
        self._unread_until: float | None = None
        # Why the server has ended the stream.
        self._cause: GradruleError | None = None

    async def run(self, serving: Awaitable[None]) -> None:
        """Serves the stream until `serving` is done.

        DEADLINE_EXCEEDED where the client does not read, UNAUTHENTICATED where the credential has been withdrawn.
        """
        self._serving = asyncio.ensure_future(serving)
        self._next_check = self._loop.call_later(self._check_every_s, self._check)
        try:
            await self._serving
        except asyncio.CancelledError:
            if self._cause is None:
                raise
            raise self._cause from None
        finally:
            self._next_check.cancel()

    async def read(self) -> bytes | None:
        """Returns the next message; None once the client has sent its last. UNAUTHENTICATED, UNAVAILABLE.

        UNAVAILABLE says that the client should continue on another stream, see `stop_reading`.
        """
        try:
            async with asyncio.timeout_at(self._reads_until) as limit:
                self._reading = limit
                raw = await self._connection.read(self._context)
        except TimeoutError as cause:
            if not limit.expired():
                raise
            message = "the server is going away, or the stream has reached its maximum age"
            raise error(errors_pb2.ERROR_REASON_UNAVAILABLE, message, retry_after_s=0.0) from cause
        finally:
            self._reading = None
        self._authenticator.check_still_valid(self.caller.principal)
        return raw

    def stop_reading(self, after_s: float = 0.0) -> None:
        """Makes `read` raise UNAVAILABLE after some seconds, if it does not earlier."""
        ends_at = self._loop.time() + after_s
        if self._reads_until is not None and self._reads_until <= ends_at:
            return
        self._reads_until = ends_at
        if self._reading is not None and not self._reading.expired():
            self._reading.reschedule(self._reads_until)

    async def write(self, data: bytes, counted: int = 0) -> None:
        """Writes a message after those that are being written; returns when the transport has taken it.

        `counted`: bytes that are counted for the message until it is written; 0: counts those of the message.
        """
        size, context, in_flight = len(data), self._context, self.caller.tenant.in_flight
        if not counted:
            counted = size
            self._admission.count(in_flight, size)
        is_held = False
        try:
            async with self._writing:
                is_held = True
                if size > MAX_COMPRESSED_BYTES:
                    context.disable_next_message_compression()
                self._unread_until = self._loop.time() + read_timeout(self._stall_s, size)
                try:
                    await context.write(data)
                    is_held = False
                finally:
                    self._unread_until = None
        finally:
            # gRPC holds a message that it could not write, even if it reports that a call which the server ended is
            # done.
            if not is_held:
                self._admission.count(in_flight, -counted)
            elif self._cause is None:
                when_done(context, lambda _: self._admission.count(in_flight, -counted))
            else:
                # Ask for the peer now: gRPC crashes if asked when the call is over.
                self._loop.call_later(_CLOSE_AFTER_STALLS * self._stall_s, self._close_unread, context.peer(), counted)

    def _check(self) -> None:
        """Ends the stream if its client does not read, or if its credential is no longer valid."""
        self._next_check = self._loop.call_later(self._check_every_s, self._check)
        try:
            self._authenticator.check_still_valid(self.caller.principal)
            if self._unread_until is not None and self._loop.time() > self._unread_until:
                raise error(
                    errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
                    f"an answer on the stream was not read within {self._stall_s:g} s (--stall-s), "
                    "and a second more for each MiB",
                )
        except GradruleError as cause:
            if self._cause is None:
                self._cause = cause
                self._serving.cancel()

    def _close_unread(self, peer: str, size: int) -> None:
        close_connection(peer)
        self._admission.count(self.caller.tenant.in_flight, -size)
