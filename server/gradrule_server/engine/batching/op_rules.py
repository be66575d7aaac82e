"""Computes the outputs of ops that keep examples apart, for inputs that are per example: one rule for each op type.

An op type without a rule may mix examples. A rule is correct only if row i of the output depends on row i of the
per-example inputs alone, for every number of examples, also for 1, and if the op fails for several examples only if it
fails for one of them. The rules of ops that move elements are in `shape_ops`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradrule_server.engine.batching.shape_ops import (
    broadcast_to,
    concat,
    ensure_shape,
    expand_dims,
    fill,
    gather,
    one_hot,
    pack,
    pad,
    reshape,
    reverse,
    select,
    split,
    squeeze,
    strided_slice,
    strided_slice_grad,
    tile,
    transpose,
    unpack,
    whole_slice,
)
from gradrule_server.engine.batching.values import (
    Attr,
    GradientAxes,
    Mixed,
    NotPerExample,
    PerExample,
    Rule,
    Shape,
    Sizes,
    Uniform,
    Unranked,
    Value,
    get_output_tail,
    read_axes,
    read_target_shape,
    require_equal_rows,
    require_per_example,
    require_same_rows,
    require_uniform,
)
from gradrule_server.policy.op_tables import ops_with


def elementwise(inputs: Sequence[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles ops that compute element by element, with broadcasting."""
    batched = [value for value in inputs if isinstance(value, PerExample)]
    if not batched:
        raise NotPerExample("computes with the number of examples")
    rank, rows = batched[0].rank, batched[0].rows
    tail: list[int | None] = [1] * (rank - 1)
    for value in inputs:
        if isinstance(value, PerExample):
            if value.rank != rank or value.rows != rows:
                raise NotPerExample("broadcasts examples against one another")
            sizes = value.tail
        elif isinstance(value, Uniform) and value.shape is not None:
            if len(value.shape) > rank or (len(value.shape) == rank and value.shape[0] != 1):
                raise NotPerExample("broadcasts along the batch")
            sizes = value.shape[1:] if len(value.shape) == rank else value.shape
        elif isinstance(value, Sizes):
            raise NotPerExample("computes with the number of examples")
        else:
            raise NotPerExample("takes a tensor whose shape is not known")
        for axis, size in enumerate(sizes, rank - 1 - len(sizes)):
            tail[axis] = _broadcast(tail[axis], size)
    return PerExample(rows, tuple(tail))


def _broadcast(a: int | None, b: int | None) -> int | None:
    known = [size for size in (a, b) if size not in (1, None)]
    return known[0] if known else None if None in (a, b) else 1


def reduction(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles reductions along axes other than the batch axis."""
    if isinstance(inputs[1], GradientAxes):
        if inputs[1].with_batch or require_per_example(inputs[0]).rows != inputs[1].rows:
            raise NotPerExample("sums over the batch")
        return Unranked()
    value = require_per_example(inputs[0])
    axes = read_axes(inputs[1], value.rank)
    if attr("keep_dims"):
        return PerExample(value.rows, tuple(1 if axis in axes else size for axis, size in enumerate(value.tail, 1)))
    return PerExample(value.rows, tuple(size for axis, size in enumerate(value.tail, 1) if axis not in axes))


def arg_reduction(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles ArgMax and ArgMin along an axis other than the batch axis."""
    value = require_per_example(inputs[0])
    axes = read_axes(inputs[1], value.rank)
    return PerExample(value.rows, tuple(size for axis, size in enumerate(value.tail, 1) if axis not in axes))


def cumulative(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles cumulative sums and products along an axis other than the batch axis."""
    value = require_per_example(inputs[0])
    read_axes(inputs[1], value.rank)
    return value


def last_axis(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles ops along the last axis, which must not be the batch axis."""
    return require_per_example(inputs[0], least_rank=2)


def matmul(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles the product of rows with one matrix."""
    a = require_per_example(inputs[0])
    require_uniform(inputs[1])
    if attr("transpose_a"):
        raise NotPerExample("sums over the batch")
    return PerExample(a.rows, get_output_tail(shapes[0]))


def batch_matmul(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles a product per example, or the product of rows with one matrix."""
    a, b = inputs
    batched = [value for value in inputs if isinstance(value, PerExample)]
    rank = max((value.rank for value in batched), default=0)
    if isinstance(a, PerExample) and isinstance(b, PerExample):
        if a.rank != b.rank or a.rank < 3 or a.rows != b.rows:
            raise NotPerExample("multiplies examples with one another")
        return PerExample(a.rows, get_output_tail(shapes[0]))
    other = b if isinstance(a, PerExample) else a
    require_uniform(other)
    shape = other.shape if isinstance(other, Uniform) else None
    if shape is None:
        raise NotPerExample("takes a tensor whose shape is not known")
    is_left_row = isinstance(a, PerExample) and rank == 2 and not attr("adj_x") and len(shape) == 2
    if not is_left_row and (rank < 3 or len(shape) > rank or (len(shape) == rank and shape[0] != 1)):
        raise NotPerExample("multiplies examples with one another")
    return PerExample(batched[0].rows, get_output_tail(shapes[0]))


def einsum(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles a product whose result has the batch as first label."""
    terms, _, result = attr("equation").decode().replace(" ", "").partition("->")
    labels = terms.split(",")
    if "." in terms or not result or result.count(result[0]) > 1:
        raise NotPerExample("has an equation that is not followed")
    batch, rows = result[0], 0
    for label, value in zip(labels, inputs, strict=True):
        if isinstance(value, PerExample):
            if label[0] != batch or label.count(batch) != 1 or rows not in (0, value.rows):
                raise NotPerExample("multiplies examples with one another")
            rows = value.rows
        elif not isinstance(value, Uniform) or batch in label:
            raise NotPerExample("multiplies examples with one another")
    return PerExample(rows, get_output_tail(shapes[0]))


def windows(*names: str, data: tuple[int, ...], uniform: tuple[int, ...] = ()) -> Rule:
    """Returns the rule of convolutions and poolings, whose windows cover one example. data: inputs per example."""

    def rule(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
        for name in names:
            sizes = attr(name)
            if sizes and sizes[0] != 1:
                raise NotPerExample(f"has windows over the batch ({name})")
        first = require_per_example(inputs[data[0]], least_rank=4)
        for index in data:
            require_same_rows(require_per_example(inputs[index]), first)
        require_uniform(*(inputs[index] for index in uniform))
        return PerExample(first.rows, get_output_tail(shapes[0]))

    return rule


def back_to(sizes: int, rule: Rule) -> Rule:
    """Returns `rule` for an op whose input `sizes` is the shape of its output."""

    def checked(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
        rows, tail = read_target_shape(inputs[sizes])
        result = rule(inputs, attr, shapes)
        if not isinstance(result, PerExample) or result.rows != rows:
            raise NotPerExample("gives another number of rows than it takes")
        return PerExample(rows, tail)

    return checked


def bias_add(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles the addition of one bias to all examples."""
    require_uniform(inputs[1])
    return require_per_example(inputs[0], least_rank=2)


def batch_norm(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> list[Value]:
    """Handles normalisation by given statistics; in training it uses those of the batch."""
    if attr("is_training"):
        raise NotPerExample("normalises by the statistics of the batch (is_training)")
    value = require_per_example(inputs[0])
    require_uniform(*inputs[1:])
    # The other outputs are the statistics that it was given, and room for a backward pass in training.
    return [value, *(Uniform(shape) for shape in shapes[1:])]


def batch_norm_grad(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> list[Value]:
    """Handles the gradient of the first input; those of scale and offset are sums over the batch."""
    if attr("is_training"):
        raise NotPerExample("normalises by the statistics of the batch (is_training)")
    dy, x, *rest = inputs
    value = require_equal_rows([dy, x])
    require_uniform(*rest[:3])
    return [value, *([Mixed("a gradient that is summed over the batch")] * (len(shapes) - 1))]


def cross_entropy(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> list[Value]:
    """Handles a loss and its gradient for each row of logits."""
    logits = require_per_example(inputs[0], least_rank=2)
    require_same_rows(require_per_example(inputs[1]), logits)
    # Logits and labels may broadcast against one another.
    return [PerExample(logits.rows, ()), PerExample(logits.rows, get_output_tail(shapes[1]))]


def images(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> Value:
    """Handles ops that treat each image independently."""
    value = require_per_example(inputs[0], least_rank=4)
    require_uniform(*inputs[1:])
    return PerExample(value.rows, get_output_tail(shapes[0]))


def top_k(inputs: list[Value], attr: Attr, shapes: list[Shape | None]) -> list[Value]:
    """Handles the largest elements along the last axis."""
    value = require_per_example(inputs[0], least_rank=2)
    require_uniform(inputs[1])
    return [PerExample(value.rows, get_output_tail(shape)) for shape in shapes]


_CONV = ("strides", "dilations")
_POOL = ("ksize", "strides")

ELEMENTWISE = ops_with("elementwise")

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(ops_with("reduction"), reduction),
    "ArgMax": arg_reduction,
    "ArgMin": arg_reduction,
    "AvgPool": windows(*_POOL, data=(0,)),
    "AvgPool3D": windows(*_POOL, data=(0,)),
    "AvgPool3DGrad": back_to(0, windows(*_POOL, data=(1,))),
    "AvgPoolGrad": back_to(0, windows(*_POOL, data=(1,))),
    "BatchMatMulV2": batch_matmul,
    "BatchMatMulV3": batch_matmul,
    "BiasAdd": bias_add,
    "BroadcastTo": broadcast_to,
    "ConcatV2": concat,
    "Conv2D": windows(*_CONV, data=(0,), uniform=(1,)),
    "Conv2DBackpropInput": back_to(0, windows(*_CONV, data=(2,), uniform=(1,))),
    "Conv3D": windows(*_CONV, data=(0,), uniform=(1,)),
    "Conv3DBackpropInputV2": back_to(0, windows(*_CONV, data=(2,), uniform=(1,))),
    "Cumprod": cumulative,
    "Cumsum": cumulative,
    "DepthwiseConv2dNative": windows(*_CONV, data=(0,), uniform=(1,)),
    "DepthwiseConv2dNativeBackpropInput": back_to(0, windows(*_CONV, data=(2,), uniform=(1,))),
    "Einsum": einsum,
    "DepthToSpace": images,
    "EnsureShape": ensure_shape,
    "ExpandDims": expand_dims,
    "Fill": fill,
    "FusedBatchNormGradV3": batch_norm_grad,
    "FusedBatchNormV3": batch_norm,
    "GatherV2": gather,
    "LogSoftmax": last_axis,
    "MatMul": matmul,
    "MaxPool": windows(*_POOL, data=(0,)),
    "MaxPool3D": windows(*_POOL, data=(0,)),
    "MaxPool3DGrad": windows(*_POOL, data=(0, 1, 2)),
    "MaxPoolGrad": windows(*_POOL, data=(0, 1, 2)),
    "MaxPoolGradGrad": windows(*_POOL, data=(0, 1, 2)),
    "MirrorPad": pad,
    "MirrorPadGrad": pad,
    "OneHot": one_hot,
    "Pack": pack,
    "Pad": pad,
    "PadV2": pad,
    "LRN": images,
    "ResizeBilinear": images,
    "ResizeNearestNeighbor": images,
    "Reshape": reshape,
    "ReverseV2": reverse,
    "SpaceToDepth": images,
    "TopKV2": top_k,
    "Select": select,
    "Slice": whole_slice,
    "Softmax": last_axis,
    "SoftmaxCrossEntropyWithLogits": cross_entropy,
    "SparseSoftmaxCrossEntropyWithLogits": cross_entropy,
    "Split": split(1, 0),
    "SplitV": split(0, 2),
    "Squeeze": squeeze,
    "StridedSlice": strided_slice,
    "StridedSliceGrad": strided_slice_grad,
    "Tile": tile,
    "Transpose": transpose,
    "Unpack": unpack,
}
"""Rules by op type."""
