"""Describes an authenticated caller, and the errors for callers without the rights that they need."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.registry.store import DEFAULT_TENANT

MAX_TENANT = 128


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


def check_tenant(name: str) -> str:
    """Returns `name` if it is a valid name of a tenant, else raises `ValueError`."""
    if not 1 <= len(name) <= MAX_TENANT or not name.isprintable() or name != name.strip():
        raise ValueError(f"a tenant's name is 1 to {MAX_TENANT} printable characters, not {name[: MAX_TENANT + 1]!r}")
    return name


def unauthenticated() -> GradruleError:
    """Returns UNAUTHENTICATED. The message is always the same, so it tells an attacker nothing about a credential."""
    return error(
        errors_pb2.ERROR_REASON_UNAUTHENTICATED,
        "the server wants a valid credential with each call: a bearer token, or a client certificate, as it is set up",
    )


def denied() -> GradruleError:
    """Returns PERMISSION_DENIED, always with the same message."""
    return error(
        errors_pb2.ERROR_REASON_PERMISSION_DENIED, "the credential does not allow this; an administrator's does"
    )


def require_admin(principal: Principal) -> None:
    """Raises PERMISSION_DENIED unless the principal is an administrator."""
    if not principal.is_admin:
        raise denied()
