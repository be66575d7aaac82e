"""Loads graphs from files; SavedModels and Keras models need TensorFlow, graph files do not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError

from gradrule._builder.graph import Graph
from gradrule._builder.graph_formats import from_bytes, from_json, from_text
from gradrule._builder.saving import read_variables_and_aliases
from gradrule.common import wire_format
from gradrule.errors import InvalidGraphError, UnsupportedError

_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt")
_KERAS = (".keras", ".h5", ".hdf5")
_ONNX = ".onnx"

_REMEDIES = {
    "SavedModel": "give the whole folder of the SavedModel, where it is called saved_model.pb",
    "MetaGraphDef": "it has no values of variables; save a SavedModel, or take its graph_def and freeze it",
}

# A SavedModel starts with its schema's version, a varint in field 1; field 1 of a GraphDef is a node.
_SAVED_MODEL_TAG = 1 << 3 | wire_format.VARINT
# Fields of `MetaGraphDef` and of its `MetaInfoDef`.
_META_INFO, _INNER_GRAPH, _TENSORFLOW_VERSION = 1, 2, 5
_VERSION = re.compile(rb"\d+\.\d+\.\d+")


def load(path: str | os.PathLike[str], signature: str = "serving_default") -> Graph:
    """Loads a graph from a file, a SavedModel's folder or a Keras model's file.

    The graph's `inputs` are its placeholders. Its `outputs` are the tensors with an alias, or, if there are none, the
    tensors that no node uses. Names from signatures and from Keras become aliases of tensors.

    Control flow of version 1 (Switch, Merge, Enter) becomes If and While nodes, if it has the form that TensorFlow
    writes.

    Args:
        path: `.pb` (bytes of a GraphDef, with the files that `Graph.save` wrote next to it), `.pbtxt` (protobuf text)
            or `.json` (protobuf's JSON mapping); with onnx also `.onnx`; with TensorFlow also a SavedModel's folder,
            `.keras` and `.h5`.
            Fields that gradrule does not know are kept in `.pb` and skipped in `.pbtxt` and `.json`.
        signature: The SavedModel's signature, or a function of its object (`__call__`, or a method's name); ignored
            for other files.

    Returns:
        The graph, with variables and aliases.

    Raises:
        InvalidGraphError: The file is missing or holds no graph.
        UnsupportedError: TensorFlow or onnx is needed but not installed, or the graph uses something that cannot be
            sent.
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
    if file.suffix.lower() == _ONNX:
        from gradrule._models import from_onnx

        return from_onnx(file)
    if file.suffix.lower() not in _READERS:
        raise InvalidGraphError(f"{file}: expected a file that ends with {', '.join([*_READERS, _ONNX, *_KERAS])}")
    try:
        data = file.read_bytes()
    except OSError as cause:
        raise InvalidGraphError(f"{file} cannot be read: {cause.strerror}") from cause
    graph = read_graph(data, file.suffix.lower(), str(file))
    if file.suffix.lower() == ".pb":
        read_variables_and_aliases(graph, file)
    return graph


def read_graph(data: bytes, suffix: str, source: str) -> Graph:
    """Reads a graph from bytes.

    Args:
        data: Content of a file that ends with `suffix`.
        suffix: `.pb`, `.pbtxt`, `.json`, or empty: recognised by the content.
        source: Names the origin of the bytes in errors.

    Raises:
        InvalidGraphError: The bytes are no graph.
        UnsupportedError: They are a SavedModel or a MetaGraphDef.
    """
    suffix = suffix or _suffix_of(data)
    if suffix == ".pb" and (kind := _other_format(data)) is not None:
        raise UnsupportedError(f"{source} is a {kind}, not a GraphDef; {_REMEDIES[kind]}")
    try:
        return _READERS[suffix](data)
    except (DecodeError, ValueError, text_format.ParseError, json_format.ParseError) as cause:
        raise InvalidGraphError(f"{source} holds no graph: {cause}") from None
    except InvalidGraphError as cause:
        raise InvalidGraphError(f"{source}: {cause.message}") from None


def _suffix_of(data: bytes) -> str:
    """Returns the ending of files with this content. Each node of a GraphDef in bytes has a control character."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return ".pb"
    if not all(character.isprintable() or character in "\t\r\n" for character in text):
        return ".pb"
    return ".json" if text.lstrip().startswith("{") else ".pbtxt"


def _other_format(data: bytes) -> str | None:
    """Returns `SavedModel` or `MetaGraphDef` for bytes of these messages, else None."""
    try:
        fields = list(islice(wire_format.fields(data, 0, len(data)), 2))
        if fields and data[0] == _SAVED_MODEL_TAG:
            return "SavedModel"
        if [number for number, _, _ in fields] == [_META_INFO, _INNER_GRAPH]:
            _, start, end = fields[0]
            info = {number: data[first:last] for number, first, last in wire_format.fields(data, start, end)}
            if _VERSION.match(info.get(_TENSORFLOW_VERSION, b"")):
                return "MetaGraphDef"
    except wire_format.MalformedError:
        return None
    return None


_READERS: dict[str, Callable[[bytes], Graph]] = {".pb": from_bytes, ".pbtxt": from_text, ".json": from_json}
