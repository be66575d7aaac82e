"""Converts ONNX operations that create, reshape, join, slice, gather and scatter tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradrule._builder.handles import TensorHandle
from gradrule._models.model_graph import UnsupportedOpError, Value
from gradrule._models.onnx_calls import (
    Converted,
    OpCall,
    converts,
    known_tensor,
)
from gradrule._models.onnx_files import array_of
from gradrule._models.onnx_reductions import flat_shape

_GREATEST = np.iinfo(np.int64).max


@converts("Constant", nodes="Const", refuses="strings and sparse tensors")
def _constant(call: OpCall) -> Converted:
    if (message := call.attr("value")) is not None:
        return known_tensor(array_of(message), message.data_type)
    for name, dtype in (
        ("value_float", np.float32),
        ("value_floats", np.float32),
        ("value_int", np.int64),
        ("value_ints", np.int64),
    ):
        if (value := call.attr(name)) is not None:
            return np.asarray(value, dtype)
    raise UnsupportedOpError("of strings, or sparse")


@converts("ConstantOfShape", nodes="Fill")
def _constant_of_shape(call: OpCall) -> Converted:
    message = call.attr("value")
    fill = np.zeros((), np.float32) if message is None else array_of(message).reshape(())
    return Value(call.op("Fill", call.x(), call.const(fill, call.output_dtype())), call.output_rank())


@converts("Shape", nodes="Shape, or a constant", differentiable=False)
def _shape(call: OpCall) -> Converted:
    rank = call.rank()
    axes = range(rank)[slice(call.attr("start", 0), call.attr("end", rank))]
    sizes = [call.shape()[axis] for axis in axes]
    if all(size is not None for size in sizes):
        return np.array(sizes, np.int64)
    every = call.op("Shape", call.x(), out_type="int64")
    if len(axes) < rank:
        every = call.op("StridedSlice", every, [axes.start], [axes.stop], [1])
    return Value(every, 1)


@converts("Size", nodes="Size, or a constant", differentiable=False)
def _size(call: OpCall) -> Converted:
    sizes = call.tensor(0).shape
    if sizes is not None and all(size is not None for size in sizes):
        return np.array(np.prod([size for size in sizes if size is not None], dtype=np.int64))
    return Value(call.op("Size", call.x(), out_type="int64"), 0)


@converts("Reshape", nodes="Reshape")
def _reshape(call: OpCall) -> Converted:
    x, shape = call.x(), call.array(1)
    keeps_zero = call.attr("allowzero", 0)
    if shape is not None and (keeps_zero or not (shape == 0).any()):
        return Value(call.op("Reshape", x, call.const(shape, "int64")), len(shape))
    rank = len(shape) if shape is not None else call.output_rank()
    sizes = call.x(1)
    if not keeps_zero:
        # A size of 0 stands for that of the input.
        own = call.op("Shape", x, out_type="int64")
        if call.rank() > rank:
            own = call.op("StridedSlice", own, [0], [rank], [1])
        elif call.rank() < rank:
            own = call.op("ConcatV2", [own, call.const([0] * (rank - call.rank()), "int64")], 0)
        sizes = call.op("SelectV2", call.op("Equal", sizes, call.const(0, "int64")), own, sizes)
    return Value(call.op("Reshape", x, sizes), rank)


@converts("Flatten", nodes="Reshape")
def _flatten(call: OpCall) -> Converted:
    axis, rank, x = int(call.attr("axis")), call.rank(), call.x()
    axis = axis + rank if axis < 0 else axis
    if axis == rank:
        return Value(call.op("Reshape", x, [-1, 1]), 2)
    if all(size is not None for size in call.shape()[axis:]):
        columns = int(np.prod([size for size in call.shape()[axis:] if size is not None], dtype=np.int64))
        if columns:
            return Value(call.op("Reshape", x, call.model.int32(-1, columns)), 2)
    return Value(call.op("Reshape", x, flat_shape(call, x, axis)), 2)


@converts("Transpose", nodes="Transpose")
def _transpose(call: OpCall) -> Converted:
    order = call.attr("perm") or [*range(call.rank())][::-1]
    return Value(call.op("Transpose", call.x(), call.model.int32(*order)), call.rank())


@converts("Squeeze", nodes="Squeeze, or Reshape if axes are computed")
def _squeeze(call: OpCall) -> Converted:
    if call.has(1) and call.array(1) is None:
        kept = call.model.ops(
            "ListDiff", call.const([*range(call.rank())], "int64"), _computed_axes(call, call.rank())
        )[0]
        shape = call.op("GatherV2", call.op("Shape", call.x(), out_type="int64"), kept, 0)
        return call.op("Reshape", call.x(), shape)
    axes = call.axes(1)
    if axes is None:
        axes = [axis for axis, size in enumerate(call.known_shape()) if size == 1]
    if not axes:
        return call.value(0)
    return Value(call.op("Squeeze", call.x(), squeeze_dims=axes), call.rank() - len(axes))


@converts("Unsqueeze", nodes="ExpandDims, or Reshape if axes are computed")
def _unsqueeze(call: OpCall) -> Converted:
    if call.has(1) and call.array(1) is None:
        rank = call.output_rank()
        kept = call.model.ops("ListDiff", call.const([*range(rank)], "int64"), _computed_axes(call, rank))[0]
        sizes = call.op("Shape", call.x(), out_type="int64")
        ones = call.const([1] * rank, "int64")
        shape = call.op("TensorScatterUpdate", ones, call.op("ExpandDims", kept, 1), sizes)
        return Value(call.op("Reshape", call.x(), shape), rank)
    given = call.known(1).tolist() if call.has(1) else call.attr("axes")
    rank, x = call.rank() + len(given), call.x()
    for axis in sorted(int(axis) % rank for axis in given):
        x = call.op("ExpandDims", x, axis)
    return Value(x, rank)


def _computed_axes(call: OpCall, rank: int) -> TensorHandle:
    return call.op("FloorMod", call.x(1), call.const(rank, "int64"))


@converts("Expand", nodes="BroadcastTo")
def _expand(call: OpCall) -> Converted:
    x = call.x()
    sizes = call.op("BroadcastArgs", call.op("Shape", x, out_type="int64"), call.x(1))
    shape = call.tensor(1).shape
    if shape is None or shape[0] is None:
        return call.op("BroadcastTo", x, sizes)
    return Value(call.op("BroadcastTo", x, sizes), max(call.rank(), shape[0]))


@converts("Tile", nodes="Tile")
def _tile(call: OpCall) -> Converted:
    return Value(call.op("Tile", call.x(), call.x(1)), call.rank())


@converts("Concat", nodes="ConcatV2")
def _concat(call: OpCall) -> Converted:
    model, axis = call.model, call.axis()
    values = [call.value(index) for index in range(len(call))]
    rank = values[0].rank
    if len(values) == 1:
        return values[0]
    if any(value.channels_last for value in values):
        tensors = [model.channels_last(value) for value in values]
        position = model.axis_of(Value(tensors[0], rank, channels_last=True), axis)
        return Value(model.op("ConcatV2", tensors, position), rank, channels_last=True)
    return Value(model.op("ConcatV2", [value.handle for value in values], axis), rank)


@converts("Split", nodes="SplitV, or Split of an axis of unknown size")
def _split(call: OpCall) -> Converted:
    model, x, axis = call.model, call.value(0), call.axis()
    count = len(call.node.output)
    if call.has(1) and call.array(1) is None:
        computed = model.ops("SplitV", x.handle, call.x(1), model.axis_of(x, axis), num_split=count)
        return [Value(part, x.rank, x.channels_last) for part in computed]
    sizes = call.known(1).tolist() if call.has(1) else call.attr("split")
    call.attr("num_outputs")
    size = call.shape()[axis]
    if sizes is None and size is not None:
        each = -(-size // count)
        sizes = [min(each, max(0, size - each * index)) for index in range(count)]
    position = model.axis_of(x, axis)
    if sizes is None:
        parts = model.ops("Split", position, x.handle, num_split=count)
    else:
        parts = model.ops("SplitV", x.handle, model.constant(sizes, "int64"), position, num_split=len(sizes))
    return [Value(part, x.rank, x.channels_last) for part in parts]


@converts("Slice", nodes="StridedSlice")
def _slice(call: OpCall) -> Converted:
    x, rank = call.value(0), call.rank()
    known = [call.array(index) for index in (1, 2, 3, 4)]
    if all(array is not None for index, array in enumerate(known, 1) if call.has(index)):
        return _known_slice(call, x, *(None if array is None else array.tolist() for array in known))
    wide = "int64"
    starts = call.cast(call.x(1), wide)
    count = call.op("Shape", starts)
    if call.has(3):
        axes = call.op("FloorMod", call.cast(call.x(3), wide), call.const(rank, wide))
    else:
        axes = call.cast(call.op("Range", 0, call.op("Reshape", count, []), 1), wide)
    places = call.op("ExpandDims", axes, 1)
    bounds = [
        call.op("TensorScatterUpdate", call.const([fill] * rank, wide), places, call.cast(given, wide))
        for fill, given in (
            (0, starts),
            (_GREATEST, call.x(2)),
            (1, call.x(4) if call.has(4) else call.op("OnesLike", starts)),
        )
    ]
    return Value(call.op("StridedSlice", call.model.natural(x), *bounds), rank)


def _known_slice(call: OpCall, x: Value, starts: Any, ends: Any, axes: Any, steps: Any) -> Value:
    model = call.model
    begins, limits, strides, whole = [0] * x.rank, [0] * x.rank, [1] * x.rank, (1 << x.rank) - 1
    for place, start in enumerate(starts):
        axis = model.axis_of(x, int(axes[place]) if axes is not None else place)
        begins[axis], limits[axis] = int(start), int(ends[place])
        strides[axis] = int(steps[place]) if steps is not None else 1
        whole &= ~(1 << axis)
    bounds = [model.constant(bound, "int64") for bound in (begins, limits, strides)]
    y = model.op("StridedSlice", x.handle, *bounds, begin_mask=whole, end_mask=whole)
    return Value(y, x.rank, x.channels_last)


def size_of(call: OpCall, x: TensorHandle, axis: int) -> TensorHandle:
    """Returns the size of an axis of a tensor, int64, scalar."""
    return call.op("GatherV2", call.op("Shape", x, out_type="int64"), axis, 0)


def _wrapped(call: OpCall, index: int, size: Any) -> TensorHandle:
    """Returns indices of which negative ones count from the end. `size`: Takes part in broadcasting; int64."""
    known = call.array(index)
    if known is not None and known.size and known.min() >= 0:
        return call.cast(call.x(index), "int64")
    indices = call.cast(call.x(index), "int64")
    return call.op(
        "SelectV2", call.op("Less", indices, call.const(0, "int64")), call.op("AddV2", indices, size), indices
    )


@converts("Gather", nodes="GatherV2")
def _gather(call: OpCall) -> Converted:
    x, axis = call.x(), call.axis()
    known = call.array(1)
    indices = (
        call.x(1)
        if known is not None and known.size and known.min() >= 0
        else _wrapped(call, 1, size_of(call, x, axis))
    )
    return Value(call.op("GatherV2", x, indices, axis), call.rank() + call.rank(1) - 1)


def _coordinates(call: OpCall, indices: TensorHandle, rank: int, axis: int) -> TensorHandle:
    """Returns the place, [..., rank], that each index along `axis` names."""
    shape = call.op("Shape", indices, out_type="int64")
    parts = []
    for other in range(rank):
        if other == axis:
            parts.append(indices)
            continue
        size = call.op("GatherV2", shape, other, 0)
        numbers = call.op("Range", call.const(0, "int64"), size, call.const(1, "int64"))
        aligned = call.op("Reshape", numbers, [-1 if place == other else 1 for place in range(rank)])
        parts.append(call.op("BroadcastTo", aligned, shape))
    return call.op("Pack", parts, axis=rank)


@converts("GatherElements", nodes="GatherNd")
def _gather_elements(call: OpCall) -> Converted:
    x, rank, axis = call.x(), call.rank(), call.axis()
    indices = _wrapped(call, 1, size_of(call, x, axis))
    return Value(call.op("GatherNd", x, _coordinates(call, indices, rank, axis)), rank)


def _scattered(call: OpCall, x: TensorHandle, places: TensorHandle, updates: TensorHandle) -> TensorHandle:
    reduction = call.attr("reduction", "none")
    op_types = {
        "none": "TensorScatterUpdate",
        "add": "TensorScatterAdd",
        "max": "TensorScatterMax",
        "min": "TensorScatterMin",
    }
    if reduction not in op_types:
        raise UnsupportedOpError(f"with reduction {reduction!r}: TensorFlow has add, max and min")
    return call.op(op_types[reduction], x, places, updates)


@converts("ScatterElements", "Scatter", nodes="TensorScatterUpdate, …Add, …Max or …Min", refuses="reduction=mul")
def _scatter_elements(call: OpCall) -> Converted:
    x, rank, axis = call.x(), call.rank(), call.axis()
    indices = _wrapped(call, 1, size_of(call, x, axis))
    return Value(_scattered(call, x, _coordinates(call, indices, rank, axis), call.x(2)), rank)


@converts("ScatterND", nodes="TensorScatterUpdate, …Add, …Max or …Min", refuses="reduction=mul")
def _scatter_nd(call: OpCall) -> Converted:
    x, width = call.x(), call.shape(1)[-1]
    if width is None:
        raise UnsupportedOpError("with indices of unknown length")
    sizes = call.op("StridedSlice", call.op("Shape", x, out_type="int64"), [0], [width], [1])
    return Value(_scattered(call, x, _wrapped(call, 1, sizes), call.x(2)), call.rank())


@converts("GatherND", nodes="GatherNd")
def _gather_nd(call: OpCall) -> Converted:
    x, width, batch = call.x(), call.shape(1)[-1], int(call.attr("batch_dims", 0))
    if width is None:
        raise UnsupportedOpError("with indices of unknown length")
    sizes = call.op("StridedSlice", call.op("Shape", x, out_type="int64"), [batch], [batch + width], [1])
    indices = _wrapped(call, 1, sizes)
    rank = call.rank(1)
    if batch:
        shape = call.op("Shape", indices, out_type="int64")
        ends = call.op("StridedSlice", shape, [0], [rank - 1], [1])
        single = call.op("ConcatV2", [ends, call.const([1], "int64")], 0)
        parts = []
        for axis in range(batch):
            size = call.op("GatherV2", shape, axis, 0)
            numbers = call.op("Range", call.const(0, "int64"), size, call.const(1, "int64"))
            aligned = call.op("Reshape", numbers, [-1 if place == axis else 1 for place in range(rank)])
            parts.append(call.op("BroadcastTo", aligned, single))
        indices = call.op("ConcatV2", [*parts, indices], rank - 1)
    return Value(call.op("GatherNd", x, indices), rank - 1 + call.rank() - batch - width)


@converts(
    "Pad",
    nodes="PadV2, MirrorPad, or GatherV2 with mode=edge or wrap",
    refuses="negative pads unless they are known and mode=constant",
)
def _pad(call: OpCall) -> Converted:
    mode, x, rank = call.attr("mode", "constant"), call.value(0), call.rank()
    pads = call.array(1)
    fill = call.op("Reshape", call.x(2), []) if call.has(2) else call.const(0)
    if pads is None or (call.has(3) and call.array(3) is None):
        return Value(_padded(call, call.x(), _computed_pads(call, rank), [*range(rank)], fill, mode), rank)
    axes = [int(axis) % rank for axis in call.known(3).tolist()] if call.has(3) else [*range(rank)]
    amounts = np.zeros((rank, 2), np.int64)
    for place, axis in enumerate(axes):
        amounts[call.model.axis_of(x, axis)] = pads[place], pads[place + len(axes)]
    y = x.handle
    if (amounts < 0).any():
        if mode != "constant":
            raise UnsupportedOpError(f"with mode {mode!r} and negative pads")
        cut = np.minimum(amounts, 0)
        ends = [int(end) if end else _GREATEST for end in cut[:, 1]]
        bounds = [call.const(bound, "int64") for bound in (-cut[:, 0], ends, [1] * rank)]
        y = call.op("StridedSlice", y, *bounds)
        amounts = np.maximum(amounts, 0)
    padded = [axis for axis in range(rank) if amounts[axis].any()]
    return Value(_padded(call, y, call.const(amounts, "int64"), padded, fill, mode), rank, x.channels_last)


def _computed_pads(call: OpCall, rank: int) -> TensorHandle:
    """Returns the pads that other nodes compute, [rank, 2]."""
    pairs = call.op("Transpose", call.op("Reshape", call.x(1), [2, -1]), [1, 0])
    if not call.has(3):
        return pairs
    axes = call.op("FloorMod", call.cast(call.x(3), "int64"), call.const(rank, "int64"))
    zeros = call.const(np.zeros((rank, 2)), "int64")
    return call.op("TensorScatterUpdate", zeros, call.op("ExpandDims", axes, 1), pairs)


def _padded(
    call: OpCall, x: TensorHandle, pads: TensorHandle, axes: Sequence[int], fill: TensorHandle, mode: str
) -> TensorHandle:
    """Pads a tensor by `pads`, [rank, 2]; modes that TensorFlow does not have gather along `axes`."""
    if mode == "constant":
        return call.op("PadV2", x, pads, fill)
    if mode == "reflect":
        return call.op("MirrorPad", x, pads, mode="REFLECT")
    zero, one = call.const(0, "int64"), call.const(1, "int64")
    for axis in axes:
        before, after = call.model.ops("Unpack", call.op("GatherV2", pads, axis, 0), num=2)
        size = size_of(call, x, axis)
        numbers = call.op("Range", call.op("Neg", before), call.op("AddV2", size, after), one)
        if mode == "wrap":
            places = call.op("FloorMod", numbers, size)
        else:
            places = call.op("Minimum", call.op("Maximum", numbers, zero), call.op("Sub", size, one))
        x = call.op("GatherV2", x, places, axis)
    return x


@converts("Range", nodes="Range")
def _range(call: OpCall) -> Converted:
    own = call.dtype()
    call.attr("stash_type")
    wide = {"int16": "int32", "float16": "float32", "bfloat16": "float32"}.get(own, own)
    ends = [call.cast(call.op("Reshape", call.x(index), []), wide) for index in range(3)]
    return Value(call.cast(call.op("Range", *ends), own), 1)


@converts("OneHot", nodes="OneHot")
def _one_hot(call: OpCall) -> Converted:
    rank = call.rank() + 1
    axis = call.axis(default=-1, rank=rank)
    depth = call.cast(call.op("Reshape", call.x(1), []), "int32")
    indices = call.cast(call.x(), "int64")
    negative = call.op("Less", indices, call.const(0, "int64"))
    indices = call.op("SelectV2", negative, call.op("AddV2", indices, call.cast(depth, "int64")), indices)
    off, on = call.model.ops("Unpack", call.x(2), num=2)
    return Value(call.op("OneHot", indices, depth, on, off, axis=axis if axis < rank - 1 else -1), rank)


def _row_minus_column(call: OpCall, x: TensorHandle, rank: int) -> TensorHandle:
    """Returns the differences of the column's and the row's number of each element of a matrix, int64."""
    rows, columns = (size_of(call, x, rank - 2), size_of(call, x, rank - 1))
    zero, one = call.const(0, "int64"), call.const(1, "int64")
    return call.op(
        "Sub", call.op("Range", zero, columns, one), call.op("ExpandDims", call.op("Range", zero, rows, one), 1)
    )


@converts("EyeLike", nodes="Cast of Equal", differentiable=False)
def _eye_like(call: OpCall) -> Converted:
    equal = call.op("Equal", _row_minus_column(call, call.x(), 2), call.const(call.attr("k"), "int64"))
    call.attr("dtype")
    return Value(call.op("Cast", equal, DstT=call.output_dtype()), 2)


@converts("Trilu", nodes="SelectV2")
def _triangle(call: OpCall) -> Converted:
    x, rank = call.x(), call.rank()
    k = call.op("Reshape", call.x(1), []) if call.has(1) else call.const(0, "int64")
    op_type = "GreaterEqual" if call.attr("upper") else "LessEqual"
    mask = call.op(op_type, _row_minus_column(call, x, rank), k)
    return Value(call.op("SelectV2", mask, x, call.const(0)), rank)


@converts("NonZero", nodes="Where", differentiable=False)
def _non_zero(call: OpCall) -> Converted:
    return Value(call.op("Transpose", call.op("Where", call.x()), [1, 0]), 2)


@converts("Compress", nodes="GatherV2")
def _compress(call: OpCall) -> Converted:
    x = call.x()
    places = call.op("Squeeze", call.op("Where", call.x(1)), squeeze_dims=[1])
    if call.attr("axis") is None:
        return Value(call.op("GatherV2", call.op("Reshape", x, [-1]), places, 0), 1)
    return Value(call.op("GatherV2", x, places, call.axis()), call.rank())


@converts("ReverseSequence", nodes="ReverseSequence")
def _reverse_sequence(call: OpCall) -> Converted:
    axes = {"seq_dim": int(call.attr("time_axis")), "batch_dim": int(call.attr("batch_axis"))}
    return Value(call.op("ReverseSequence", call.x(), call.x(1), **axes), call.rank())


def regrouped(
    call: OpCall, x: TensorHandle, split: Sequence[Sequence[Any]], order: Sequence[int], joined: Sequence[Sequence[int]]
) -> TensorHandle:
    """Splits axes, transposes, and joins axes.

    Args:
        call: The call.
        x: The tensor.
        split: For each of its axes, the sizes of its parts: integers, or None for the rest; no list: the axis stays.
        order: Order of the parts.
        joined: For each axis of the result, the parts, numbered before the transposition.
    """
    sizes: list[TensorHandle] = []
    shape = call.op("Shape", x)
    for axis, parts in enumerate(split):
        size = call.op("GatherV2", shape, axis, 0)
        known = int(np.prod([part for part in parts if part is not None]))
        for part in parts:
            if part is not None:
                sizes.append(call.const(part, "int32"))
            else:
                sizes.append(size if known == 1 else call.op("FloorDiv", size, call.const(known, "int32")))
    parts_first = call.op("Transpose", call.op("Reshape", x, call.op("Pack", sizes)), call.model.int32(*order))
    results = []
    for group in joined:
        product = sizes[group[0]]
        for part in group[1:]:
            product = call.op("Mul", product, sizes[part])
        results.append(product)
    return call.op("Reshape", parts_first, call.op("Pack", results))


@converts("DepthToSpace", nodes="Transpose and Reshape")
def _depth_to_space(call: OpCall) -> Converted:
    block = int(call.attr("blocksize"))
    if call.attr("mode", "DCR") == "DCR":
        split, order, channels, rows, columns = [block, block, None], [0, 3, 4, 1, 5, 2], [3], [4, 1], [5, 2]
    else:
        split, order, channels, rows, columns = [None, block, block], [0, 1, 4, 2, 5, 3], [1], [4, 2], [5, 3]
    y = regrouped(call, call.x(), [[None], split, [None], [None]], order, [[0], channels, rows, columns])
    return Value(y, 4)


@converts("SpaceToDepth", nodes="Transpose and Reshape")
def _space_to_depth(call: OpCall) -> Converted:
    block = int(call.attr("blocksize"))
    split: list[list[int | None]] = [[None], [None], [None, block], [None, block]]
    if call.attr("mode", "DCR") == "DCR":
        order, channels = [0, 3, 5, 1, 2, 4], [3, 5, 1]
    else:
        order, channels = [0, 1, 3, 5, 2, 4], [1, 3, 5]
    return Value(regrouped(call, call.x(), split, order, [[0], channels, [2], [4]]), 4)
