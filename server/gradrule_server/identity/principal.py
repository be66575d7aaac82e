"""Principals, and how those are refused that are none."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error
from gradrule_server.registry.store import DEFAULT_TENANT

MAX_TENANT = 128


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. `tenant`: whose names are meant; `expires_at`: seconds since 1970 after which the credential is none.

    `key`: what the credential is known by, where it may be taken back; it tells nothing about the credential. `signer`:
    fingerprint of the key that signed it, where that one may be taken back.
    """

    tenant: str
    is_admin: bool = False
    expires_at: float | None = None
    key: bytes = b""
    signer: bytes = b""

    @property
    def label(self) -> str:
        """What logs call the credential: enough to find it, nothing to use it with."""
        return self.key[:6].hex()

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at


OPEN = Principal(DEFAULT_TENANT, is_admin=True)
"""Everybody, where a server asks for no credentials: whoever reaches it may do what it does."""


def check_tenant(name: str) -> str:
    """The name of a tenant; `ValueError` for what is none."""
    if not 1 <= len(name) <= MAX_TENANT or not name.isprintable() or name != name.strip():
        raise ValueError(f"a tenant's name is 1 to {MAX_TENANT} printable characters, not {name[: MAX_TENANT + 1]!r}")
    return name


def unauthenticated() -> GradruleError:
    """UNAUTHENTICATED, always in the same words: whoever tries credentials learns nothing about them."""
    return error(
        errors_pb2.ERROR_REASON_UNAUTHENTICATED,
        "the server wants a valid credential with each call: a bearer token, or a client certificate, as it is set up",
    )


def denied() -> GradruleError:
    """PERMISSION_DENIED, always in the same words."""
    return error(
        errors_pb2.ERROR_REASON_PERMISSION_DENIED, "the credential does not allow this; an administrator's does"
    )


def require_admin(principal: Principal) -> None:
    """PERMISSION_DENIED for all but administrators."""
    if not principal.is_admin:
        raise denied()
