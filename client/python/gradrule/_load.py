"""Graphs from files: of graphs without TensorFlow, of SavedModels and of Keras with it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError

from gradrule._formats import other_format
from gradrule._graph import Graph
from gradrule._saving import read_beside
from gradrule.errors import InvalidGraphError, UnsupportedError
from gradrule.v1 import graph_pb2

_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt")
_KERAS = (".keras", ".h5", ".hdf5")

_REMEDIES = {
    "SavedModel": "give the whole folder of the SavedModel, where it is called saved_model.pb",
    "MetaGraphDef": "it has no values of variables; save a SavedModel, or take its graph_def and freeze it",
}

# Zero values whose names differ from TensorFlow's: one convention for enums holds in all of gradrule's messages.
_RENAMED = {"DT_INVALID": "DT_UNSPECIFIED", "TFT_UNSET": "TFT_UNSPECIFIED"}

# A quoted string, which stays as it is, or one of the renamed words.
_TEXT_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|\b(?:DT_INVALID|TFT_UNSET)\b')


def load(path: str | os.PathLike[str], signature: str = "serving_default") -> Graph:
    """The graph in a file: `.pb` (a GraphDef's bytes), `.pbtxt` (protobuf text) or `.json` (protobuf's JSON mapping).

    With TensorFlow also that of a SavedModel's folder, and of a model in a `.keras` or `.h5` file.

    signature: which signature of a SavedModel to take, or which function of its object (`__call__`, or a method's
    name); files of one graph have none and ignore it. Signatures' and Keras's names are aliases of the tensors. The
    graph's `inputs` and `outputs` list its placeholders and what has an alias, or else the tensors that nothing else
    uses. What `Graph.save` wrote beside a `.pb` is read too. Fields that gradrule does not know are kept (`.pb`) or
    skipped. Raises `InvalidGraphError`, and `UnsupportedError` where TensorFlow is needed and missing, or where the
    graph needs what cannot travel.
    """
    file = Path(path)
    if file.is_dir() and any((file / name).exists() for name in _SAVED_MODEL):
        from gradrule._tracing import load_saved_model

        return load_saved_model(file, signature)
    if file.name in _SAVED_MODEL and file.exists():
        raise UnsupportedError(
            f"{file} is one file of a SavedModel, which holds its variables in others; give the folder {file.parent}"
        )
    if file.is_dir():
        raise InvalidGraphError(
            f"{file} is a folder without a SavedModel; expected a file that ends with {', '.join(_READERS)}, or a "
            "folder with saved_model.pb"
        )
    if file.suffix.lower() in _KERAS:
        if not file.exists():
            raise InvalidGraphError(f"{file} cannot be read: No such file or directory")
        from gradrule._tracing import load_keras

        return load_keras(file)
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise InvalidGraphError(f"{file}: expected a file that ends with {', '.join([*_READERS, *_KERAS])}")
    try:
        data = file.read_bytes()
    except OSError as cause:
        raise InvalidGraphError(f"{file} cannot be read: {cause.strerror}") from cause
    if file.suffix.lower() == ".pb" and (kind := other_format(data)) is not None:
        raise UnsupportedError(f"{file} is a {kind}, not a GraphDef; {_REMEDIES[kind]}")
    try:
        graph = reader(data)
    except (DecodeError, ValueError, text_format.ParseError, json_format.ParseError) as cause:
        raise InvalidGraphError(f"{file} holds no graph: {cause}") from None
    except InvalidGraphError as cause:
        raise InvalidGraphError(f"{file}: {cause.message}") from None
    if file.suffix.lower() == ".pb":
        read_beside(graph, file)
    return graph


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
