"""Reads, writes and checks a file of bearer tokens: one line of JSON for each, with its SHA-256, tenant and expiry.

The file holds no tokens, only their hashes. A token is 256 random bits, so its hash needs no salt. The token itself is
shown once, when it is made.
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

from gradrule_server.concurrency import RepeatedWarning
from gradrule_server.errors import CannotStartError
from gradrule_server.identity.principal import Principal, check_tenant
from gradrule_server.identity.watched_file import WatchedFile

_log = logging.getLogger(__name__)

_PREFIX = "gr_"
_RANDOM_BYTES = 32
_ID_DIGITS = 12
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_PROBLEMS_SHOWN = 5
_FIELDS = frozenset({"sha256", "tenant", "admin", "created", "expires"})


class TokenFileError(CannotStartError):
    """A file of tokens cannot be used; the message says where and why."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token as the file stores it, by its hash. Times are in seconds since 1970; `expires` None: never."""

    sha256: str
    tenant: str
    is_admin: bool = False
    created: float = 0.0
    expires: float | None = None

    @property
    def id(self) -> str:
        """The token's name in commands and logs: the first digits of its hash."""
        return self.sha256[:_ID_DIGITS]

    def line(self) -> str:
        """Returns the token's line in the file."""
        fields: dict[str, Any] = {"sha256": self.sha256, "tenant": self.tenant}
        if self.is_admin:
            fields["admin"] = True
        fields["created"] = show_time(self.created)
        if self.expires is not None:
            fields["expires"] = show_time(self.expires)
        return json.dumps(fields, ensure_ascii=False) + "\n"


def new_token(tenant: str, *, is_admin: bool = False, expires: float | None = None) -> tuple[str, Token]:
    """Makes a token: returns its text for the bearer, and its record for the file.

    Raises:
        ValueError: `tenant` is not a valid name of a tenant.
    """
    text = _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    return text, Token(hash_token(text), check_tenant(tenant), is_admin, float(int(time.time())), expires)


def hash_token(text: str) -> str:
    """Returns the SHA-256 of a token, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_tokens(path: Path) -> list[Token]:
    """Returns all tokens of a file. Raises `TokenFileError`, also if one of its lines is not a valid token."""
    tokens, problems = _read_lines(path)
    if problems:
        raise TokenFileError(problems[0])
    return tokens


def add_token(path: Path, token: Token) -> None:
    """Adds a token to a file, which is created if missing. Raises `TokenFileError` or `OSError`."""
    with _locked(path):
        tokens = read_tokens(path) if path.exists() else []
        _write(path, [*tokens, token])


def revoke_tokens(path: Path, wanted: str) -> list[Token]:
    """Removes tokens from a file, and returns them.

    Args:
        path: The file.
        wanted: The id or SHA-256 of one token, or the name of a tenant, all of whose tokens are removed.

    Raises:
        TokenFileError: The file cannot be used.
    """
    with _locked(path):
        tokens = read_tokens(path)
        removed = [token for token in tokens if token.tenant == wanted or token.id == wanted or token.sha256 == wanted]
        if removed:
            _write(path, [token for token in tokens if token not in removed])
    return removed


def read_time(text: str) -> float:
    """Converts a time such as `2030-01-31T00:00:00Z` to seconds since 1970; UTC if it names no time zone.

    Raises:
        ValueError: The text is not a time.
    """
    moment = datetime.datetime.fromisoformat(text)
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.UTC)).timestamp()


def show_time(seconds: float) -> str:
    """Converts seconds since 1970 to text that `read_time` reads, rounded down to the second."""
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).isoformat().replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class _Contents:
    """The tokens of a file by their hash, and one sentence for each invalid line."""

    tokens: Mapping[bytes, Token]
    problems: Sequence[str] = ()


class TokenFile:
    """Finds the principals of tokens in a file; `refresh` reads a changed file again. Safe to use from several threads.

    The first reading raises `TokenFileError` for an invalid file. Later, invalid lines are logged and ignored; for a
    file that cannot be read see `WatchedFile`.
    """

    def __init__(self, path: Path) -> None:
        self._warning = RepeatedWarning(_log)
        self._file = WatchedFile(path, _read_contents, TokenFileError, fallback=_Contents({}), merge=_merged)
        problems = self._file.value().problems
        if problems:
            raise TokenFileError(problems[0])

    def find(self, text: str) -> Principal | None:
        """Returns the token's principal; None if the token is unknown, revoked or expired."""
        # Look up by hash, so that the time of a look-up tells nothing about the stored tokens.
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        token = self._file.value().tokens.get(digest)
        if token is None:
            # The token may have been added a moment ago.
            self._file.refresh_if_small()
            token = self._file.value().tokens.get(digest)
        if token is None:
            return None
        principal = Principal(token.tenant, token.is_admin, token.expires, digest)
        return None if principal.is_expired else principal

    def refresh(self) -> None:
        """Reads the file if it has changed. Blocks."""
        self._file.refresh()
        problems = self._file.value().problems
        shown = "; ".join(problems[:_MAX_PROBLEMS_SHOWN])
        self._warning.report(
            f"{len(problems)} lines are no valid tokens and are ignored: {shown}" if problems else None
        )

    def is_still_valid(self, principal: Principal) -> bool:
        """Returns whether the token of a principal is still in the file, unexpired, with the same tenant and rights."""
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


def _merged(before: _Contents, after: _Contents) -> _Contents:
    """Returns the tokens of two readings: some lines may not be written yet."""
    return _Contents({**before.tokens, **after.tokens})


def _read_lines(path: Path) -> tuple[list[Token], list[str]]:
    """Returns the tokens of a file and one sentence for each invalid line. Raises `TokenFileError`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as cause:
        raise TokenFileError(f"the file of tokens {path} cannot be read: {_cause_text(cause)}") from cause
    found: dict[str, Token] = {}
    problems = []
    duplicates = set()
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith(b"#"):
            try:
                token = _token(json.loads(line))
            except (ValueError, TypeError, OverflowError, RecursionError) as cause:
                problems.append(f"{path}, line {number}: {cause}")
                continue
            if token.sha256 in found:
                problems.append(f"{path}, line {number}: the token {token.id} appears twice")
                duplicates.add(token.sha256)
            found[token.sha256] = token
    # Use neither of two lines for one token: they may differ in tenant or rights.
    return [token for token in found.values() if token.sha256 not in duplicates], problems


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
def _locked(path: Path) -> Iterator[None]:
    """Lets one process at a time change a file."""
    # Use a lock file of its own: a running server holds the lock of its data folder, where the tokens may be.
    try:
        handle = os.open(path.with_name(f".{path.name}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as cause:
        raise TokenFileError(f"the file of tokens {path} cannot be written: {_cause_text(cause)}") from cause
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write(path: Path, tokens: Sequence[Token]) -> None:
    """Replaces the file by renaming a new one, so that a server never reads a partly written file."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    handle = os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.writelines(token.line() for token in tokens)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        # Keep owner and permissions: the server may run as another user.
        before = path.stat()
        unfinished.chmod(before.st_mode & 0o777)
        if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(unfinished, before.st_uid, before.st_gid)
    unfinished.rename(path)


def _cause_text(cause: Exception) -> str:
    return (cause.strerror or str(cause)) if isinstance(cause, OSError) else str(cause)
