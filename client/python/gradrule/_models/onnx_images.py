"""Converts ONNX operations on images: convolution, pooling, resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradrule._builder.handles import TensorHandle
from gradrule._models import images
from gradrule._models.model_graph import UnsupportedOpError, Value
from gradrule._models.onnx_calls import Convert, Converted, OnnxOp, OpCall, add_op, converts

# An axis of 8,192 elements to 4,096, or the like.
_MOST_WEIGHTS = 2**25
Pairs = list[tuple[int, int]]


def _window(call: OpCall, kernel: Sequence[int]) -> tuple[list[int], Pairs, list[int]]:
    """Returns strides, padding and dilations of a convolution or pooling."""
    axes = len(kernel)
    strides = list(call.attr("strides") or [1] * axes)
    dilations = list(call.attr("dilations") or [1] * axes)
    pads = call.attr("pads") or [0] * (2 * axes)
    auto_pad = call.attr("auto_pad")
    padding: Pairs = list(zip(pads[:axes], pads[axes:], strict=True))
    if auto_pad == "VALID":
        padding = [(0, 0)] * axes
    elif auto_pad != "NOTSET":
        at_end = auto_pad == "SAME_UPPER"
        padding = list(images.same_padding(call.shape()[2:], kernel, strides, dilations, at_end=at_end))
    return strides, padding, dilations


def convolved(call: OpCall, x: Value, weight: TensorHandle, shape: Sequence[int], bias: TensorHandle | None) -> Value:
    """Adds the convolution that a node's attributes describe."""
    call.attr("kernel_shape")
    strides, padding, dilations = _window(call, shape[2:])
    return images.convolution(
        call.model, x, weight, bias, weight_shape=shape, strides=strides, padding=padding, dilations=dilations,
        groups=int(call.attr("group")),
    )  # fmt: skip


@converts(
    "Conv",
    nodes="Conv1D to 3D: Conv2D, DepthwiseConv2dNative or Conv3D, and BiasAdd",
    refuses="weights of unknown shape; auto_pad=SAME with strides, of unknown sizes",
)
def _convolution(call: OpCall) -> Converted:
    bias = call.x(2) if call.has(2) else None
    return convolved(call, call.value(0), call.x(1), call.known_shape(1), bias)


@converts(
    "ConvTranspose",
    nodes="Conv2DBackpropInput or Conv3DBackpropInputV2, and BiasAdd",
    refuses="weights of unknown shape",
)
def _transposed_convolution(call: OpCall) -> Converted:
    shape = call.known_shape(1)
    axes = len(shape) - 2
    call.attr("kernel_shape")
    strides = list(call.attr("strides") or [1] * axes)
    dilations = list(call.attr("dilations") or [1] * axes)
    more = list(call.attr("output_padding") or [0] * axes)
    pads = call.attr("pads") or [0] * (2 * axes)
    padding = list(zip(pads[:axes], pads[axes:], strict=True))
    auto_pad, wanted = call.attr("auto_pad"), call.attr("output_shape")
    if wanted is not None or auto_pad.startswith("SAME"):
        sizes = [0] * axes if wanted is None else list(call.known_shape()[2:])
        ends = (
            [size * stride for size, stride in zip(sizes, strides, strict=True)] if wanted is None else wanted[-axes:]
        )
        padding = []
        for place, size in enumerate(sizes):
            extent = (shape[2 + place] - 1) * dilations[place] + 1
            total = strides[place] * (size - 1) + more[place] + extent - ends[place]
            small, large = total // 2, total - total // 2
            padding.append((small, large) if auto_pad == "SAME_UPPER" else (large, small))
    elif auto_pad == "VALID":
        padding = [(0, 0)] * axes
    return images.transposed_convolution(
        call.model, call.value(0), call.x(1), call.x(2) if call.has(2) else None, weight_shape=shape, strides=strides,
        padding=padding, dilations=dilations, output_padding=more, groups=int(call.attr("group")),
    )  # fmt: skip


def _windows(call: OpCall, kernel: Sequence[int], filler: float, mask: bool = False) -> tuple[TensorHandle, list[int]]:
    """Gathers all windows of an image of known size.

    Returns:
        The windows, [batch, channels, count, kernel, count, kernel, …], and the axes of the kernel. With `mask`: ones
        where a window has an element that counts for means, shape [count, kernel, …].
    """
    strides, padding, dilations = _window(call, kernel)
    sizes = call.known_shape()
    x = call.const(np.ones(sizes[2:])) if mask else call.x()
    first = 0 if mask else 2
    counts_padding = bool(call.attr("count_include_pad", 0))
    for place, (taps, (before, after)) in enumerate(zip(kernel, padding, strict=True)):
        size, extent = sizes[2 + place], (taps - 1) * dilations[place] + 1
        span = (size + before + after - extent) / strides[place]
        count = (math.ceil(span) if call.attr("ceil_mode", 0) else math.floor(span)) + 1
        if (count - 1) * strides[place] >= size + before:
            count -= 1
        end = max(size + before + after, (count - 1) * strides[place] + extent) - size - before
        axis = first + 2 * place
        rank = (0 if mask else 2) + len(kernel) + place
        amounts = np.zeros((rank, 2), np.int32)
        amounts[axis] = before, end
        inner = call.const(amounts, "int32")
        if mask and counts_padding:
            amounts = amounts.copy()
            amounts[axis] = before, after
            x = call.op("PadV2", x, call.const(amounts, "int32"), call.const(1))
            amounts[axis] = 0, end - after
            inner = call.const(amounts, "int32")
        x = call.op("PadV2", x, inner, call.const(filler))
        starts = np.arange(count)[:, None] * strides[place] + np.arange(taps) * dilations[place]
        x = call.op("GatherV2", x, call.const(starts, "int32"), axis)
    return x, [first + 1 + 2 * place for place in range(len(kernel))]


def _is_plain(call: OpCall) -> bool:
    return set(call.attr("dilations") or [1]) == {1}


@converts("MaxPool", nodes="MaxPool or MaxPool3D; with dilations: GatherV2 and Max", refuses="the output Indices")
def _max_pool(call: OpCall) -> Converted:
    kernel = list(call.attr("kernel_shape"))
    if call.wants(1):
        raise UnsupportedOpError("with the output Indices")
    call.attr("storage_order")
    if not _is_plain(call) or call.dtype() in ("int8", "uint8"):
        lowest = -math.inf if "float" in call.dtype() else np.iinfo(call.dtype()).min
        windows, axes = _windows(call, kernel, lowest)
        return Value(call.op("Max", windows, call.model.int32(*axes)), call.rank())
    strides, padding, _ = _window(call, kernel)
    return images.max_pool(
        call.model, call.value(0), kernel=kernel, strides=strides, padding=padding, sizes=call.shape()[2:],
        ceil_mode=bool(call.attr("ceil_mode")),
    )  # fmt: skip


@converts(
    "AveragePool",
    nodes="AvgPool or AvgPool3D; with dilations: GatherV2 and Sum",
    refuses="padding that does not count, ceil_mode or dilations, of unknown sizes",
)
def _average_pool(call: OpCall) -> Converted:
    kernel = list(call.attr("kernel_shape"))
    if not _is_plain(call):
        windows, axes = _windows(call, kernel, 0)
        total = call.op("Sum", windows, call.model.int32(*axes))
        mask, axes = _windows(call, kernel, 0, mask=True)
        return Value(call.op("RealDiv", total, call.op("Sum", mask, call.model.int32(*axes))), call.rank())
    strides, padding, _ = _window(call, kernel)
    return images.average_pool(
        call.model, call.value(0), kernel=kernel, strides=strides, padding=padding, sizes=call.shape()[2:],
        ceil_mode=bool(call.attr("ceil_mode")), count_padding=bool(call.attr("count_include_pad")),
    )  # fmt: skip


@converts("LpPool", nodes="GatherV2, Abs, Pow, Sum", refuses="unknown sizes")
def _lp_pool(call: OpCall) -> Converted:
    windows, axes = _windows(call, list(call.attr("kernel_shape")), 0)
    return Value(_norm(call, windows, axes, int(call.attr("p")), keep=False), call.rank())


def _norm(call: OpCall, x: TensorHandle, axes: Sequence[int], p: int, keep: bool) -> TensorHandle:
    positions = call.model.int32(*axes)
    if p == 1:
        return call.op("Sum", call.op("Abs", x), positions, keep_dims=keep)
    if p == 2:
        return call.op("Sqrt", call.op("Sum", call.op("Square", x), positions, keep_dims=keep))
    total = call.op("Sum", call.op("Pow", call.op("Abs", x), call.const(p)), positions, keep_dims=keep)
    return call.op("Pow", total, call.const(1 / p))


@converts("GlobalLpPool", nodes="Abs, Pow, Sum")
def _global_lp_pool(call: OpCall) -> Converted:
    return Value(_norm(call, call.x(), range(2, call.rank()), int(call.attr("p")), keep=True), call.rank())


def _global_pool(op_type: str) -> Convert:
    def convert(call: OpCall) -> Value:
        axes = call.model.int32(*range(1, call.rank() - 1))
        x = call.model.channels_last(call.value(0))
        return Value(call.op(op_type, x, axes, keep_dims=True), call.rank(), channels_last=call.rank() > 2)

    return convert


add_op("GlobalAveragePool", OnnxOp(_global_pool("Mean"), "Mean"))
add_op("GlobalMaxPool", OnnxOp(_global_pool("Max"), "Max"))


@converts("Resize", nodes="GatherV2 of mode=nearest, else Einsum", refuses="unknown sizes; tf_crop_and_resize")
def _resize(call: OpCall) -> Converted:
    sizes, rank = call.known_shape(), call.rank()
    axes = [axis % rank for axis in call.attr("axes") or range(rank)]
    coordinates = call.attr("coordinate_transformation_mode")
    if coordinates == "tf_crop_and_resize":
        raise UnsupportedOpError("with coordinate_transformation_mode tf_crop_and_resize")
    # Only tf_crop_and_resize uses these.
    call.has(1), call.attr("extrapolation_value")
    policy = call.attr("keep_aspect_ratio_policy", "stretch")
    scales: list[float | None]
    if call.has(2) and call.known(2).size:
        scales = [float(scale) for scale in call.known(2)]
        counts = [math.floor(sizes[axis] * scale) for axis, scale in zip(axes, call.known(2).tolist(), strict=True)]
    else:
        counts = [int(size) for size in call.known(3)]
        scales = [None] * len(axes)
        if policy != "stretch":
            choose = min if policy == "not_larger" else max
            factor = choose(count / sizes[axis] for axis, count in zip(axes, counts, strict=True))
            counts = [math.floor(factor * sizes[axis] + 0.5) for axis in axes]
            scales = [factor] * len(axes)
    if any(max(count, 512) * max(sizes[axis], 512) > _MOST_WEIGHTS for axis, count in zip(axes, counts, strict=True)):
        raise UnsupportedOpError(
            f"of sizes {sizes} to {counts}, which needs matrices of more than {_MOST_WEIGHTS} weights"
        )
    matrices: list[np.ndarray[Any, Any] | None] = [None] * rank
    for axis, count, scale in zip(axes, counts, scales, strict=True):
        if count != sizes[axis] or (scale is not None and scale != 1):
            matrices[axis] = images.interpolation(
                call.attr("mode"), sizes[axis], count, coordinates=coordinates, scale=scale,
                nearest=call.attr("nearest_mode"), cubic=float(call.attr("cubic_coeff_a")),
                exclude_outside=bool(call.attr("exclude_outside")), antialias=bool(call.attr("antialias", 0)),
                length=None if scale is None or policy != "stretch" else scale * sizes[axis],
            )  # fmt: skip
    for name in ("mode", "nearest_mode", "cubic_coeff_a", "exclude_outside", "antialias"):
        call.attr(name)
    return _resampled(call, matrices)


def _resampled(call: OpCall, matrices: list[np.ndarray[Any, Any] | None]) -> Value:
    rank = call.rank()
    if rank > 2 and matrices[0] is None and matrices[1] is None:
        return images.resampled(call.model, call.value(0), matrices[2:])
    # Two axes in front and one behind make an image of all axes.
    x = call.op("ExpandDims", call.op("ExpandDims", call.x(), 0), rank + 1)
    y = images.resampled(call.model, Value(x, rank + 2, channels_last=True), matrices)
    return Value(call.op("Squeeze", y.handle, squeeze_dims=[0, rank + 1]), rank)
