"""Checks URLs of PostgreSQL databases, and keeps their passwords out of all messages."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, urlsplit

_SCHEMES = ("postgresql://", "postgres://")
_HOSTS = re.compile(r"(([\w.-]*|\[[0-9A-Fa-f:.%]+\]|%2[Ff][\w.%-]*)(:[0-9]{0,5})?)(,[^,@]*)*")


def is_postgres_url(url: str) -> bool:
    """Returns whether a text is the URL of a PostgreSQL database."""
    return url.startswith(_SCHEMES)


def check_url(url: str) -> str:
    """Returns the URL of a PostgreSQL database. Raises `ValueError`, whose text holds no part of the URL.

    libpq splits a URL with a password that is not percent-encoded at the wrong places, and would show parts of it.
    """
    if not url.isprintable() or " " in url:
        raise ValueError("it holds a space, a line break or a character that cannot be printed; percent-encode it")
    try:
        parts = urlsplit(url)
    except ValueError:
        # Its text shows parts of the URL.
        raise ValueError("it is no valid URL; percent-encode the special characters of a password") from None
    rest = f"{parts.path}?{parts.query}#{parts.fragment}"
    if not is_postgres_url(url) or url.count("@") > 1 or "@" in rest or parts.fragment:
        raise ValueError(
            "expected postgresql://USER@HOST:PORT/DATABASE, in which special characters of a password are "
            "percent-encoded (%40 for @)"
        )
    if not _HOSTS.fullmatch(parts.netloc.rpartition("@")[2]):
        raise ValueError("its host or port is not valid: expected postgresql://USER@HOST:PORT/DATABASE")
    return url


def describe_url(url: str) -> str:
    """Returns a URL without its password and options, for messages."""
    parts = urlsplit(url)
    user, _, hosts = parts.netloc.rpartition("@")
    user = user.partition(":")[0]
    return f"postgresql://{user}{'@' if user else ''}{hosts}{parts.path}"


def hide_password(message: str, url: str) -> str:
    """Returns a message with the URL's password replaced by `***`, as a guard against drivers that would show it."""
    parts = urlsplit(url)
    secrets = {parts.password or ""} | {value for name, value in parse_qsl(parts.query) if "password" in name}
    for secret in secrets | set(map(unquote, secrets)):
        if secret:
            message = message.replace(secret, "***")
    return message
