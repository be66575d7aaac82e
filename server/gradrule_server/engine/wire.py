"""Reads and writes parts of protobuf's wire format, where a whole message would be parsed or copied in vain."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, BYTES = 0, 2
"""Wire types."""
_FIXED = {1: 8, 5: 4}


class MalformedMessage(Exception):
    """The bytes are no protobuf message."""


def varint(number: int) -> bytes:
    """Returns a number from 0 up as a varint."""
    if number < 0x80:
        return bytes((number,))
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def tag(number: int, wire_type: int = BYTES) -> bytes:
    """Returns the tag of a field."""
    return varint(number << 3 | wire_type)


def field(number: int, content: bytes) -> bytes:
    """Returns a field that has a length, with its content."""
    return tag(number) + varint(len(content)) + content


def read_varint(message: memoryview, position: int) -> tuple[int, int]:
    """Returns the number at a position, and where it ends. Raises `MalformedMessage`."""
    number = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            raise MalformedMessage
        byte = message[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
    raise MalformedMessage


def fields(message: memoryview) -> Iterator[tuple[int, memoryview, memoryview | None]]:
    """Yields number, all bytes, and content of each field; the content is None unless the field has a length.

    Raises `MalformedMessage`.
    """
    position = 0
    while position < len(message):
        start = position
        key, position = read_varint(message, position)
        kind, content = key & 7, None
        if kind == VARINT:
            _, position = read_varint(message, position)
        elif kind == BYTES:
            length, begin = read_varint(message, position)
            position = begin + length
            content = message[begin:position]
        elif kind in _FIXED:
            position += _FIXED[kind]
        else:
            raise MalformedMessage
        if position > len(message):
            raise MalformedMessage
        yield key >> 3, message[start:position], content
