"""A rule bound to an override of a program: from a node's tensors to one checked gradient per input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf
from tensorflow.core.framework import graph_pb2 as tf_graph_pb2

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.engine.checks import require_same_shape
from gradrule_server.engine.imports import import_graph
from gradrule_server.engine.names import readable
from gradrule_server.errors import GradruleError, error
from gradrule_server.rules import RuleContent, RuleGraph, Signature

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
OwnGradient = Callable[[tf.Operation, Sequence[Gradient], str], Sequence[Gradient]]


class BoundRule:
    """What all rules share: the check of what comes out."""

    def __init__(self, name: str) -> None:
        self.name = name

    def gradients(self, op: tf.Operation, dys: Sequence[Gradient], node: str) -> Sequence[Gradient]:
        """One gradient per input of `op`; RULE_ARITY, RULE_OUTPUT, RULE_NOT_APPLICABLE where the rule gives no such."""
        raise NotImplementedError


class OpGradientRule(BoundRule):
    """The gradient that TensorFlow registers for some op type, used on any op."""

    def __init__(self, op_type: str) -> None:
        super().__init__(op_type)
        self._op_type = op_type

    def gradients(self, op: tf.Operation, dys: Sequence[Gradient], node: str) -> Sequence[Gradient]:
        function = tf_private.gradient_of(self._op_type)
        if function is None:
            raise self._not_applicable(op, node, f"TensorFlow registers {self._op_type!r} as not differentiable")
        try:
            result = function(op, *dys)
        except GradruleError:
            raise
        except Exception as cause:
            # The function was written for another op: what it misses can be anything, and all means the same here.
            raise self._not_applicable(op, node, f"{type(cause).__name__}: {readable(str(cause))}") from cause
        gradients = list(result) if isinstance(result, (list, tuple)) else [result]
        if len(gradients) != len(op.inputs):
            raise error(
                errors_pb2.ERROR_REASON_RULE_ARITY,
                f"rule {self.name!r} gives {len(gradients)} gradients, but node {node!r} ({op.type}) has "
                f"{len(op.inputs)} inputs",
                node=node,
            )
        return [
            _checked(gradient, value, rule=self.name, node=node, index=index, shape_known=False)
            for index, (gradient, value) in enumerate(zip(gradients, op.inputs, strict=True))
        ]

    def _not_applicable(self, op: tf.Operation, node: str, why: str) -> GradruleError:
        return error(
            errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
            f"OP rule {self.name!r} cannot be used on node {node!r} ({op.type}): {why}",
            node=node,
        )


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A rule's graph for one signature, without the placeholders that values take the place of."""

    rule_graph: RuleGraph
    graph_def: tf_graph_pb2.GraphDef


class GraphRule(BoundRule):
    """A rule given by an expression or a graph."""

    def __init__(
        self, name: str, content: RuleContent, params: Mapping[str, tf.Tensor], own_gradient: OwnGradient
    ) -> None:
        super().__init__(name)
        self._content = content
        self._params = params
        self._own_gradient = own_gradient
        self._prepared: dict[Signature, _Prepared] = {}

    def gradients(self, op: tf.Operation, dys: Sequence[Gradient], node: str) -> Sequence[Gradient]:
        prepared = self._prepare(op, node)
        rule_graph = prepared.rule_graph
        graph = tf.compat.v1.get_default_graph()
        values = self._values(op, dys, node, rule_graph.inputs)
        bound = {
            f"{placeholder}:0": tf_private.in_graph(graph, values[variable])
            for variable, placeholder in rule_graph.inputs.items()
        }
        wanted = [name for name in rule_graph.results if name is not None]
        computed = dict(zip(wanted, import_graph(prepared.graph_def, bound, wanted, scope="rule"), strict=True))
        gradients: list[Gradient] = []
        for index, (result, source) in enumerate(zip(rule_graph.results, rule_graph.shape_sources, strict=True)):
            gradient = None if result is None else computed[result]
            gradients.append(
                _checked(
                    gradient,
                    op.inputs[index],
                    rule=self.name,
                    node=node,
                    index=index,
                    shape_known=source <= {f"x{index}"},
                )
            )
        return gradients

    def _prepare(self, op: tf.Operation, node: str) -> _Prepared:
        signature = Signature(
            tuple(value.dtype.base_dtype.as_datatype_enum for value in op.inputs),
            tuple(value.dtype.base_dtype.as_datatype_enum for value in op.outputs),
        )
        prepared = self._prepared.get(signature)
        if prepared is None:
            try:
                rule_graph = self._content.bind(signature)
            except GradruleError as cause:
                raise error(
                    cause.reason, f"rule {self.name!r} on node {node!r} ({op.type}): {cause.message}", node=node
                ) from cause
            graph_def = tf_graph_pb2.GraphDef.FromString(rule_graph.graph.SerializeToString())
            prepared = self._prepared[signature] = _Prepared(rule_graph, graph_def)
        return prepared

    def _values(
        self, op: tf.Operation, dys: Sequence[Gradient], node: str, wanted: Mapping[str, str]
    ) -> dict[str, tf.Tensor]:
        values: dict[str, tf.Tensor] = dict(self._params)
        values.update({f"x{index}": value for index, value in enumerate(op.inputs)})
        values.update({f"y{index}": value for index, value in enumerate(op.outputs)})
        for index, dy in enumerate(dys):
            if dy is not None:
                # A rule sees dense gradients only: `5 * dy` means nothing on slices.
                values[f"dy{index}"] = tf.convert_to_tensor(dy)
            elif f"dy{index}" in wanted:
                values[f"dy{index}"] = tf.zeros_like(op.outputs[index])
        if any(variable.startswith("default") for variable in wanted):
            own = self._own_gradient(op, dys, node)
            for index, (gradient, value) in enumerate(zip(own, op.inputs, strict=True)):
                values[f"default{index}"] = tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient)
        return values


def _checked(gradient: Gradient, value: tf.Tensor, *, rule: str, node: str, index: int, shape_known: bool) -> Gradient:
    """`gradient` if it has the dtype and shape of `value`, a rank 0 one broadcast to it; RULE_OUTPUT otherwise.

    Where the shapes are known only at run time, the check is made then.
    """
    if gradient is None:
        return None
    where = f"rule {rule!r} on node {node!r}, gradient of input {index}"
    wanted = value.dtype.base_dtype
    if not (wanted.is_floating or wanted.is_complex):
        raise error(
            errors_pb2.ERROR_REASON_RULE_OUTPUT,
            f"{where}: the input is {wanted.name}, which has no gradient; the rule must give None for it",
            node=node,
        )
    if gradient.dtype.base_dtype != wanted:
        raise error(
            errors_pb2.ERROR_REASON_RULE_OUTPUT,
            f"{where}: the gradient is {gradient.dtype.base_dtype.name}, but the input is {wanted.name}",
            node=node,
        )
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    if gradient.shape.rank == 0 and value.shape.rank != 0:
        return tf.fill(tf.shape(value), gradient)
    if shape_known:
        return gradient
    if not gradient.shape.is_compatible_with(value.shape):
        raise error(
            errors_pb2.ERROR_REASON_RULE_OUTPUT,
            f"{where}: the gradient has shape {gradient.shape}, but the input has {value.shape}; only rank 0 is "
            f"broadcast, sum_to(v, x{index}) sums down to the input's shape",
            node=node,
        )
    return require_same_shape(gradient, value, errors_pb2.ERROR_REASON_RULE_OUTPUT, where)
