"""Reads ONNX models: checks the file, reads external data, expands functions, infers element types and shapes."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError
from onnx import external_data_helper, numpy_helper
from onnx.inliner import inline_selected_functions

from gradrule.errors import InvalidGraphError, UnsupportedError

OLDEST_OPSET = 11
# Expanding functions that call functions can take exponential time and memory.
_MAX_NODES = 200_000
_MAX_DEPTH = 32
_MAX_AXES = 64
_EQUATION = re.compile(rb"[A-Za-z., ]*(->[A-Za-z. ]*)?")
_REFUSALS = (onnx.checker.ValidationError, onnx.shape_inference.InferenceError)
_EXPANDED_DOMAIN = "gradrule.expanded"
# Larger initialisers say nothing about shapes.
_SMALL = 1024


def read_model(source: bytes | str | os.PathLike[str], expanded: Collection[tuple[str, str]]) -> onnx.ModelProto:
    """Reads and checks a model.

    Args:
        source: Bytes of a model, or the path of its file.
        expanded: Domain and name of operations to replace by the functions that ONNX defines for them.

    Returns:
        The model, all values at hand, without calls of functions of its own, with `value_info`.

    Raises:
        InvalidGraphError: The file is missing, is no ONNX model, or breaks a rule of ONNX.
        UnsupportedError: The opset is older than `OLDEST_OPSET`, or data is outside of the model's folder.
    """
    where, folder, data = "these bytes", None, source
    if not isinstance(source, (bytes, bytearray, memoryview)):
        file = Path(source)
        where, folder = str(file), file.parent
        try:
            data = file.read_bytes()
        except OSError as cause:
            raise InvalidGraphError(f"{file} cannot be read: {cause.strerror}") from cause
    assert not isinstance(data, (str, os.PathLike))
    try:
        model = onnx.ModelProto.FromString(bytes(data))
    except DecodeError as cause:
        raise InvalidGraphError(f"{where}: no ONNX model of {len(data)} bytes: {cause}") from None
    if not model.HasField("graph") or not model.opset_import:
        raise InvalidGraphError(
            f"{where}: no ONNX model: it has no {'graph' if model.opset_import else 'opset_import'}"
        )
    _check_opset(model, where)
    _check_size(model, where)
    for tensor in _tensors(model):
        if external_data_helper.uses_external_data(tensor):
            _read_external(tensor, folder, where)
    return _prepared(model, set(expanded), where)


def opsets(model: onnx.ModelProto) -> Mapping[str, int]:
    """Returns the versions of the operations by domain; the default domain is the empty string."""
    return {"" if item.domain == "ai.onnx" else item.domain: item.version for item in model.opset_import}


def _check_opset(model: onnx.ModelProto, where: str) -> None:
    version = opsets(model).get("", OLDEST_OPSET)
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST_OPSET <= version <= newest:
        raise UnsupportedError(
            f"{where} has opset {version}; supported are {OLDEST_OPSET} to {newest}. "
            "onnx.version_converter.convert_version(model, 17) converts it"
        )


def _check_size(model: onnx.ModelProto, where: str) -> None:
    """Refuses functions that call themselves, and models with too many nodes once functions are expanded."""
    functions = {(item.domain, item.name): item for item in model.functions}
    sizes: dict[tuple[str, str], int] = {}
    pending: set[tuple[str, str]] = set()

    def check_ranges(node: onnx.NodeProto) -> None:
        # ONNX's inference of shapes reads beyond its arrays, or does not end, for some of these.
        for attribute in node.attribute:
            if attribute.name == "equation" and not _EQUATION.fullmatch(attribute.s):
                raise InvalidGraphError(f"{where}: {node.op_type} node {node.name!r}: {attribute.s!r} is no equation")
            if attribute.name == "num_outputs" and attribute.i != len(node.output):
                raise InvalidGraphError(f"{where}: {node.op_type} node {node.name!r} has another number of outputs")
            if any(abs(number) > _MAX_AXES for number in (attribute.i, *attribute.ints)) and (
                attribute.name in ("axis", "axes", "perm") or attribute.name.endswith(("_axis", "_axes"))
            ):
                raise InvalidGraphError(f"{where}: {node.op_type} node {node.name!r} has {attribute.name} out of range")

    def size(nodes: Iterable[onnx.NodeProto], depth: int) -> int:
        if depth > _MAX_DEPTH:
            raise InvalidGraphError(f"{where}: more than {_MAX_DEPTH} graphs or functions inside of each other")
        total = 0
        for node in nodes:
            key = node.domain, node.op_type
            total += 1
            check_ranges(node)
            if key in functions:
                if key in pending:
                    raise InvalidGraphError(f"{where}: function {node.op_type!r} calls itself")
                if key not in sizes:
                    pending.add(key)
                    sizes[key] = size(functions[key].node, depth + 1)
                    pending.remove(key)
                total += sizes[key]
            for graph in subgraphs(node):
                total += size(graph.node, depth + 1)
            if total > _MAX_NODES:
                raise UnsupportedError(f"{where}: more than {_MAX_NODES} nodes once all functions are expanded")
        return total

    size(model.graph.node, 0)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the graphs in the attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    graphs = [model.graph]
    nodes = [node for function in model.functions for node in function.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from graph.initializer
            nodes += graph.node
        else:
            node = nodes.pop()
            graphs += subgraphs(node)
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors


def _read_external(tensor: onnx.TensorProto, folder: Path | None, where: str) -> None:
    """Reads a tensor's data from a file in the model's folder."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    what = f"{where}: the data of {tensor.name!r} is in the file {location!r}"
    if folder is None:
        raise UnsupportedError(
            f"{what}, but only bytes were given. onnx.save(model, path, save_as_external_data=False) writes one file"
        )
    parts = Path(location).parts
    if not parts or Path(location).is_absolute() or ".." in parts:
        raise UnsupportedError(f"{what}; it must be in the model's folder, without '..'")
    file = folder
    try:
        for part in parts:
            file = file / part
            if stat.S_ISLNK(file.lstat().st_mode):
                raise UnsupportedError(f"{what}, which is a symbolic link; the file must be in the model's folder")
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", file.stat().st_size - offset))
        if offset < 0 or length < 0 or offset + length > file.stat().st_size:
            raise InvalidGraphError(f"{what}, which is shorter than its {offset} + {length} bytes")
        with file.open("rb") as opened:
            opened.seek(offset)
            tensor.raw_data = opened.read(length)
    except (OSError, ValueError) as cause:
        raise InvalidGraphError(f"{what}, which cannot be read: {cause}") from None
    tensor.data_location = onnx.TensorProto.DEFAULT
    del tensor.external_data[:]


def _prepared(model: onnx.ModelProto, expanded: set[tuple[str, str]], where: str) -> onnx.ModelProto:
    """Checks a model, expands functions, and infers shapes."""
    own = {(item.domain, item.name) for item in model.functions}
    versions = opsets(model)
    for item in model.functions:
        for import_ in item.opset_import:
            if versions.get(import_.domain, import_.version) != import_.version:
                raise UnsupportedError(
                    f"{where}: function {item.name!r} is written for opset {import_.version} of "
                    f"{import_.domain or 'ai.onnx'}, the model for {versions[import_.domain]}; they must be equal"
                )
    try:
        small, large = _without_large(model)
        onnx.checker.check_model(small)
        if own:
            small = inline_selected_functions(small, sorted(own))
        _give_defaults(small)
        small = inferred(small)
        while functions := _as_functions(small, expanded):
            small = inline_selected_functions(small, functions)
            _give_defaults(small)
            small = inferred(small)
    except (*_REFUSALS, RuntimeError, EncodeError, ValueError) as cause:
        raise InvalidGraphError(f"{where}: not a valid ONNX model: {_short(cause)}") from None
    return _with_large(small, large)


def _without_large(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[onnx.TensorProto]]:
    """Returns a model with inputs in place of large initialisers, and these: their values say nothing about shapes."""
    small = onnx.ModelProto()
    small.CopyFrom(model)
    large = [item for item in model.graph.initializer if np.prod([float(size) for size in item.dims]) > _SMALL]
    names = {item.name for item in large}
    known = {item.name for item in model.graph.input}
    kept = [item for item in model.graph.initializer if item.name not in names]
    del small.graph.initializer[:]
    small.graph.initializer.extend(kept)
    for item in large:
        if item.name not in known:
            small.graph.input.append(onnx.helper.make_tensor_value_info(item.name, item.data_type, item.dims))
    return small, large


def _with_large(small: onnx.ModelProto, large: Sequence[onnx.TensorProto]) -> onnx.ModelProto:
    """Reverses `_without_large`."""
    small.graph.initializer.extend(large)
    return small


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the model with the element types and shapes that ONNX infers."""
    return onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)


def with_known(model: onnx.ModelProto, known: Mapping[str, np.ndarray]) -> onnx.ModelProto | None:
    """Returns the model in which initialisers replace the nodes whose results are known; None if ONNX refuses it."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    graph = found.graph
    kept = [node for node in graph.node if not all(name in known for name in node.output)]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(kept)
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in known.items())
    small, large = _without_large(found)
    try:
        return _with_large(inferred(small), large)
    except _REFUSALS:
        return None


def _give_defaults(model: onnx.ModelProto) -> None:
    """Adds default attributes to operations that ONNX defines by functions, whose nodes need them."""
    versions = opsets(model)
    for node in all_nodes(model.graph):
        try:
            schema: Any = onnx.defs.get_schema(node.op_type, versions.get(node.domain, 0), node.domain)
        except onnx.defs.SchemaError:
            continue
        if schema.has_function or schema.has_context_dependent_function:
            given = {attribute.name for attribute in node.attribute}
            node.attribute.extend(
                attribute.default_value
                for name, attribute in schema.attributes.items()
                if name not in given and attribute.default_value.type
            )


def _as_functions(model: onnx.ModelProto, expanded: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Writes operations as functions of the model; returns domain and name of these. They need inferred types."""
    versions, added = opsets(model), list[tuple[str, str]]()
    types = {item.name: item.type for graph in _graphs(model.graph) for item in (*graph.input, *graph.value_info)}
    for graph in _graphs(model.graph):
        types |= {
            item.name: onnx.helper.make_tensor_type_proto(item.data_type, item.dims) for item in graph.initializer
        }
    for node in all_nodes(model.graph):
        if (node.domain, node.op_type) not in expanded:
            continue
        version = versions[node.domain]
        schema: Any = onnx.defs.get_schema(node.op_type, version, node.domain)
        function = model.functions.add()
        if found := [number for number in schema.function_opset_versions if number <= version]:
            function.ParseFromString(schema.get_function_with_opset_version(max(found)))
        elif found := [number for number in schema.context_dependent_function_opset_versions if number <= version]:
            kinds = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
            function.ParseFromString(
                schema.get_context_dependent_function_with_opset_version(max(found), node.SerializeToString(), kinds)
            )
        function.domain, function.name = _EXPANDED_DOMAIN, f"{node.op_type}_{len(model.functions)}"
        del function.opset_import[:]
        function.opset_import.extend(model.opset_import)
        for inner in function.node:
            inner.name = f"{node.name or node.op_type}/{inner.name or inner.op_type}"
        node.domain, node.op_type = function.domain, function.name
        added.append((function.domain, function.name))
    if added and _EXPANDED_DOMAIN not in versions:
        model.opset_import.add(domain=_EXPANDED_DOMAIN, version=1)
    return added


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _graphs(inner)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yields the nodes of a graph and of the graphs inside."""
    for inner in _graphs(graph):
        yield from inner.node


def array_of(tensor: onnx.TensorProto) -> np.ndarray:
    """Returns the values of a tensor. Raises `InvalidGraphError` if their number does not fit the shape."""
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, MemoryError) as cause:
        raise InvalidGraphError(f"the values of tensor {tensor.name!r} are not valid: {_short(cause)}") from None


def _short(cause: BaseException) -> str:
    return " ".join(str(cause).split())[:500]
