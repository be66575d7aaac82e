"""Fields of protobuf messages as bytes, where a whole message would be parsed or copied in vain."""

from __future__ import annotations

from collections.abc import Iterator

from gradrule.common.wire_format import (
    FIXED32,
    FIXED64,
    LENGTH_DELIMITED,
    VARINT,
    MalformedError,
    prefix,
    read_varint,
    varint,
)

_FIXED = {FIXED64: 8, FIXED32: 4}


def tag(number: int) -> bytes:
    """Returns the tag of a field that has a length."""
    return varint(number << 3 | LENGTH_DELIMITED)


def field(number: int, content: bytes) -> bytes:
    """Returns a field that has a length, with its content."""
    return prefix(number, len(content)) + content


def fields(message: memoryview) -> Iterator[tuple[int, memoryview, memoryview | None]]:
    """Yields number, all bytes, and content of each field; the content is None unless the field has a length.

    Raises `MalformedError`.
    """
    position = 0
    while position < len(message):
        start = position
        key, position = read_varint(message, position)
        kind, content = key & 7, None
        if kind == VARINT:
            _, position = read_varint(message, position)
        elif kind == LENGTH_DELIMITED:
            length, begin = read_varint(message, position)
            position = begin + length
            content = message[begin:position]
        elif kind in _FIXED:
            position += _FIXED[kind]
        else:
            raise MalformedError(f"wire type {kind}")
        if position > len(message):
            raise MalformedError("a field is longer than its message")
        yield key >> 3, message[start:position], content
