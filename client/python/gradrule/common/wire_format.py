"""Reads and writes fields of protobuf's wire format, so that large bytes are not copied into messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

Part: TypeAlias = "bytes | memoryview"
"""Bytes of a message. A memoryview has items of one byte, so that its length is its number of bytes."""

Parts: TypeAlias = "Sequence[Part]"

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5
_MAX_SHIFT = 63


class MalformedError(ValueError):
    """Reports bytes that are not a protobuf message."""


def length(parts: Parts) -> int:
    """Returns the number of bytes of all parts together."""
    return sum(map(len, parts))


def wrapped(field: int, parts: Parts) -> Parts:
    """Returns the parts as one length-delimited field of another message."""
    return prefix(field, length(parts)), *parts


@lru_cache(4096)
def prefix(field: int, size: int) -> bytes:
    """Returns the tag and length that precede a length-delimited field of `size` bytes."""
    return varint(field << 3 | LENGTH_DELIMITED) + varint(size)


def varint(number: int) -> bytes:
    """Returns the varint encoding of a number >= 0."""
    if number < 0x80:
        return bytes((number,))
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def read_varint(data: Part, position: int) -> tuple[int, int]:
    """Returns the varint at a position and the position after it. Raises `MalformedError`."""
    number = shift = 0
    try:
        while (byte := data[position]) >= 0x80:
            number |= (byte & 0x7F) << shift
            shift += 7
            position += 1
            if shift > _MAX_SHIFT:
                raise MalformedError("a number has more than ten bytes")
    except IndexError:
        raise MalformedError("the bytes end within a number") from None
    return number | byte << shift, position + 1


def fields(data: Part, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields number, start and end of the value of each field of the message between two positions.

    The value of a length-delimited field is its bytes without their length. Raises `MalformedError`.
    """
    while position < end:
        tag, position = read_varint(data, position)
        kind = tag & 7
        if kind == LENGTH_DELIMITED:
            size, start = read_varint(data, position)
            position = start + size
        elif kind == VARINT:
            start = position
            _, position = read_varint(data, position)
        elif kind in (FIXED64, FIXED32):
            start = position
            position += 8 if kind == FIXED64 else 4
        else:
            raise MalformedError(f"wire type {kind}")
        if position > end:
            raise MalformedError("a field is longer than its message")
        yield tag >> 3, start, position
