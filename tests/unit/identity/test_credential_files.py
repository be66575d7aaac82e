"""Tests files of tokens and keys: what is refused, and what happens when a file changes."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from gradrule_server.identity import Authenticator
from gradrule_server.identity.jwt_verifier import JwtKeyError, JwtVerifier
from gradrule_server.identity.token_file import (
    TokenFile,
    TokenFileError,
    add_token,
    hash_token,
    new_token,
    read_tokens,
    revoke_tokens,
)
from gradrule_server.identity.watched_file import WatchedFile
from gradrule_server.registry.store import Store


def public(key: Any) -> bytes:
    found: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found


def jwts(folder: Path, pem: bytes | None = None, jwks: str | None = None, **words: Any) -> JwtVerifier:
    files: dict[str, Path | None] = {"key": None, "jwks": None}
    for name, content in (("key", pem), ("jwks", None if jwks is None else jwks.encode())):
        if content is not None:
            files[name] = folder / name
            (folder / name).write_bytes(content)
    return JwtVerifier(**files, **({"issuer": "i", "audience": "a", "claim": "sub"} | words))


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
        (json.dumps({"sha256": "f" * 64, "tenant": "b"}), "appears twice"),
    ],
)
def test_file_with_an_invalid_line_is_refused(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(json.dumps({"sha256": "f" * 64, "tenant": "a"}) + "\n" + line + "\n")
    with pytest.raises(TokenFileError, match=why):
        TokenFile(file)
    with pytest.raises(TokenFileError, match="cannot be read"):
        TokenFile(tmp_path / "nowhere")


@pytest.mark.parametrize("space", ["\xa0", "\t", "\u2003", "\u3000", "\x0b", " \xa0", "\n"])
def test_only_spaces_separate_the_scheme_from_the_token(tmp_path: Path, space: str) -> None:
    text, token = new_token("ada")
    add_token(tmp_path / "tokens", token)
    authenticator = Authenticator(tokens=TokenFile(tmp_path / "tokens"))
    for value in (f"Bearer {text}", f"bearer  {text} "):
        found = authenticator.from_authorization([value])
        assert found is not None and found.tenant == "ada"
    for value in (f"Bearer{space}{text}", f"Bearer {space}{text}", f"Bearer {text}{space}"):
        assert authenticator.from_authorization([value]) is None


def test_token_is_valid_until_it_expires_or_is_revoked(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    text, token = new_token("ada", is_admin=True)
    late, expired = new_token("ada", expires=time.time() - 1)
    for item in (token, expired):
        add_token(file, item)
    assert len(text) >= 46
    assert hash_token(text) in file.read_text()
    tokens = TokenFile(file)
    principal = tokens.find(text)
    assert principal is not None
    assert (principal.tenant, principal.is_admin) == ("ada", True)
    assert tokens.find(late) is tokens.find("") is tokens.find(token.sha256) is tokens.find("\udcff") is None
    assert tokens.is_still_valid(principal)
    assert revoke_tokens(file, token.id) == [token]
    tokens.refresh()
    assert tokens.find(text) is None
    assert not tokens.is_still_valid(principal)
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
def test_token_with_fewer_rights_or_another_tenant_ends_open_calls(
    tmp_path: Path, changed: dict[str, Any], holds: bool
) -> None:
    file = tmp_path / "tokens"
    text, token = new_token("ada", is_admin=True, expires=time.time() + 60)
    add_token(file, token)
    tokens = TokenFile(file)
    principal = tokens.find(text)
    assert principal is not None
    file.write_text(json.dumps(json.loads(file.read_text()) | changed) + "\n# changed\n")
    tokens.refresh()
    assert Authenticator(tokens=tokens).is_still_valid(principal) is holds


def test_json_web_token_is_invalid_once_its_key_is_removed(tmp_path: Path) -> None:
    old, new = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    found = jwts(tmp_path, public(old) + public(new))
    text = jwt.encode({"iss": "i", "aud": "a", "exp": time.time() + 60, "sub": "ada"}, old, "ES256")
    principal = found.find(text)
    assert principal is not None
    (tmp_path / "key").write_bytes(public(new) + public(old))
    found.refresh()
    assert Authenticator(jwts=found).is_still_valid(principal)
    assert found.find(text) == principal
    (tmp_path / "key").write_bytes(public(new))
    found.refresh()
    assert not Authenticator(jwts=found).is_still_valid(principal)
    assert found.find(text) is None


def test_invalid_lines_are_logged_and_ignored_after_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tokens"
    (kept, one), (broken, two), (twice, three) = (new_token("ada") for _ in range(3))
    for token in (one, two, three):
        add_token(file, token)
    tokens = TokenFile(file)
    deep = "[" * 100_000
    file.write_text(one.line() + two.line()[:-3] + "\n" + three.line() * 2 + deep + "\n" + "\N{BEL}\n")
    with file.open("ab") as raw:
        raw.write(b'{"sha256": "\xff"}\n')
    settle(file)
    tokens.refresh()
    assert tokens.find(kept) is not None
    # Neither of two lines for one token is used, and a line that is cut off may be about to be revoked.
    assert tokens.find(broken) is tokens.find(twice) is None
    for _ in range(5):
        tokens.refresh()
    warnings = [message for message in caplog.messages if "no valid tokens" in message]
    assert len(warnings) == 1
    assert warnings[0].startswith("5 lines are no valid tokens and are ignored: ")
    assert f"{file}, line 2: " in warnings[0]
    with pytest.raises(TokenFileError, match="line 2"):
        TokenFile(file)


def lose(file: Path) -> None:
    file.unlink()


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("change", [lose, replace_by_folder])
def test_credentials_of_an_unreadable_file_become_invalid_after_a_grace_period(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    file, key = tmp_path / "tokens", ec.generate_private_key(ec.SECP256R1())
    text, token = new_token("ada")
    add_token(file, token)
    signed = jwt.encode({"iss": "i", "aud": "a", "exp": time.time() + 600, "sub": "ada"}, key, "ES256")
    credentials = Authenticator(TokenFile(file), jwts(tmp_path, public(key)))
    assert credentials.tokens is not None
    assert credentials.jwts is not None
    principals = [credentials.tokens.find(text), credentials.jwts.find(signed)]
    content = file.read_bytes()
    for path in (file, tmp_path / "key"):
        change(path)
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for _ in range(3):
        credentials.refresh()
    assert [credentials.tokens.find(text), credentials.jwts.find(signed)] == principals
    clock[0] += 31
    for _ in range(3):
        credentials.refresh()
    assert credentials.tokens.find(text) is credentials.jwts.find(signed) is None
    assert not any(credentials.is_still_valid(principal) for principal in principals if principal is not None)
    assert caplog.text.count("the content that was read last stays valid for 30 s") == 2
    assert caplog.text.count("nothing in it is valid until it can be read") == 2
    clock[0] += 61
    credentials.refresh()
    assert caplog.text.count("nothing in it is valid until it can be read") == 4
    if file.is_dir():
        file.rmdir()
    file.write_bytes(content)
    credentials.refresh()
    assert credentials.tokens.find(text) == principals[0]


def test_file_that_becomes_readable_without_a_change_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tokens"
    text, token = new_token("ada")
    add_token(file, token)
    tokens = TokenFile(file)
    new, added = new_token("grace")
    add_token(file, added)
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    tokens.refresh()
    assert tokens.find(text) is not None
    assert tokens.find(new) is None
    monkeypatch.setattr(Path, "read_bytes", read)
    tokens.refresh()
    assert tokens.find(new) is not None


def settle(file: Path) -> None:
    """Makes a file one that was written a while ago."""
    long_ago = time.time() - 60
    os.utime(file, (long_ago, long_ago))


@pytest.mark.parametrize("partial", [0, 40, 150])
def test_token_stays_valid_while_its_file_is_written_in_place(tmp_path: Path, partial: int) -> None:
    file = tmp_path / "tokens"
    (kept, one), (removed, two), (added, three) = (new_token("ada") for _ in range(3))
    for token in (one, two):
        add_token(file, token)
    tokens = TokenFile(file)
    content = (three.line() + one.line()).encode()
    with file.open("wb", buffering=0) as raw:
        raw.write(content[:partial])
        tokens.refresh()
        # An unknown token makes the server read the file again.
        assert tokens.find("unknown") is None
        assert tokens.find(kept) is not None
        raw.write(content[partial:])
    tokens.refresh()
    assert tokens.find(kept) is not None
    assert tokens.find(added) is not None
    settle(file)
    tokens.refresh()
    assert tokens.find(removed) is None
    assert tokens.find(kept) is not None


def test_change_within_one_tick_of_the_clock_of_files_is_read(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    (first, one), (second, two) = new_token("ada"), new_token("ada")
    now = time.time_ns()
    file.write_text(one.line())
    settle(file)
    tokens = TokenFile(file)
    for token in (one, two):
        file.write_text(token.line())
        os.utime(file, ns=(now, now))
        tokens.refresh()
    assert tokens.find(second) is not None
    settle(file)
    tokens.refresh()
    assert tokens.find(first) is None


def test_token_stays_valid_if_its_file_is_written_in_place_right_after_it_was_replaced(tmp_path: Path) -> None:
    """The file is emptied between the look at the complete file and its reading."""
    path, new = tmp_path / "tokens", tmp_path / "new"
    path.write_text("a b")
    reads = 0

    def read(path: Path) -> frozenset[str]:
        nonlocal reads
        reads += 1
        if reads == 2:
            path.write_text("")
        return frozenset(path.read_text().split())

    file = WatchedFile[frozenset[str]](path, read, OSError, merge=frozenset.union)
    new.write_text("a b c")
    new.rename(path)
    file.refresh()
    assert file.value() == {"a", "b"}
    path.write_text("a c")
    settle(path)
    file.refresh()
    assert file.value() == {"a", "c"}


def test_valid_tokens_are_accepted_while_a_file_changes_in_every_way(tmp_path: Path) -> None:
    """Calls meet a file that is replaced, written in place, deleted for a moment and made unreadable."""
    file, other = tmp_path / "tokens", tmp_path / "other"
    text, token = new_token("ada")
    add_token(file, token)
    tokens = TokenFile(file)
    refused: list[str] = []
    ended = threading.Event()

    def call() -> None:
        while not ended.is_set():
            if tokens.find(text) is None:
                refused.append("find")
            tokens.find("unknown")

    def check() -> None:
        while not ended.is_set():
            tokens.refresh()

    threads = [threading.Thread(target=call) for _ in range(4)] + [threading.Thread(target=check)]
    for thread in threads:
        thread.start()
    for number in range(100):
        match number % 5:
            case 0:
                add_token(file, new_token("grace")[1])
            case 1:
                content = file.read_bytes()
                with file.open("wb", buffering=0) as raw:
                    for start in range(0, len(content), 100):
                        raw.write(content[start : start + 100])
            case 2:
                file.rename(other)
                other.rename(file)
            case 3:
                file.chmod(0)
                file.chmod(0o600)
            case 4:
                revoke_tokens(file, "grace")
    ended.set()
    for thread in threads:
        thread.join()
    assert refused == []


def test_token_that_was_just_added_is_found_without_a_wait(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    add_token(file, new_token("ada")[1])
    tokens = TokenFile(file)
    text, token = new_token("grace")
    add_token(file, token)
    assert tokens.find(text) is not None


def test_large_file_is_read_by_refresh_only(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    add_token(file, new_token("ada")[1])
    tokens = TokenFile(file)
    text, token = new_token("grace")
    file.write_text(token.line() + "# what people wrote\n" * 10_000)
    # `find` runs on the event loop, which must not read large files; `refresh` runs on a thread.
    assert tokens.find(text) is None
    tokens.refresh()
    assert tokens.find(text) is not None


def test_tokens_can_be_added_while_a_server_holds_the_folder(tmp_path: Path) -> None:
    # A server holds the lock of its data folder, and the tokens may lie there.
    store = Store(tmp_path)
    add_token(tmp_path / "tokens", new_token("ada")[1])
    store.close()
    assert len(read_tokens(tmp_path / "tokens")) == 1


@pytest.mark.parametrize(
    ("pem", "why"),
    [
        (b"", "no public key in PEM"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "unusable"),
        (public(rsa.generate_private_key(65537, 1024)), "RSA of 2048 bits"),
        (public(ec.generate_private_key(ec.SECP384R1())), "P-256"),
        (public(ed448.Ed448PrivateKey.generate()), "Ed25519"),
    ],
    ids=["nothing", "nonsense", "short", "other curve", "other kind"],
)
def test_unsupported_keys_are_refused(tmp_path: Path, pem: bytes, why: str) -> None:
    with pytest.raises(JwtKeyError, match=why):
        jwts(tmp_path, pem)


def test_private_key_is_refused(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(JwtKeyError, match="no public key"):
        jwts(tmp_path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


@pytest.mark.parametrize(
    ("jwks", "why"),
    [
        ("", "no valid JSON Web Key Set"),
        ("[]", "no valid JSON Web Key Set"),
        ('{"keys": [7]}', "no valid JSON Web Key Set"),
        ('{"keys": [{"kty": "EC", "kid": "curve"}]}', "'curve'"),
        ('{"keys": [{"kty": "none of these"}]}', "unusable"),
        ('{"keys": []}', "no usable key for signatures"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"}]}', "unsupported kind of key"),
    ],
)
def test_unsupported_key_sets_are_refused(tmp_path: Path, jwks: str, why: str) -> None:
    with pytest.raises(JwtKeyError, match=why):
        jwts(tmp_path, jwks=jwks)


def test_unsupported_keys_of_a_set_are_skipped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_json_web_tokens_of_admin_tenants_are_administrators(tmp_path: Path) -> None:
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


def test_cached_json_web_token_ends_with_its_time_and_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    found = jwts(tmp_path, public(old))
    now = time.time()
    text = jwt.encode({"iss": "i", "aud": "a", "exp": now + 60, "sub": "ada"}, old, "ES256")
    assert found.find(text) is not None
    with monkeypatch.context() as later:
        # The leeway is 10 s.
        later.setattr(time, "time", lambda: now + 71)
        assert found.find(text) is None
    assert found.find(text) is not None
    (tmp_path / "key").write_bytes(public(new))
    found.refresh()
    assert found.find(text) is None
