"""Checks a value of an op's attribute for its kind, minimum and allowed values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gradrule.common.dtypes import NAMES, dtype_name
from gradrule.common.op_definitions import AttrDef
from gradrule.v1.graph_pb2 import AttrValue

Kind = Literal["TYPE_MISMATCH", "INVALID_ATTR"]

_FIELD = {
    "int": "i",
    "float": "f",
    "bool": "b",
    "string": "s",
    "type": "type",
    "shape": "shape",
    "tensor": "tensor",
    "func": "func",
}
_LIST_FIELDS = tuple(_FIELD.values())


class InferenceError(Exception):
    """Reports that a node does not fit its op's definition.

    Attributes:
        kind: name of the error's reason.
        message: a sentence without the node's name.
    """

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class AttributeCheck:
    """Holds an attribute's definition in the form that checks need."""

    __slots__ = ("allowed", "attr", "field", "is_list", "name")

    def __init__(self, attr: AttrDef) -> None:
        self.attr = attr
        self.name = attr.name
        self.is_list = attr.type.startswith("list(")
        self.field = _FIELD[attr.type[5:-1] if self.is_list else attr.type]
        self.allowed: frozenset[object] | None = None
        if attr.allowed is not None:
            self.allowed = frozenset(getattr(attr.allowed.list, self.field))

    def check(self, value: AttrValue) -> None:
        """Raises `InferenceError` if the value does not fit the attribute."""
        field = value.WhichOneof("value")
        if field == "placeholder":
            return
        if field is None or field != ("list" if self.is_list else self.field):
            raise InferenceError(
                "INVALID_ATTR",
                f"attribute {self.name!r} is {_article(self.attr.type)}, not {_article(_kind_of(value))}",
            )
        entries: Sequence[object]
        if self.is_list:
            entries = getattr(value.list, self.field)
            for other in _LIST_FIELDS:
                if other != self.field and getattr(value.list, other):
                    raise InferenceError(
                        "INVALID_ATTR", f"attribute {self.name!r} is a {self.attr.type}, not a list of {other}"
                    )
            size, what = len(entries), "length "
        else:
            entries = (getattr(value, self.field),)
            size, what = (value.i, "") if self.field == "i" else (0, "")
        minimum = self.attr.minimum
        if minimum is not None and size < minimum:
            raise InferenceError("INVALID_ATTR", f"attribute {self.name!r} has {what}{size}; the minimum is {minimum}")
        if self.field == "type" and any(entry not in NAMES for entry in entries):
            raise InferenceError("INVALID_ATTR", f"attribute {self.name!r} holds an element type that is not set")
        if self.allowed is not None:
            for entry in entries:
                if entry not in self.allowed:
                    raise InferenceError(
                        "INVALID_ATTR", f"attribute {self.name!r} cannot be {_shown(entry)}; {self.choices()}"
                    )

    def choices(self) -> str:
        """Returns the allowed values as `allowed: float32, float64`."""
        shown = sorted(_shown(entry) for entry in self.allowed or ())
        return f"allowed: {', '.join(shown)}"


def _shown(entry: object) -> str:
    if isinstance(entry, int):
        return dtype_name(entry)
    return repr(entry.decode(errors="replace")) if isinstance(entry, bytes) else str(entry)


def _kind_of(value: AttrValue) -> str:
    field = value.WhichOneof("value")
    if field is None:
        return "value that is not set"
    return next((name for name, own in _FIELD.items() if own == field), field)


def _article(text: str) -> str:
    return f"{'an' if text[0] in 'aeiou' else 'a'} {text}"
