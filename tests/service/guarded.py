"""Runs a server that authenticates callers by TLS, a token file and JSON Web Tokens."""

from __future__ import annotations

import base64
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import gradrule as gr
from tests.service.certificates import Authority
from tests.service.servers import RunningServer, running_server, server_environment

ISSUER, AUDIENCE = "https://issuer.example", "gradrule.example"

QUOTAS = {
    "tenant-rules": "5",
    "tenant-programs": "4",
    "tenant-registry-bytes": "100000",
    "tenant-sessions": "2",
    "tenant-session-bytes": "4096",
    "tenant-handles": "3",
    "tenant-handle-bytes": "1MiB",
    "tenant-blob-bytes": "100000",
    "tenant-streams": "8",
    "tenant-requests": "12",
}


@dataclass(frozen=True)
class Guarded:
    """Holds the server and creates credentials for it."""

    running: RunningServer
    authority: Authority
    tokens: Path
    keys: dict[str, Any]
    """Private keys by algorithm."""

    def new_token(self, tenant: str, *flags: str) -> str:
        """Creates a token with the operator's command."""
        return token_command("new", "--tenant", tenant, *flags, "--file", str(self.tokens)).strip()

    def connect(self, tenant: str | None = None, *, token: str | None = None, **words: Any) -> gr.Client:
        """Returns a client with the tenant's or the given token."""
        text = self.web_token(tenant) if tenant is not None else token
        return gr.connect(
            self.running.target, credentials=gr.tls(self.authority.file), token=text, **{"timeout": 60.0, **words}
        )

    def web_token(self, tenant: str, *, algorithm: str = "ES256", **changed: Any) -> str:
        """Creates a valid JSON Web Token; `changed` replaces claims, and None removes a claim."""
        now = datetime.datetime.now(datetime.UTC)
        claims = {"sub": tenant, "iss": ISSUER, "aud": AUDIENCE, "exp": now + datetime.timedelta(hours=1)} | changed
        claims = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(claims, self.keys[algorithm], algorithm)


def token_command(*arguments: str, code: int = 0) -> str:
    """Runs `gradrule token …` and returns its output."""
    return run_gradrule("token", *arguments, code=code)


def run_gradrule(*arguments: str, code: int = 0) -> str:
    """Runs `gradrule …` and returns its output, with stderr where the exit code is not 0."""
    ended = subprocess.run(
        [sys.executable, "-m", "gradrule.cli", *arguments],
        capture_output=True,
        text=True,
        env=server_environment(),
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout if code == 0 else ended.stdout + ended.stderr


def unsigned_web_token(claims: dict[str, Any]) -> str:
    """Creates a JSON Web Token of the algorithm `none`."""
    parts = [{"alg": "none", "typ": "JWT"}, claims]
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


@contextmanager
def guarded_server(folder: Path) -> Iterator[Guarded]:
    """Starts the server and stops it at the end."""
    authority = Authority(folder, "authority")
    signed = authority.server("server")
    keys: dict[str, Any] = {
        "ES256": ec.generate_private_key(ec.SECP256R1()),
        "RS256": rsa.generate_private_key(65537, 2048),
        "EdDSA": ed25519.Ed25519PrivateKey.generate(),
    }
    form = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    public = folder / "jwt.pem"
    public.write_bytes(b"".join(keys[name].public_key().public_bytes(*form) for name in ("ES256", "RS256")))
    jwks = folder / "jwks.json"
    entry = json.loads(jwt.algorithms.OKPAlgorithm.to_jwk(keys["EdDSA"].public_key()))
    jwks.write_text(json.dumps({"keys": [entry | {"kid": "one", "use": "sig"}]}))
    tokens = folder / "tokens"
    token_command("new", "--tenant", "first", "--file", str(tokens))
    flags = {
        "tls-cert": signed.certificate,
        "tls-key": signed.key,
        "tokens": tokens,
        "jwt-key": public,
        "jwt-jwks": jwks,
        "jwt-issuer": ISSUER,
        "jwt-audience": AUDIENCE,
        "admin-tenants": "root",
        "stall-s": "2",
        **QUOTAS,
    }
    with running_server(folder, [f"--{name}={value}" for name, value in flags.items()]) as running:
        yield Guarded(running, authority, tokens, keys)
