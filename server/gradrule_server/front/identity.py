"""From what gRPC tells of a caller to a principal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradrule_server.errors import GradruleError
from gradrule_server.front.calls import Context
from gradrule_server.identity import ANONYMOUS, Authenticator, Principal, unauthenticated

_AUTHORIZATION = "authorization"
# The certificate itself: gRPC gives its names without their types, and ends them at a zero byte.
_CERTIFICATE = "x509_pem_cert"


class Identity:
    """Tells who calls, as far as the server asks."""

    def __init__(self, credentials: Authenticator) -> None:
        self._credentials = credentials
        self.is_open = credentials.is_open

    def of_metadata(self, metadata: Iterable[Any]) -> Principal | None:
        """Who sent this metadata, before anything else of the call is read; None where the connection tells.

        UNAUTHENTICATED.
        """
        if self.is_open:
            return ANONYMOUS
        if not self._credentials.takes_tokens:
            return None
        values = [value for key, value in metadata if key == _AUTHORIZATION and isinstance(value, str)]
        found = self._credentials.from_authorization(values)
        if found is None:
            raise unauthenticated()
        return found

    def of_connection(self, context: Context) -> Principal:
        """Whose certificate opened the connection; UNAUTHENTICATED."""
        told: Mapping[str, Iterable[bytes]] = context.auth_context()
        certificates = list(told.get(_CERTIFICATE, ()))
        found = self._credentials.from_certificate(certificates[0]) if len(certificates) == 1 else None
        if found is None:
            raise unauthenticated()
        return found

    def check(self, principal: Principal) -> None:
        """UNAUTHENTICATED where the credential of one who came before holds no longer."""
        if not self._credentials.is_still_valid(principal):
            raise unauthenticated()


class Recheck:
    """A stream whose credential may be taken back: `end` it then."""

    __slots__ = ("_end", "_identity", "_principal")

    def __init__(self, identity: Identity, principal: Principal, end: Callable[[GradruleError], object]) -> None:
        self._identity = identity
        self._principal = principal
        self._end = end

    def look(self) -> None:
        try:
            self._identity.check(self._principal)
        except GradruleError as cause:
            self._end(cause)
