"""Refuses messages that would take too much memory after parsing."""

from __future__ import annotations

from google.protobuf.message import Message

from gradrule.common.parsed_size import FREE_BYTES, SMALL_BYTES, ParsedSizeError, check_size
from gradrule_server.errors import Reason, error
from gradrule_server.limits import NodeLimits

__all__ = ["FREE_BYTES", "SMALL_BYTES", "check_parsed_size"]


def check_parsed_size(data: bytes, message: type[Message], bounds: NodeLimits, *, field: str = "") -> None:
    """Raises LIMIT_EXCEEDED for an encoded message that would take far more memory than it has bytes.

    Accepts bytes that are not a valid message, which the parser refuses.

    Args:
        data: The encoded message.
        message: Its type.
        bounds: The limits.
        field: The field of the request that holds the message, for the error.
    """
    try:
        check_size(data, message, bounds.unpacking)
    except ParsedSizeError as cause:
        text = f"{cause} (--max-unpacking)"
        raise error(Reason.ERROR_REASON_LIMIT_EXCEEDED, text, field=field) from None
