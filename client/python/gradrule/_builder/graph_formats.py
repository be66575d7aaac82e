"""Reads graphs from bytes, protobuf text and JSON."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError

from gradrule._builder.functional_control_flow import with_functions
from gradrule._builder.graph import Graph
from gradrule.errors import InvalidGraphError
from gradrule.v1 import graph_pb2

# Zero values whose names differ from TensorFlow's: one convention for enums holds in all of gradrule's messages.
_RENAMED = {"DT_INVALID": "DT_UNSPECIFIED", "TFT_UNSET": "TFT_UNSPECIFIED"}

# A quoted string, which stays as it is, or one of the renamed words.
_TEXT_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|\b(?:DT_INVALID|TFT_UNSET)\b')

_ENUM_KEYS = {"type", "dtype", "typeId", "type_id"}
# Protobuf text starts with a comment or with a field of a GraphDef; bytes of a GraphDef start with a control character.
_TEXT = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:#|(?:node|library|versions|version)\s*[{:])")
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{")
# Neither text nor JSON has these characters. A node of at most 123 bytes, which is `{`, has those of its fields' tags.
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")
_LONGEST_START = 125


Kind = Literal["bytes", "JSON", "text"]


def kind_of(data: bytes) -> Kind:
    """Tells by their start whether data are bytes of a GraphDef, protobuf text or protobuf JSON."""
    if data[:1] == b"\n" and _CONTROL.search(data, 0, _LONGEST_START):
        # A GraphDef starts with a line feed and the length of its first node, which may look like `{` or `#`.
        return "bytes"
    if _JSON.match(data):
        return "JSON"
    return "text" if _TEXT.match(data) else "bytes"


def graphdef_of(data: bytes) -> bytes:
    """Returns the bytes of the GraphDef in bytes, protobuf text or protobuf JSON, told apart by their start.

    Raises:
        InvalidGraphError: The data hold no GraphDef.
    """
    kind = kind_of(data)
    with _errors_of(kind):
        if kind == "bytes":
            return data
        return _from_json(data) if kind == "JSON" else _from_text(data)


def read_graphdef(data: bytes) -> Graph:
    """Returns the graph in bytes of a GraphDef. Raises `InvalidGraphError`."""
    with _errors_of("bytes"):
        return from_bytes(data)


def from_bytes(data: bytes) -> Graph:
    """Returns the graph in bytes of a GraphDef. Raises `DecodeError` or `InvalidGraphError`."""
    return Graph.from_bytes(with_functions(data))


def from_text(data: bytes) -> Graph:
    """Returns the graph in protobuf text. Raises `ParseError`, `ValueError` or `InvalidGraphError`."""
    return from_bytes(_from_text(data))


def from_json(data: bytes) -> Graph:
    """Returns the graph in protobuf's JSON. Raises `ParseError`, `ValueError` or `InvalidGraphError`."""
    return from_bytes(_from_json(data))


@contextlib.contextmanager
def _errors_of(kind: Kind) -> Iterator[None]:
    try:
        yield
    except (DecodeError, ValueError, RecursionError, text_format.ParseError, json_format.ParseError) as cause:
        raise InvalidGraphError(f"the {kind} holds no GraphDef: {cause}") from None


def _from_text(data: bytes) -> bytes:
    text = _TEXT_TOKEN.sub(lambda match: _RENAMED.get(match[0], match[0]), data.decode("utf-8-sig"))
    message = text_format.Parse(text, graph_pb2.Graph(), allow_unknown_field=True)
    return message.SerializeToString(deterministic=True)


def _from_json(data: bytes) -> bytes:
    document = json.loads(data, object_hook=_rename)
    message = json_format.ParseDict(document, graph_pb2.Graph(), ignore_unknown_fields=True)
    return message.SerializeToString(deterministic=True)


def _rename(entry: dict[str, Any]) -> dict[str, Any]:
    """Renames TensorFlow's zero values of enums to ours in an object of JSON."""
    for key in _ENUM_KEYS & entry.keys():
        value = entry[key]
        if isinstance(value, list):
            entry[key] = [_RENAMED.get(each, each) if isinstance(each, str) else each for each in value]
        elif isinstance(value, str):
            entry[key] = _RENAMED.get(value, value)
    return entry
