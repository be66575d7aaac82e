"""Max pooling that passes its gradient back as a kind of average pooling would.

What reaches only the largest element of each window makes feature visualisations noisy; an average spreads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from gradrule_server.engine.code_rules.common import not_applicable, wide
from gradrule_server.engine.site import Site

# By op type: average pooling, what that calls its data, and its gradient.
_AVERAGES = {
    "MaxPool": (tf.raw_ops.AvgPool, "value", tf.raw_ops.AvgPoolGrad),
    "MaxPool3D": (tf.raw_ops.AvgPool3D, "input", tf.raw_ops.AvgPool3DGrad),
}


class _AveragePool:
    """Average pooling over the windows of a max pooling; of what padding adds nothing is counted."""

    def __init__(self, site: Site, rule: str) -> None:
        op = site.ops[0]
        if len(site.ops) != 1 or op.type not in _AVERAGES:
            raise not_applicable(site, rule, "MaxPool and MaxPool3D")
        data_format, ksize = op.get_attr("data_format").decode(), op.get_attr("ksize")
        padding = op.get_attr("padding").decode()
        if padding not in ("SAME", "VALID") or ksize[data_format.index("C")] != 1:
            # TensorFlow has no such average pooling.
            raise not_applicable(site, rule, "pooling with SAME or VALID padding that does not pool across channels")
        self._forward, self._data, self._backward = _AVERAGES[op.type]
        self._attributes: dict[str, Any] = {
            "ksize": ksize,
            "strides": op.get_attr("strides"),
            "padding": padding,
            "data_format": data_format,
        }

    def apply(self, x: tf.Tensor) -> tf.Tensor:
        """The mean of each window."""
        return self._forward(**{self._data: x}, **self._attributes)

    def transposed(self, x: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
        """`dy` spread evenly over each window, of the shape of x."""
        return self._backward(orig_input_shape=tf.shape(x), grad=dy, **self._attributes)


def maxpool_as_avgpool(
    site: Site, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """The gradient of average pooling over the same windows, which does not look at x.

    Lucid, smoothed_maxpool_grad ("avg").
    """
    pool = _AveragePool(site, "maxpool_as_avgpool")
    return [pool.transposed(site.inputs[0], dys[0])]


def maxpool_smooth(site: Site, dys: Sequence[tf.Tensor], params: Mapping[str, tf.Tensor]) -> Sequence[tf.Tensor | None]:
    """The gradient of avg(x²)/(eps + avg(abs(x))), a smooth relative of the maximum, over the same windows.

    2x·avgᵀ(dy/d) − sgn(x)·avgᵀ(dy·avg(x²)/d²) with d = eps + avg(abs(x)), sgn(0) = 0. Lucid, smoothed_maxpool_grad
    ("L2"), eps 0.01. An x of 0 gets 0; so does a window of zeros where eps is 0. 16-bit types: calculated in float32.
    """
    pool = _AveragePool(site, "maxpool_smooth")
    dtype = site.inputs[0].dtype
    x, dy, eps = (tf.cast(value, wide(dtype)) for value in (site.inputs[0], dys[0], params["eps"]))
    denominator = eps + pool.apply(tf.abs(x))
    of_squares = tf.math.divide_no_nan(dy, denominator)
    of_sizes = of_squares * tf.math.divide_no_nan(pool.apply(tf.square(x)), denominator)
    gradient = 2 * x * pool.transposed(x, of_squares) - tf.sign(x) * pool.transposed(x, of_sizes)
    return [tf.cast(gradient, dtype)]
