"""Authenticates callers by all kinds of credentials that a server accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradrule_server.identity.certificates import ClientCertificates
from gradrule_server.identity.jwt_verifier import JwtVerifier
from gradrule_server.identity.principal import ANONYMOUS, Principal
from gradrule_server.identity.token_file import TokenFile

_SCHEME = "bearer "


@dataclass(frozen=True)
class Authenticator:
    """Finds the principal of a credential. Without any source of credentials, every caller is `ANONYMOUS`.

    If `tokens` or `jwts` is set, each call needs a token, which names the tenant; a client certificate then only
    secures the connection. Otherwise the client certificate names the tenant.

    Attributes:
        tokens: The file of bearer tokens.
        jwts: Verifies JSON Web Tokens.
        certificates: Reads the tenant from client certificates.
    """

    tokens: TokenFile | None = None
    jwts: JwtVerifier | None = None
    certificates: ClientCertificates | None = None

    @property
    def takes_tokens(self) -> bool:
        return self.tokens is not None or self.jwts is not None

    @property
    def is_open(self) -> bool:
        """Whether callers need no credentials."""
        return not self.takes_tokens and self.certificates is None

    def from_authorization(self, values: Sequence[str]) -> Principal | None:
        """Returns the principal of a call's `authorization` headers; None if they hold no valid token."""
        if len(values) != 1 or values[0][: len(_SCHEME)].lower() != _SCHEME:
            return None
        text = values[0][len(_SCHEME) :].strip()
        found = None if self.tokens is None else self.tokens.find(text)
        return self.jwts.find(text) if found is None and self.jwts is not None else found

    def from_certificate(self, pem: bytes) -> Principal | None:
        """Returns the principal of a client certificate; None if it names no tenant."""
        return None if self.certificates is None else self.certificates.find(pem)

    def refresh(self) -> None:
        """Reads all files that have changed. Blocks."""
        for source in (self.tokens, self.jwts):
            if source is not None:
                source.refresh()

    def is_still_valid(self, principal: Principal) -> bool:
        """Returns whether a principal's credential is still valid; long streams check this again and again."""
        if principal is ANONYMOUS:
            return True
        if principal.key and self.tokens is not None:
            return self.tokens.is_still_valid(principal)
        if principal.signer and self.jwts is not None:
            return self.jwts.is_still_valid(principal)
        return not principal.is_expired
