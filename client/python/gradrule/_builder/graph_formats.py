"""Reads graphs from bytes, protobuf text and JSON."""

from __future__ import annotations

import json
import re
from typing import Any

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


def read_graph(data: bytes) -> Graph:
    """Returns the graph in bytes of a GraphDef, protobuf text or protobuf JSON, which are told apart by their start.

    Raises:
        InvalidGraphError: The data holds no graph.
    """
    kind, reader = ("bytes", from_bytes)
    if _JSON.match(data):
        kind, reader = ("JSON", from_json)
    elif _TEXT.match(data):
        kind, reader = ("text", from_text)
    try:
        return reader(data)
    except (DecodeError, ValueError, RecursionError, text_format.ParseError, json_format.ParseError) as cause:
        raise InvalidGraphError(f"the {kind} holds no GraphDef: {cause}") from None


def from_bytes(data: bytes) -> Graph:
    """Returns the graph in bytes of a GraphDef. Raises `DecodeError` or `InvalidGraphError`."""
    return Graph.from_bytes(with_functions(data))


def from_text(data: bytes) -> Graph:
    """Returns the graph in protobuf text. Raises `ParseError`, `ValueError` or `InvalidGraphError`."""
    text = _TEXT_TOKEN.sub(lambda match: _RENAMED.get(match[0], match[0]), data.decode("utf-8-sig"))
    message = text_format.Parse(text, graph_pb2.Graph(), allow_unknown_field=True)
    return from_bytes(message.SerializeToString(deterministic=True))


def from_json(data: bytes) -> Graph:
    """Returns the graph in protobuf's JSON. Raises `ParseError`, `ValueError` or `InvalidGraphError`."""
    document = _renamed(json.loads(data))
    message = json_format.ParseDict(document, graph_pb2.Graph(), ignore_unknown_fields=True)
    return from_bytes(message.SerializeToString(deterministic=True))


def _renamed(value: Any, key: str = "") -> Any:
    """Renames TensorFlow's zero values of enums to ours, anywhere in parsed JSON."""
    if isinstance(value, dict):
        return {name: _renamed(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [_renamed(entry, key) for entry in value]
    if isinstance(value, str) and key in _ENUM_KEYS:
        return _RENAMED.get(value, value)
    return value
