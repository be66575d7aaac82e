"""Converts ONNX models to graphs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from gradrule._builder.graph import Graph
from gradrule._builder.handles import TensorHandle
from gradrule._builder.names import UniqueNames
from gradrule._models.model_graph import ModelGraph, UnsupportedOpError, Value
from gradrule._models.onnx_calls import (
    DTYPES,
    FLOATS,
    MissingTensorError,
    OpCall,
    Tensor,
    known_tensor,
)
from gradrule._models.onnx_files import array_of, opsets, read_model, with_known
from gradrule._models.onnx_folding import folded
from gradrule._models.onnx_table import all_rows
from gradrule.errors import Detail, GradruleError, InvalidGraphError, UnsupportedError
from gradrule.v1 import graph_pb2

# Nodes that follow the one that an ONNX node stands for.
_FOLLOWERS = frozenset({"AddV2", "BiasAdd", "Reshape", "Squeeze", "Transpose", "Identity"})

Info = tuple[str, "tuple[int | None, ...] | None"]
"""Element type (empty: none that graphs hold) and sizes (None: unknown number of axes) of a tensor."""


# Each pass infers shapes from what the pass before computed; models need one or two.
_MOST_PASSES = 5


@dataclass(slots=True)
class ConvertedModel:
    """A model as a graph.

    Attributes:
        message: The graph.
        variables: Values of its variables by the names of their nodes.
        non_trainable: Names of the variables that are not trained by default.
        aliases: Further names of tensors: the model's outputs, and inputs whose names no node can have.
        names: Names of tensors by the names of values at the model's top level. Images in the middle of the graph have
            their channels last.
    """

    message: graph_pb2.Graph
    variables: dict[str, np.ndarray[Any, Any]]
    non_trainable: set[str]
    aliases: dict[str, str]
    names: dict[str, str]


def from_onnx(source: bytes | str | os.PathLike[str]) -> Graph:
    """Implements `gradrule.from_onnx`."""
    model = convert(source)
    graph = Graph.from_bytes(model.message.SerializeToString(deterministic=True))
    for name, array in model.variables.items():
        graph.variables[name] = array
    graph.non_trainable |= model.non_trainable
    graph.aliases.update(model.aliases)
    return graph


def convert(source: bytes | str | os.PathLike[str]) -> ConvertedModel:
    """Converts the bytes of an ONNX model, or a file. Raises `UnsupportedError` or `InvalidGraphError`."""
    rows = all_rows()
    schemas: Any = onnx.defs.get_all_schemas()
    expanded = {
        (schema.domain, schema.name)
        for schema in schemas
        if schema.name not in rows and (schema.has_function or schema.has_context_dependent_function)
    }
    model: onnx.ModelProto | None = read_model(source, expanded)
    refused: list[Detail] = []
    for _ in range(_MOST_PASSES):
        if model is None:
            break
        conversion = _Conversion(model)
        found = conversion.run()
        if found is not None:
            return found
        refused, known = conversion.refused, conversion.computed()
        model = with_known(model, known) if known else None
    names = ", ".join(dict.fromkeys(detail.message.partition(" ")[0] for detail in refused))
    raise UnsupportedError(f"this model has operations that gr.from_onnx cannot convert: {names}", details=refused)


def valid_name(name: str) -> str:
    """Returns the valid node name that is most similar to a name; empty if no character is valid."""
    return re.sub(r"[^A-Za-z0-9_.\\/>-]", "_", name).lstrip("_\\/>-")


class _Conversion:
    """One conversion of a model."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self.opsets = opsets(model)
        self.refused: list[Detail] = []
        self.paths = UniqueNames()
        self.results: dict[str, str] = {}
        """Names of the tensors that ONNX nodes at the top level compute, by the path of the node."""

    def computed(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the results of nodes of the model that are known."""
        return {
            name: found.array
            for node in self._model.graph.node
            for name in node.output
            if (found := self._tensors.get(name)) is not None and found.array is not None and node.op_type != "Constant"
        }

    def run(self) -> ConvertedModel | None:
        """Returns the model; None if there is something that cannot be converted, which is then in `refused`."""
        onnx_graph = self._model.graph
        model = ModelGraph()
        body = Body(self, model, onnx_graph)
        body.add_initializers()
        self._tensors = body.tensors
        inputs: dict[str, str] = {}
        for item in onnx_graph.input:
            if item.name in body.tensors:
                continue
            dtype, shape = body.info(item.name)
            if not dtype or not item.type.HasField("tensor_type"):
                kind = onnx.helper.printable_type(item.type)
                self.refuse(item.name, f"input of type {kind}: graphs take tensors of numbers and booleans")
                continue
            handle = model.graph.placeholder(valid_name(item.name) or "input", dtype, shape)
            inputs[item.name] = handle.name
            if shape is None:
                self.refuse(item.name, "input whose number of axes is not known")
            else:
                body.tensors[item.name] = Tensor(dtype, shape, value=Value(handle, len(shape)))
        body.convert()
        results = {}
        for item in onnx_graph.output:
            try:
                value = body.value(item.name)
            except MissingTensorError:
                continue
            except UnsupportedOpError as cause:
                self.refuse(item.name, f"output {cause}")
                continue
            handle = model.natural(value)
            if item.name in inputs or messages_op(model, handle) == "Const" or handle.name in inputs.values():
                handle = model.op("Identity", handle)
            results[item.name] = handle
        if self.refused:
            return None
        values = {name: found.value.handle for name, found in body.tensors.items() if found.value is not None}
        return _named(model.graph, self.results, results, inputs, values | results)

    def refuse(self, node: str, text: str) -> None:
        """Records what cannot be converted."""
        self.refused.append(Detail(UnsupportedError.REASON, text, node=node))


class Body:
    """A graph of an ONNX model under construction: the main one, or a branch or loop body.

    Args:
        conversion: The conversion that it is part of.
        model: Gets the nodes.
        graph: ONNX's description.
        outer: The graph around it, whose tensors it may use.
        is_inline: Whether its nodes are part of the graph around it.

    Attributes:
        tensors: Tensors by their names in ONNX.
        captured: Tensors of the graph around it that became placeholders, by their names in ONNX.
    """

    def __init__(
        self,
        conversion: _Conversion,
        model: ModelGraph,
        graph: onnx.GraphProto,
        outer: Body | None = None,
        is_inline: bool = False,
    ) -> None:
        self.conversion = conversion
        self.model = model
        self.graph = graph
        self.tensors: dict[str, Tensor] = {}
        self.captured: dict[str, TensorHandle] = {}
        self._outer = outer
        self._is_inline = is_inline
        self._failed: set[str] = set()
        self._infos: dict[str, Info] = {}
        for item in (*graph.input, *graph.value_info, *graph.output):
            self._infos[item.name] = _info(item.type)
        self._element_types = {
            item.name: item.type.tensor_type.elem_type for item in (*graph.input, *graph.value_info, *graph.output)
        } | {item.name: item.data_type for item in graph.initializer}

    def info(self, name: str) -> Info:
        """Returns element type and sizes of a tensor as ONNX infers them."""
        return self._infos.get(name, ("", None))

    def element_type(self, name: str) -> int:
        """Returns ONNX's number of a tensor's element type; 0 if it is not known."""
        if name in self._element_types or self._outer is None:
            return self._element_types.get(name, 0)
        return self._outer.element_type(name)

    def child(self, graph: onnx.GraphProto, is_inline: bool = False) -> Body:
        """Returns an empty body of a graph inside of this one."""
        model = self.model if is_inline else self.model.nested()
        inner = Body(self.conversion, model, graph, self, is_inline)
        inner.add_initializers()
        return inner

    def add_initializers(self) -> None:
        """Adds the initialisers. Floating-point ones with axes become variables, others constants."""
        for message in self.graph.initializer:
            array = array_of(message)
            found = known_tensor(array, message.data_type)
            if found.dtype in FLOATS and array.ndim and self._outer is None:
                found.weight = valid_name(message.name) or "weight"
            self.tensors[message.name] = found

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor of this graph or of one around it. Raises `MissingTensorError` if there is none."""
        if name in self.tensors:
            return self.tensors[name]
        if name in self._failed or self._outer is None:
            raise MissingTensorError(name)
        return self._outer.tensor(name)

    def value(self, name: str) -> Value:
        """Returns a tensor in the graph, to which it is added if it is not there."""
        found = self.tensors.get(name)
        if found is None and self._is_inline and self._outer is not None:
            return self._outer.value(name)
        if found is None:
            outer = self.tensor(name)
            if outer.array is not None and not outer.weight:
                found = Tensor(outer.dtype, outer.shape, outer.array)
            else:
                assert self._outer is not None
                outside = self._outer.value(name)
                self._outer.model.natural(outside)
                own = self.model.graph.placeholder(f"captured/{valid_name(name) or 'x'}", outside.dtype, None)
                self.captured[name] = own
                # A branch inside of this one must not take the value of a variable for a constant.
                found = Tensor(outer.dtype, outer.shape, outer.array, outer.weight, Value(own, outside.rank))
            self.tensors[name] = found
        if found.value is None and found.quantised is not None and found.dtype:
            found.value = self.model.elementwise("Cast", found.quantised, DstT=found.dtype)
        if found.value is None:
            if found.array is None or not found.dtype:
                raise UnsupportedOpError(f"with the tensor {name!r} of an element type that graphs do not have")
            if found.weight:
                handle = self.model.graph.variable(found.weight, found.array)
            else:
                handle = self.model.constant(found.array, found.dtype)
            found.value = Value(handle, found.array.ndim)
        return found.value

    def tensor_or_value(self, name: str) -> Tensor | Value:
        """Returns a tensor that no node has yet as it is, else its value."""
        found = self.tensor(name)
        return found if found.value is None else self.value(name)

    def convert(self) -> None:
        """Adds all nodes of the graph. Records those that cannot be converted."""
        for node in self.graph.node:
            try:
                self._convert(node)
            except MissingTensorError:
                # An input could not be converted, which is recorded already.
                self._failed.update(node.output)

    def _convert(self, node: onnx.NodeProto) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        path = self.conversion.paths.make(valid_name(node.name) or node.op_type)
        opset = self.conversion.opsets.get(domain, 0)
        what = f"{node.op_type} of {domain or 'ai.onnx'} {opset}, node {node.name or path!r}"
        row = all_rows().get(node.op_type) if not domain else None
        try:
            schema = onnx.defs.get_schema(node.op_type, opset, domain)
        except onnx.defs.SchemaError:
            self._refuse(node, f"{what}: no operation that ONNX defines, and no function of the model")
            return
        if row is None or row.convert is None:
            self._refuse(node, f"{what}: {row.refuses if row else 'not supported'}")
            return
        with self.model.scope(path):
            try:
                call = OpCall(self, node, schema)
                for name in node.input:
                    if name:
                        self.tensor(name)
                results: Any = folded(call)
                if results is None:
                    results = row.convert(call)
                    call.check_all_read()
                self._add_results(call, results)
            except UnsupportedOpError as cause:
                self._refuse(node, f"{what}: {cause}")
                return
            except GradruleError as cause:
                if isinstance(cause, InvalidGraphError):
                    raise
                self._refuse(node, f"{what}: {cause.message}")
                return
            except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError) as cause:
                # A valid model may have any numbers as attributes: sizes that no array has, axes that do not exist.
                self._refuse(node, f"{what}: its attributes or shapes are not valid: {cause}")
                return
        first = self.tensors.get(node.output[0]) if node.output else None
        result = first and (first.quantised or first.value)
        if self._outer is None and result:
            self.conversion.results[path] = result.handle.name

    def _refuse(self, node: onnx.NodeProto, text: str) -> None:
        self._failed.update(node.output)
        self.conversion.refuse(node.name, text)

    def _add_results(self, call: OpCall, results: Any) -> None:
        listed = list(results) if isinstance(results, (list, tuple)) else [results]
        for name, result in zip(call.node.output, listed, strict=False):
            if not name or result is None:
                continue
            dtype, shape = self.info(name)
            if isinstance(result, Tensor):
                found = result
            elif isinstance(result, np.ndarray):
                found = Tensor(_array_dtype(result, dtype), result.shape, result)
            else:
                value = result
                if isinstance(result, TensorHandle):
                    value = Value(result, call.output_rank(call.node.output[:].index(name)))
                found = Tensor(value.dtype, shape, value=value)
            # What ONNX infers is a check of the conversion.
            rank = found.value.rank if found.value is not None else len(found.shape or ())
            if found.value is not None and shape is not None and rank != len(shape):
                raise UnsupportedOpError(f"converted to {rank} axes where ONNX has {len(shape)}")
            if found.dtype and dtype and found.dtype != dtype:
                raise UnsupportedOpError(f"converted to {found.dtype} where ONNX has {dtype}")
            self.tensors[name] = found
        missing = [name for name in call.node.output[len(listed) :] if name]
        missing += [name for name, result in zip(call.node.output, listed, strict=False) if name and result is None]
        if missing:
            raise UnsupportedOpError(f"with the output {missing[0]!r}, which is not supported")


def messages_op(model: ModelGraph, handle: TensorHandle) -> str:
    """Returns the op type of the node that computes a tensor."""
    return model.graph.node(handle.name.partition(":")[0]).op_type


def _array_dtype(array: np.ndarray[Any, Any], inferred: str) -> str:
    return inferred or array.dtype.name


def _info(kind: onnx.TypeProto) -> Info:
    if not kind.HasField("tensor_type"):
        return "", None
    tensor = kind.tensor_type
    shape = None
    if tensor.HasField("shape"):
        shape = tuple(axis.dim_value if axis.HasField("dim_value") else None for axis in tensor.shape.dim)
    return DTYPES.get(tensor.elem_type, ""), shape


def _named(
    graph: Graph,
    nodes: Mapping[str, str],
    results: Mapping[str, TensorHandle],
    inputs: Mapping[str, str],
    values: Mapping[str, TensorHandle],
) -> ConvertedModel:
    """Returns the graph in which the node that an ONNX node became has its name.

    Args:
        graph: The graph.
        nodes: Names of the tensors that ONNX nodes became, by their paths.
        results: The outputs by their names.
        inputs: The names of the inputs' tensors by their names.
        values: All values of the model, except known ones, by their names.
    """
    ops = {node.name: node for node in graph.messages()}
    renamed: dict[str, str] = {}
    for path, tensor in nodes.items():
        name = tensor.partition(":")[0]
        while name.startswith(f"{path}/") and ops[name].op in _FOLLOWERS:
            source = ops[name].input[0].partition(":")[0]
            if not source.startswith(f"{path}/"):
                break
            name = source
        if name.startswith(f"{path}/") and path not in ops:
            renamed[name] = path

    def new(tensor: str) -> str:
        name, colon, index = tensor.partition(":")
        return renamed.get(name, name) + colon + index

    message = graph_pb2.Graph.FromString(graph.to_bytes())
    for node in message.node:
        node.name = renamed.get(node.name, node.name)
        node.input[:] = [new(text) for text in node.input]
    aliases = {name: new(handle.name) for name, handle in results.items()}
    aliases |= {name: tensor for name, tensor in inputs.items() if name != tensor}
    names = {name: new(handle.name) for name, handle in values.items()}
    return ConvertedModel(message, dict(graph.variables), set(graph.non_trainable), aliases, names)
