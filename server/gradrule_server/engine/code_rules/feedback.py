"""Feedback alignment: errors that travel back through weights of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from gradrule_server.engine.code_rules.common import dense
from gradrule_server.engine.code_rules.linear import MATRIX_PRODUCTS, Linear
from gradrule_server.engine.site import Site


def feedback_alignment(
    site: Site, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """dx = Bᵀdy with a fixed random B in place of W; weights and bias get their own gradients.

    Lillicrap et al. 2014, arXiv:1411.0247 (2016, doi:10.1038/ncomms13276), where B is uniform too, in a range tuned per
    experiment. Here its deviation is 1/sqrt(n), n = how many outputs one input feeds, so that dx is about as large as
    dy whatever W is. B depends on `seed`, the node's name and the shape of W; it is the same in each step, with and
    without XLA, and but for rounding in each type.
    """
    linear = Linear(site, "feedback_alignment")
    seed = tf.stack([tf.cast(params["seed"], tf.int64), tf.constant(site.salt, tf.int64)])
    # XLA and TensorFlow's kernels draw the same bits, but make different floats of them.
    bits = tf.random.stateless_uniform(tf.shape(linear.w), seed, minval=None, dtype=tf.int32, alg="philox")
    deviation_one = linear.cast(tf.cast(bits, tf.float32)) * (3**0.5 / 2**31)
    b = deviation_one * tf.math.rsqrt(linear.cast(_outputs_per_input(linear)))
    dx = linear.apply(linear.x, b).transposed(linear.cast(dys[0]))
    _, *others = site.own(dys)
    return [*linear.only_data(dx)[:1], *(dense(gradient) for gradient in others)]


def _outputs_per_input(linear: Linear) -> tf.Tensor:
    """How many outputs an element of x has a weight for; strides and borders are not counted."""
    op, shape = linear.op, tf.shape(linear.w)
    if op.type in MATRIX_PRODUCTS:
        transposed = op.get_attr("transpose_b" if op.type == "MatMul" else "adj_y")
        return shape[-2 if transposed else -1]
    channel_axis = op.get_attr("data_format").decode().index("C")
    return tf.reduce_prod(shape) // tf.shape(linear.x)[channel_axis]
