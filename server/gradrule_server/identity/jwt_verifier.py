"""Verifies JSON Web Tokens: their signature, issuer, audience and times.

Each key is used with one algorithm only (RS256, ES256 or EdDSA), so a token cannot choose a weaker one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
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

from gradrule_server.errors import CannotStartError
from gradrule_server.identity.principal import Principal, check_tenant
from gradrule_server.identity.watched_file import WatchedFile

_log = logging.getLogger(__name__)

_LEEWAY_S = 10.0
_MIN_RSA_BITS = 2048
# Number of valid tokens that are not verified again.
_CACHE_SIZE = 4096
_MAX_TOKEN_LENGTH = 16 * 1024
_MAX_KEY_ID_SHOWN = 80
# The last second of the year 9999: `datetime` can show no later time.
_LATEST_TIME = 253_402_300_799
# What PyJWT raises for malformed tokens. Which of these it converts to its own errors depends on its version.
_MALFORMED = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)

_PublicKey: TypeAlias = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey


class JwtKeyError(CannotStartError):
    """A file of keys cannot be used; the message says which file and why."""


class _InvalidTokenError(Exception):
    """A token is not valid for this server."""


@dataclass(frozen=True, slots=True)
class _Key:
    """A public key with the only algorithm that it is used with."""

    key: _PublicKey
    algorithm: str
    id: str
    fingerprint: bytes


class JwtVerifier:
    """Verifies JSON Web Tokens and finds their principals. Safe to use from several threads.

    Args:
        key: A file of public keys in PEM; `refresh` reads it again.
        jwks: A file with a JSON Web Key Set; `refresh` reads it again.
        issuer: The required value of the claim `iss`.
        audience: A value that the claim `aud` must hold.
        claim: The claim that names the tenant.
        admins: Tenants whose tokens belong to administrators.

    Raises:
        JwtKeyError: A file of keys cannot be used.
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
        # Exceptions are not cached, so invalid tokens take no room.
        self._verify_cached = functools.lru_cache(_CACHE_SIZE)(self._verify)

    def find(self, text: str) -> Principal | None:
        """Returns the token's principal; None if the token is not valid for this server."""
        if text.count(".") != 2 or len(text) > _MAX_TOKEN_LENGTH:
            return None
        try:
            principal = self._verify_cached(text)
        except _InvalidTokenError:
            return None
        return principal if self.is_still_valid(principal) else None

    def refresh(self) -> None:
        """Reads the files of keys that have changed. Blocks."""
        for file in self._files:
            file.refresh()

    def is_still_valid(self, principal: Principal) -> bool:
        """Returns whether a principal that `find` returned is unexpired and its signing key is still in the files."""
        return not principal.is_expired and any(
            key.fingerprint == principal.signer for file in self._files for key in file.value()
        )

    def _verify(self, text: str) -> Principal:
        """Returns the token's principal. Raises `_InvalidTokenError` for a token that no key signed for this server."""
        try:
            header = jwt.get_unverified_header(text)
        except _MALFORMED:
            raise _InvalidTokenError from None
        algorithm, key_id = header.get("alg"), header.get("kid", "")
        for file in self._files:
            for key in file.value():
                if key.algorithm == algorithm and (not key.id or not key_id or key.id == key_id):
                    claims = self._verified_claims(text, key)
                    if claims is not None:
                        return self._principal(claims, key)
        raise _InvalidTokenError

    def _verified_claims(self, text: str, key: _Key) -> dict[str, Any] | None:
        """Returns the claims of a token that this key signed for this server; None for others."""
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

    def _principal(self, claims: dict[str, Any], key: _Key) -> Principal:
        tenant = claims[self._claim]
        try:
            check_tenant(tenant if isinstance(tenant, str) else "")
        except ValueError:
            raise _InvalidTokenError from None
        if not all(_is_time(claims[name]) for name in ("exp", "nbf", "iat") if name in claims):
            raise _InvalidTokenError
        return Principal(tenant, tenant in self._admins, float(claims["exp"]) + _LEEWAY_S, signer=key.fingerprint)


def _is_time(value: object) -> bool:
    """Returns whether a claim is a valid time of RFC 7519: a number of seconds since 1970."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LATEST_TIME


def _read_pem(path: Path) -> Sequence[_Key]:
    data = _read_bytes(path)
    end = b"-----END PUBLIC KEY-----"
    parts = [part + end for part in data.split(end)[:-1]]
    if not parts:
        raise JwtKeyError(f"{path} holds no public key in PEM (-----BEGIN PUBLIC KEY-----)")
    try:
        return [_with_algorithm(load_pem_public_key(part.lstrip())) for part in parts]
    except (ValueError, UnsupportedAlgorithm) as cause:
        raise JwtKeyError(f"{path} holds an unusable public key: {cause}") from cause


def _read_jwks(path: Path) -> Sequence[_Key]:
    try:
        # Key sets also hold keys for other uses, such as encryption.
        entries = [entry for entry in json.loads(_read_bytes(path))["keys"] if entry.get("use", "sig") == "sig"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise JwtKeyError(f"{path} holds no valid JSON Web Key Set: {cause}") from cause
    # Skip keys of unsupported kinds: an issuer may publish them for other services.
    found: list[_Key] = []
    skipped: list[str] = []
    for entry in entries:
        key_id = str(entry.get("kid", ""))
        try:
            found.append(_with_algorithm(jwt.PyJWK(entry).key, key_id))
        except (ValueError, KeyError, TypeError, AttributeError, UnsupportedAlgorithm, jwt.PyJWTError) as cause:
            skipped.append(f"{key_id[:_MAX_KEY_ID_SHOWN]!r} ({cause})")
    if not found:
        why = f"; unusable: {', '.join(skipped)}" if skipped else ""
        raise JwtKeyError(f"{path} holds no usable key for signatures{why}")
    if skipped:
        _log.warning("these keys of %s are not used: %s", path, ", ".join(skipped))
    return found


def _with_algorithm(key: object, key_id: str = "") -> _Key:
    """Returns the key with its algorithm. Raises `ValueError` for keys of unsupported kinds."""
    if isinstance(key, RSAPublicKey) and key.key_size >= _MIN_RSA_BITS:
        return _Key(key, "RS256", key_id, _fingerprint(key))
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return _Key(key, "ES256", key_id, _fingerprint(key))
    if isinstance(key, Ed25519PublicKey):
        return _Key(key, "EdDSA", key_id, _fingerprint(key))
    raise ValueError(
        f"unsupported kind of key: public keys must be RSA of {_MIN_RSA_BITS} bits or more, P-256 or Ed25519"
    )


def _fingerprint(key: _PublicKey) -> bytes:
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise JwtKeyError(f"the file of keys {path} cannot be read: {cause.strerror or cause}") from cause
