"""Converts ONNX operations that sample images at computed places, and Fourier transforms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from gradrule._builder.handles import TensorHandle
from gradrule._models import images
from gradrule._models.model_graph import UnsupportedOpError, Value
from gradrule._models.onnx_calls import Converted, OpCall, converts
from gradrule._models.onnx_reductions import moved_last


def _number(call: OpCall, vector: TensorHandle, place: int, dtype: str) -> TensorHandle:
    """Returns an element of a vector as a scalar."""
    return call.cast(call.op("GatherV2", vector, call.const(place, "int32"), 0), dtype)


@converts("GridSample", nodes="GatherV2, Mul and AddV2", refuses="mode=cubic")
def _grid_sample(call: OpCall) -> Converted:
    model, x, rank, own = call.model, call.value(0), call.rank(), call.dtype()
    mode, padding, aligned = call.attr("mode"), call.attr("padding_mode"), bool(call.attr("align_corners"))
    if mode not in ("linear", "bilinear", "nearest"):
        raise UnsupportedOpError(f"with mode {mode!r}")
    axes = rank - 2
    image = model.channels_last(x)
    shape = call.op("Shape", image)
    sizes = [_number(call, shape, 1 + place, own) for place in range(axes)]
    grid = call.cast(call.x(1), own)
    one, half = call.const(1), call.const(0.5)
    positions = []
    for place, size in enumerate(sizes):
        # The grid has the last axis of the image first.
        given = call.op("AddV2", call.op("GatherV2", grid, call.const(axes - 1 - place, "int32"), axes + 1), one)
        last = call.op("Sub", size, one)
        if aligned:
            position = call.op("Mul", call.op("Mul", given, half), last)
        else:
            position = call.op("Mul", call.op("Sub", call.op("Mul", given, size), one), half)
        if mode == "nearest":
            position = call.op("Round", position)
        if padding == "border":
            position = call.op("Minimum", call.op("Maximum", position, call.const(0)), last)
        elif padding == "reflection":
            low, span = (call.const(0), last) if aligned else (call.const(-0.5), size)
            span = call.op("Maximum", span, call.const(1e-6))
            phase = call.op("FloorMod", call.op("Sub", position, low), call.op("AddV2", span, span))
            position = call.op("AddV2", call.op("Sub", span, call.op("Abs", call.op("Sub", phase, span))), low)
        positions.append((position, last))
    flat = call.op("Reshape", image, _joined_axes(call, shape, axes))
    total: TensorHandle | None = None
    for corner in itertools.product((0,) if mode == "nearest" else (0, 1), repeat=axes):
        weight: TensorHandle | None = None
        index: TensorHandle | None = None
        for place, ((position, last), upper) in enumerate(zip(positions, corner, strict=True)):
            floor = call.op("Floor", position)
            whole = call.op("AddV2", floor, one) if upper else floor
            factor: TensorHandle | None = None
            if mode != "nearest":
                share = call.op("Sub", position, floor)
                factor = share if upper else call.op("Sub", one, share)
            inside = call.op("Minimum", call.op("Maximum", whole, call.const(0)), last)
            if padding == "zeros":
                counted = call.cast(call.op("Equal", inside, whole), own)
                factor = counted if factor is None else call.op("Mul", factor, counted)
            number = call.op("Cast", inside, DstT="int32")
            size = call.op("GatherV2", shape, call.const(1 + place, "int32"), 0)
            index = number if index is None else call.op("AddV2", call.op("Mul", index, size), number)
            if factor is not None:
                weight = factor if weight is None else call.op("Mul", weight, factor)
        found = call.op("GatherV2", flat, index, 1, batch_dims=1)
        if weight is not None:
            found = call.op("Mul", found, call.op("ExpandDims", weight, -1))
        total = found if total is None else call.op("AddV2", total, found)
    assert total is not None
    return Value(total, rank, channels_last=True)


def _joined_axes(call: OpCall, shape: TensorHandle, axes: int) -> TensorHandle:
    """Returns the shape [batch, product of the sizes, channels]."""
    ends = [_number(call, shape, place, "int32") for place in (0, axes + 1)]
    return call.op("Pack", [ends[0], call.const(-1, "int32"), ends[1]])


@converts("AffineGrid", nodes="BatchMatMulV2")
def _affine_grid(call: OpCall) -> Converted:
    theta, own = call.x(0), call.dtype()
    axes = (call.shape(1)[0] or 4) - 2
    sizes = call.x(1)
    lines = []
    for place in range(axes):
        count = _number(call, sizes, 2 + place, "int32")
        number = call.cast(call.op("Range", 0, count, 1), own)
        size = call.cast(count, own)
        if call.attr("align_corners"):
            step = call.op("DivNoNan", call.const(2), call.op("Sub", size, call.const(1)))
            line = call.op("Sub", call.op("Mul", number, step), call.const(1))
        else:
            step = call.op("RealDiv", call.const(1), size)
            double = call.op("AddV2", call.op("AddV2", number, number), call.const(1))
            line = call.op("Sub", call.op("Mul", double, step), call.const(1))
        lines.append(call.op("Reshape", line, [-1 if other == place else 1 for other in range(axes)]))
    images_shape = call.op("StridedSlice", call.cast(sizes, "int32"), [2], [2 + axes], [1])
    # The last axis comes first.
    parts = [call.op("BroadcastTo", line, images_shape) for line in reversed(lines)]
    base = call.op("Reshape", call.op("Pack", [*parts, call.op("OnesLike", parts[0])], axis=axes), [1, -1, axes + 1])
    grid = call.op("BatchMatMulV2", base, theta, adj_y=True)
    batch = call.op("StridedSlice", call.op("Shape", theta), [0], [1], [1])
    shape = call.op("ConcatV2", [batch, images_shape, call.model.int32(axes)], 0)
    return Value(call.op("Reshape", grid, shape), axes + 2)


@converts("Col2Im", nodes="Conv2DBackpropInput or Conv3DBackpropInputV2", refuses="sizes that other nodes compute")
def _columns_to_image(call: OpCall) -> Converted:
    sizes, block = call.known(1).tolist(), call.known(2).tolist()
    axes, taps = len(sizes), int(np.prod(call.known(2)))
    channels = call.known_shape()[1] // taps
    strides = list(call.attr("strides") or [1] * axes)
    dilations = list(call.attr("dilations") or [1] * axes)
    pads = call.attr("pads") or [0] * (2 * axes)
    padding = list(zip(pads[:axes], pads[axes:], strict=True))
    counts, rest = [], []
    for size, tap, stride, dilation, (before, after) in zip(sizes, block, strides, dilations, padding, strict=True):
        span = size + before + after - (tap - 1) * dilation - 1
        counts.append(span // stride + 1)
        rest.append(span % stride)
    x = call.op("Reshape", call.x(), call.model.int32(-1, channels * taps, *counts))
    kernel = np.tile(np.eye(taps).reshape(taps, 1, *block), (channels, *[1] * (axes + 1)))
    return images.transposed_convolution(
        call.model, Value(x, axes + 2), call.const(kernel), None, weight_shape=kernel.shape, strides=strides,
        padding=padding, dilations=dilations, output_padding=rest, groups=channels,
    )  # fmt: skip


@converts(
    "DFT", nodes="FFT or IFFT", refuses="inverse with onesided; an axis or length that other nodes compute; 16 bits"
)
def _fourier_transform(call: OpCall) -> Converted:
    rank, own = call.rank(), call.dtype()
    complex_type = {"float32": "complex64", "float64": "complex128"}.get(own)
    inverse, one_sided = bool(call.attr("inverse")), bool(call.attr("onesided"))
    if complex_type is None or (inverse and one_sided):
        raise UnsupportedOpError(f"of {own} with inverse={inverse:d} and onesided={one_sided:d}")
    axis = int(call.known(2)) if call.has(2) else int(call.attr("axis", -2))
    axis %= rank
    parts = call.model.ops("Unpack", call.x(), num=call.known_shape()[-1], axis=rank - 1)
    imaginary = parts[1] if len(parts) == 2 else call.op("ZerosLike", parts[0])
    x = moved_last(call, call.op("Complex", parts[0], imaginary, Tout=complex_type), axis, rank - 1)
    size = call.shape()[axis]
    if call.has(1):
        length = int(call.known(1))
        if size is None:
            raise UnsupportedOpError("with a length, along an axis of unknown size")
        padding = np.zeros((rank - 1, 2))
        padding[-1, 1] = max(0, length - size)
        x = _first_of_last(call, call.op("Pad", x, call.const(padding, "int32")), length, rank - 1)
        size = length
    y = call.op("IFFT" if inverse else "FFT", x)
    if one_sided:
        if size is None:
            raise UnsupportedOpError("with onesided, along an axis of unknown size")
        y = _first_of_last(call, y, size // 2 + 1, rank - 1)
    y = moved_last(call, y, axis, rank - 1)
    real, imaginary = (call.op(op_type, y, Tout=own) for op_type in ("Real", "Imag"))
    return Value(call.op("Pack", [real, imaginary], axis=rank - 1), rank)


def _first_of_last(call: OpCall, x: TensorHandle, count: int, rank: int) -> TensorHandle:
    ends: Sequence[int] = [*[-1] * (rank - 1), count]
    return call.op("Slice", x, call.model.int32(*[0] * rank), call.model.int32(*ends))
