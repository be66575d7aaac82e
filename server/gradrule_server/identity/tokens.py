"""A file of bearer tokens: one line of JSON each, with the token's SHA-256, its tenant, and until when it holds.

A token is 256 random bits, so its plain hash gives nothing away and needs no salt; the token itself is shown once, when
it is made, and kept nowhere.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradrule_server.identity.principal import Principal, check_tenant
from gradrule_server.identity.watched import WatchedFile
from gradrule_server.periodic import RepeatedWarning

_log = logging.getLogger(__name__)

_PREFIX = "gr_"
_RANDOM_BYTES = 32
_ID_DIGITS = 12
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN = 5
_FIELDS = frozenset({"sha256", "tenant", "admin", "created", "expires"})


class TokenFileError(Exception):
    """A file of tokens that cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token as it is kept; times in seconds since 1970."""

    sha256: str
    tenant: str
    is_admin: bool = False
    created: float = 0.0
    expires: float | None = None

    @property
    def id(self) -> str:
        """By which people name it: the first digits of its hash."""
        return self.sha256[:_ID_DIGITS]

    def line(self) -> str:
        """The token's line in the file."""
        fields: dict[str, Any] = {"sha256": self.sha256, "tenant": self.tenant}
        if self.is_admin:
            fields["admin"] = True
        fields["created"] = show_time(self.created)
        if self.expires is not None:
            fields["expires"] = show_time(self.expires)
        return json.dumps(fields, ensure_ascii=False) + "\n"


def new_token(tenant: str, *, is_admin: bool = False, expires: float | None = None) -> tuple[str, Token]:
    """A new token for its bearer, and what is kept of it. `ValueError` for no tenant's name."""
    text = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    return text, Token(hash_of(text), check_tenant(tenant), is_admin, float(int(time.time())), expires)


def hash_of(text: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_tokens(path: Path) -> list[Token]:
    """All tokens of a file; `TokenFileError`, also where one of its lines is no token."""
    tokens, problems = _read_lines(path)
    if problems:
        raise TokenFileError(problems[0])
    return tokens


def add_token(path: Path, token: Token) -> None:
    """Adds a token to a file, which is made where missing. `TokenFileError`, `OSError`."""
    with _changing(path):
        tokens = read_tokens(path) if path.exists() else []
        _write(path, [*tokens, token])


def revoke_tokens(path: Path, wanted: str) -> list[Token]:
    """Takes tokens out of a file: the one with that id, or all of a tenant's; those that went. `TokenFileError`."""
    with _changing(path):
        tokens = read_tokens(path)
        gone = [token for token in tokens if token.tenant == wanted or token.id == wanted or token.sha256 == wanted]
        if gone:
            _write(path, [token for token in tokens if token not in gone])
    return gone


def read_time(text: str) -> float:
    """Seconds since 1970, from a time like `2030-01-31T00:00:00Z`; UTC unless it says otherwise. `ValueError`."""
    moment = datetime.datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)).timestamp()


def show_time(seconds: float) -> str:
    """The other half of `read_time`, to the second."""
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a file holds: tokens by their hash, and which of its lines are none."""

    tokens: Mapping[bytes, Token]
    problems: Sequence[str] = ()


class Tokens:
    """The tokens of a file, read again by `refresh`. `TokenFileError` where it cannot be used at first.

    Later, a line that is no token is logged and costs that line; where the file cannot be read, see `WatchedFile`.
    """

    def __init__(self, path: Path) -> None:
        self._warning = RepeatedWarning(_log)
        self._file = WatchedFile(path, _read_contents, TokenFileError, fallback=_Contents({}))
        problems = self._file.value().problems
        if problems:
            raise TokenFileError(problems[0])

    def find(self, text: str) -> Principal | None:
        """Whose token it is; None where it is none, or none any more."""
        # Tables are looked up by a hash of what was sent, so that the time it takes tells nothing about what is kept.
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        token = self._file.value().tokens.get(digest)
        if token is None:
            # It may have been made a moment ago.
            self._file.refresh_if_small()
            token = self._file.value().tokens.get(digest)
        if token is None:
            return None
        principal = Principal(token.tenant, token.is_admin, token.expires, digest)
        return None if principal.is_expired else principal

    def refresh(self) -> None:
        """Looks at the file now, and reads it where it changed. Blocking."""
        self._file.refresh()
        problems = self._file.value().problems
        shown = "; ".join(problems[:_SHOWN])
        self._warning.report(f"{len(problems)} lines are no tokens, and none holds: {shown}" if problems else None)

    def still_holds(self, principal: Principal) -> bool:
        """Whether a principal that `find` gave is one still: the token's tenant, and allowed no less than then."""
        token = self._file.value().tokens.get(principal.key)
        return (
            token is not None
            and token.tenant == principal.tenant
            and token.is_admin >= principal.is_admin
            and (token.expires is None or time.time() < token.expires)
        )


def _read_contents(path: Path) -> _Contents:
    tokens, problems = _read_lines(path)
    return _Contents({bytes.fromhex(token.sha256): token for token in tokens}, problems)


def _read_lines(path: Path) -> tuple[list[Token], list[str]]:
    """The tokens of a file, and which lines are none. `TokenFileError` where it cannot be read at all."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as cause:
        raise TokenFileError(f"the file of tokens {path} cannot be read: {_why(cause)}") from cause
    found: dict[str, Token] = {}
    problems = []
    twice = set()
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith(b"#"):
            try:
                token = _token(json.loads(line))
            except (ValueError, TypeError, OverflowError, RecursionError) as cause:
                problems.append(f"{path}, line {number}: {cause}")
                continue
            if token.sha256 in found:
                problems.append(f"{path}, line {number}: the token {token.id} is there twice")
                twice.add(token.sha256)
            found[token.sha256] = token
    # Which of the lines is meant is not known.
    return [token for token in found.values() if token.sha256 not in twice], problems


def _token(fields: Any) -> Token:
    if not isinstance(fields, dict) or not {"sha256", "tenant"} <= fields.keys():
        raise ValueError('expected a line like {"sha256": "…", "tenant": "…"}, as `gradrule token new` writes it')
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise ValueError(f"unknown fields {', '.join(map(repr, unknown))}; there are {', '.join(sorted(_FIELDS))}")
    sha256, tenant, is_admin = fields["sha256"], fields["tenant"], fields.get("admin", False)
    if not isinstance(sha256, str) or _SHA256.fullmatch(sha256) is None:
        raise ValueError("sha256 is 64 of 0-9 and a-f: the hash of a token, not the token")
    if not isinstance(tenant, str) or not isinstance(is_admin, bool):
        raise ValueError("tenant is a text, and admin true or false")
    return Token(
        sha256, check_tenant(tenant), is_admin, _time(fields.get("created")) or 0.0, _time(fields.get("expires"))
    )


def _time(text: Any) -> float | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"a time is a text like 2030-01-31T00:00:00Z, not {text!r}")
    return read_time(text)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Lets one process at a time change a file."""
    # Not the folder's lock: that of a data folder is a server's for as long as it runs.
    try:
        handle = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as cause:
        raise TokenFileError(f"the file of tokens {path} cannot be written: {_why(cause)}") from cause
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, tokens: Sequence[Token]) -> None:
    """Replaces the file as a whole: a server that reads it meanwhile sees the old one or the new one."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    handle = os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.writelines(token.line() for token in tokens)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        # Whoever may read the old one may read the new one: the server may run as another user.
        before = path.stat()
        unfinished.chmod(before.st_mode & 0o777)
        if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(unfinished, before.st_uid, before.st_gid)
    unfinished.rename(path)


def _why(cause: Exception) -> str:
    return (cause.strerror or str(cause)) if isinstance(cause, OSError) else str(cause)
