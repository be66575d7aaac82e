"""Estimates the memory of a message after parsing, and refuses messages that would take too much.

A field of two bytes can become an object of a hundred bytes, and the check of a node takes a kilobyte. The scan reads
the encoded message before it is parsed. It skips the contents of bytes and strings, so its time depends on the number
of fields, not on the size. If a field holds many small messages, only a sample of them is scanned.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

FREE_BYTES = 128 << 20
"""Memory that a message of any size may take, bytes: enough for a hundred thousand nodes of 50 bytes."""
SMALL_BYTES = 1 << 20
"""Largest size of messages that are not scanned, bytes, because they never take more than `FREE_BYTES`."""
# Largest number of scanned fields; scanning more would take seconds.
_MAX_FIELDS = 4_000_000
_MAX_DEPTH = 100
_MAX_SHIFT = 63

# Memory of a parsed message without its fields, and of each string in a list, bytes.
_MESSAGE_BYTES = 40
_STRING_BYTES = 48
# Factor for lists: they grow by doubling, the memory of their earlier sizes is freed only with the message, and an
# engine gets a copy.
_GROWTH = 3
# Memory of the objects that the server makes for a message of this type, besides the parsed message.
_SERVER_OBJECT_BYTES: Mapping[str, int] = {
    "gradrule.v1.Node": 850,
    "gradrule.v1.AttrValue": 40,
    "gradrule.v1.GradientOverride": 1600,
    "gradrule.v1.NamedTensor": 400,
    "gradrule.v1.RuleParam": 800,
    "gradrule.v1.TensorShape.Dim": 24,
}

_VARINT, _FIXED64, _LENGTH, _GROUP_START, _GROUP_END, _FIXED32 = range(6)
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_CONTINUED = bytes(range(0x80, 0x100))
# Number of messages of a field that are all scanned; of further small ones, one in `_SAMPLE_INTERVAL` is scanned.
_ALWAYS_SCANNED = 1_000
_SAMPLE_INTERVAL = 32
_SMALL_PART_BYTES = 1024

_ELEMENT_BYTES = {
    FieldDescriptor.CPPTYPE_INT64: 8,
    FieldDescriptor.CPPTYPE_UINT64: 8,
    FieldDescriptor.CPPTYPE_DOUBLE: 8,
    FieldDescriptor.CPPTYPE_BOOL: 1,
    FieldDescriptor.CPPTYPE_STRING: 16,
}
_PACKED_FIXED = {
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
}


class ParsedSizeError(Exception):
    """A message would take too much memory; the text says why."""


def check_size(data: bytes, message: type[Message], unpacking: int) -> None:
    """Raises `ParsedSizeError` for an encoded message that would take far more memory than it has bytes.

    Accepts bytes that are not a valid message, which the parser refuses.

    Args:
        data: The encoded message.
        message: Its type.
        unpacking: Memory that the parsed message may take for each of its bytes, besides `FREE_BYTES`.
    """
    if len(data) <= SMALL_BYTES:
        return
    scan = _SizeScan(data, FREE_BYTES + unpacking * len(data))
    try:
        scan.scan(0, len(data), cast(Descriptor, message.DESCRIPTOR), 0, 1)
    except _TooLargeError as cause:
        raise ParsedSizeError(
            f"the message of {len(data) / 2**20:.1f} MiB {cause}; its largest part is {scan.largest_part()}; "
            f"a message may take {FREE_BYTES >> 20} MiB and {unpacking} times its size"
        ) from None
    except IndexError:
        # The message ends within a field: all fields before were counted, and the parser reports the error.
        return


class _TooLargeError(Exception):
    """A message would take too much memory; the text is a clause that says why."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A field that takes memory each time it occurs.

    Attributes:
        name: The field's name.
        bytes: Memory of each occurrence; in a packed list, of each element.
        message: The type of its messages, if it holds messages.
        packed: Encoded size of an element of a packed list; 0: varies.
        is_scalar: Whether the field is a list of numbers.
    """

    name: str
    bytes: int
    message: Descriptor | None = None
    packed: int = 0
    is_scalar: bool = False


class _SizeScan:
    """Adds up the memory that one message will take."""

    def __init__(self, data: bytes, max_bytes: int) -> None:
        self._data = data
        self._max_bytes = max_bytes
        self._bytes = len(data)
        self._fields = 0
        self._counts: dict[_Part, int] = {}
        # Seed with the hash: a message always gives the same result, but its sender cannot predict the sample.
        self._random = random.Random(hash(data)).random

    def largest_part(self) -> str:
        """Returns the name and number of the parts that take the most memory, for the error message."""
        largest = max(self._counts, key=lambda part: self._counts[part] * part.bytes, default=None)
        if largest is None:
            return "unknown fields"
        return f"{largest.name!r}, which occurs about {self._counts[largest]} times"

    def scan(self, position: int, end: int, message: Descriptor, depth: int, scale: int) -> None:
        """Counts the fields of a message between two positions.

        Args:
            position: Where the message starts.
            end: Where it ends.
            message: Its type.
            depth: Number of messages that contain it.
            scale: Number of messages that it represents as a sample.

        Raises:
            IndexError: The bytes are not a valid message.
        """
        if depth > _MAX_DEPTH:
            raise IndexError("nested deeper than messages may be")
        data, parts = self._data, _parts(message)
        fields = 0
        while position < end:
            fields += 1
            if fields > _MAX_FIELDS:
                break
            tag = data[position]
            position += 1
            if tag > 0x7F:
                tag, position = self._read_varint(position - 1)
            kind = tag & 7
            part = parts.get(tag >> 3)
            if kind == _LENGTH:
                size = data[position]
                position += 1
                if size > 0x7F:
                    size, position = self._read_varint(position - 1)
                start, position = position, position + size
                if position > end:
                    raise IndexError("a field reaches beyond its message")
                if part is not None:
                    self._add_delimited(part, start, position, depth, scale)
                continue
            if kind == _VARINT:
                while data[position] > 0x7F:
                    position += 1
                position += 1
            elif kind not in (_GROUP_START, _GROUP_END):
                position += _FIXED.get(kind, end)
            if part is not None:
                self._add(part, scale)
        self._fields += fields
        if self._fields > _MAX_FIELDS:
            raise _TooLargeError(f"has more than {_MAX_FIELDS} fields")

    def _add_delimited(self, part: _Part, start: int, end: int, depth: int, scale: int) -> None:
        """Counts a length-delimited field: a packed list, a string or a message."""
        if part.is_scalar:
            count = (end - start) // part.packed if part.packed else self._count_varints(start, end)
            self._add(part, count * scale)
            return
        number = self._add(part, scale)
        if part.message is None or start == end:
            return
        if scale > 1 or number <= _ALWAYS_SCANNED or end - start > _SMALL_PART_BYTES:
            self.scan(start, end, part.message, depth + 1, scale)
        elif self._random() * _SAMPLE_INTERVAL < 1:
            self.scan(start, end, part.message, depth + 1, _SAMPLE_INTERVAL)

    def _add(self, part: _Part, count: int) -> int:
        """Counts occurrences of a part; returns their number so far."""
        number = self._counts[part] = self._counts.get(part, 0) + count
        self._bytes += part.bytes * count
        if self._bytes > self._max_bytes:
            raise _TooLargeError(f"would take more than {self._max_bytes >> 20} MiB of memory")
        return number

    def _count_varints(self, start: int, end: int) -> int:
        return len(self._data[start:end].translate(None, _CONTINUED))

    def _read_varint(self, position: int) -> tuple[int, int]:
        """Returns a number of several bytes, and the position after it."""
        number = shift = 0
        while True:
            byte = self._data[position]
            position += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, position
            shift += 7
            if shift > _MAX_SHIFT:
                raise IndexError("a number without an end")


@lru_cache(maxsize=1024)
def _parts(descriptor: Descriptor) -> Mapping[int, _Part]:
    """Returns the fields of a message type that take memory each time they occur, by number."""
    parts: dict[int, _Part] = {}
    for item in descriptor.fields:
        if item.message_type is not None:
            parts[item.number] = _Part(item.name, _message_bytes(item.message_type), item.message_type)
        elif item.is_repeated and item.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            parts[item.number] = _Part(item.name, _STRING_BYTES)
        elif item.is_repeated:
            size = _GROWTH * _ELEMENT_BYTES.get(item.cpp_type, 4)
            parts[item.number] = _Part(item.name, size, packed=_PACKED_FIXED.get(item.type, 0), is_scalar=True)
    return MappingProxyType(parts)


def _message_bytes(descriptor: Descriptor) -> int:
    """Returns the memory of an empty message of this type, with the objects that the server makes for it."""
    fields: dict[str, int] = {}
    for item in descriptor.fields:
        size = 8 if item.message_type is not None or item.is_repeated else _ELEMENT_BYTES.get(item.cpp_type, 4)
        # The fields of a oneof share the memory of the largest.
        group = item.containing_oneof.full_name if item.containing_oneof is not None else item.full_name
        fields[group] = max(fields.get(group, 0), size)
    return _MESSAGE_BYTES + sum(fields.values()) + _SERVER_OBJECT_BYTES.get(descriptor.full_name, 0)
