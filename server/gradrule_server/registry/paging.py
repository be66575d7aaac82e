"""Pages of lists: sizes, and opaque tokens that say after what the next page starts.

A token holds the last entry's place in the order, not a number of entries, so that what is added or removed between two
pages neither repeats nor hides anything else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Sequence

from gradrule.v1 import errors_pb2
from gradrule_server.errors import error

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

_VERSION = 1
_CHECKSUM_BYTES = 6


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


def decode(listing: str, token: str) -> list[str]:
    """The place in a token that `encode` made for the same listing; MALFORMED_REQUEST for any other."""
    foreign = error(
        errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
        "page_token is not one that this list gave out; start again without one, and keep the filter from page to page",
        field="page_token",
    )
    try:
        raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as cause:
        raise foreign from cause
    checksum, body = raw[:_CHECKSUM_BYTES], raw[_CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise foreign
    version, of_listing, *place = json.loads(body)
    if version != _VERSION or of_listing != listing:
        raise foreign
    return [str(part) for part in place]


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(b"gradrule page token" + body).digest()[:_CHECKSUM_BYTES]
