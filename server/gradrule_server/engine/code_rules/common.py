"""Defines what a code rule is applied to, and helpers that code rules share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import tensorflow as tf

from gradrule.v1 import errors_pb2
from gradrule_server.errors import GradruleError, error

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None
OwnGradient: TypeAlias = Callable[[Sequence[Gradient]], Sequence[Gradient]]


@dataclass(frozen=True, eq=False)
class RuleTarget:
    """An op or a subgraph, as a rule sees it.

    `node`: its name for people. `what`: its op type, or those of a chain joined by `+`.
    `inputs`, `outputs`: as tensors of the graph in which gradients are built.
    `find_ops`: finds the forward ops, producers before consumers, of which there may be very many.
    `own`: the gradients of the inputs that TensorFlow gives for upstream gradients of the outputs.
    `reference`: a tensor of the forward graph as it is where all xs are a baseline (a number or a tensor that
    broadcasts to them); RULE_NOT_APPLICABLE inside loops and branches.
    `salt`: a number made of the name, so that random rules differ from node to node.
    `op`: the op itself; None for a subgraph.
    """

    node: str
    what: str
    inputs: tuple[tf.Tensor, ...]
    outputs: tuple[tf.Tensor, ...]
    find_ops: Callable[[], Sequence[tf.Operation]]
    own_gradients: OwnGradient
    reference: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    salt: int
    op: tf.Operation | None = None

    @cached_property
    def ops(self) -> Sequence[tf.Operation]:
        """The forward ops, producers before consumers; a single op has one."""
        return self.find_ops()


def salt_for(node: str) -> int:
    """The same number for the same name, in every process."""
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:8], "little", signed=True)


CodeRuleFunction: TypeAlias = Callable[
    [RuleTarget, Sequence[tf.Tensor], Mapping[str, tf.Tensor]], Sequence[tf.Tensor | None]
]
"""A rule of the catalogue that is code: from a target, dense upstream gradients (zeros where none arrives) and params
(float64) to one gradient per input."""


_HALF_TYPES = (tf.float16, tf.bfloat16)


def not_applicable(target: RuleTarget, rule: str, meant_for: str) -> GradruleError:
    """The refusal of a target: `meant_for` says what the rule is for."""
    return error(
        errors_pb2.ERROR_REASON_RULE_NOT_APPLICABLE,
        f"rule {rule!r} cannot be used on node {target.node!r} ({target.what}): it is for {meant_for}",
        node=target.node,
    )


def require_elementwise(target: RuleTarget, rule: str) -> None:
    """Refuses a target that has not one input and one output of compatible shapes."""
    if (
        len(target.inputs) != 1
        or len(target.outputs) != 1
        or not target.inputs[0].shape.is_compatible_with(target.outputs[0].shape)
    ):
        raise not_applicable(target, rule, "elementwise ops with one input, such as Relu")


def wide(dtype: tf.DType) -> tf.DType:
    """float32 for the 16-bit types, whose quotients and squares overflow or round to nothing; else the type itself."""
    return tf.float32 if dtype in _HALF_TYPES else dtype


def dense(gradient: Gradient) -> tf.Tensor | None:
    """An op's own gradient without slices."""
    return None if gradient is None else tf.convert_to_tensor(gradient)
