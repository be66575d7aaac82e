"""Encodes and decodes page tokens, and limits page sizes.

A token holds the sort key of the page's last entry, not an offset. So adding or removing entries between two pages does
not repeat or hide other entries.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Approximate size at which a page of large entries ends, bytes; every page has at least one entry."""

_VERSION = 1
_CHECKSUM_BYTES = 6
# Names and ids have at most 128 characters.
_MAX_TOKEN_LENGTH = 4096


def page_size(requested: int) -> int:
    """Returns the size of a page: 100 for 0, at most 1,000. Raises MALFORMED_REQUEST for a negative number."""
    if requested < 0:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            f"page_size is {requested}; it must not be negative",
            field="page_size",
        )
    return min(requested or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def encode(listing: str, key: Sequence[str]) -> str:
    """Returns the token for the page after an entry.

    Args:
        listing: The list, with its filter.
        key: The sort key of the entry.
    """
    body = json.dumps([_VERSION, listing, *key]).encode()
    return base64.urlsafe_b64encode(_checksum(body) + body).decode()


def decode(listing: str, token: str, *patterns: re.Pattern[str]) -> list[str]:
    """Returns the sort key in a token that `encode` made for the same listing.

    Each part must match its pattern. Raises MALFORMED_REQUEST for all other tokens.
    """
    try:
        key = _decode_key(listing, token)
    except (ValueError, RecursionError) as cause:
        raise _invalid_token() from cause
    if len(key) != len(patterns):
        raise _invalid_token()
    for text, pattern in zip(key, patterns, strict=True):
        if not isinstance(text, str) or not pattern.fullmatch(text):
            raise _invalid_token()
    return key


def _decode_key(listing: str, token: str) -> list[str]:
    """Returns the parts of the key, of any JSON type. Raises `ValueError` or `RecursionError` for invalid tokens."""
    # The checksum detects mistakes; it does not prevent forged tokens, which do no harm.
    if len(token) > _MAX_TOKEN_LENGTH:
        raise ValueError("too long")
    raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
    checksum, body = raw[:_CHECKSUM_BYTES], raw[_CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise ValueError("another checksum")
    found = json.loads(body.decode())
    if not isinstance(found, list) or found[:2] != [_VERSION, listing]:
        raise ValueError("of another list")
    # Refuse half of a surrogate pair: it is valid JSON, but the database does not accept it.
    json.dumps(found, ensure_ascii=False).encode()
    key: list[str] = found[2:]
    return key


def _invalid_token() -> GradruleError:
    return error(
        errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
        "page_token does not belong to this list; start again without a token, and use the same filter for all pages",
        field="page_token",
    )


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"gradrule page token" + body).digest()[:_CHECKSUM_BYTES]
