"""Tests that malformed JSON Web Tokens, from strangers or by an issuer's mistake, raise nothing."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from random import Random
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gradrule_server.identity.jwt_verifier import JwtVerifier


def keys(folder: Path, key: ec.EllipticCurvePrivateKey) -> JwtVerifier:
    """Takes tokens that this key signed."""
    (folder / "key").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return JwtVerifier(key=folder / "key", jwks=None, issuer="i", audience="a", claim="sub")


def encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).decode().rstrip("=")


def signed_token(key: Any, claims: bytes, header: bytes = b'{"alg": "ES256"}') -> str:
    """A token with these bytes, well signed."""
    signed = f"{encoded(header)}.{encoded(claims)}"
    signature = jwt.algorithms.ECAlgorithm(jwt.algorithms.ECAlgorithm.SHA256).sign(signed.encode(), key)
    return f"{signed}.{encoded(signature)}"


TIMES = [
    *(
        "9" * 4000,
        "-" + "9" * 4000,
        "9" * 5000,
        "1e400",
        "-1e400",
        "1e300",
        "1e12",
        str(10**15),
        "-1",
        "NaN",
        "Infinity",
    ),
    *("true", "null", '"1e9"', "[1]", "{}"),
]


@pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
@pytest.mark.parametrize("value", TIMES, ids=lambda value: str(value)[:8])
def test_invalid_time_makes_the_token_invalid(tmp_path: Path, claim: str, value: str) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    found = keys(tmp_path, key)
    now = int(time.time())
    claims = {
        "iss": '"i"',
        "aud": '"a"',
        "sub": '"ada"',
        "exp": str(now + 60),
        "nbf": str(now - 5),
        "iat": str(now - 5),
    }

    def text(changed: dict[str, str]) -> bytes:
        return ("{" + ",".join(f'"{name}": {what}' for name, what in (claims | changed).items()) + "}").encode()

    assert found.find(signed_token(key, text({}))) is not None
    assert found.find(signed_token(key, text({claim: value}))) is None


_HEADERS = [
    *(
        b'"kid": 7}',
        b'"kid": "' + b"9" * 4000 + b'"}',
        b'"crit": ["x"]}',
        b'"crit": 7}',
        b'"b64": false}',
        b'"typ": []}',
    ),
]


def test_malformed_tokens_raise_nothing(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    found = keys(tmp_path, key)
    random = Random(7)
    good = json.dumps({"iss": "i", "aud": "a", "sub": "ada", "exp": time.time() + 60}).encode()
    parts = [
        *(b"", b"null", b"7", b'"x"', b"{}", b"\xff\xfe", b"[" * 5000, b'{"a":' * 2000, good),
        *(b'{"alg": {}}', b'{"alg": null}', b'{"alg": "none"}', b'{"alg": ' + b"9" * 4500 + b"}"),
        *(b'{"alg": "ES256", ' + more for more in _HEADERS),
    ]
    for header in parts:
        for claims in parts:
            assert found.find(signed_token(key, claims, header)) is None or claims == good
            assert found.find(f"{encoded(header)}.{encoded(claims)}.") is None
    for name in ("iss", "aud", "sub", "jti"):
        values: tuple[Any, ...] = (7, None, [], {}, [[]], {"a": 1}, True, "x" * 200, "")
        for value in values:
            claims = json.dumps(json.loads(good) | {name: value}).encode()
            assert (found.find(signed_token(key, claims)) is not None) == (name == "jti" and isinstance(value, str))
    for _ in range(2000):
        junk = bytes(random.randrange(256) for _ in range(random.randrange(60))).decode("latin-1")
        assert (
            found.find(junk) is found.find(f"{junk}.{junk}.{junk}") is found.find(f"{encoded(good)}.{junk}.x") is None
        )
