"""Rules for activations that compare elements with one another, or with a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from gradrule_server.engine.code_rules.common import dense, not_applicable, require_elementwise
from gradrule_server.engine.site import Site


def rectgrad(site: Site, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]) -> Sequence[tf.Tensor | None]:
    """dy where y·dy > percentile_q(y·dy), else 0; the percentile is each sample's own (axis 0 counts samples).

    Kim et al. 2019, arXiv:1902.04893. Percentiles as NumPy's, linear between order statistics. The comparison is
    strict: equal elements stay or go together, q = 100 passes nothing, and neither does a tensor of rank 1, whose
    samples are single numbers. A q outside 0…100 counts as the nearer bound.
    """
    require_elementwise(site, "rectgrad")
    y, dy = site.outputs[0], dys[0]
    contribution = y * dy
    shape = tf.shape(contribution, out_type=tf.int64)
    size = tf.reduce_prod(shape[1:])
    flat = tf.reshape(contribution, tf.stack([shape[0], size]))
    # A percentile between two order statistics has no element between itself and the lower one, so the elements above
    # it are those above the lower one: no interpolation, hence no rounding, whatever the type.
    last = tf.maximum(size - 1, 0)
    position = tf.clip_by_value(tf.cast(params["q"], tf.float64), 0.0, 100.0) * tf.cast(last, tf.float64) / 100
    from_top = tf.clip_by_value(last - tf.cast(tf.floor(position), tf.int64), 0, last)
    descending, _ = tf.math.top_k(flat, tf.cast(size, tf.int32))
    # One column more, so that samples without elements have something to gather.
    threshold = tf.gather(tf.pad(descending, [[0, 0], [0, 1]]), from_top, axis=1)
    passed = tf.reshape(flat > threshold[:, tf.newaxis], shape)
    return [tf.where(passed, dy, tf.zeros_like(dy))]


def deeplift_rescale(
    site: Site, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """dy·(y−y₀)/(x−x₀), and the op's own gradient where abs(x−x₀) ≤ eps.

    x₀, y₀: what x and y are where all xs of the program are `baseline`. Shrikumar et al. 2017, arXiv:1704.02685, the
    rescale rule; its code takes the gradient below 1e-7.
    """
    require_elementwise(site, "deeplift_rescale")
    if len(site.ops) != 1:
        raise not_applicable(site, "deeplift_rescale", "single elementwise ops, such as Relu")
    op, x, y, dy = site.ops[0], site.inputs[0], site.outputs[0], dys[0]
    x_change = x - site.reference(op.inputs[0], params["baseline"])
    y_change = y - site.reference(op.outputs[0], params["baseline"])
    near = tf.abs(x_change) <= tf.cast(params["eps"], x.dtype)
    default = dense(site.own([dy])[0])
    if default is None:
        default = tf.zeros_like(x)
    # Divides by 1 where the quotient is not used: what is chosen away would be NaN in the derivative of this.
    slope = y_change / tf.where(near, tf.ones_like(x), x_change)
    return [tf.where(near, default, dy * slope)]
