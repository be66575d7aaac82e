"""Graphs from files, without TensorFlow."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError

from gradrule._graph import Graph
from gradrule.errors import InvalidGraphError, UnsupportedError
from gradrule.v1 import graph_pb2

_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt")

# Zero values whose names differ from TensorFlow's: one convention for enums holds in all of gradrule's messages.
_RENAMED = {"DT_INVALID": "DT_UNSPECIFIED", "TFT_UNSET": "TFT_UNSPECIFIED"}

# A quoted string, which stays as it is, or one of the renamed words.
_TEXT_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|\b(?:DT_INVALID|TFT_UNSET)\b')


def load(path: str | os.PathLike[str], signature: str = "serving_default") -> Graph:
    """The graph in a file: `.pb` (a GraphDef's bytes), `.pbtxt` (protobuf text) or `.json` (protobuf's JSON mapping).

    signature: which signature of a SavedModel to take; files of one graph have none and ignore it. The graph's `inputs`
    and `outputs` list its placeholders and the tensors that nothing else uses. Fields that gradrule does not know are
    kept (`.pb`) or skipped. Raises `InvalidGraphError`, and `UnsupportedError` for SavedModels.
    """
    file = Path(path)
    if _is_saved_model(file):
        raise UnsupportedError(
            f"{file} is a SavedModel, which this version does not read; freeze it to a GraphDef (.pb) with TensorFlow"
        )
    if file.is_dir():
        raise InvalidGraphError(f"{file} is a folder; expected a file that ends with {', '.join(_READERS)}")
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise InvalidGraphError(f"{file}: expected a file that ends with {', '.join(_READERS)}")
    try:
        data = file.read_bytes()
    except OSError as cause:
        raise InvalidGraphError(f"{file} cannot be read: {cause.strerror}") from cause
    try:
        return reader(data)
    except (DecodeError, ValueError, text_format.ParseError, json_format.ParseError) as cause:
        raise InvalidGraphError(f"{file} holds no graph: {cause}") from None
    except InvalidGraphError as cause:
        raise InvalidGraphError(f"{file}: {cause.message}") from None


def _is_saved_model(path: Path) -> bool:
    if path.is_dir():
        return any((path / name).exists() for name in _SAVED_MODEL)
    return path.name in _SAVED_MODEL and path.exists()


def _from_text(data: bytes) -> Graph:
    text = _TEXT_TOKEN.sub(lambda match: _RENAMED.get(match[0], match[0]), data.decode())
    message = text_format.Parse(text, graph_pb2.Graph(), allow_unknown_field=True)
    return Graph.from_bytes(message.SerializeToString(deterministic=True))


def _from_json(data: bytes) -> Graph:
    document = _renamed(json.loads(data))
    message = json_format.ParseDict(document, graph_pb2.Graph(), ignore_unknown_fields=True)
    return Graph.from_bytes(message.SerializeToString(deterministic=True))


def _renamed(value: Any, key: str = "") -> Any:
    """The JSON with TensorFlow's zero values by our names, wherever an enum can stand."""
    if isinstance(value, dict):
        return {name: _renamed(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [_renamed(entry, key) for entry in value]
    if isinstance(value, str) and key in _ENUM_KEYS:
        return _RENAMED.get(value, value)
    return value


_ENUM_KEYS = {"type", "dtype", "typeId", "type_id"}

_READERS: dict[str, Callable[[bytes], Graph]] = {".pb": Graph.from_bytes, ".pbtxt": _from_text, ".json": _from_json}
