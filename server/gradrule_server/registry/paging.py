"""Pages of lists: sizes, and opaque tokens that say after what the next page starts.

A token holds the last entry's place in the order, not a number of entries, so that what is added or removed between two
pages neither repeats nor hides anything else.
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
"""Roughly: a page ends earlier where its entries are large, though not before the first."""

_VERSION = 1
_CHECKSUM_BYTES = 6
# Names and ids are 128 characters at most.
_MAX_TOKEN = 4096


def page_size(asked: int) -> int:
    """0 is 100, more than 1,000 is 1,000; MALFORMED_REQUEST for less than 0."""
    if asked < 0:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            f"page_size is {asked}; it must not be negative",
            field="page_size",
        )
    return min(asked or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def encode(listing: str, place: Sequence[str]) -> str:
    """A token of `listing` (which list, with which filter) for what comes after `place`."""
    body = json.dumps([_VERSION, listing, *place]).encode()
    return base64.urlsafe_b64encode(_checksum(body) + body).decode()


def decode(listing: str, token: str, *parts: re.Pattern[str]) -> list[str]:
    """The place in a token that `encode` made for the same listing, a text of each pattern; MALFORMED_REQUEST else."""
    try:
        place = _place(listing, token)
    except (ValueError, RecursionError) as cause:
        raise _foreign() from cause
    if len(place) != len(parts):
        raise _foreign()
    for text, pattern in zip(place, parts, strict=True):
        if not isinstance(text, str) or not pattern.fullmatch(text):
            raise _foreign()
    return place


def _place(listing: str, token: str) -> list[str]:
    """What the token holds, of any type yet. `ValueError`, `RecursionError` where it is no token of the listing."""
    # The checksum finds mistakes, not forgeries: whoever reads this file can make one.
    if len(token) > _MAX_TOKEN:
        raise ValueError("too long")
    raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
    checksum, body = raw[:_CHECKSUM_BYTES], raw[_CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise ValueError("another checksum")
    found = json.loads(body.decode())
    if not isinstance(found, list) or found[:2] != [_VERSION, listing]:
        raise ValueError("of another list")
    # Half of a surrogate pair is JSON, but no text that a database takes.
    json.dumps(found, ensure_ascii=False).encode()
    place: list[str] = found[2:]
    return place


def _foreign() -> GradruleError:
    return error(
        errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
        "page_token is not one that this list gave out; start again without one, and keep the filter from page to page",
        field="page_token",
    )


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"gradrule page token" + body).digest()[:_CHECKSUM_BYTES]
