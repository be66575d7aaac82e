"""Loads SavedModels of TensorFlow 1, whose variables are references or resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2

from gradrule._builder.graph import Graph
from gradrule._builder.names import UniqueNames
from gradrule._tracing.aliases import name_ends
from gradrule.errors import Detail, UnsupportedError

_REFERENCES = {"Variable", "VariableV2"}


def load(folder: Path, tags: list[str], signature: Any) -> Graph:
    """Returns the part of the graph that a signature's outputs need; reference variables become resources."""
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        tf.compat.v1.saved_model.loader.load(session, tags, str(folder))
        inputs = {alias: info.name for alias, info in signature.inputs.items() if info.name}
        outputs = {alias: info.name for alias, info in signature.outputs.items() if info.name}
        wanted = sorted({name.partition(":")[0] for name in [*inputs.values(), *outputs.values()]})
        definition = tf.compat.v1.graph_util.extract_sub_graph(graph.as_graph_def(), wanted)
        values = _values(session, graph, definition)
    _use_resources(definition)
    for node in definition.node:
        node.device = ""
    wrapped = Graph.from_bytes(definition.SerializeToString(deterministic=True))
    wrapped.variables.update(values)
    name_ends(wrapped, inputs, outputs.items())
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
