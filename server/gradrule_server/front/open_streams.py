"""Streams that are open: what ends one other than its method does, and what its answers count for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.front.admission import Admission
from gradrule_server.front.calls import Caller, Context, StreamMethod
from gradrule_server.front.connections import ConnectionWatch
from gradrule_server.front.cutting import cut
from gradrule_server.front.identity import Identity, Recheck
from gradrule_server.front.outcomes import MAX_COMPRESSED_BYTES, when_done
from gradrule_server.front.rounds import Rounds
from gradrule_server.front.stalls import WatchedWriter

# So many times the patience that a stream's end gets to be read, before the connection is closed.
_LAST = 2


class OpenStreams:
    """Serves streams for as long as their clients read and their credentials hold.

    `stall_s`: for so long an answer may wait to be read, see `stalls.patience`. `recheck_s`: between two looks at
    whether the credential that opened a stream still holds.
    """

    def __init__(
        self,
        identity: Identity,
        admission: Admission,
        connections: ConnectionWatch,
        stall_s: float,
        recheck_s: float,
    ) -> None:
        self._identity = identity
        self._connections = connections
        self._admission = admission
        self._stall_s = stall_s
        self._rechecks = Rounds(recheck_s)

    async def serve(
        self, method: StreamMethod, caller: Caller, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        """Serves a stream until it ends, its client has not read for too long (DEADLINE_EXCEEDED), or the credential
        that opened it holds no longer (UNAUTHENTICATED).
        """
        causes: list[GradruleError] = []
        share = caller.tenant.share

        def end(cause: GradruleError) -> None:
            if not causes:
                causes.append(cause)
                serving.cancel()

        def stalled() -> None:
            end(
                error(
                    errors_pb2.ERROR_REASON_DEADLINE_EXCEEDED,
                    f"an answer on the stream was not read within {self._stall_s:g} s (--stall-s), "
                    "and a second more for each MiB",
                )
            )

        messages = self._connections.of(context.peer()).messages(requests)

        async def checked() -> AsyncIterator[bytes]:
            async for raw in messages:
                self._identity.check(caller.principal)
                yield raw

        async def write(data: bytes) -> None:
            size = len(data)
            self._admission.adjust(share, size)
            if size > MAX_COMPRESSED_BYTES:
                context.disable_next_message_compression()
            try:
                await context.write(data)
            except BaseException:
                # It is on its way all the same, and gRPC is done with a call that we end though it has not sent it.
                if causes:
                    # gRPC crashes where it is asked for the peer of a call that is over.
                    loop = asyncio.get_running_loop()
                    loop.call_later(_LAST * self._stall_s, cut_off, context.peer(), size)
                else:
                    when_done(context, lambda _: self._admission.adjust(share, -size))
                raise
            self._admission.adjust(share, -size)

        def cut_off(peer: str, size: int) -> None:
            cut(peer)
            self._admission.adjust(share, -size)

        writer = WatchedWriter(write, self._stall_s, stalled)
        serving = asyncio.ensure_future(method(caller, checked(), writer.write))
        recheck = Recheck(self._identity, caller.principal, end)
        self._rechecks.add(recheck)
        try:
            await serving
        except asyncio.CancelledError:
            if not causes:
                raise
            raise causes[0] from None
        finally:
            self._rechecks.discard(recheck)
            writer.close()
