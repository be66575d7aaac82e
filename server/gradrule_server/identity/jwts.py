"""JSON Web Tokens: signed by somebody whose public keys the server was given, for this server, and not outdated.

Each key stands for one algorithm (RS256, ES256 or EdDSA), so no token chooses how it is checked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from gradrule_server.identity.principal import Principal, check_tenant
from gradrule_server.identity.watched import WatchedFile

_log = logging.getLogger(__name__)

_LEEWAY_S = 10.0
_MIN_RSA_BITS = 2048
# What tokens that were found good say is not read again for so long.
_REMEMBERED_S = 60.0
_MAX_REMEMBERED = 4096
_MAX_LENGTH = 16 * 1024
_SHOWN = 80
# The last second of the year 9999: no later one can be shown as a time.
_LATEST = 253_402_300_799
# What PyJWT raises about a token that is none; which of these it turns into its own errors differs by its version.
_MALFORMED = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)

_PublicKey: TypeAlias = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


class JwtKeyError(Exception):
    """A file of keys that cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class _Key:
    key: _PublicKey
    algorithm: str
    id: str
    fingerprint: bytes


class Jwts:
    """Checks JSON Web Tokens. `JwtKeyError` where the keys cannot be used.

    key: a file with public keys in PEM; jwks: one with a JSON Web Key Set; both are read again by `refresh`.
    issuer, audience: what `iss` is, and what `aud` holds. claim: which claim names the tenant. admins: tenants whose
    tokens are administrators'.
    """

    def __init__(
        self,
        *,
        key: Path | None,
        jwks: Path | None,
        issuer: str,
        audience: str,
        claim: str,
        admins: frozenset[str] = frozenset(),
    ) -> None:
        self._files: list[WatchedFile[Sequence[_Key]]] = []
        if key is not None:
            self._files.append(WatchedFile(key, _read_pem, JwtKeyError, fallback=()))
        if jwks is not None:
            self._files.append(WatchedFile(jwks, _read_jwks, JwtKeyError, fallback=()))
        self._issuer = issuer
        self._audience = audience
        self._claim = claim
        self._admins = admins
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, tuple[float, Principal]] = OrderedDict()

    def find(self, text: str) -> Principal | None:
        """Whose token it is; None where it is none, or none for this server."""
        if text.count(".") != 2 or len(text) > _MAX_LENGTH:
            return None
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        now = time.monotonic()
        with self._lock:
            until, known = self._found.get(digest, (0.0, None))
        if known is not None and now < until:
            return known if self.still_holds(known) else None
        principal = self._check(text)
        if principal is not None:
            with self._lock:
                self._found[digest] = (now + _REMEMBERED_S, principal)
                self._found.move_to_end(digest)
                while len(self._found) > _MAX_REMEMBERED:
                    self._found.popitem(last=False)
        return principal

    def refresh(self) -> None:
        """Looks at the files now, and reads those that changed. Blocking."""
        for file in self._files:
            file.refresh()

    def still_holds(self, principal: Principal) -> bool:
        """Whether a principal that `find` gave is one still: neither it nor the key that signed it is outdated."""
        return not principal.is_expired and any(
            key.fingerprint == principal.signer for file in self._files for key in file.value()
        )

    def _check(self, text: str) -> Principal | None:
        try:
            header = jwt.get_unverified_header(text)
        except _MALFORMED:
            return None
        algorithm, key_id = header.get("alg"), header.get("kid", "")
        for file in self._files:
            for key in file.value():
                if key.algorithm == algorithm and (not key.id or not key_id or key.id == key_id):
                    found = self._claims(text, key)
                    if found is not None:
                        return self._principal(found, key)
        return None

    def _claims(self, text: str, key: _Key) -> dict[str, Any] | None:
        try:
            return jwt.decode(
                text,
                key.key,
                algorithms=[key.algorithm],
                issuer=self._issuer,
                audience=self._audience,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud", self._claim]},
            )
        except _MALFORMED:
            return None

    def _principal(self, claims: dict[str, Any], key: _Key) -> Principal | None:
        tenant = claims[self._claim]
        try:
            check_tenant(tenant if isinstance(tenant, str) else "")
        except ValueError:
            return None
        if not all(_is_time(claims[name]) for name in ("exp", "nbf", "iat") if name in claims):
            return None
        return Principal(tenant, tenant in self._admins, float(claims["exp"]) + _LEEWAY_S, signer=key.fingerprint)


def _is_time(value: object) -> bool:
    """Whether a claim is a time as RFC 7519 has them: a number of seconds, and one that there can be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LATEST


def _read_pem(path: Path) -> Sequence[_Key]:
    data = _bytes(path)
    end = b"-----END PUBLIC KEY-----"
    parts = [part + end for part in data.split(end)[:-1]]
    if not parts:
        raise JwtKeyError(f"{path} holds no public key in PEM (-----BEGIN PUBLIC KEY-----)")
    try:
        return [_usable(load_pem_public_key(part.lstrip())) for part in parts]
    except (ValueError, UnsupportedAlgorithm) as cause:
        raise JwtKeyError(f"{path} holds a public key that is of no use: {cause}") from cause


def _read_jwks(path: Path) -> Sequence[_Key]:
    try:
        # Keys for other uses than signing stand in such sets too.
        entries = [entry for entry in json.loads(_bytes(path))["keys"] if entry.get("use", "sig") == "sig"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise JwtKeyError(f"{path} holds no JSON Web Key Set that can be read: {cause}") from cause
    # Whoever signs tokens may have keys of more kinds than these, and those of another are no fault of the set.
    found: list[_Key] = []
    skipped: list[str] = []
    for entry in entries:
        key_id = str(entry.get("kid", ""))
        try:
            found.append(_usable(jwt.PyJWK(entry).key, key_id))
        except (ValueError, KeyError, TypeError, AttributeError, UnsupportedAlgorithm, jwt.PyJWTError) as cause:
            skipped.append(f"{key_id[:_SHOWN]!r} ({cause})")
    if not found:
        why = f"; of no use are {', '.join(skipped)}" if skipped else ""
        raise JwtKeyError(f"{path} holds no key for signing that is taken{why}")
    if skipped:
        _log.warning("tokens are not checked with these keys of %s: %s", path, ", ".join(skipped))
    return found


def _usable(key: object, key_id: str = "") -> _Key:
    """The key with its algorithm. `ValueError` where it is of a kind that is not taken."""
    if isinstance(key, RSAPublicKey) and key.key_size >= _MIN_RSA_BITS:
        return _Key(key, "RS256", key_id, _fingerprint(key))
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return _Key(key, "ES256", key_id, _fingerprint(key))
    if isinstance(key, Ed25519PublicKey):
        return _Key(key, "EdDSA", key_id, _fingerprint(key))
    raise ValueError(
        f"a key of a kind that is not taken: public keys are RSA of {_MIN_RSA_BITS} bits or more, P-256 or Ed25519"
    )


def _fingerprint(key: _PublicKey) -> bytes:
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise JwtKeyError(f"the file of keys {path} cannot be read: {cause.strerror or cause}") from cause
