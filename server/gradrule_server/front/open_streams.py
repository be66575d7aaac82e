"""Serves bidirectional streams, and ends those whose client does not read or whose credential is withdrawn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.admission import Admission
from gradrule_server.front.authentication import CallerAuthenticator
from gradrule_server.front.calls import MAX_COMPRESSED_BYTES, Caller, Context, StreamMethod, when_done
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.sockets import close_connection
from gradrule_server.front.time_limits import IntervalChecks, WatchedWriter

# The connection of an ended stream is closed after this many times `stall_s`, if its last message is still unread.
_CLOSE_AFTER_STALLS = 2


class OpenStreams:
    """Serves streams as long as their clients read and their credentials are valid.

    Args:
        authenticator: checks the credentials again.
        admission: counts unread answers.
        connections: counts bytes of unfinished messages.
        stall_s: seconds that an answer may stay unread, see `time_limits.read_timeout`.
        recheck_s: seconds between two checks of the credential that opened a stream.
    """

    def __init__(
        self,
        authenticator: CallerAuthenticator,
        admission: Admission,
        connections: ConnectionWatch,
        stall_s: float,
        recheck_s: float,
    ) -> None:
        self._authenticator = authenticator
        self._connections = connections
        self._admission = admission
        self._stall_s = stall_s
        self._credential_checks = IntervalChecks(recheck_s)

    async def serve(
        self, method: StreamMethod, caller: Caller, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        """Runs the method of a stream until it returns.

        DEADLINE_EXCEEDED where the client does not read, UNAUTHENTICATED where the credential has been withdrawn.
        """
        causes: list[GradruleError] = []
        in_flight = caller.tenant.in_flight

        def end(cause: GradruleError) -> None:
            if not causes:
                causes.append(cause)
                serving.cancel()

        def on_stall() -> None:
            end(
                error(
                    errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
                    f"an answer on the stream was not read within {self._stall_s:g} s (--stall-s), "
                    "and a second more for each MiB",
                )
            )

        def check_credential() -> None:
            try:
                self._authenticator.check_still_valid(caller.principal)
            except GradruleError as cause:
                end(cause)

        messages = self._connections.get(context.peer()).messages(requests)

        async def authenticated_messages() -> AsyncIterator[bytes]:
            async for raw in messages:
                self._authenticator.check_still_valid(caller.principal)
                yield raw

        async def write(data: bytes) -> None:
            size = len(data)
            self._admission.adjust_bytes(in_flight, size)
            if size > MAX_COMPRESSED_BYTES:
                context.disable_next_message_compression()
            try:
                await context.write(data)
            except BaseException:
                # gRPC still holds the message, even if it reports that a call which the server ended is done.
                if causes:
                    # Ask for the peer now: gRPC crashes if asked when the call is over.
                    loop = asyncio.get_running_loop()
                    loop.call_later(_CLOSE_AFTER_STALLS * self._stall_s, close_unread, context.peer(), size)
                else:
                    when_done(context, lambda _: self._admission.adjust_bytes(in_flight, -size))
                raise
            self._admission.adjust_bytes(in_flight, -size)

        def close_unread(peer: str, size: int) -> None:
            close_connection(peer)
            self._admission.adjust_bytes(in_flight, -size)

        writer = WatchedWriter(write, self._stall_s, on_stall)
        serving = asyncio.ensure_future(method(caller, authenticated_messages(), writer.write))
        self._credential_checks.add(check_credential)
        try:
            await serving
        except asyncio.CancelledError:
            if not causes:
                raise
            raise causes[0] from None
        finally:
            self._credential_checks.discard(check_credential)
            writer.close()
