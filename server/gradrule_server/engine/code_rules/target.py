"""Describes the op or subgraph to which a rule is applied, and checks and converts its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from gradrule.v1 import errors_pb2
from gradrule_server.engine import tf_private
from gradrule_server.errors import GradruleError, error
from gradrule_server.policy.op_tables import ops_with

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
OwnGradient: TypeAlias = Callable[[Sequence[Gradient]], Sequence[Gradient]]


class Dependence:
    """Finds the xs that tensors of the graph of the xs depend on; nothing is known inside loops and branches."""

    def __init__(self, xs: Sequence[tf.Tensor]) -> None:
        self._xs = {x.ref(): 1 << number for number, x in enumerate(xs)}
        self._graphs = {x.graph for x in xs}
        self._known: dict[tf.Operation, int] = {}

    def bits(self, tensor: tf.Tensor) -> int:
        """Returns a bit for each x that the tensor is or depends on; 0 inside loops and branches."""
        if tensor.graph not in self._graphs:
            return 0
        known, pending = self._known, [tensor.op]
        while pending:
            op = pending[-1]
            missing = [] if op in known else [value.op for value in op.inputs if value.op not in known]
            if missing:
                pending += missing
            else:
                pending.pop()
                known.setdefault(op, self._of_op(op))
        return known[tensor.op] | self._xs.get(tensor.ref(), 0)

    def may_depend(self, tensor: tf.Tensor) -> bool:
        """Returns whether the tensor is or depends on an x; True inside loops and branches."""
        return tensor.graph not in self._graphs or self.bits(tensor) != 0

    def is_x(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is one of the xs."""
        return tensor.ref() in self._xs

    def _of_op(self, op: tf.Operation) -> int:
        found = 0
        for value in op.inputs:
            found |= self._known[value.op] | self._xs.get(value.ref(), 0)
        return found


@dataclass(frozen=True, eq=False)
class RuleTarget:
    """The op or subgraph to which a rule is applied.

    Attributes:
        node: Name of the node, for messages.
        what: The op type, or the op types of a chain joined by `+`.
        inputs, outputs: As tensors of the graph in which gradients are built.
        find_ops: Finds the forward ops, producers before consumers. There may be thousands.
        own_gradients: Returns TensorFlow's gradients of the inputs for upstream gradients of the outputs.
        reference: Returns the value of a tensor of the forward graph if all xs are a baseline (a number or a tensor
            that broadcasts to them). Raises RULE_NOT_APPLICABLE inside loops and branches.
        sources: The inputs in the forward graph.
        dependence: Finds the xs that tensors of the forward graph depend on.
        salt: `salt_for` the name, so that random rules draw different numbers for each node.
        op: The op itself; None for a subgraph.
    """

    node: str
    what: str
    inputs: tuple[tf.Tensor, ...]
    outputs: tuple[tf.Tensor, ...]
    find_ops: Callable[[], Sequence[tf.Operation]]
    own_gradients: OwnGradient
    reference: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    sources: tuple[tf.Tensor, ...]
    dependence: Dependence
    salt: int
    op: tf.Operation | None = None

    @cached_property
    def ops(self) -> Sequence[tf.Operation]:
        """Forward ops, producers before consumers."""
        return self.find_ops()


def ops_between(xs: Sequence[tf.Tensor], ys: Sequence[tf.Tensor]) -> list[tf.Operation]:
    """Returns the ops on the paths from the tensors `xs` to the tensors `ys`, producers before consumers."""
    border = {x.ref() for x in xs}
    reaches: dict[tf.Operation, bool] = {}
    order: list[tf.Operation] = []
    pending = [(y.op, False) for y in ys]
    while pending:
        op, ready = pending.pop()
        if ready:
            reaches[op] = any(value.ref() in border or reaches.get(value.op, False) for value in op.inputs)
            if reaches[op]:
                order.append(op)
        elif op not in reaches:
            reaches[op] = False
            pending.append((op, True))
            pending += [(value.op, False) for value in op.inputs if value.ref() not in border]
    return order


CodeRuleFunction: TypeAlias = Callable[
    [RuleTarget, Sequence[tf.Tensor], Mapping[str, tf.Tensor]], Sequence[tf.Tensor | None]
]
"""A rule of the catalogue that is code: returns one gradient per input for a target, dense upstream gradients (zeros
where none arrives) and params (float64)."""


_PERMUTES = ops_with("permutes")
_HALF_TYPES = (tf.float16, tf.bfloat16)


def not_applicable(target: RuleTarget, rule: str, meant_for: str) -> GradruleError:
    """Returns the error that refuses a target. `meant_for`: the ops that the rule supports."""
    return error(
        errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
        f"rule {rule!r} cannot be used on node {target.node!r} ({target.what}): it is for {meant_for}",
        node=target.node,
    )


def require_elementwise(target: RuleTarget, rule: str) -> None:
    """Raises RULE_NOT_APPLICABLE unless a target has one input and one output of compatible shapes, in one order."""
    if (
        (target.op is not None and target.op.type in _PERMUTES)
        or len(target.inputs) != 1
        or len(target.outputs) != 1
        or not target.inputs[0].shape.is_compatible_with(target.outputs[0].shape)
    ):
        raise not_applicable(target, rule, "elementwise ops with one input, such as Relu")


def wide(dtype: tf.DType) -> tf.DType:
    """Returns the type to calculate in: float32 for 16-bit types, whose quotients and squares overflow or underflow."""
    return tf.float32 if dtype in _HALF_TYPES else dtype


def repeated(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds the op with other inputs to the current graph, in `wide` types; `op` may belong to an outer graph.

    Attributes with an underscore are left out: among them is the one that would make gradrule ask for a rule again.
    """
    attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
    for name, value in attributes.items():
        if value.type:
            attributes[name] = attr_value_pb2.AttrValue(type=wide(tf.as_dtype(value.type)).as_datatype_enum)
    graph = tf.compat.v1.get_default_graph()
    operands = [tf_private.in_graph(graph, value) for value in inputs]
    widened = [tf.cast(value, wide(value.dtype)) for value in operands]
    return graph.create_op(op.type, widened, attrs=attributes).outputs[0]


def unrounded(y: tf.Tensor, again: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns an output in its `wide` type, for rules that divide by it, take its sign, or subtract another output.

    Where terms cancel, rounding to 16 bits changes such results a lot, and kernels round differently. So the value of a
    16-bit `y` is that of `again`, which calculates it in the wide type. Its derivative is that of y: a second
    differentiation then reaches the rule.
    """
    if wide(y.dtype) == y.dtype:
        return y
    zero = tf.where(tf.math.is_finite(y), y - tf.stop_gradient(y), tf.zeros_like(y))
    return tf.stop_gradient(again()) + tf.cast(zero, wide(y.dtype))


def dense_upstream(outputs: Sequence[tf.Tensor], dys: Sequence[Gradient]) -> list[tf.Tensor]:
    """Returns a dense upstream gradient for each output; zeros where none arrives."""
    return [tf.zeros_like(y) if dy is None else tf.convert_to_tensor(dy) for y, dy in zip(outputs, dys, strict=True)]


def dense(gradient: Gradient) -> tf.Tensor | None:
    """Returns a gradient as a dense tensor."""
    return None if gradient is None else tf.convert_to_tensor(gradient)
