"""Encodes and decodes page tokens, and limits page sizes.

A token holds the sort key of the page's last entry, not an offset. So adding or removing entries between two pages does
not repeat or hide other entries.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence

from gradrule.v1 import errors_pb2
from gradrule_server.errors import error

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Approximate size at which a page of large entries ends, bytes; every page has at least one entry."""

_VERSION = 2
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
    return base64.urlsafe_b64encode(json.dumps([_VERSION, listing, *key]).encode()).decode()


def decode(listing: str, token: str, *patterns: re.Pattern[str]) -> list[str]:
    """Returns the sort key in a token that `encode` made for the same listing.

    Each part must match its pattern. Raises MALFORMED_REQUEST for all other tokens.
    """
    try:
        if len(token) > _MAX_TOKEN_LENGTH:
            raise ValueError("too long")
        found = json.loads(base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True))
        # Refuse half of a surrogate pair: it is valid JSON, but the database does not accept it.
        json.dumps(found, ensure_ascii=False).encode()
        version, of_listing, *key = found
        if (version, of_listing) != (_VERSION, listing):
            raise ValueError("of another list")
        if not all(pattern.fullmatch(text) for text, pattern in zip(key, patterns, strict=True)):
            raise ValueError("another key")
    except (ValueError, TypeError, RecursionError) as cause:
        raise error(
            errors_pb2.ERROR_REASON_MALFORMED_REQUEST,
            "page_token does not belong to this list; start again without a token, and use the same filter for all "
            "pages",
            field="page_token",
        ) from cause
    return [str(text) for text in key]
