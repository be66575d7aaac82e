"""Describes programs that never run, without their functions: builds the gradients of similar nodes only once."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule.v1 import evaluate_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.build import build, function_arguments, start_build
from gradrule_server.engine.checks import check_ops
from gradrule_server.engine.code_rules.target import Gradient
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.engine.memory_estimate import estimate_need, static_bytes
from gradrule_server.engine.program import BuiltProgram
from gradrule_server.link.v1 import link_pb2

_VJP = (evaluate_pb2.DERIVATIVE_UNSPECIFIED, evaluate_pb2.DERIVATIVE_VJP)

_Key: TypeAlias = tuple[Any, ...]

_FOR_GRADRULE = frozenset({"_gradrule_mark", tf_private.GRADIENT_ATTR})
# Larger constants are kept as a hash. Gradient functions read the values of integer constants: sizes and axes.
_MAX_VALUE_BYTES = 4096


def describe(request: link_pb2.CompileRequest, values: Sequence[tf.Tensor], device: str) -> BuiltProgram:
    """Returns the program as `build` does, but without its function; raises the same errors.

    The whole program is built if gradients are differentiated again, if they are a function of their own, or if the
    program might not fit into memory.
    """
    if request.derivative in _VJP and not request.stacked_grad_ys and not request.split:
        built = _describe_without_function(request, values)
        if built is not None:
            return built
    return build(request, values, device)


def _describe_without_function(request: link_pb2.CompileRequest, values: Sequence[tf.Tensor]) -> BuiltProgram | None:
    """Returns the program without its function; None if it might not fit into memory."""
    graph_def = tf_graph_pb2.GraphDef.FromString(request.graph)
    functions = tf_private.add_functions(graph_def.library)
    try:
        graph = tf_private.RecordingGraph()
        with graph.as_default():
            gradient_cache = GradientCache(graph, graph_def)
            built, trace = start_build(request, graph_def, values, gradient_cache)
            arguments = [
                tf.compat.v1.placeholder(spec.dtype, spec.shape, spec.name) for spec in function_arguments(built)
            ]
            with tf_private.sums_made_by(gradient_cache.sum):
                outputs = trace.run(arguments)
        if not request.trusted:
            check_ops(graph)
        if request.memory_limit and _upper_bound_bytes(graph, outputs) > request.memory_limit:
            return None
        return built
    finally:
        tf_private.remove_functions(functions)


def _upper_bound_bytes(graph: tf_private.RecordingGraph, outputs: Sequence[tf.Tensor]) -> int:
    """Returns the bytes of all tensors of the program; reused gradients count each time."""
    repeated = sum(static_bytes(tensor) for op in graph.made for tensor in op.outputs)
    return estimate_need(graph, outputs, sys.maxsize).size + repeated


class GradientCache:
    """Reuses the gradients of a node for similar nodes. For programs that never run: values would be wrong.

    The gradients that a gradient function or a rule builds depend on the op's type and attributes, on types, shapes and
    constants of its inputs, and on which upstream gradients exist. If all of these are equal for two nodes, their
    gradients have the same types and shapes, the same ones are missing, and building both succeeds or fails.

    Args:
        graph: The graph that is built.
        graph_def: The graph that is imported into it.
    """

    def __init__(self, graph: tf_private.RecordingGraph, graph_def: tf_graph_pb2.GraphDef) -> None:
        self._graph = graph
        self._nodes = {node.name: node for node in graph_def.node}
        self._attributes: dict[str, bytes] = {}
        self._known: dict[_Key, tuple[Sequence[Gradient], list[tf.Operation]]] = {}
        self._constants: dict[str, bytes] = {}
        self._sums: dict[_Key, tuple[tf.Tensor, list[tf.Operation]]] = {}

    def gradients(
        self,
        op: tf.Operation,
        dys: Sequence[Gradient],
        rule: int,
        make: Callable[[], Sequence[Gradient]],
        report_count: Callable[[], int],
    ) -> Sequence[Gradient]:
        """Returns the gradients that `make` builds, or those that it built for a similar op.

        Args:
            op: The op.
            dys: Upstream gradients of its outputs.
            rule: Number of the rule; negative for the op's own gradient.
            make: Builds the gradients.
            report_count: Returns a count; if `make` changes it, the gradients are not reused.
        """
        key = self._key(op, dys, rule)
        if key is None:
            return make()
        known = self._known.get(key)
        if known is not None:
            self._graph.made += known[1]
            return known[0]
        before, count_before = len(self._graph.made), report_count()
        gradients = make()
        if report_count() == count_before:
            self._known[key] = gradients, self._graph.made[before:]
        return gradients

    def sum(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor | None:
        """Returns the sum of tensors, or an earlier sum of tensors of the same types and shapes.

        None where an earlier sum cannot stand for this one: in graphs of loops and branches.
        """
        graph = self._graph
        if tf.compat.v1.get_default_graph() is not graph or any(tensor.graph is not graph for tensor in tensors):
            return None
        key = tuple([(tensor.dtype, _shape(tensor)) for tensor in tensors])
        known = self._sums.get(key)
        if known is not None:
            graph.made += known[1]
            return known[0]
        before = len(graph.made)
        total = tf.add_n(tensors)
        self._sums[key] = total, graph.made[before:]
        return total

    def _key(self, op: tf.Operation, dys: Sequence[Gradient], rule: int) -> _Key | None:
        """Returns everything on which the gradients of an op depend; None if that is not known."""
        graph = self._graph
        if op.graph is not graph or tf.compat.v1.get_default_graph() is not graph:
            # Gradients in the graph of a loop or branch also decide which tensors the forward part keeps.
            return None
        attributes = self._attributes_of(op)
        if attributes is None:
            return None
        inputs: dict[int, int] = {}
        parts: list[Any] = [rule, op.type, attributes]
        for number, value in enumerate(op.inputs):
            described = self._describe_without_function(value)
            if described is None:
                return None
            parts.append((inputs.setdefault(id(value), number), described))
        parts += [(output.dtype, _shape(output)) for output in op.outputs]
        for dy in dys:
            if isinstance(dy, tf.IndexedSlices):
                parts.append((_upstream(dy.values), _upstream(dy.indices), _upstream(dy.dense_shape)))
            elif dy is not None and dy.op.type == "Const":
                return None
            else:
                parts.append(_upstream(dy))
        return tuple(parts)

    def _attributes_of(self, op: tf.Operation) -> bytes | None:
        """Returns the attributes as bytes; None for an op that was not imported or runs functions."""
        name = op.name.removeprefix(IMPORT_SCOPE)
        found = self._attributes.get(name)
        if found is None and name in self._nodes and not tf_private.runs_functions(op.type):
            attributes = self._nodes[name].attr
            parts = [(key, attributes[key].SerializeToString()) for key in sorted(attributes)]
            found = repr([part for part in parts if part[0] not in _FOR_GRADRULE]).encode()
            self._attributes[name] = found
        return found

    def _describe_without_function(self, value: tf.Tensor) -> _Key | None:
        """Returns type, shape and producer of a tensor, and its values if gradient functions may read them."""
        producer, dtype = value.op, value.dtype
        if dtype.is_floating or dtype.is_complex or producer.type == "Placeholder":
            return dtype, _shape(value), producer.type
        # TensorFlow may know computed integers too, from the shapes of other tensors, so they have no key.
        constant = self._constant(producer) if producer.type == "Const" else None
        return None if constant is None else (dtype, _shape(value), constant)

    def _constant(self, op: tf.Operation) -> bytes | None:
        found = self._constants.get(op.name)
        node = self._nodes.get(op.name.removeprefix(IMPORT_SCOPE))
        if found is None and node is not None:
            data = node.attr["value"].SerializeToString()
            found = self._constants[op.name] = data if len(data) <= _MAX_VALUE_BYTES else hashlib.sha256(data).digest()
        return found


def _shape(value: tf.Tensor) -> tuple[int | None, ...] | None:
    shape = value.shape
    return None if shape.rank is None else tuple(shape)


def _upstream(value: tf.Tensor | None) -> _Key | None:
    return None if value is None else (value.dtype, _shape(value), value.op.type)
