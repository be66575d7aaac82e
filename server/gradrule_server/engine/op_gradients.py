"""Finds the gradient function of an op type: TensorFlow's, or one that is right where that is wrong or fails.

docs/reference/gradients.md lists the ops and attributes that were compared with finite differences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import tensorflow as tf

from gradrule_server.engine import tf_private


def gradient_of(
    op_type: str, is_needed: Callable[[tf.Tensor], bool] | None = None
) -> tf_private.GradientFunction | None:
    """Returns the gradient function of an op type; None if registered as not differentiable. Raises `LookupError`.

    is_needed: Returns whether the gradient by an input is needed; those of others may be left out.
    """
    if op_type in _BATCH_NORMS and is_needed is not None:
        return functools.partial(_batch_norm_gradient, is_needed=is_needed)
    return _REPLACED.get(op_type) or tf_private.gradient_of(op_type)


def tensorflow_gradients(op: Any, *dys: Any) -> list[Any]:
    """Returns the gradients of an op by TensorFlow's function for its type, one for each input."""
    return as_list(cast("tf_private.GradientFunction", tf_private.gradient_of(op.type))(op, *dys))


def own_gradients(op: Any, *dys: Any) -> list[Any]:
    """Returns the gradients of an op whose type has a gradient function, one for each input."""
    return as_list(cast("tf_private.GradientFunction", gradient_of(op.type))(op, *dys))


def as_list(gradients: Any) -> list[Any]:
    """Returns the result of a gradient function as a list; functions of ops with one input may return a tensor."""
    return list(gradients) if isinstance(gradients, (list, tuple)) else [gradients]


def takes_needed(op_type: str) -> bool:
    """Returns whether the gradients of an op type depend on `is_needed` of `gradient_of`."""
    return op_type in _BATCH_NORMS


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
        return tensorflow_gradients(op, dy)
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


def _complex_gradient(op: tf.Operation, dy: tf.Tensor) -> Any:
    """Returns TensorFlow's gradients, with the conjugate of the derivative, which they lack for complex numbers."""
    if not dy.dtype.is_complex:
        return tensorflow_gradients(op, dy)
    if op.type == "SquaredDifference":
        # Its value is |x - y|², without imaginary part.
        return tensorflow_gradients(op, tf.cast(tf.math.real(dy), dy.dtype))
    return [tf.math.conj(gradient) for gradient in tensorflow_gradients(op, tf.math.conj(dy))]


def _padded_gradient(op: tf.Operation, dy: tf.Tensor) -> Any:
    """Returns TensorFlow's gradients with that of the padding value, the last input, which TensorFlow leaves out."""
    first, *others = tensorflow_gradients(op, dy)
    x, *sizes, value = op.inputs
    attributes = {name: setting for name, setting in op.node_def.attr.items() if not name.startswith("_")}
    marks = [tf.zeros_like(x), *sizes, tf.ones_like(value)]
    is_padding = tf.compat.v1.get_default_graph().create_op(op.type, marks, attrs=attributes).outputs[0] == 1
    return [first, *others[:-1], tf.reduce_sum(tf.where(is_padding, dy, tf.zeros_like(dy)))]


def _stitch_gradient(op: tf.Operation, dy: Any) -> Any:
    """Returns the gradients of DynamicStitch: zeros for a slice that a later slice of the same index replaced."""
    dy = tf.convert_to_tensor(dy)
    count = len(op.inputs) // 2
    indices = [tf.reshape(value, [-1]) for value in list(op.inputs)[:count]]
    ends = tf.cumsum([tf.size(index) for index in indices])
    places = [tf.range(ends[n] - tf.size(index), ends[n]) for n, index in enumerate(indices)]
    last = tf.dynamic_stitch(indices, places)
    gradients = []
    for index, place, value in zip(indices, places, list(op.inputs)[count:], strict=True):
        remains = tf.gather(last, index) == place
        rows = tf.where(
            tf.reshape(remains, tf.concat([tf.shape(index), tf.ones(tf.rank(dy) - 1, tf.int32)], 0)),
            tf.gather(dy, index),
            0,
        )
        gradients.append(tf.reshape(rows, tf.shape(value)))
    return [None] * count + gradients


def _cumprod_gradient(op: tf.Operation, dy: tf.Tensor) -> Any:
    """Returns the gradients of Cumprod; that of the first 0 along the axis, which TensorFlow gives as 0, is added."""
    found, _ = tensorflow_gradients(op, dy)
    x, axis = op.inputs
    is_exclusive, is_reverse = op.get_attr("exclusive"), op.get_attr("reverse")
    is_zero = tf.equal(x, 0)
    number = tf.cumsum(tf.cast(is_zero, tf.int32), axis, reverse=is_reverse)
    # The gradient of the second 0 is 0, but that gradient has a derivative by the first 0.
    for wanted in (1, 2):
        is_this = tf.logical_and(is_zero, tf.equal(number, wanted))
        products = tf.math.cumprod(tf.where(is_this, tf.ones_like(x), x), axis, is_exclusive, is_reverse)
        by_this = tf.cumsum(tf.math.conj(products) * dy, axis, is_exclusive, not is_reverse)
        found = tf.where(is_this, by_this, found)
    return found, None


def _always(_: tf.Tensor) -> bool:
    return True


def _batch_norm_gradient(op: tf.Operation, *dys: tf.Tensor, is_needed: Callable[[tf.Tensor], bool] = _always) -> Any:
    """Returns TensorFlow's gradients, and what it leaves out.

    These are the gradients of a given mean and variance, and those of the outputs `batch_mean` and `batch_variance`.
    """
    by_x, by_scale, by_offset, *others = tensorflow_gradients(op, *dys)
    statistics = None if all(map(_is_zero, dys[1:3])) else dys[1:3]
    if not op.get_attr("is_training"):
        if not any(map(is_needed, op.inputs[3:5])):
            return [by_x, by_scale, by_offset, None, None]
        scale, variance = op.inputs[1], op.inputs[4] + op.get_attr("epsilon")
        others = [-by_offset * scale * tf.math.rsqrt(variance), -0.5 * by_scale * scale / variance]
        if statistics:
            others = [by_input + dy for by_input, dy in zip(others, statistics, strict=True)]
    elif statistics:
        share = op.get_attr("exponential_avg_factor")
        by_x += _by_moments(op, *(share * dy for dy in statistics))
        if share != 1:
            others = [(1 - share) * dy for dy in statistics]
    return [by_x, by_scale, by_offset, *others]


def _batch_norm_second_gradient(op: tf.Operation, *gradients: tf.Tensor) -> Any:
    """Returns TensorFlow's gradients, with those of a given mean and variance, which TensorFlow leaves out."""
    by_dy, by_x, by_scale, by_mean, by_variance, *others = tensorflow_gradients(op, *gradients)
    if not op.get_attr("is_training"):
        dy, variance = op.inputs[0], op.inputs[4] + op.get_attr("epsilon")
        axes = [axis for axis, name in enumerate(op.get_attr("data_format").decode()) if name != "C"]
        products = tf.cast(gradients[0], variance.dtype) * tf.cast(op.outputs[0], variance.dtype)
        by_mean = -gradients[1] * tf.math.rsqrt(variance) * tf.reduce_sum(tf.cast(dy, variance.dtype), axes)
        by_variance = -0.5 * (tf.reduce_sum(products, axes) + gradients[1] * op.outputs[1]) / variance
    return [by_dy, by_x, by_scale, by_mean, by_variance, *others]


def _by_moments(op: tf.Operation, by_mean: tf.Tensor, by_variance: tf.Tensor) -> tf.Tensor:
    """Returns the gradient of the data of a batch normalisation from those of its batch mean and unbiased variance."""
    layout = op.get_attr("data_format").decode()
    shape = [-1 if axis == "C" else 1 for axis in layout]
    x = tf.cast(op.inputs[0], by_mean.dtype)
    centred = x - tf.reduce_mean(x, [axis for axis, size in enumerate(shape) if size == 1], keepdims=True)
    count = tf.cast(tf.size(x) // tf.maximum(tf.size(by_mean), 1), x.dtype)
    by_x = tf.reshape(by_mean, shape) / count + 2 * centred * tf.reshape(by_variance, shape) / tf.maximum(count - 1, 1)
    return tf.cast(by_x, op.inputs[0].dtype)


def _is_zero(dy: tf.Tensor | None) -> bool:
    """Returns whether an upstream gradient is known as zeros: TensorFlow makes these for an output without one."""
    if dy is None or dy.op.type == "ZerosLike":
        return True
    if dy.op.type not in ("Const", "Fill"):
        return False
    value = tf.get_static_value(dy.op.inputs[1] if dy.op.type == "Fill" else dy)
    return value is not None and not value.any()


def _gradient_of_some_outputs(op: tf.Operation, *dys: tf.Tensor) -> Any:
    """Returns gradients for upstream gradients of some outputs; raises `NotImplementedError` for those of others."""
    known = (1, 6) if op.type.startswith("BlockLSTM") else (0,)
    for number, dy in enumerate(dys):
        if number not in known and not _is_zero(dy):
            raise NotImplementedError(f"there is none for output {number}; override the node with a rule")
    if op.type == "BlockLSTMV2":
        return _block_lstm_v2_gradient(op, *dys)
    return tensorflow_gradients(op, *dys)


def _cross_entropy_gradient(op: tf.Operation, by_loss: tf.Tensor, by_backprop: tf.Tensor) -> Any:
    """Returns TensorFlow's gradients; of those of the labels it leaves out that of the output softmax - labels."""
    by_features, by_labels = tensorflow_gradients(op, by_loss, by_backprop)
    return by_features, by_labels - by_backprop


def _block_lstm_v2_gradient(op: tf.Operation, *dys: tf.Tensor) -> Any:
    """Returns the gradients of BlockLSTMV2. TensorFlow registers those of BlockLSTM, whose gates have another order."""
    inputs = zip(("seq_len_max", "x", "cs_prev", "h_prev", "w", "wci", "wcf", "wco", "b"), op.inputs, strict=True)
    outputs = zip(("i", "cs", "f", "o", "ci", "co", "h"), op.outputs, strict=True)
    given = {"cs_grad": dys[1], "h_grad": dys[6], "use_peephole": op.get_attr("use_peephole")}
    return None, *tf.raw_ops.BlockLSTMGradV2(**dict(inputs), **dict(outputs), **given)


def _list_gather_gradient(op: tf.Operation, dy: tf.Tensor) -> Any:
    """Returns the gradient of TensorListGather: TensorFlow keeps one row only of an element that is gathered twice."""
    handle, indices, shape = op.inputs
    count = tf.raw_ops.TensorListLength(input_handle=handle)
    rows = tf.math.unsorted_segment_sum(tf.convert_to_tensor(dy), indices, count)
    return tf.raw_ops.TensorListFromTensor(tensor=rows, element_shape=shape), None, None


def _no_gradient(op: tf.Operation, dy: tf.Tensor) -> Any:
    """Raises `NotImplementedError`: TensorFlow moves dy by the inverse transform, which is no derivative."""
    raise NotImplementedError("it is the inverse transform of dy, and no derivative; override the node with a rule")


_BATCH_NORMS = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
_REPLACED: Mapping[str, tf_private.GradientFunction] = {
    "Conv2D": _conv2d_gradient,
    "Cumprod": _cumprod_gradient,
    "SoftmaxCrossEntropyWithLogits": _cross_entropy_gradient,
    "DynamicStitch": _stitch_gradient,
    "TensorListGather": _list_gather_gradient,
    **dict.fromkeys(("BlockLSTM", "BlockLSTMV2", "CTCLoss", "CTCLossV2"), _gradient_of_some_outputs),
    **dict.fromkeys(_BATCH_NORMS, _batch_norm_gradient),
    **dict.fromkeys(
        ("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"), _batch_norm_second_gradient
    ),
    **dict.fromkeys(("MulNoNan", "SquaredDifference", "Xdivy", "Xlog1py", "Xlogy"), _complex_gradient),
    **dict.fromkeys(
        ("MatrixDiagPartV2", "MatrixDiagPartV3", "MatrixDiagV2", "MatrixDiagV3", "PadV2"), _padded_gradient
    ),
    **dict.fromkeys(("ImageProjectiveTransformV2", "ImageProjectiveTransformV3"), _no_gradient),
}
