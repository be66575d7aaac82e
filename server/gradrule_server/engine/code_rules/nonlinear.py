"""Rules for ops that are not linear: activations, max pooling, eigendecomposition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gradrule_server.engine.code_rules.target import (
    RuleTarget,
    dense,
    not_applicable,
    repeated,
    require_elementwise,
    unrounded,
    wide,
)


def rectgrad(
    target: RuleTarget, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Returns dy where y·dy > percentile_q(y·dy), else 0; the percentile is each sample's own (axis 0 counts samples).

    Kim et al. 2019, arXiv:1902.04893. Percentiles as NumPy's, linear between order statistics. The comparison is
    strict: equal elements stay or go together, q = 100 passes nothing, and neither does a tensor of rank 1, whose
    samples are single numbers. A q outside 0…100 counts as the nearer bound. 16-bit types: calculated in float32.
    """
    require_elementwise(target, "rectgrad")
    dy = dys[0]
    y_wide, dy_wide = (tf.cast(value, wide(dy.dtype)) for value in (target.outputs[0], dy))
    contribution = y_wide * dy_wide
    shape = tf.shape(contribution, out_type=tf.int64)
    size = tf.reduce_prod(shape[1:])
    flat = tf.reshape(contribution, tf.stack([shape[0], size]))
    # A percentile between two order statistics has no element between itself and the lower one, so the elements above
    # it are those above the lower one: no interpolation, hence no rounding, whatever the type.
    last = tf.maximum(size - 1, 0)
    position = tf.clip_by_value(tf.cast(params["q"], tf.float64), 0.0, 100.0) * tf.cast(last, tf.float64) / 100
    from_top = tf.clip_by_value(last - tf.cast(tf.floor(position), tf.int64), 0, last)
    descending, _ = tf.math.top_k(flat, tf.cast(size, tf.int32))
    # One more column, so that gathering works for samples without elements.
    threshold = tf.gather(tf.pad(descending, [[0, 0], [0, 1]]), from_top, axis=1)
    passed = tf.reshape(flat > threshold[:, tf.newaxis], shape)
    return [tf.where(passed, dy, tf.zeros_like(dy))]


def deeplift_rescale(
    target: RuleTarget, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Returns dy·(y−y₀)/(x−x₀), and the op's own gradient where abs(x−x₀) ≤ eps.

    x₀, y₀: what x and y are where all xs of the program are `baseline`. Shrikumar et al. 2017, arXiv:1704.02685, the
    rescale rule; its code takes the gradient below 1e-7. 16-bit types: calculated in float32.
    """
    require_elementwise(target, "deeplift_rescale")
    if len(target.ops) != 1:
        raise not_applicable(target, "deeplift_rescale", "single elementwise ops, such as Relu")
    op, dtype = target.ops[0], target.inputs[0].dtype

    def widened(value: tf.Tensor) -> tf.Tensor:
        return tf.cast(value, wide(dtype))

    x, dy = widened(target.inputs[0]), widened(dys[0])
    x0, y0 = (target.reference(value, params["baseline"]) for value in (op.inputs[0], op.outputs[0]))
    x_change = x - widened(x0)
    y = unrounded(target.outputs[0], lambda: repeated(op, [target.inputs[0]]))
    y_change = widened(y) - widened(unrounded(y0, lambda: repeated(op, [x0])))
    near = tf.abs(x_change) <= widened(params["eps"])
    own = dense(target.own_gradients([dys[0]])[0])
    default = tf.zeros_like(x) if own is None else widened(own)
    # Divides by 1 where the quotient is not used: a NaN there would reach the derivative of this rule.
    slope = y_change / tf.where(near, tf.ones_like(x), x_change)
    return [tf.cast(tf.where(near, default, dy * slope), dtype)]


# By op type: average pooling, the name of its input, and its gradient.
_AVERAGES = {
    "MaxPool": (tf.raw_ops.AvgPool, "value", tf.raw_ops.AvgPoolGrad),
    "MaxPool3D": (tf.raw_ops.AvgPool3D, "input", tf.raw_ops.AvgPool3DGrad),
}


class _AveragePool:
    """Average pooling over the windows of a max pooling; padding does not count."""

    def __init__(self, target: RuleTarget, rule: str) -> None:
        op = target.ops[0]
        if len(target.ops) != 1 or op.type not in _AVERAGES:
            raise not_applicable(target, rule, "MaxPool and MaxPool3D")
        data_format, ksize = op.get_attr("data_format").decode(), op.get_attr("ksize")
        padding = op.get_attr("padding").decode()
        if padding not in ("SAME", "VALID") or ksize[data_format.index("C")] != 1:
            # TensorFlow has no such average pooling.
            raise not_applicable(target, rule, "pooling with SAME or VALID padding that does not pool across channels")
        self._forward, self._data, self._backward = _AVERAGES[op.type]
        self._attributes: dict[str, Any] = {
            "ksize": ksize,
            "strides": op.get_attr("strides"),
            "padding": padding,
            "data_format": data_format,
        }

    def apply(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the mean of each window."""
        return self._forward(**{self._data: x}, **self._attributes)

    def transposed(self, x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        """Spreads `dy` evenly over each window; returns it in the shape of x."""
        return self._backward(orig_input_shape=tf.shape(x), grad=dy, **self._attributes)


def maxpool_as_avgpool(
    target: RuleTarget, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Returns the gradient of average pooling over the same windows, which does not depend on x.

    Lucid, smoothed_maxpool_grad ("avg"). 16-bit types: calculated in float32.
    """
    pool = _AveragePool(target, "maxpool_as_avgpool")
    dtype = target.inputs[0].dtype
    return [tf.cast(pool.transposed(target.inputs[0], tf.cast(dys[0], wide(dtype))), dtype)]


def maxpool_smooth(
    target: RuleTarget, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Returns the gradient of avg(x²)/(eps + avg(abs(x))), a smooth variant of the maximum, over the same windows.

    2x·avgᵀ(dy/d) − sgn(x)·avgᵀ(dy·avg(x²)/d²) with d = eps + avg(abs(x)), sgn(0) = 0. Lucid, smoothed_maxpool_grad
    ("L2"), eps 0.01. An x of 0 gets 0; so does a window of zeros where eps is 0. 16-bit types: calculated in float32.
    """
    pool = _AveragePool(target, "maxpool_smooth")
    dtype = target.inputs[0].dtype
    x, dy, eps = (tf.cast(value, wide(dtype)) for value in (target.inputs[0], dys[0], params["eps"]))
    denominator = eps + pool.apply(tf.abs(x))
    of_squares = tf.math.divide_no_nan(dy, denominator)
    of_sizes = of_squares * tf.math.divide_no_nan(pool.apply(tf.square(x)), denominator)
    gradient = 2 * x * pool.transposed(x, of_squares) - tf.sign(x) * pool.transposed(x, of_sizes)
    return [tf.cast(gradient, dtype)]


def eigh_lorentzian(
    target: RuleTarget, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Returns SelfAdjointEigV2's own gradient with 1/(eⱼ−eᵢ) replaced by d/(d²+eps), d = eⱼ−eᵢ.

    v·(diag(de) + F∘(vᴴdv))·vᴴ with Fᵢⱼ = d/(d²+eps) and 0 on the diagonal; as the op reads the lower triangle only, the
    result is folded there. Matrices: the last two axes. Lorentzian broadening: Liao et al. 2019, arXiv:1903.09650.
    Finite where eigenvalues are equal: such a pair adds nothing, with eps = 0 too. Without eigenvectors among the
    outputs (compute_v) eps does not matter.
    """
    op = target.ops[0]
    if len(target.ops) != 1 or op.type != "SelfAdjointEigV2":
        raise not_applicable(target, "eigh_lorentzian", "SelfAdjointEigV2")
    inner = tf.linalg.diag(dys[0])
    if op.get_attr("compute_v"):
        e, v = target.outputs
        d = e[..., tf.newaxis, :] - e[..., :, tf.newaxis]
        # 0 on the diagonal by itself, as d is 0 there.
        f = tf.math.divide_no_nan(d, tf.square(d) + tf.cast(params["eps"], d.dtype))
        inner += f * tf.linalg.matmul(v, dys[1], adjoint_a=True)
    else:
        _, v = tf.linalg.eigh(target.inputs[0])
    full = tf.linalg.matmul(v, tf.linalg.matmul(inner, v, adjoint_b=True))
    return [_folded(full)]


def _folded(gradient: tf.Tensor) -> tf.Tensor:
    """Returns the gradient for the lower triangle: each element plus its mirror image."""
    both = tf.linalg.band_part(gradient + tf.linalg.adjoint(gradient), -1, 0)
    return tf.linalg.set_diag(both, tf.linalg.diag_part(both) / 2)
