"""Converts ONNX operations that reduce, scan or sort axes."""

from __future__ import annotations

from collections.abc import Sequence

from gradrule._builder.handles import TensorHandle
from gradrule._models.model_graph import UnsupportedOpError, Value
from gradrule._models.onnx_calls import FLOATS, Convert, Converted, OnnxOp, OpCall, add_op, converts


def _reduced(call: OpCall, op_type: str, x: Value, axes: Sequence[int] | TensorHandle) -> Value:
    keep = bool(call.attr("keepdims", 1))
    if isinstance(axes, TensorHandle):
        rank = x.rank if keep else call.output_rank()
        return Value(call.op(op_type, call.model.natural(x), axes, keep_dims=keep), rank)
    rank = x.rank if keep else x.rank - len(axes)
    if x.channels_last and keep:
        positions = call.model.int32(*(call.model.axis_of(x, axis) for axis in axes))
        return Value(call.op(op_type, x.handle, positions, keep_dims=True), rank, channels_last=True)
    return Value(call.op(op_type, call.model.natural(x), call.model.int32(*axes), keep_dims=keep), rank)


def _axes(call: OpCall) -> list[int] | TensorHandle | None:
    """Returns the axes to reduce; None if the tensor stays as it is."""
    call.attr("keepdims")
    if call.has(1) and call.array(1) is None:
        count = call.shape(1)[0]
        if count is None:
            raise UnsupportedOpError("with axes of unknown number")
        if count:
            call.attr("noop_with_empty_axes")
            return call.x(1)
        axes: list[int] | None = []
    else:
        axes = call.axes(1)
    empty = call.attr("noop_with_empty_axes", 0)
    if axes:
        return axes
    return None if empty else [*range(call.rank())]


def _reduction(op_type: str, before: str = "", after: str = "") -> Convert:
    """Returns the conversion of a reduction; `before` and `after` are applied to each element."""

    def convert(call: OpCall) -> Converted:
        x = call.value(0)
        own = x.dtype
        is_logical = own == "bool"
        if after and own not in FLOATS:
            x = call.model.elementwise("Cast", x, DstT="float64")
        elif is_logical:
            x = call.model.elementwise("Cast", x, DstT="uint8")
        if before:
            x = call.model.elementwise(before, x)
        axes = _axes(call)
        y = x if axes is None else _reduced(call, op_type, x, axes)
        if after:
            y = call.model.elementwise(after, y)
        return y if y.dtype == own else call.model.elementwise("Cast", y, DstT=own)

    return convert


for _name, (_row, _nodes) in {
    "ReduceSum": (_reduction("Sum"), "Sum"),
    "ReduceMean": (_reduction("Mean"), "Mean"),
    "ReduceProd": (_reduction("Prod"), "Prod"),
    "ReduceMax": (_reduction("Max"), "Max"),
    "ReduceMin": (_reduction("Min"), "Min"),
    "ReduceL1": (_reduction("Sum", before="Abs"), "Abs and Sum"),
    "ReduceL2": (_reduction("Sum", before="Square", after="Sqrt"), "Square, Sum and Sqrt"),
    "ReduceSumSquare": (_reduction("Sum", before="Square"), "Square and Sum"),
    "ReduceLogSum": (_reduction("Sum", after="Log"), "Sum and Log"),
}.items():
    add_op(_name, OnnxOp(_row, _nodes, refuses=""))


@converts("ReduceLogSumExp", nodes="Max, Exp, Sum and Log")
def _log_sum_exp(call: OpCall) -> Converted:
    model, x = call.model, call.x()
    own = call.dtype()
    if own not in FLOATS:
        x = call.op("Cast", x, DstT="float64")
    axes = _axes(call)
    if axes is None:
        return Value(call.cast(x, own), call.rank())
    positions = axes if isinstance(axes, TensorHandle) else model.int32(*axes)
    top = call.op("Max", x, positions, keep_dims=True)
    # The maximum of no or infinite elements would give inf - inf.
    top = call.op("SelectV2", call.op("IsFinite", top), top, call.op("ZerosLike", top))
    top = call.op("StopGradient", top)
    total = call.op("Sum", call.op("Exp", call.op("Sub", x, top)), positions, keep_dims=True)
    y = call.op("AddV2", call.op("Log", total), top)
    if not call.attr("keepdims", 1):
        shape = call.op("Shape", call.op("Max", x, positions))
        return Value(call.cast(call.op("Reshape", y, shape), own), call.output_rank())
    return Value(call.cast(y, own), call.rank())


def _arg_extremum(op_type: str) -> Convert:
    def convert(call: OpCall) -> Value:
        model, x, axis = call.model, call.x(), call.axis()
        if call.attr("select_last_index", 0):
            size = call.op("GatherV2", call.op("Shape", x, out_type="int64"), axis, 0)
            found = call.op(op_type, call.op("ReverseV2", x, [axis]), axis, output_type="int64")
            y = call.op("Sub", call.op("Sub", size, model.constant(1, "int64")), found)
        else:
            y = call.op(op_type, x, axis, output_type="int64")
        if not call.attr("keepdims", 1):
            return Value(y, call.rank() - 1)
        return Value(call.op("ExpandDims", y, axis), call.rank())

    return convert


add_op("ArgMax", OnnxOp(_arg_extremum("ArgMax"), "ArgMax", differentiable=False))
add_op("ArgMin", OnnxOp(_arg_extremum("ArgMin"), "ArgMin", differentiable=False))


def _cumulative(op_type: str) -> Convert:
    def convert(call: OpCall) -> Value:
        axis = call.op("Reshape", call.x(1), call.model.int32())
        attrs = {"exclusive": bool(call.attr("exclusive")), "reverse": bool(call.attr("reverse"))}
        return Value(call.op(op_type, call.x(), axis, **attrs), call.rank())

    return convert


add_op("CumSum", OnnxOp(_cumulative("Cumsum"), "Cumsum"))
add_op("CumProd", OnnxOp(_cumulative("Cumprod"), "Cumprod"))


def moved_last(call: OpCall, x: TensorHandle, axis: int, rank: int) -> TensorHandle:
    """Swaps an axis with the last one; twice gives the tensor itself."""
    if axis == rank - 1:
        return x
    order = [*range(rank)]
    order[axis], order[-1] = order[-1], order[axis]
    return call.op("Transpose", x, call.model.int32(*order))


def _along_last(op_type: str) -> Convert:
    """Returns the conversion of an operation that TensorFlow computes along the last axis."""

    def convert(call: OpCall) -> Value:
        x, rank = call.value(0), call.rank()
        axis = call.axis(default=-1 if call.since >= 13 else 1)
        if call.since < 13 and axis != rank - 1:
            # Before opset 13, all axes from `axis` on count as one.
            handle = call.model.natural(x)
            flat = call.op("Reshape", handle, flat_shape(call, handle, axis))
            return Value(call.op("Reshape", call.op(op_type, flat), call.op("Shape", handle)), rank)
        if x.channels_last and axis == 1:
            return Value(call.op(op_type, x.handle), rank, channels_last=True)
        moved = moved_last(call, call.model.natural(x), axis, rank)
        return Value(moved_last(call, call.op(op_type, moved), axis, rank), rank)

    return convert


def flat_shape(call: OpCall, x: TensorHandle, axis: int) -> TensorHandle:
    """Returns the shape of a matrix: the product of the sizes before `axis`, and the rest."""
    if axis == 0:
        return call.model.int32(1, -1)
    sizes = call.op("Shape", x)
    rows = call.op("Prod", call.op("StridedSlice", sizes, [0], [axis], [1]), [0], keep_dims=True)
    rest = call.op("Prod", call.op("StridedSlice", sizes, [axis], [0], [1], end_mask=1), [0], keep_dims=True)
    return call.op("ConcatV2", [rows, rest], 0)


add_op("Softmax", OnnxOp(_along_last("Softmax"), "Softmax"))
add_op("LogSoftmax", OnnxOp(_along_last("LogSoftmax"), "LogSoftmax"))


@converts("Hardmax", nodes="ArgMax and OneHot", differentiable=False)
def _hardmax(call: OpCall) -> Value:
    x, rank = call.x(), call.rank()
    axis = call.axis(default=-1 if call.since >= 13 else 1)
    shape = call.op("Shape", x)
    if call.since < 13:
        x = call.op("Reshape", x, flat_shape(call, x, axis))
        axis, count = 1, 2
    else:
        count = rank
    size = call.op("GatherV2", call.op("Shape", x), axis, 0)
    top = call.op("ArgMax", x, axis, output_type="int64")
    y = call.op("OneHot", top, size, call.const(1), call.const(0), axis=axis if axis < count - 1 else -1)
    return Value(call.op("Reshape", y, shape), rank)


@converts("TopK", nodes="TopKV2")
def _top_k(call: OpCall) -> Converted:
    model, rank, axis = call.model, call.rank(), call.axis(default=-1)
    x = moved_last(call, call.x(), axis, rank)
    k = call.op("Cast", call.op("Reshape", call.x(1), model.int32()), DstT="int32")
    largest = call.attr("largest", 1)
    # Sorted values are a valid answer where any order is.
    call.attr("sorted")
    if not largest:
        if call.dtype() not in (*FLOATS, "int8", "int16", "int32", "int64"):
            raise UnsupportedOpError(f"with largest=0 of {call.dtype()}")
        # -x - 1 orders all integers, while -x of the smallest one is itself.
        ranked = call.op("Neg", x) if call.dtype() in FLOATS else call.op("Invert", x)
    else:
        ranked = x
    values, indices = model.ops("TopKV2", ranked, k, sorted=True)
    if not largest:
        values = call.op("GatherV2", x, indices, rank - 1, batch_dims=rank - 1)
    indices = call.op("Cast", indices, DstT="int64")
    return [Value(moved_last(call, item, axis, rank), rank) for item in (values, indices)]
