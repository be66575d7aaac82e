"""What a message takes once it is read, told from its bytes before it is parsed.

A field of two bytes can stand for an object of a hundred, and a node of a graph for a kilobyte of what checking it
takes. What lies in bytes and strings is skipped, so a message costs time by its fields, not by its size; of many
small parts of one kind, a sample is looked into and stands for the rest.
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

from gradrule_server.errors import Reason, error
from gradrule_server.policy.bounds import Bounds

FREE_BYTES = 128 << 20
"""What every message may take, however small it is: a hundred thousand nodes of 50 bytes need it."""
SMALL_BYTES = 1 << 20
"""A message of no more bytes than this takes less than every message may."""
# Fields are looked at one by one; more than these in one message take seconds.
_MAX_FIELDS = 4_000_000
_MAX_DEPTH = 100
_MAX_SHIFT = 63

# Bytes of a message in memory besides its fields; of one more string, or one more entry, in a list.
_MESSAGE_BYTES = 40
_STRING_BYTES = 48
# Lists grow by doubling, what they grew out of stays till the message goes, and an engine gets a copy.
_GROWTH = 3
# What the server makes of a part, besides the message: bytes by message type.
_MADE: Mapping[str, int] = {
    "gradrule.v1.Node": 850,
    "gradrule.v1.AttrValue": 40,
    "gradrule.v1.Override": 1600,
    "gradrule.v1.NamedTensor": 400,
    "gradrule.v1.RuleParam": 800,
    "gradrule.v1.TensorShape.Dim": 24,
}

_VARINT, _FIXED64, _LENGTH, _GROUP_START, _GROUP_END, _FIXED32 = range(6)
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_CONTINUED = bytes(range(0x80, 0x100))
# Of parts that are alike, so many are looked into, and after that one of so many where they are small.
_LOOKED_INTO = 1_000
_SAMPLED = 32
_SMALL_PART_BYTES = 1024

_SIZES = {
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


def check_unpacking(data: bytes, message: type[Message], bounds: Bounds, *, field: str = "") -> None:
    """LIMIT_EXCEEDED for a message that would take far more memory than it has bytes. `field`: where it lies."""
    if len(data) <= SMALL_BYTES:
        return
    most = FREE_BYTES + bounds.unpacking * len(data)
    weighing = _Weighing(data, most)
    try:
        weighing.walk(0, len(data), cast(Descriptor, message.DESCRIPTOR), 0, 1)
    except _TooMuchError as cause:
        text = (
            f"what is in this message of {len(data) / 2**20:.1f} MiB {cause}, most of it {weighing.heaviest()}; "
            f"a message may take {FREE_BYTES >> 20} MiB and {bounds.unpacking} times its size (--max-unpacking)"
        )
        raise error(Reason.ERROR_REASON_LIMIT_EXCEEDED, text, field=field) from None
    except IndexError:
        # It ends within a field: whoever parses it says so, and what comes before that has been weighed.
        return


class _TooMuchError(Exception):
    """What is too much, as a clause."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A field of which there can be many. bytes: that one more of them takes; in a packed list, one more element."""

    name: str
    bytes: int
    # Of what is inside, if it is a message.
    inside: Descriptor | None = None
    # Bytes of an element on the wire in a packed list; 0: they vary.
    packed: int = 0
    is_scalar: bool = False


class _Weighing:
    """One look through a message."""

    def __init__(self, data: bytes, most: int) -> None:
        self._data = data
        self._most = most
        self._taken = len(data)
        self._fields = 0
        self._counts: dict[_Part, int] = {}
        # The same message meets the same end, and which parts are looked into nobody can tell before.
        self._random = random.Random(hash(data)).random

    def heaviest(self) -> str:
        """What takes most, in words."""
        most = max(self._counts, key=lambda part: self._counts[part] * part.bytes, default=None)
        return "of no meaning" if most is None else f"{most.name!r}, of which there are about {self._counts[most]}"

    def walk(self, position: int, end: int, inside: Descriptor, depth: int, scale: int) -> None:
        """Weighs what lies between two places. `scale`: how many parts it stands for. IndexError: it is no message."""
        if depth > _MAX_DEPTH:
            raise IndexError("nested deeper than messages may be")
        data, parts = self._data, _parts(inside)
        fields = 0
        while position < end:
            fields += 1
            if fields > _MAX_FIELDS:
                break
            tag = data[position]
            position += 1
            if tag > 0x7F:
                tag, position = self._number(position - 1)
            kind = tag & 7
            part = parts.get(tag >> 3)
            if kind == _LENGTH:
                size = data[position]
                position += 1
                if size > 0x7F:
                    size, position = self._number(position - 1)
                start, position = position, position + size
                if position > end:
                    raise IndexError("a field reaches beyond its message")
                if part is not None:
                    self._take(part, start, position, depth, scale)
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
            raise _TooMuchError(f"is over {_MAX_FIELDS} fields")

    def _take(self, part: _Part, start: int, end: int, depth: int, scale: int) -> None:
        if part.is_scalar:
            count = (end - start) // part.packed if part.packed else self._varints(start, end)
            self._add(part, count * scale)
            return
        number = self._add(part, scale)
        if part.inside is None or start == end:
            return
        if scale > 1 or number <= _LOOKED_INTO or end - start > _SMALL_PART_BYTES:
            self.walk(start, end, part.inside, depth + 1, scale)
        elif self._random() * _SAMPLED < 1:
            self.walk(start, end, part.inside, depth + 1, _SAMPLED)

    def _add(self, part: _Part, count: int) -> int:
        number = self._counts[part] = self._counts.get(part, 0) + count
        self._taken += part.bytes * count
        if self._taken > self._most:
            raise _TooMuchError(f"would take more than {self._most >> 20} MiB of memory")
        return number

    def _varints(self, start: int, end: int) -> int:
        return len(self._data[start:end].translate(None, _CONTINUED))

    def _number(self, position: int) -> tuple[int, int]:
        """A number of several bytes, and where the next field is."""
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
    """Fields that take memory for each time they stand there, by number."""
    parts: dict[int, _Part] = {}
    for item in descriptor.fields:
        if item.message_type is not None:
            parts[item.number] = _Part(item.name, _message_bytes(item.message_type), item.message_type)
        elif item.is_repeated and item.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            parts[item.number] = _Part(item.name, _STRING_BYTES)
        elif item.is_repeated:
            size = _GROWTH * _SIZES.get(item.cpp_type, 4)
            parts[item.number] = _Part(item.name, size, packed=_PACKED_FIXED.get(item.type, 0), is_scalar=True)
    return MappingProxyType(parts)


def _message_bytes(descriptor: Descriptor) -> int:
    """What a message takes with no field set, and what is made of it."""
    fields: dict[str, int] = {}
    for item in descriptor.fields:
        size = 8 if item.message_type is not None or item.is_repeated else _SIZES.get(item.cpp_type, 4)
        # Of fields that exclude each other, the largest gives the room.
        group = item.containing_oneof.full_name if item.containing_oneof is not None else item.full_name
        fields[group] = max(fields.get(group, 0), size)
    return _MESSAGE_BYTES + sum(fields.values()) + _MADE.get(descriptor.full_name, 0)
