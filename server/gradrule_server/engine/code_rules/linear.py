"""Applies a linear op, with or without a bias add after it, to other operands, and transposes it.

With data x, weights W and a bias b that may be missing, the target's output is Wx + b.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from gradrule_server.engine import tf_private
from gradrule_server.engine.code_rules.common import RuleTarget, dense, not_applicable, wide
from gradrule_server.policy.op_traits import ops_with

MATRIX_PRODUCTS = ops_with("@dense")
CONVOLUTIONS = ops_with("@convolution")
_BIAS_ADDS = ops_with("plain_add") | {"BiasAdd"}

_MEANT_FOR = (
    "MatMul, BatchMatMul, Conv2D, Conv3D and DepthwiseConv2dNative of real numbers, alone or with a BiasAdd, Add or "
    "AddV2 after them"
)


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """A linear op applied to operands: `output` is Wx."""

    x: tf.Tensor
    output: tf.Tensor

    def transposed(self, r: tf.Tensor) -> tf.Tensor:
        """Returns Wᵀr, of the shape of x: the op's own gradient for `r` at its output."""
        op = self.output.op
        gradient = cast("tf_private.GradientFunction", tf_private.gradient_of(op.type))
        return gradient(op, _sum_to(r, self.output))[0]

    def relevance(self, r: tf.Tensor) -> tf.Tensor:
        """Returns x∘Wᵀr: the share of each element of x in the outputs, each output weighted by `r`."""
        return self.x * self.transposed(r)


class Linear:
    """A target whose first op is linear. Raises RULE_NOT_APPLICABLE for any other.

    `x`, `w`, `bias`, `y`: data, weights, bias (or None) and output; in float32 where the target's type has 16 bits, as
    what rules divide by is often so small that the quotient overflows float16. `op`: the linear op of the forward.
    """

    def __init__(self, target: RuleTarget, rule: str) -> None:
        linear, *adds = target.ops
        if (
            linear.type not in MATRIX_PRODUCTS | CONVOLUTIONS
            or len(adds) > 1
            or any(add.type not in _BIAS_ADDS for add in adds)
            or len(target.inputs) != 2 + len(adds)
            or not target.inputs[0].dtype.is_floating
        ):
            raise not_applicable(target, rule, _MEANT_FOR)
        self.op = linear
        self._bias_add = adds[0] if adds else None
        self._n_inputs = len(target.inputs)
        self._dtype = target.inputs[0].dtype
        self.dtype = wide(self._dtype)
        self.x, self.w = (tf.cast(value, self.dtype) for value in target.inputs[:2])
        self.bias = tf.cast(target.inputs[2], self.dtype) if adds else None
        self.y = tf.cast(target.outputs[0], self.dtype)

    def apply(self, x: tf.Tensor, w: tf.Tensor) -> Applied:
        """Applies the op, without the bias, to other data and weights of the same shapes."""
        return Applied(x, _repeated(self.op, [x, w]))

    def add_bias(self, z: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Returns z + change(b); z if the target has no bias."""
        if self._bias_add is None or self.bias is None:
            return z
        return _repeated(self._bias_add, [z, change(self.bias)])

    def cast(self, value: tf.Tensor) -> tf.Tensor:
        """Casts an upstream gradient or a param to the type of the calculation."""
        return tf.cast(value, self.dtype)

    def only_data(self, gradient: tf.Tensor) -> list[tf.Tensor | None]:
        """Returns the gradients of a rule: `gradient` for the data, None for weights and bias."""
        return [tf.cast(gradient, self._dtype), *[None] * (self._n_inputs - 1)]


def positive(value: tf.Tensor) -> tf.Tensor:
    """Returns v⁺ = max(v, 0)."""
    return tf.maximum(value, tf.zeros([], value.dtype))


def negative(value: tf.Tensor) -> tf.Tensor:
    """Returns v⁻ = min(v, 0)."""
    return tf.minimum(value, tf.zeros([], value.dtype))


def _repeated(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Adds the op with other inputs to the current graph; `op` itself may belong to an outer graph.

    Attributes with an underscore are left out: among them is the one that would make gradrule ask for a rule again.
    """
    attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
    attributes["T"] = attr_value_pb2.AttrValue(type=inputs[0].dtype.as_datatype_enum)
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(op.type, list(inputs), attrs=attributes).outputs[0]


def _sum_to(r: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """Returns `r` summed over the axes along which `like` is broadcast to it, as for a bias with more rows than Wx."""
    if r.shape.is_fully_defined() and r.shape == like.shape:
        return r
    axes, _ = tf.raw_ops.BroadcastGradientArgs(s0=tf.shape(like), s1=tf.shape(r))
    return tf.reshape(tf.reduce_sum(r, axes), tf.shape(like))


def feedback_alignment(
    target: RuleTarget, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Returns dx = Bᵀdy with a fixed random B in place of W; weights and bias get their own gradients.

    Lillicrap et al. 2014, arXiv:1411.0247 (2016, doi:10.1038/ncomms13276), where B is uniform too, in a range tuned per
    experiment. Here its deviation is 1/sqrt(n), n = how many outputs one input feeds, so that dx is about as large as
    dy whatever W is. B depends on `seed`, the node's name and the shape of W; it is the same in each step, with and
    without XLA, and but for rounding in each type.
    """
    linear = Linear(target, "feedback_alignment")
    seed = tf.stack([tf.cast(params["seed"], tf.int64), tf.constant(target.salt, tf.int64)])
    # XLA and TensorFlow's kernels draw the same bits, but convert them to different floats.
    bits = tf.random.stateless_uniform(tf.shape(linear.w), seed, minval=None, dtype=tf.int32, alg="philox")
    deviation_one = linear.cast(tf.cast(bits, tf.float32)) * (3**0.5 / 2**31)
    b = deviation_one * tf.math.rsqrt(linear.cast(_outputs_per_input(linear)))
    dx = linear.apply(linear.x, b).transposed(linear.cast(dys[0]))
    _, *others = target.own_gradients(dys)
    return [*linear.only_data(dx)[:1], *(dense(gradient) for gradient in others)]


def _outputs_per_input(linear: Linear) -> tf.Tensor:
    """Returns the number of outputs for which an element of x has a weight, without strides and borders."""
    op, shape = linear.op, tf.shape(linear.w)
    if op.type in MATRIX_PRODUCTS:
        transposed = op.get_attr("transpose_b" if op.type == "MatMul" else "adj_y")
        return shape[-2 if transposed else -1]
    channel_axis = op.get_attr("data_format").decode().index("C")
    return tf.reduce_prod(shape) // tf.shape(linear.x)[channel_axis]
