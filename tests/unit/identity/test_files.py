"""Files of tokens and of keys that cannot be used, and what is said of them; what a file's change brings."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from gradrule_server.identity import Credentials
from gradrule_server.identity.jwts import JwtKeyError, Jwts
from gradrule_server.identity.tokens import (
    TokenFileError,
    Tokens,
    add_token,
    hash_of,
    new_token,
    read_tokens,
    revoke_tokens,
)


def public(key: Any) -> bytes:
    found: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found


def jwts(folder: Path, pem: bytes | None = None, jwks: str | None = None, **words: Any) -> Jwts:
    files: dict[str, Path | None] = {"key": None, "jwks": None}
    for name, content in (("key", pem), ("jwks", None if jwks is None else jwks.encode())):
        if content is not None:
            files[name] = folder / name
            (folder / name).write_bytes(content)
    return Jwts(**files, **({"issuer": "i", "audience": "a", "claim": "sub"} | words))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("secret", "line 2"),
        ("[]", "expected a line like"),
        ('{"sha256": "00", "tenant": "a"}', "64 of 0-9 and a-f"),
        (json.dumps({"sha256": "0" * 64, "tenant": ""}), "tenant's name"),
        (json.dumps({"sha256": "0" * 64, "tenant": "a", "admin": "yes"}), "true or false"),
        (json.dumps({"sha256": "0" * 64, "tenant": "a", "expiry": "never"}), "unknown fields 'expiry'"),
        (json.dumps({"sha256": "0" * 64, "tenant": "a", "expires": "never"}), "line 2"),
        (json.dumps({"sha256": "f" * 64, "tenant": "b"}), "there twice"),
    ],
)
def test_lines_that_are_no_token(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(json.dumps({"sha256": "f" * 64, "tenant": "a"}) + "\n" + line + "\n")
    with pytest.raises(TokenFileError, match=why):
        Tokens(file)
    with pytest.raises(TokenFileError, match="cannot be read"):
        Tokens(tmp_path / "nowhere")


def test_a_token_is_found_until_it_expires_or_is_revoked(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    text, token = new_token("ada", is_admin=True)
    late, expired = new_token("ada", expires=time.time() - 1)
    for item in (token, expired):
        add_token(file, item)
    assert len(text) >= 46
    assert hash_of(text) in file.read_text()
    tokens = Tokens(file)
    principal = tokens.find(text)
    assert principal is not None
    assert (principal.tenant, principal.is_admin) == ("ada", True)
    assert tokens.find(late) is tokens.find("") is tokens.find(token.sha256) is tokens.find("\udcff") is None
    assert tokens.still_holds(principal)
    assert revoke_tokens(file, token.id) == [token]
    tokens.refresh()
    assert tokens.find(text) is None
    assert not tokens.still_holds(principal)
    assert [item.sha256 for item in read_tokens(file)] == [expired.sha256]


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, True),
        ({"admin": False}, False),
        ({"tenant": "grace"}, False),
        ({"expires": "2020-01-01T00:00:00Z"}, False),
        ({"expires": "2100-01-01T00:00:00Z"}, True),
    ],
    ids=str,
)
def test_a_token_that_means_less_than_it_did_holds_no_longer(
    tmp_path: Path, changed: dict[str, Any], holds: bool
) -> None:
    file = tmp_path / "tokens"
    text, token = new_token("ada", is_admin=True, expires=time.time() + 60)
    add_token(file, token)
    tokens = Tokens(file)
    principal = tokens.find(text)
    assert principal is not None
    file.write_text(json.dumps(json.loads(file.read_text()) | changed) + "\n# changed\n")
    tokens.refresh()
    assert Credentials(tokens=tokens).still_holds(principal) is holds


def test_a_web_token_holds_no_longer_than_its_key(tmp_path: Path) -> None:
    old, new = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    found = jwts(tmp_path, public(old) + public(new))
    text = jwt.encode({"iss": "i", "aud": "a", "exp": time.time() + 60, "sub": "ada"}, old, "ES256")
    principal = found.find(text)
    assert principal is not None
    (tmp_path / "key").write_bytes(public(new) + public(old))
    found.refresh()
    assert Credentials(jwts=found).still_holds(principal)
    assert found.find(text) == principal
    (tmp_path / "key").write_bytes(public(new))
    # As a server notices by itself: nothing is forgotten but the key.
    time.sleep(1.1)
    assert not Credentials(jwts=found).still_holds(principal)
    assert found.find(text) is None


def test_a_file_that_is_gone_or_broken_leaves_what_held(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens"
    text, token = new_token("ada")
    add_token(file, token)
    tokens = Tokens(file)
    for change in (lambda: file.write_text("nonsense"), file.unlink):
        change()
        tokens.refresh()
        assert tokens.find(text) is not None
    assert caplog.text.count("goes on holding") == 2


@pytest.mark.parametrize(
    ("pem", "why"),
    [
        (b"", "no public key in PEM"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "of no use"),
        (public(rsa.generate_private_key(65537, 1024)), "RSA of 2048 bits"),
        (public(ec.generate_private_key(ec.SECP384R1())), "P-256"),
        (public(ed448.Ed448PrivateKey.generate()), "Ed25519"),
    ],
    ids=["nothing", "nonsense", "short", "other curve", "other kind"],
)
def test_keys_that_are_not_taken(tmp_path: Path, pem: bytes, why: str) -> None:
    with pytest.raises(JwtKeyError, match=why):
        jwts(tmp_path, pem)


def test_a_private_key_is_not_taken(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(JwtKeyError, match="no public key"):
        jwts(tmp_path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@pytest.mark.parametrize(
    ("jwks", "why"),
    [
        ("", "can be read"),
        ("[]", "can be read"),
        ('{"keys": [7]}', "can be read"),
        ('{"keys": [{"kty": "EC", "kid": "curve"}]}', "'curve'"),
        ('{"keys": [{"kty": "none of these"}]}', "of no use"),
        ('{"keys": []}', "no key for signing"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"}]}', "kind that is not taken"),
    ],
)
def test_sets_of_keys_that_are_not_taken(tmp_path: Path, jwks: str, why: str) -> None:
    with pytest.raises(JwtKeyError, match=why):
        jwts(tmp_path, jwks=jwks)


def test_keys_of_other_kinds_do_not_hinder_those_of_the_set_that_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = ec.generate_private_key(ec.SECP256R1())
    other = ec.generate_private_key(ec.SECP384R1())
    curve = jwt.algorithms.ECAlgorithm
    keys = [
        curve.to_jwk(other.public_key(), as_dict=True) | {"kid": "other curve"},
        jwt.algorithms.RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key(), as_dict=True)
        | {"kid": "short"},
        {"kty": "AKP", "kid": "later kind"},
        {"kty": "EC", "crv": "P-256", "kid": "broken"},
        curve.to_jwk(good.public_key(), as_dict=True) | {"kid": "good"},
    ]
    found = jwts(tmp_path, jwks=json.dumps({"keys": keys}))
    claims = {"iss": "i", "aud": "a", "exp": time.time() + 60, "sub": "ada"}
    assert found.find(jwt.encode(claims, good, "ES256", {"kid": "good"})) is not None
    assert found.find(jwt.encode(claims, other, "ES384", {"kid": "other curve"})) is None
    assert all(repr(key["kid"]) in caplog.text for key in keys[:-1])
    assert "'good'" not in caplog.text
    with pytest.raises(JwtKeyError, match=r"'other curve'.*'short'"):
        jwts(tmp_path, jwks=json.dumps({"keys": keys[:-1]}))


def test_whose_web_tokens_are_administrators(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    found = jwts(tmp_path, public(key), claim="team", admins=frozenset({"ops"}))

    def principal(team: Any) -> Any:
        claims = {"iss": "i", "aud": ["a", "b"], "exp": time.time() + 60, "team": team}
        return found.find(jwt.encode(claims, key, "ES256"))

    assert (principal("ops").is_admin, principal("ada").is_admin) == (True, False)
    assert principal(["ops"]) is principal(7) is None
    expires_at = principal("ada").expires_at
    assert expires_at is not None
    assert expires_at < time.time() + 100


def test_a_web_token_that_was_found_good_ends_with_its_time_and_key(tmp_path: Path) -> None:
    old, new = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    found = jwts(tmp_path, public(old))
    text = jwt.encode({"iss": "i", "aud": "a", "exp": int(time.time()) - 8, "sub": "ada"}, old, "ES256")
    assert found.find(text) is not None
    time.sleep(2.1)
    assert found.find(text) is None
    text = jwt.encode({"iss": "i", "aud": "a", "exp": time.time() + 60, "sub": "ada"}, old, "ES256")
    assert found.find(text) is not None
    (tmp_path / "key").write_bytes(public(new))
    found.refresh()
    assert found.find(text) is None


def test_a_certificate_s_first_name_is_the_tenant() -> None:
    credentials = Credentials(by_certificate=True, admins=frozenset({"ops"}))
    ada = credentials.of_certificate(["spiffe://example/ada", "ada"])
    assert ada is not None
    assert (ada.tenant, ada.is_admin) == ("spiffe://example/ada", False)
    ops = credentials.of_certificate(["ops"])
    assert ops is not None
    assert ops.is_admin
    assert credentials.of_certificate([]) is credentials.of_certificate(["two\nlines"]) is None
