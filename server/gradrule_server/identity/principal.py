"""Finds the principal of a credential: the caller with tenant and rights, and the errors for missing rights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.registry.store import DEFAULT_TENANT

if TYPE_CHECKING:
    from gradrule_server.identity.certificates import ClientCertificates
    from gradrule_server.identity.jwt_verifier import JwtVerifier
    from gradrule_server.identity.token_file import TokenFile

MAX_TENANT = 128
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        tenant: The tenant whose rules, programs and blobs the caller uses.
        is_admin: Whether the caller is an administrator.
        expires_at: When the credential expires, in seconds since 1970; None: never.
        key: SHA-256 of the token, by which a revoked token is recognised; empty for other credentials.
        signer: Fingerprint of the key that signed a JSON Web Token, by which a removed key is recognised.
    """

    tenant: str
    is_admin: bool = False
    expires_at: float | None = None
    key: bytes = b""
    signer: bytes = b""

    @property
    def label(self) -> str:
        """The credential's name in logs: the first digits of its hash, with which nobody can authenticate."""
        return self.key[:6].hex()

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at


ANONYMOUS = Principal(DEFAULT_TENANT, is_admin=True)
"""The principal of every caller of a server that asks for no credentials."""


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
        text = values[0][len(_SCHEME) :].strip(" ")
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


def check_tenant(name: str) -> str:
    """Returns `name` if it is a valid name of a tenant, else raises `ValueError`."""
    if not 1 <= len(name) <= MAX_TENANT or not name.isprintable() or name != name.strip():
        raise ValueError(f"a tenant's name is 1 to {MAX_TENANT} printable characters, not {name[: MAX_TENANT + 1]!r}")
    return name


def unauthenticated() -> GradruleError:
    """Returns UNAUTHENTICATED. The message is always the same, so it tells an attacker nothing about a credential."""
    return error(
        errors_pb2.ERROR_REASON_UNAUTHENTICATED,
        "each call needs a valid credential: a bearer token or a client certificate, as the server's settings require",
    )


def require_admin(principal: Principal) -> None:
    """Raises PERMISSION_DENIED, always with the same message, unless the principal is an administrator."""
    if not principal.is_admin:
        raise error(
            errors_pb2.ERROR_REASON_PERMISSION_DENIED,
            "the credential has no administrator rights, which this needs",
        )
