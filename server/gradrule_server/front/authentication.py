"""Finds the handler of a call and authenticates its caller, if possible before the request is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, TypeAlias

import grpc

from gradrule_server.errors import GradruleError
from gradrule_server.front.calls import Context, abort, observe_call
from gradrule_server.identity import ANONYMOUS, Authenticator, Principal, unauthenticated
from gradrule_server.operations.request_record import Observer

Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
CreateHandler: TypeAlias = "Callable[[Principal | None], Handler]"
"""Creates the handler of a call, given its principal; None: it is read from the client's certificate."""

_AUTHORIZATION = "authorization"
# The certificate itself: gRPC gives its names without their types, and cuts them at a zero byte.
_CERTIFICATE = "x509_pem_cert"
# Lets gRPC cancel a call whose client resets it meanwhile: grpc.aio never frees a status that it cannot send, some 300
# bytes for each call.
_REFUSAL_DELAY_S = 0.005


class CallerAuthenticator:
    """Finds the principal of a call from its metadata or its connection."""

    def __init__(self, credentials: Authenticator) -> None:
        self._credentials = credentials
        self.is_open = credentials.is_open
        """Whether the server asks for no credentials."""

    def from_metadata(self, metadata: Iterable[Any]) -> Principal | None:
        """Returns the principal that the metadata names; None where only the connection shows it.

        Needs nothing else of the call. UNAUTHENTICATED.
        """
        if self.is_open:
            return ANONYMOUS
        if not self._credentials.takes_tokens:
            return None
        values = [value for key, value in metadata if key == _AUTHORIZATION and isinstance(value, str)]
        principal = self._credentials.from_authorization(values)
        if principal is None:
            raise unauthenticated()
        return principal

    def from_connection(self, context: Context) -> Principal:
        """Returns the principal of the client's certificate; UNAUTHENTICATED."""
        auth_context: Mapping[str, Iterable[bytes]] = context.auth_context()
        certificates = list(auth_context.get(_CERTIFICATE, ()))
        principal = self._credentials.from_certificate(certificates[0]) if len(certificates) == 1 else None
        if principal is None:
            raise unauthenticated()
        return principal

    def check_still_valid(self, principal: Principal) -> None:
        """Raises UNAUTHENTICATED where a credential that was accepted before has been withdrawn."""
        if not self._credentials.is_still_valid(principal):
            raise unauthenticated()


class RpcService(grpc.GenericRpcHandler):
    """Finds the handler of each call of one gRPC service by the path of its method.

    Refuses callers before their request is read, where the metadata is enough for that.
    """

    def __init__(
        self, authenticator: CallerAuthenticator, observer: Observer, create_handlers: Mapping[str, CreateHandler]
    ) -> None:
        self._authenticator = authenticator
        self._observer = observer
        self._create_handlers = create_handlers
        self._open_handlers = (
            {path: create(ANONYMOUS) for path, create in create_handlers.items()} if authenticator.is_open else {}
        )

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Returns the handler of a call; None where this service has no such method. gRPC calls this."""
        path = handler_call_details.method
        handler = self._open_handlers.get(path)
        if handler is not None:
            return handler
        create = self._create_handlers.get(path)
        if create is None:
            return None
        try:
            principal = self._authenticator.from_metadata(handler_call_details.invocation_metadata)
        except GradruleError as cause:
            return _refuse(self._observer, path, cause)
        return create(principal)


def _refuse(observer: Observer, path: str, cause: GradruleError) -> Handler:
    """Returns a handler that ends a call of any kind without reading its request."""

    async def refuse(_: AsyncIterator[bytes], context: Context) -> None:
        await asyncio.sleep(_REFUSAL_DELAY_S)
        observed = observe_call(observer, path.rpartition(".")[2], context)
        try:
            with observed:
                raise cause
        except GradruleError:
            await abort(context, cause, observed.request)

    return grpc.stream_stream_rpc_method_handler(refuse)
