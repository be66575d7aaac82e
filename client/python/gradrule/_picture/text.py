"""Prepares texts for pictures: names are untrusted and attributes may be large."""

from __future__ import annotations

import re
import unicodedata

from gradrule._builder.graph_lookup import GRADIENT_ATTR
from gradrule.common.dtypes import dtype_name
from gradrule.common.tensor_codec import shape_tuple
from gradrule.v1.graph_pb2 import AttrValue, Node
from gradrule.v1.tensor_pb2 import TensorShape

# Characters that XML forbids, and those that change the direction of text.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_ATTR_LENGTH = 60
_ATTRS = 8
_CHAR = 6.7


def clean(text: str) -> str:
    """Returns the text without forbidden characters."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def shortened(text: str, length: int) -> str:
    """Returns the text; replaces the middle of a long text by `…`, because both ends of a name are informative."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def width(text: str, size: float = 11.0) -> float:
    """Returns the width of a text in pixels, for a monospaced font of `size` pixels, with a margin for wide fonts."""
    columns = sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
    return columns * _CHAR * size / 11


def attrs(node: Node) -> list[str]:
    """Returns a node's attributes as short lines `name: value`, without attributes for TensorFlow's tools."""
    names = sorted(name for name in node.attr if not name.startswith("_") or name == GRADIENT_ATTR)
    lines = [f"{shortened(clean(name), _ATTR_LENGTH)}: {_value(node.attr[name])}" for name in names[:_ATTRS]]
    return lines if len(names) <= _ATTRS else [*lines, f"… {len(names) - _ATTRS} more"]


def _value(value: AttrValue) -> str:
    return shortened(clean(_plain(value)), _ATTR_LENGTH)


def _plain(value: AttrValue) -> str:
    kind = value.WhichOneof("value")
    if kind == "s":
        return value.s[: 4 * _ATTR_LENGTH].decode(errors="replace")
    if kind == "type":
        return dtype_name(value.type)
    if kind == "shape":
        return _shape(value.shape)
    if kind == "tensor":
        return f"{dtype_name(value.tensor.dtype)} {_shape(value.tensor.tensor_shape)}"
    if kind == "func":
        return value.func.name
    if kind == "list":
        return _list(value.list)
    return str(getattr(value, kind)) if kind else ""


def _list(values: AttrValue.ListValue) -> str:
    (field, entries), *_ = [(field.name, entries) for field, entries in values.ListFields()] or [("", ())]
    shown = [_entry(field, entry) for entry in entries[:_ATTRS]]
    return f"[{', '.join(shown)}{', …' if len(entries) > _ATTRS else ''}]"


def _entry(field: str, entry: object) -> str:
    value = AttrValue()
    if field in ("shape", "tensor", "func"):
        getattr(value, field).CopyFrom(entry)
    else:
        setattr(value, field, entry)
    return _plain(value)


def _shape(shape: TensorShape) -> str:
    sizes = shape_tuple(shape)
    return "?" if sizes is None else f"[{', '.join('?' if size is None else str(size) for size in sizes[:_ATTRS])}]"
