"""Which handler takes a call, and which calls are refused before their request is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeAlias

import grpc

from gradrule_server.errors import GradruleError
from gradrule_server.front.calls import Context
from gradrule_server.front.identity import Identity
from gradrule_server.front.outcomes import abort, observed_of
from gradrule_server.identity import ANONYMOUS, Principal
from gradrule_server.operations.observer import Observer

Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
Make: TypeAlias = "Callable[[Principal | None], Handler]"
"""Makes the handler of a caller, who is None where the connection tells who it is."""

# A call that its client resets meanwhile is cancelled before it is answered: grpc.aio never frees a status that it
# cannot send, some 300 bytes for each call.
_REFUSAL_DELAY_S = 0.005


class Service(grpc.GenericRpcHandler):
    """Finds the handler of a call, and refuses callers before the request is read where its metadata tells enough."""

    def __init__(
        self,
        identity: Identity,
        observer: Observer,
        makes: Mapping[str, Make],
    ) -> None:
        self._identity = identity
        self._observer = observer
        self._makes = makes
        self._open = {path: make(ANONYMOUS) for path, make in makes.items()} if identity.is_open else {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        path = handler_call_details.method
        found = self._open.get(path)
        if found is not None:
            return found
        make = self._makes.get(path)
        if make is None:
            return None
        try:
            known = self._identity.of_metadata(handler_call_details.invocation_metadata)
        except GradruleError as cause:
            return _refusing(self._observer, path, cause)
        return make(known)


def _refusing(observer: Observer, path: str, cause: GradruleError) -> Handler:
    """Ends a call of any form without reading its request."""

    async def refuse(_: AsyncIterator[bytes], context: Context) -> None:
        await asyncio.sleep(_REFUSAL_DELAY_S)
        observed = observed_of(observer, path.rpartition(".")[2], context)
        try:
            with observed:
                raise cause
        except GradruleError:
            await abort(context, cause, observed.request)

    return grpc.stream_stream_rpc_method_handler(refuse)
