"""All kinds of credentials that a server takes, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradrule_server.identity.certificates import ClientCertificates
from gradrule_server.identity.jwts import Jwts
from gradrule_server.identity.principal import OPEN, Principal
from gradrule_server.identity.tokens import Tokens

_SCHEME = "bearer "


@dataclass(frozen=True)
class Credentials:
    """What a server asks of its callers. Without anything, everybody is `OPEN`.

    Where tokens are taken, of either kind, each call needs one, and it names the tenant; a certificate then only opens
    the connection. `certificates`: where none are taken, the client's certificate names the tenant.
    """

    tokens: Tokens | None = None
    jwts: Jwts | None = None
    certificates: ClientCertificates | None = None

    @property
    def takes_tokens(self) -> bool:
        return self.tokens is not None or self.jwts is not None

    @property
    def is_open(self) -> bool:
        """Whether everybody may come."""
        return not self.takes_tokens and self.certificates is None

    def of_authorization(self, values: Sequence[str]) -> Principal | None:
        """Who sent these `authorization` headers; None where they are nobody's."""
        if len(values) != 1 or values[0][: len(_SCHEME)].lower() != _SCHEME:
            return None
        text = values[0][len(_SCHEME) :].strip()
        found = None if self.tokens is None else self.tokens.find(text)
        return self.jwts.find(text) if found is None and self.jwts is not None else found

    def of_certificate(self, pem: bytes) -> Principal | None:
        """Whose certificate this is; None where it names no tenant."""
        return None if self.certificates is None else self.certificates.find(pem)

    def refresh(self) -> None:
        """Looks at all files now, and reads those that changed. Blocking."""
        for source in (self.tokens, self.jwts):
            if source is not None:
                source.refresh()

    def still_holds(self, principal: Principal) -> bool:
        """Whether one who came before may still stay: a stream may outlive what opened it."""
        if principal is OPEN:
            return True
        if principal.key and self.tokens is not None:
            return self.tokens.still_holds(principal)
        if principal.signer and self.jwts is not None:
            return self.jwts.still_holds(principal)
        return not principal.is_expired
