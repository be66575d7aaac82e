"""Telling TensorFlow's other files from graphs, by the fields of their bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BYTES, _VARINT = 2, 0
_FIXED_SIZES = {1: 8, 5: 4}
_VERSION = re.compile(rb"\d+\.\d+\.\d+")

# Fields of `MetaGraphDef` and of its `MetaInfoDef`.
_META_INFO, _INNER_GRAPH, _TENSORFLOW_VERSION = 1, 2, 5


def other_format(data: bytes) -> str | None:
    """What the bytes are if they are no GraphDef but a SavedModel's or a MetaGraphDef's; None where neither."""
    try:
        fields = list(_fields(data, most=2))
        if fields and fields[0][:2] == (1, _VARINT):
            # A SavedModel begins with its schema's version; a GraphDef's field 1 is a node.
            return "SavedModel"
        if [field[0] for field in fields] == [_META_INFO, _INNER_GRAPH]:
            info = {number: content for number, _, content in _fields(fields[0][2])}
            if _VERSION.match(info.get(_TENSORFLOW_VERSION, b"")):
                return "MetaGraphDef"
    except (IndexError, ValueError):
        return None
    return None


def _fields(data: bytes, most: int | None = None) -> Iterator[tuple[int, int, bytes]]:
    """Number, wire type and content of a message's fields. Raises `ValueError` or `IndexError` for other bytes."""
    at = count = 0
    while at < len(data) and count != most:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            start = at
            _, at = _varint(data, at)
        elif kind == _BYTES:
            size, start = _varint(data, at)
            at = start + size
        elif kind in _FIXED_SIZES:
            start, at = at, at + _FIXED_SIZES[kind]
        else:
            raise ValueError(f"wire type {kind}")
        if at > len(data):
            raise ValueError("a field ends behind the end")
        yield tag >> 3, kind, data[start:at]
        count += 1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
        shift += 7
    raise ValueError("a number without an end")
