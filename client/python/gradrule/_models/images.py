"""Adds convolutions, pooling and resizing in one to three dimensions, as PyTorch and ONNX define them.

All functions take values of shape [batch, channels, size, ...] in any layout and compute with channels last, since
TensorFlow's kernels on the CPU have no other form. Sizes of axes: those that are no ints are not known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from gradrule._builder.handles import TensorHandle
from gradrule._models.model_graph import ModelGraph, UnsupportedOpError, Value

Padding: TypeAlias = Sequence[tuple[int, int]]
"""Numbers of elements before and after, for each axis of an image."""


def same_padding(
    sizes: Sequence[Any],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    *,
    at_end: bool = True,
) -> Padding:
    """Returns the padding for which an output has size/stride elements, rounded up.

    Args:
        sizes: Sizes of the image's axes; they may be unknown where the stride is 1.
        kernel: Sizes of the kernel.
        strides: Strides.
        dilations: Distances between the elements of the kernel.
        at_end: Whether an odd element is added after the image; False: before it.
    """
    padding = []
    for size, taps, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        extent = (taps - 1) * dilation + 1
        if stride == 1:
            total = extent - 1
        elif isinstance(size, int):
            total = max(0, (math.ceil(size / stride) - 1) * stride + extent - size)
        else:
            raise UnsupportedOpError("with padding 'same' and a stride, of an image whose size is not known")
        small, large = total // 2, total - total // 2
        padding.append((small, large) if at_end else (large, small))
    return padding


def convolution(
    model: ModelGraph,
    x: Value,
    weight: TensorHandle,
    bias: TensorHandle | None,
    *,
    weight_shape: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilations: Sequence[int],
    groups: int = 1,
) -> Value:
    """Adds a convolution.

    Args:
        model: The graph.
        x: Value [batch, channels, size, ...] with 1 to 3 axes of sizes.
        weight: Tensor [outputs, channels / groups, kernel size, ...].
        bias: Tensor [outputs].
        weight_shape: Shape of `weight`.
        strides: One number for each axis of the image, as `padding` and `dilations`.
        padding: Zeros before and after the image; negative: elements that are left out.
        dilations: Distances between the elements of the kernel.
        groups: Number of groups of channels that are convolved alone.
    """
    axes = x.rank - 2
    _check_axes(axes)
    tensor, whole = _without_negative_padding(model, model.channels_last(x), [(0, 0), *padding, (0, 0)])
    padding = whole[1:-1]
    kernel = model.op("Transpose", weight, model.int32(*range(2, axes + 2), 1, 0))
    strides, dilations = list(strides), list(dilations)
    if axes == 1:
        tensor, kernel = model.op("ExpandDims", tensor, 1), model.op("ExpandDims", kernel, 0)
        strides, padding, dilations = strides * 2, [(0, 0), *padding], [1, *dilations]
    if axes == 3:
        y = _convolution_3d(model, tensor, kernel, strides, padding, dilations, groups, weight_shape)
    else:
        # Kernels for explicit padding are slower than those for SAME, and than Pad and those for VALID.
        taps = [1, *weight_shape[2:]][-2:]
        is_same = set(strides) == {1} and [*padding] == [*same_padding([None] * 2, taps, strides, dilations)]
        window: dict[str, Any] = {"strides": [1, *strides, 1]}
        window["padding"] = "SAME" if is_same and _any(padding) else "VALID"
        if not is_same:
            tensor = padded(model, tensor, padding)
        # The kernel of DepthwiseConv2dNative takes neither dilations nor two strides.
        if groups > 1 and weight_shape[1] == 1 and set(dilations) == {1} and len(set(strides)) == 1:
            outputs, sizes = weight_shape[0], [1, *weight_shape[2:]][-2:]
            kernel = model.op("Reshape", kernel, model.int32(*sizes, groups, outputs // groups))
            y = model.op("DepthwiseConv2dNative", tensor, kernel, **window)
        else:
            y = model.op("Conv2D", tensor, kernel, dilations=[1, *dilations, 1], **window)
    return _image_result(model, y, bias, x.rank)


def _convolution_3d(
    model: ModelGraph,
    tensor: TensorHandle,
    kernel: TensorHandle,
    strides: Sequence[int],
    padding: Padding,
    dilations: Sequence[int],
    groups: int,
    weight_shape: Sequence[int],
) -> TensorHandle:
    tensor = padded(model, tensor, padding)
    kernel = _dilated(model, kernel, weight_shape[2:], dilations)
    parts = [tensor] if groups == 1 else model.ops("Split", -1, tensor, num_split=groups)
    kernels = [kernel] if groups == 1 else model.ops("Split", -1, kernel, num_split=groups)
    window: dict[str, Any] = {"strides": [1, *strides, 1], "padding": "VALID"}
    results = [model.op("Conv3D", part, own, **window) for part, own in zip(parts, kernels, strict=True)]
    return results[0] if groups == 1 else model.op("ConcatV2", results, -1)


def transposed_convolution(
    model: ModelGraph,
    x: Value,
    weight: TensorHandle,
    bias: TensorHandle | None,
    *,
    weight_shape: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilations: Sequence[int],
    output_padding: Sequence[int],
    groups: int = 1,
) -> Value:
    """Adds the gradient of a convolution with respect to its input, also called deconvolution.

    Args:
        model: The graph.
        x: Value [batch, channels, size, ...] with 1 to 3 axes of sizes.
        weight: Tensor [channels, outputs / groups, kernel size, ...].
        bias: Tensor [outputs].
        weight_shape: Shape of `weight`.
        strides: One number for each axis of the image, as the next arguments.
        padding: Elements that are left out before and after the result.
        dilations: Distances between the elements of the kernel.
        output_padding: Elements that the result has more at its end.
        groups: Number of groups of channels that are convolved alone.
    """
    axes = x.rank - 2
    _check_axes(axes)
    tensor = model.channels_last(x)
    kernel = model.op("Transpose", weight, model.int32(*range(2, axes + 2), 1, 0))
    kernel = _dilated(model, kernel, weight_shape[2:], dilations)
    extents = [(taps - 1) * dilation + 1 for taps, dilation in zip(weight_shape[2:], dilations, strict=True)]
    crop = [(-before, more - after) for (before, after), more in zip(padding, output_padding, strict=True)]
    strides = list(strides)
    if axes == 1:
        tensor, kernel = model.op("ExpandDims", tensor, 1), model.op("ExpandDims", kernel, 0)
        strides, crop, extents = [1, *strides], [(0, 0), *crop], [1, *extents]
    shape = model.op("Shape", tensor)
    # size -> (size - 1) * stride + extent
    factor = model.int32(1, *strides, 0)
    full = [max(0, extent - stride) for extent, stride in zip(extents, strides, strict=True)]
    sizes = model.op("AddV2", model.op("Mul", shape, factor), model.int32(0, *full, weight_shape[1]))
    op_type = "Conv3DBackpropInputV2" if axes == 3 else "Conv2DBackpropInput"
    parts = [tensor] if groups == 1 else model.ops("Split", -1, tensor, num_split=groups)
    kernels = [kernel] if groups == 1 else model.ops("Split", -1, kernel, num_split=groups)
    window: dict[str, Any] = {"strides": [1, *strides, 1], "padding": "VALID"}
    results = [model.op(op_type, sizes, own, part, **window) for part, own in zip(parts, kernels, strict=True)]
    y = results[0] if groups == 1 else model.op("ConcatV2", results, -1)
    # A stride above the extent of the kernel leaves elements at the end that no element of x reaches.
    rest = [max(0, stride - extent) for extent, stride in zip(extents, strides, strict=True)]
    crop = [(before, after - more) for (before, after), more in zip(crop, rest, strict=True)]
    return _image_result(model, padded(model, y, crop), bias, x.rank)


def max_pool(
    model: ModelGraph,
    x: Value,
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    sizes: Sequence[Any],
    ceil_mode: bool = False,
) -> Value:
    """Adds the maxima of windows; padding never wins.

    Args:
        model: The graph.
        x: Value [batch, channels, size, ...] with 1 to 3 axes of sizes.
        kernel: Sizes of the windows.
        strides: Distances between windows.
        padding: Elements before and after the image.
        sizes: Sizes of the image; they must be known for `ceil_mode`.
        ceil_mode: Whether a window may reach beyond the end, if it starts within the image or the padding before it.
    """
    axes = x.rank - 2
    _check_axes(axes)
    padding = _with_ceiling(sizes, kernel, strides, padding) if ceil_mode else list(padding)
    tensor, kernel, strides = model.channels_last(x), list(kernel), list(strides)
    if axes == 1:
        tensor, kernel, strides = model.op("ExpandDims", tensor, 1), [1, *kernel], [1, *strides]
        padding = [(0, 0), *padding]
    window: dict[str, Any] = {"ksize": [1, *kernel, 1], "strides": [1, *strides, 1]}
    if axes == 3:
        _check_type(x)
        y = model.op("MaxPool3D", padded(model, tensor, padding, -math.inf), **window, padding="VALID")
    else:
        y = model.op("MaxPool", tensor, **window, **_padding_attrs(padding))
    return _image_result(model, y, None, x.rank)


def average_pool(
    model: ModelGraph,
    x: Value,
    *,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    sizes: Sequence[Any],
    ceil_mode: bool = False,
    count_padding: bool = False,
) -> Value:
    """Adds the means of windows.

    Args:
        model: The graph.
        x: Value [batch, channels, size, ...] with 1 to 3 axes of sizes.
        kernel: Sizes of the windows.
        strides: Distances between windows.
        padding: Zeros before and after the image.
        sizes: Sizes of the image; they must be known for `ceil_mode`, and for padding that is not counted.
        ceil_mode: Whether a window may reach beyond the end, if it starts within the image or the padding before it.
        count_padding: Whether the zeros of `padding` count for the means; those of `ceil_mode` never count.
    """
    axes = x.rank - 2
    _check_axes(axes)
    full = _with_ceiling(sizes, kernel, strides, padding) if ceil_mode else list(padding)
    tensor = padded(model, model.channels_last(x), full)
    window: dict[str, Any] = {"ksize": [1, *kernel, 1], "strides": [1, *strides, 1], "padding": "VALID"}
    if axes == 1:
        tensor = model.op("ExpandDims", tensor, 1)
        window |= {"ksize": [1, 1, *kernel, 1], "strides": [1, 1, *strides, 1]}
    if axes == 3:
        _check_type(x)
    y = model.op("AvgPool3D" if axes == 3 else "AvgPool", tensor, **window)
    counted = padding if count_padding else [(0, 0)] * axes
    if list(counted) != full:
        _check_known(sizes)
        factors = np.ones((), np.float64)
        for size, taps, stride, (before, after), own in zip(sizes, kernel, strides, full, counted, strict=True):
            ones = np.zeros(before + size + after)
            ones[before - own[0] : before + size + own[1]] = 1
            counts = [ones[start : start + taps].sum() for start in range(0, len(ones) - taps + 1, stride)]
            factors = np.multiply.outer(factors, taps / np.array(counts))
        lead = [1] * (len(window["ksize"]) - 1 - axes)
        y = model.op("Mul", y, model.constant(factors.reshape([*lead, *factors.shape, 1]), x.dtype))
    return _image_result(model, y, None, x.rank)


def adaptive_average_pool(model: ModelGraph, x: Value, *, sizes: Sequence[Any], output: Sequence[int]) -> Value:
    """Adds the means of windows whose number is given: they start at floor(i n / m) and end at ceil((i + 1) n / m).

    Args:
        model: The graph.
        x: Value [batch, channels, size, ...].
        sizes: Sizes of the image; they must be known unless all of `output` are 1.
        output: Sizes of the result.
    """
    if set(output) == {1}:
        axes = model.int32(*range(1, x.rank - 1))
        return Value(model.op("Mean", model.channels_last(x), axes, keep_dims=True), x.rank, channels_last=True)
    _check_known(sizes)
    if all(size % count == 0 for size, count in zip(sizes, output, strict=True)):
        kernel = [size // count for size, count in zip(sizes, output, strict=True)]
        padding = [(0, 0)] * len(kernel)
        return average_pool(model, x, kernel=kernel, strides=kernel, padding=padding, sizes=sizes)
    matrices = []
    for size, count in zip(sizes, output, strict=True):
        matrix = np.zeros((count, size))
        for row in range(count):
            start, end = row * size // count, -(-(row + 1) * size // count)
            matrix[row, start:end] = 1 / (end - start)
        matrices.append(matrix)
    return resampled(model, x, matrices)


def resampled(model: ModelGraph, x: Value, matrices: Sequence[np.ndarray[Any, Any] | None]) -> Value:
    """Multiplies each axis of an image by a matrix.

    Args:
        model: The graph.
        x: Value [batch, channels, size, ...].
        matrices: One matrix [new size, size] for each axis of sizes; None: the axis stays. A matrix with one 1 in each
            row selects elements instead, which computes no products.
    """
    tensor = model.channels_last(x)
    letters = "nhwdc"[: x.rank - 1] + "c"
    for axis, matrix in enumerate(matrices, start=1):
        if matrix is None:
            continue
        if ((matrix == 0) | (matrix == 1)).all() and (matrix.sum(axis=1) == 1).all():
            tensor = model.op("GatherV2", tensor, model.int32(*matrix.argmax(axis=1)), axis)
        else:
            result = letters.replace(letters[axis], "o")
            equation = f"o{letters[axis]},{letters}->{result}"
            tensor = model.op("Einsum", [model.constant(matrix, x.dtype), tensor], equation=equation)
    return Value(tensor, x.rank, channels_last=True)


def interpolation(
    mode: str,
    size: int,
    count: int,
    *,
    coordinates: str = "half_pixel",
    scale: float | None = None,
    nearest: str = "floor",
    cubic: float = -0.75,
    exclude_outside: bool | None = None,
    antialias: bool = False,
    length: float | None = None,
) -> np.ndarray[Any, Any]:
    """Returns the matrix [count, size] that interpolates an axis, for `resampled`.

    Args:
        mode: "nearest", "linear" or "cubic".
        size: Number of elements.
        count: Number of elements of the result.
        coordinates: Position in the input of element i of the result, as ONNX's Resize names it: "half_pixel":
            (i + 0.5) / scale - 0.5; "align_corners": i (size - 1) / (count - 1); "asymmetric": i / scale;
            "pytorch_half_pixel": as "half_pixel", 0 if count is 1; "half_pixel_symmetric": as "half_pixel", but the
            centres of input and result agree where count / size is not the scale.
        scale: Factor of the size; default: count / size.
        nearest: How a position becomes an index: "floor", "ceil", "round_prefer_floor" or "round_prefer_ceil".
        cubic: Coefficient of the cubic kernel; Keys 1981, equation 15, has -0.5.
        exclude_outside: Whether elements outside of the image get no weight; False: they are the elements at its edge;
            default: `antialias`.
        antialias: Whether the kernel is as wide as several elements where the size becomes smaller.
        length: Size of the result for "align_corners", before it was rounded; default: count.

    Raises:
        UnsupportedOpError: There is no such mode.
    """
    # Integers are exact: a position that is one must not be rounded down.
    step = size / count if scale is None else 1 / scale
    index = np.arange(count, dtype=np.float64)
    if coordinates == "align_corners":
        length = count if length is None else length
        position = index * (size - 1) / (length - 1) if count > 1 else index * 0.0
    elif coordinates == "half_pixel_symmetric":
        ratio = count / size if scale is None else scale
        position = size / 2 * (1 - count / (ratio * size)) + (index + 0.5) / ratio - 0.5
    elif coordinates == "asymmetric":
        position = index * size / count if scale is None else index / scale
    elif coordinates == "half_pixel" or (coordinates == "pytorch_half_pixel" and count > 1):
        position = (index + 0.5) * step - 0.5
    elif coordinates == "pytorch_half_pixel":
        position = index * 0.0
    else:
        raise UnsupportedOpError(f"with positions {coordinates!r}")
    matrix = np.zeros((count, size))
    if mode == "nearest":
        rounded = {
            "floor": np.floor(position),
            "ceil": np.ceil(position),
            "round_prefer_floor": np.ceil(position - 0.5),
            "round_prefer_ceil": np.floor(position + 0.5),
        }[nearest]
        matrix[np.arange(count), np.clip(rounded, 0, size - 1).astype(int)] = 1
        return matrix
    if mode not in ("linear", "cubic"):
        raise UnsupportedOpError(f"with mode {mode!r}")
    radius = 1 if mode == "linear" else 2
    width = max(1.0, step) if antialias else 1.0
    for row, centre in enumerate(position):
        first = math.floor(centre - radius * width) + 1
        taps = np.arange(first, math.ceil(centre + radius * width) + 1)
        distance = np.abs(taps - centre) / width
        weights = np.maximum(0, 1 - distance) if mode == "linear" else _cubic(distance, cubic)
        if antialias if exclude_outside is None else exclude_outside:
            weights = np.where((taps < 0) | (taps >= size), 0, weights)
        np.add.at(matrix[row], np.clip(taps, 0, size - 1), weights / weights.sum())
    return matrix


def _cubic(distance: np.ndarray[Any, Any], a: float) -> np.ndarray[Any, Any]:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def padded(
    model: ModelGraph, tensor: TensorHandle, padding: Padding, filler: float = 0, *, all_axes: bool = False
) -> TensorHandle:
    """Pads the axes between the first and the last one, or all; negative numbers leave elements out."""
    padding = padding if all_axes else [(0, 0), *padding, (0, 0)]
    tensor, padding = _without_negative_padding(model, tensor, padding)
    if not _any(padding):
        return tensor
    amounts = model.constant(np.array(padding), "int32")
    if filler == 0:
        return model.op("Pad", tensor, amounts)
    return model.op("PadV2", tensor, amounts, model.constant(filler, Value(tensor, 0).dtype))


def _without_negative_padding(
    model: ModelGraph, tensor: TensorHandle, padding: Padding
) -> tuple[TensorHandle, Padding]:
    """Leaves out the elements that negative padding means; returns the padding that remains."""
    if all(amount >= 0 for pair in padding for amount in pair):
        return tensor, padding
    begin = [max(0, -before) for before, _ in padding]
    end = [-max(0, -after) for _, after in padding]
    # Axes without an end run to their last element.
    mask = sum(1 << axis for axis, last in enumerate(end) if last == 0)
    ones = model.int32(*[1] * len(padding))
    cut = model.op("StridedSlice", tensor, model.int32(*begin), model.int32(*end), ones, end_mask=mask)
    return cut, [(max(0, before), max(0, after)) for before, after in padding]


def _dilated(model: ModelGraph, kernel: TensorHandle, taps: Sequence[int], dilations: Sequence[int]) -> TensorHandle:
    """Puts zeros between the elements of a kernel [size, ..., a, b]."""
    for axis, (size, step) in enumerate(zip(taps, dilations, strict=True)):
        if step > 1 and size > 1:
            positions = np.zeros(((size - 1) * step + 1, size))
            positions[np.arange(size) * step, np.arange(size)] = 1
            letters = "hwdab"[: len(taps)] + "ab"
            equation = f"o{letters[axis]},{letters}->{letters.replace(letters[axis], 'o')}"
            matrix = model.constant(positions, Value(kernel, 0).dtype)
            kernel = model.op("Einsum", [matrix, kernel], equation=equation)
    return kernel


def _with_ceiling(sizes: Sequence[Any], kernel: Sequence[int], strides: Sequence[int], padding: Padding) -> Padding:
    """Adds elements after the image, so that a last window that is not full counts."""
    _check_known(sizes)
    result = []
    for size, taps, stride, (before, after) in zip(sizes, kernel, strides, padding, strict=True):
        count = math.ceil((size + before + after - taps) / stride) + 1
        if (count - 1) * stride >= size + before:
            count -= 1
        result.append((before, max(after, (count - 1) * stride + taps - size - before)))
    return result


def _image_result(model: ModelGraph, y: TensorHandle, bias: TensorHandle | None, rank: int) -> Value:
    if bias is not None:
        y = model.op("BiasAdd", y, bias)
    if rank == 3:
        y = model.op("Squeeze", y, squeeze_dims=[1])
    return Value(y, rank, channels_last=True)


def _any(padding: Padding) -> bool:
    return any(amount for pair in padding for amount in pair)


def _padding_attrs(padding: Padding) -> dict[str, Any]:
    """Returns the attributes of Conv2D and MaxPool for a padding."""
    if not _any(padding):
        return {"padding": "VALID"}
    return {"padding": "EXPLICIT", "explicit_paddings": [0, 0, *(amount for pair in padding for amount in pair), 0, 0]}


def _check_axes(axes: int) -> None:
    if axes not in (1, 2, 3):
        raise UnsupportedOpError(f"of a tensor with {axes + 2} axes; it must have 3 to 5, batch and channels first")


def _check_type(x: Value) -> None:
    if x.dtype == "float64":
        raise UnsupportedOpError("of float64 in three dimensions, for which TensorFlow has no kernel; use float32")


def _check_known(sizes: Sequence[Any]) -> None:
    if not all(isinstance(size, int) for size in sizes):
        raise UnsupportedOpError("of an image whose size is not known; give its height and width a fixed size")
