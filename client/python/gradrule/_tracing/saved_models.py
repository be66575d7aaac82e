"""Loads graphs from SavedModels of TensorFlow 2 and 1."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import text_format
from google.protobuf.message import DecodeError
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2
from tensorflow.core.protobuf import saved_model_pb2

from gradrule._builder.frozen_variables import needed_functions
from gradrule._builder.functional_control_flow import with_functions
from gradrule._builder.graph import Graph
from gradrule._builder.names import UniqueNames, did_you_mean
from gradrule._tracing.functions import graph_of_concrete
from gradrule._tracing.lookup_tables import TABLE_OPS, replace_tables, session_table
from gradrule._tracing.signatures import add_aliases
from gradrule.errors import Detail, GradruleError, InvalidGraphError, UnsupportedError

_SERVE = "serve"
_BINARY, _TEXT = "saved_model.pb", "saved_model.pbtxt"
_RESERVED = {"signatures", "variables", "trainable_variables", "non_trainable_variables", "regularization_losses"}
_REFERENCES = {"Variable", "VariableV2"}


def load(folder: Path, signature: str) -> Graph:
    """Loads the graph of a signature, or of a function of the object. Raises `InvalidGraphError`."""
    message = _message(folder)
    meta = _meta_graph(message, folder)
    tags = list(meta.meta_info_def.tags)
    try:
        if not meta.object_graph_def.nodes:
            signatures = {
                key: value for key, value in meta.signature_def.items() if not key.startswith("__saved_model")
            }
            if signature not in signatures:
                raise _unknown(signature, list(signatures), [])
            return _load_tf1(folder, tags, signatures[signature])
        with _without_slots(message, folder) as loadable:
            return _of_object(tf.saved_model.load(str(loadable), tags=tags), signature)
    except GradruleError as cause:
        details = cause.details if len(cause.details) > 1 else ()
        raise type(cause)(f"{folder}: {cause.message}", details=details) from cause
    except (OSError, ValueError, tf.errors.OpError) as cause:
        raise InvalidGraphError(f"{folder}: TensorFlow cannot load the SavedModel: {cause}") from cause


def _meta_graph(message: Any, folder: Path) -> Any:
    """Returns the model's graph for serving."""
    for meta in message.meta_graphs:
        if _SERVE in meta.meta_info_def.tags:
            return meta
    if len(message.meta_graphs) == 1:
        return message.meta_graphs[0]
    known = "; ".join(", ".join(meta.meta_info_def.tags) or "no tag" for meta in message.meta_graphs) or "none at all"
    raise InvalidGraphError(f"{folder} has no graph with the tag {_SERVE!r}; there are: {known}")


def _message(folder: Path) -> Any:
    """Returns the content of the folder's SavedModel."""
    binary, text = folder / _BINARY, folder / _TEXT
    message = saved_model_pb2.SavedModel()
    try:
        if binary.exists():
            message.ParseFromString(binary.read_bytes())
        else:
            text_format.Parse(text.read_text(), message)
    except (OSError, DecodeError, ValueError, text_format.ParseError) as cause:
        raise InvalidGraphError(f"{folder} holds no SavedModel: {cause}") from None
    return message


@contextlib.contextmanager
def _without_slots(message: Any, folder: Path) -> Iterator[Path]:
    """Yields a folder with the model, without the slots of optimizers.

    TensorFlow restores slots with the optimizer's class, which Keras 3 does not register; the functions use no slots.
    """
    nodes = [node for meta in message.meta_graphs for node in meta.object_graph_def.nodes if node.slot_variables]
    if not nodes:
        yield folder
        return
    for node in nodes:
        del node.slot_variables[:]
    with tempfile.TemporaryDirectory(prefix="gradrule-") as temporary:
        copy = Path(temporary)
        for entry in folder.iterdir():
            if entry.name not in (_BINARY, _TEXT):
                (copy / entry.name).symlink_to(entry.resolve())
        (copy / _BINARY).write_bytes(message.SerializeToString())
        yield copy


def _of_object(loaded: Any, signature: str) -> Graph:
    signatures: Mapping[str, Any] = loaded.signatures
    if signature in signatures:
        # Keep the object alive while the function is read: it holds the variables.
        return graph_of_concrete(signatures[signature])
    functions = _functions(loaded)
    if signature not in functions:
        raise _unknown(signature, list(signatures), list(functions))
    return graph_of_concrete(_only(signature, functions[signature].concrete_functions))


def _functions(loaded: Any) -> dict[str, Any]:
    """Returns the object's functions by name; `__call__` is the object itself."""
    found = {}
    for name in ["__call__", *(name for name in dir(loaded) if not name.startswith("_") and name not in _RESERVED)]:
        function = getattr(loaded, name, None)
        if getattr(function, "concrete_functions", None):
            found[name] = function
    return found


def _only(name: str, concrete: list[Any]) -> Any:
    """Returns the single trace of a function; of a Keras function, the trace for inference."""
    inference = [function for function in concrete if not _is_for_training(function)]
    for candidates in (concrete, inference):
        if len(candidates) == 1:
            return candidates[0]
    shown = "; ".join(str(function.function_type) for function in concrete)
    raise InvalidGraphError(
        f"the function {name!r} was traced for several signatures: {shown}. Load it with tf.saved_model.load and give "
        "it to gr.trace with specs"
    )


def _is_for_training(function: Any) -> bool:
    args, kwargs = function.structured_input_signature
    return kwargs.get("training") is True or any(value is True for value in args)


def _unknown(signature: str, signatures: list[str], functions: list[str]) -> InvalidGraphError:
    known = ", ".join(map(repr, sorted(signatures))) or "none"
    functions = [name for name in functions if name not in signatures]
    more = f"; functions, which work too: {', '.join(map(repr, functions))}" if functions else ""
    return InvalidGraphError(
        f"there is no signature {signature!r}.{did_you_mean(signature, [*signatures, *functions])} "
        f"Signatures: {known}{more}"
    )


def _load_tf1(folder: Path, tags: list[str], signature: Any) -> Graph:
    """Returns the part of the graph that a signature's outputs need; reference variables become resources."""
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        tf.compat.v1.saved_model.loader.load(session, tags, str(folder))
        inputs = {alias: info.name for alias, info in signature.inputs.items() if info.name}
        outputs = {alias: info.name for alias, info in signature.outputs.items() if info.name}
        wanted = sorted({name.partition(":")[0] for name in [*inputs.values(), *outputs.values()]})
        definition = tf.compat.v1.graph_util.extract_sub_graph(graph.as_graph_def(), wanted)
        values = _values(session, graph, definition)
        _replace_tables(session, graph, definition)
    _use_resources(definition)
    for node in definition.node:
        node.device = ""
    wrapped = Graph.from_bytes(with_functions(definition.SerializeToString(deterministic=True)))
    wrapped.variables.update(values)
    add_aliases(wrapped, inputs, outputs.items())
    return wrapped


def _values(session: Any, graph: Any, definition: graph_pb2.GraphDef) -> dict[str, Any]:
    reads = {}
    with graph.as_default():
        for node in definition.node:
            tensor = graph.get_tensor_by_name(f"{node.name}:0") if node.op in {*_REFERENCES, "VarHandleOp"} else None
            if node.op in _REFERENCES:
                reads[node.name] = tensor
            elif node.op == "VarHandleOp":
                dtype = tf.as_dtype(node.attr["dtype"].type)
                reads[node.name] = tf.raw_ops.ReadVariableOp(resource=tensor, dtype=dtype)
    # Scalars come back as NumPy scalars, not as arrays.
    return {name: np.asarray(value) for name, value in session.run(reads).items()}


def _replace_tables(session: Any, graph: Any, definition: graph_pb2.GraphDef) -> None:
    """Replaces lookup tables, which loading has initialized."""
    tables = {
        node.name: session_table(session, graph.get_tensor_by_name(f"{node.name}:0"), node.name)
        for node in definition.node
        if node.op in TABLE_OPS
    }
    if not tables:
        return
    functions = {function.signature.name: function for function in definition.library.function}
    replace_tables(definition.node, functions, {}, tables)
    needed = needed_functions(definition.node, functions, {})
    kept = [function_pb2.FunctionDef.FromString(functions[name].SerializeToString()) for name in sorted(needed)]
    del definition.library.function[:]
    definition.library.function.extend(kept)


def _use_resources(definition: graph_pb2.GraphDef) -> None:
    """Converts reference variables to resources, because the server supports only these."""
    names = UniqueNames()
    for node in definition.node:
        names.reserve(node.name)
    references = {node.name: node for node in definition.node if node.op in _REFERENCES}
    reads: dict[str, node_def_pb2.NodeDef] = {}
    refused: list[Detail] = []
    for node in list(definition.node):
        for index, text in enumerate(node.input):
            variable = references.get(text.removesuffix(":0"))
            if variable is None:
                continue
            if _writes(node.op):
                message = f"{node.op} node {node.name!r} writes to the variable {variable.name!r} by reference"
                refused.append(Detail(UnsupportedError.REASON, message, node=node.name))
            elif node.op == "Identity":
                node.op = "ReadVariableOp"
                node.attr["dtype"].type = variable.attr["dtype"].type
                del node.attr["T"]
            else:
                if variable.name not in reads:
                    read = definition.node.add(name=names.make(f"{variable.name}/ReadVariableOp"), op="ReadVariableOp")
                    read.input.append(variable.name)
                    read.attr["dtype"].type = variable.attr["dtype"].type
                    reads[variable.name] = read
                node.input[index] = reads[variable.name].name
    if refused:
        raise UnsupportedError(
            f"{refused[0].message}; save the model with resource variables (use_resource=True)", details=refused
        )
    for name, node in references.items():
        node.op = "VarHandleOp"
        node.attr["shared_name"].s = node.attr["shared_name"].s or name.encode()
        node.attr["container"].s = b""


def _writes(op_type: str) -> bool:
    return op_type.startswith(("Assign", "Scatter", "Apply", "SparseApply", "CountUpTo"))
