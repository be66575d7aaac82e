"""Changes messages and their bytes with one random source."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

INTEGERS = (0, 1, -1, 2, 3, 7, 8, 31, 32, 255, 256, 1024, 65_536, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 1e-45, 3.4e38)
STRINGS = (
    "", " ", "/", ":", ":0", "x:0", "x:1", "x:-1", "x:99999999999999999999", "^x", "^", "^^x", "*", "**", "a/**/b",
    "(", "(a+)+$", "\\", "\x00", "é", "𝔛", "…", "\u202e", "x" * 300, "a/" * 200, "y" * 5000, "default", "dy", "None",
    "true", "-1", "0", "1e9", "@step", "@convolution", "rules/", "rules/ste", "builtin/ste", "builtin/", "programs/",
    "programs/a", "../../etc/passwd", "CustomGradient-17", "gradrule", "_x", "%s%n", "fold_batch_norm", "lrp",
    "Identity", "Relu", "MatMul", "ArgMax", "ste", "ste_sign", "0" * 64, "z" * 64,
)  # fmt: skip
_INTEGER_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_MAX_DEPTH = 60
_MAX_REPEATS = 40

Inside = Callable[[Random, bytes], bytes]
"""Changes bytes that are themselves a message."""


class Mutator:
    """Changes messages. words: strings that mean something to the server; inside: for fields that contain messages."""

    def __init__(self, random: Random, words: Sequence[str], inside: dict[str, Inside] | None = None) -> None:
        self._random = random
        self._words = words
        self._inside = inside or {}

    def message(self, message: Message) -> None:
        """Changes one to four places anywhere in it."""
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 4))):
            self._change_in(message, 0)

    def _change_in(self, message: Message, depth: int) -> None:
        """Descends at random and changes something there."""
        chance = self._random
        inner = [
            (field, item)
            for field, value in message.ListFields()
            if field.message_type is not None
            for item in _messages(field, value)
        ]
        if inner and chance.random() < 0.85 and depth < _MAX_DEPTH:
            self._change_in(chance.choice(inner)[1], depth + 1)
            return
        fields = _fields(message)
        if not fields:
            return
        present = [field for field, _ in message.ListFields()]
        field = chance.choice(present if present and chance.random() < 0.7 else fields)
        if _is_map(field):
            self._change_map(message, field)
        elif field.is_repeated:
            self._change_repeated(message, field)
        else:
            self._change_single(message, field)

    def _change_single(self, message: Message, field: FieldDescriptor) -> None:
        if self._random.random() < 0.2:
            message.ClearField(field.name)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            self._fill(getattr(message, field.name), 0)
        else:
            old = getattr(message, field.name)
            setattr(message, field.name, self._scalar(field, old))

    def _change_repeated(self, message: Message, field: FieldDescriptor) -> None:
        chance = self._random
        items: Any = getattr(message, field.name)
        what = chance.choice(("add", "add", "delete", "double", "swap", "change", "clear", "many"))
        if not items or what == "add":
            if field.message_type is not None:
                self._fill(items.add(), 0)
            else:
                items.append(self._scalar(field, None))
        elif what == "delete":
            del items[chance.randrange(len(items))]
        elif what == "double":
            items.extend([items[chance.randrange(len(items))]])
        elif what == "many":
            items.extend([items[chance.randrange(len(items))]] * chance.randrange(2, _MAX_REPEATS))
        elif what == "swap":
            order = list(items)
            chance.shuffle(order)
            copies = (
                [type(item).FromString(item.SerializeToString()) for item in order] if field.message_type else order
            )
            del items[:]
            items.extend(copies)
        elif what == "change" and field.message_type is None:
            index = chance.randrange(len(items))
            items[index] = self._scalar(field, items[index])
        else:
            message.ClearField(field.name)

    def _change_map(self, message: Message, field: FieldDescriptor) -> None:
        chance = self._random
        items: Any = getattr(message, field.name)
        key_field, value_field = _entry(field)
        keys = list(items)
        if keys and chance.random() < 0.3:
            del items[chance.choice(keys)]
            return
        key = chance.choice(keys) if keys and chance.random() < 0.5 else self._scalar(key_field, None)
        if value_field.message_type is not None:
            if keys and chance.random() < 0.3:
                items[key].CopyFrom(items[chance.choice(keys)])
            else:
                self._fill(items[key], 0)
        else:
            items[key] = self._scalar(value_field, None)

    def _fill(self, message: Message, depth: int) -> None:
        """Sets one or two fields of a message at random; sometimes with deeply nested messages."""
        fields = _fields(message)
        if not fields:
            return
        for _ in range(self._random.choice((1, 1, 2, 3))):
            field = self._random.choice(fields)
            if field.message_type is None:
                if field.is_repeated:
                    items: Any = getattr(message, field.name)
                    items.extend([self._scalar(field, None) for _ in range(self._random.choice((0, 1, 2, 5)))])
                else:
                    setattr(message, field.name, self._scalar(field, None))
            elif _is_map(field):
                self._change_map(message, field)
            elif depth < _MAX_DEPTH:
                items = getattr(message, field.name)
                self._fill(items.add() if field.is_repeated else items, depth + 1)

    def _scalar(self, field: FieldDescriptor, old: Any) -> Any:
        chance = self._random
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return chance.choice(FLOATS) if chance.random() < 0.8 else chance.uniform(-10, 10)
        if kind == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return self._bytes(field, old or b"")
            return self._string(old or "")
        low, high = _INTEGER_RANGES[kind]
        if kind == FieldDescriptor.CPPTYPE_ENUM and chance.random() < 0.8:
            return chance.choice(_enum_values(field)).number
        if isinstance(old, int) and chance.random() < 0.4:
            return min(high, max(low, old + chance.choice((-2, -1, 1, 2, old))))
        return min(high, max(low, chance.choice(INTEGERS)))

    def _string(self, old: str) -> str:
        chance = self._random
        drawn = chance.random()
        if drawn < 0.45:
            return chance.choice(self._words)
        if drawn < 0.75:
            return chance.choice(STRINGS)
        if drawn < 0.9 and old:
            at = chance.randrange(len(old) + 1)
            return old[:at] + chance.choice(("", "/", ":", "0", "x", "é", " ", "\n")) + old[at + chance.randrange(2) :]
        return "".join(chance.choice("abxy01_/:.*^ -") for _ in range(chance.randrange(12)))

    def _bytes(self, field: FieldDescriptor, old: bytes) -> bytes:
        inside = self._inside.get(field.full_name)
        if inside is not None and old and self._random.random() < 0.8:
            return inside(self._random, old)
        if old and self._random.random() < 0.6:
            return mutated_bytes(self._random, old)
        return self._random.randbytes(self._random.choice((0, 1, 2, 3, 4, 8, 12, 64, 1000)))


def mutated_bytes(chance: Random, data: bytes) -> bytes:
    """Flips, cuts, truncates, doubles or inserts bytes, without knowledge of their meaning."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(changed) + 1)
        what = chance.randrange(7)
        if what == 0 and changed:
            changed[at % len(changed)] ^= 1 << chance.randrange(8)
        elif what == 1 and changed:
            changed[at % len(changed)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif what == 2:
            del changed[at : at + chance.randrange(1, 20)]
        elif what == 3:
            del changed[at:]
        elif what == 4:
            changed[at:at] = chance.randbytes(chance.randrange(1, 12))
        elif what == 5:
            changed[at:at] = changed[at : at + chance.randrange(1, 200)]
        else:
            # An overlong varint, an open group, field number 0, a length beyond the end.
            changed[at:at] = chance.choice((b"\xff" * 10, b"\x0b", b"\x00", b"\x0a\xff\xff\xff\xff\x0f", b"\x7a\x03"))
    return bytes(changed)


def spliced_bytes(chance: Random, first: bytes, second: bytes) -> bytes:
    """Joins the beginning of one and the end of the other: concatenated messages merge."""
    return first[: chance.randrange(len(first) + 1)] + second[chance.randrange(len(second) + 1) :]


def parsed_or_none(kind: type[Message], data: bytes) -> Message | None:
    """The message, or None where the bytes are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def _messages(field: FieldDescriptor, value: Any) -> list[Message]:
    if _is_map(field):
        return list(value.values()) if _entry(field)[1].message_type is not None else []
    return list(value) if field.is_repeated else [value]


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


# The stubs declare as optional what descriptors of these fields always have.


def _fields(message: Message) -> Sequence[FieldDescriptor]:
    fields: Any = message.DESCRIPTOR.fields
    return tuple(fields)


def _entry(field: FieldDescriptor) -> tuple[FieldDescriptor, FieldDescriptor]:
    """Makes key and value of a map."""
    entry: Any = field.message_type
    return entry.fields_by_name["key"], entry.fields_by_name["value"]


def _enum_values(field: FieldDescriptor) -> Sequence[Any]:
    enum: Any = field.enum_type
    return tuple(enum.values)
