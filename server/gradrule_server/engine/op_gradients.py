"""Finds the gradient function of an op type: TensorFlow's, or one that also works where that fails on the CPU."""

from __future__ import annotations

from typing import Any, cast

import tensorflow as tf

from gradrule_server.engine import tf_private


def gradient_of(op_type: str) -> tf_private.GradientFunction | None:
    """Returns the gradient function of an op type; None if registered as not differentiable. Raises `LookupError`."""
    return _REPLACED.get(op_type) or tf_private.gradient_of(op_type)


def _conv2d_gradient(op: tf.Operation, dy: tf.Tensor) -> Any:
    """Returns the gradients of Conv2D, also if it is grouped or dilated: TensorFlow has no kernel on the CPU for that.

    Groups are split; if the numbers of channels are not known before running, the convolution counts as one group, and
    TensorFlow refuses more at run time. A dilated filter is a filter with zeros between its elements.
    """
    x, w = op.inputs
    layout, dilations = op.get_attr("data_format").decode(), op.get_attr("dilations")
    axis, steps = layout.index("C"), [dilations[layout.index("H")], dilations[layout.index("W")]]
    channels, of_group = x.shape.rank and x.shape[axis], w.shape.rank and w.shape[2]
    groups = channels // of_group if channels and of_group else 1
    if (groups == 1 and steps == [1, 1]) or tf.config.get_visible_devices("GPU"):
        return cast("tf_private.GradientFunction", tf_private.gradient_of("Conv2D"))(op, dy)
    names = ("strides", "use_cudnn_on_gpu", "padding", "explicit_paddings", "data_format")
    attributes = {name: op.get_attr(name) for name in names}
    by_x, by_w = [], []
    parts = zip(tf.split(x, groups, axis), tf.split(w, groups, 3), tf.split(dy, groups, axis), strict=True)
    for x_part, w_part, dy_part in parts:
        full = _dilated(w_part, steps)
        back = {"out_backprop": dy_part, **attributes}
        by_x.append(tf.raw_ops.Conv2DBackpropInput(input_sizes=tf.shape(x_part), filter=full, **back))
        by_full = tf.raw_ops.Conv2DBackpropFilter(input=x_part, filter_sizes=tf.shape(full), **back)
        by_w.append(by_full[:: steps[0], :: steps[1]])
    return tf.concat(by_x, axis), tf.concat(by_w, 3)


def _dilated(w: tf.Tensor, steps: list[int]) -> tf.Tensor:
    """Returns a filter with steps - 1 zeros between the elements along its first two axes."""
    if steps == [1, 1]:
        return w
    height, width, *channels = tf.unstack(tf.shape(w), num=4)
    holes = tf.reshape(w, [height, 1, width, 1, *channels])
    holes = tf.pad(holes, [[0, 0], [0, steps[0] - 1], [0, 0], [0, steps[1] - 1], [0, 0], [0, 0]])
    full = tf.reshape(holes, [height * steps[0], width * steps[1], *channels])
    return full[: (height - 1) * steps[0] + 1, : (width - 1) * steps[1] + 1]


_REPLACED = {"Conv2D": _conv2d_gradient}
