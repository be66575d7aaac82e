"""Adds nodes for functions of several ops: reductions, norm, size, softmax, sum_to and random numbers.

Ranks are unknown when the graph is built. So reductions of all axes flatten the tensor, and "sample" and "channel" axes
are computed when the graph runs. Random numbers depend only on the seed and the op, so that a call can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gradrule.common.dtypes import dtype_name
from gradrule.v1 import graph_pb2
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.rules.language.functions import (
    BINARY,
    COMPARISONS,
    FLOAT,
    REDUCTIONS,
    SMOOTH,
    UNARY,
    Domain,
)
from gradrule_server.rules.language.syntax_tree import Axes
from gradrule_server.rules.language.values import (
    GraphBuilder,
    TypeConflictError,
    Value,
    coerce,
    number,
    reduced_sources,
)
from gradrule_server.rules.signature import COMPLEX_TYPES, REAL_TYPES

if TYPE_CHECKING:
    from gradrule_server.rules.language.lowering import Lowering

_INT64 = Dt.DT_INT64
_INT32 = Dt.DT_INT32

# TensorFlow's error for a scalar shows the name of the node, so the name describes the error.
_AXES_NODES = {"sample": "axis_sample_wants_rank_1_or_more", "channel": "axis_channel_wants_rank_1_or_more"}


def reduce(context: Lowering, function: str, axes: Axes, value: Value) -> Value:
    """Adds a reduction. A reduction of all axes has rank 0; otherwise the reduced axes stay with size 1."""
    op, domain = REDUCTIONS[function]
    if function in ("any", "all"):
        if not value.is_bool:
            raise TypeConflictError(
                f"{function!r} needs truth values, such as x > 0, and this is {dtype_name(value.dtype)}"
            )
        return _reduced(context, op, axes, value, coerce(value, Dt.DT_BOOL, context.builder), Dt.DT_BOOL)
    value = context.numeric(value)
    tensor, dtype = context.own_type(value)
    context.require(dtype, domain, function)
    return _reduced(context, op, axes, value, tensor, dtype)


def norm(context: Lowering, axes: Axes, value: Value) -> Value:
    """Adds the Euclidean norm, as scale * sqrt(sum(square(v / scale))).

    The scale is the largest magnitude, or 1 where that is 0 or not finite. So the result overflows only if the norm
    itself does. The scale counts as a constant, because the norm does not depend on it.
    """
    value = context.numeric(value)
    tensor, dtype = context.own_type(value)
    context.require(dtype, SMOOTH, "norm")
    builder = context.builder
    if dtype in COMPLEX_TYPES:
        real = REAL_TYPES[dtype]
        tensor, dtype = builder.add("ComplexAbs", tensor, T=dtype, Tout=real), real
        magnitude = tensor
    else:
        magnitude = builder.add("Abs", tensor, T=dtype)
    largest = _reduced(context, "Max", axes, value, magnitude, dtype)
    zero, inf, one = (builder.constant(number, dtype) for number in (0.0, math.inf, 1.0))
    fixed = builder.add("StopGradient", largest.tensor or "", T=dtype)
    usable = builder.add(
        "LogicalAnd",
        builder.add("Greater", fixed, zero, T=dtype),
        builder.add("Less", fixed, inf, T=dtype),
    )
    scale = builder.add("SelectV2", usable, fixed, one, T=dtype)
    squares = builder.add("Square", builder.add("RealDiv", tensor, scale, T=dtype), T=dtype)
    total = _reduced(context, "Sum", axes, value, squares, dtype)
    root = builder.add("Mul", scale, builder.add("Sqrt", total.tensor or "", T=dtype), T=dtype)
    return Value(dtype, root, weak=value.weak, sources=largest.sources)


def size(context: Lowering, axes: Axes, value: Value) -> Value:
    """Adds the number of elements that a reduction along the axes combines, of rank 0."""
    builder = context.builder
    tensor, dtype = context.strong(value)
    if axes.kind == "all":
        return Value(_INT64, builder.add("Size", tensor, T=dtype, out_type=_INT64), weak=True)
    shape = builder.add("Shape", tensor, T=dtype, out_type=_INT64)
    # Reduced axes have size 1 here. This also refuses axes that do not exist or occur twice, such as 0 and -2.
    flags = builder.cast(tensor, dtype, Dt.DT_BOOL)
    reduced = _reduced(context, "Any", axes, value, flags, Dt.DT_BOOL).tensor or ""
    remaining = builder.add("Shape", reduced, T=Dt.DT_BOOL, out_type=_INT64)
    is_kept = builder.add("Equal", remaining, shape, T=_INT64, incompatible_shape_error=True)
    sizes = builder.add("SelectV2", is_kept, builder.constant(1, _INT64), shape, T=_INT64)
    product = builder.add("Prod", sizes, builder.constant(0, _INT32), T=_INT64, Tidx=_INT32, keep_dims=False)
    return Value(_INT64, product, weak=True)


def softmax(context: Lowering, axes: Axes, value: Value) -> Value:
    """Adds exp(v) divided by its sum along the axes."""
    return _softmax(context, axes, value, log=False)


def log_softmax(context: Lowering, axes: Axes, value: Value) -> Value:
    """Adds the logarithm of softmax, computed so that small values are not rounded to 0."""
    return _softmax(context, axes, value, log=True)


def erf(context: Lowering, value: Value) -> Value:
    """Adds the error function. TensorFlow's kernel gives NaN for infinities in float64."""
    value = context.numeric(value)
    if value.dtype == Dt.DT_DOUBLE and value.constant is None:
        # Beyond these bounds the result is -1 or 1 exactly, and its derivative 0.
        value = context.elementwise(BINARY["maximum"], [value, number(-30.0)], "erf")
        value = context.elementwise(BINARY["minimum"], [value, number(30.0)], "erf")
    return context.elementwise(UNARY["erf"], [value], "erf")


def digamma(context: Lowering, value: Value) -> Value:
    """Adds the digamma function. At 0, where TensorFlow's kernel gives NaN, it is -1/v, an infinity."""
    value = context.numeric(value)
    found = context.elementwise(UNARY["digamma"], [value], "digamma")
    pole = coerce(context.elementwise(BINARY["/"], [number(-1.0), value], "digamma"), found.dtype, context.builder)
    at_pole = context.elementwise(COMPARISONS["=="], [value, number(0.0)], "digamma")
    condition = coerce(at_pole, Dt.DT_BOOL, context.builder)
    tensor = context.builder.add("SelectV2", condition, pole, found.tensor or "", T=found.dtype)
    return Value(found.dtype, tensor, weak=found.weak, sources=found.sources)


def sum_to(context: Lowering, value: Value, like: Value) -> Value:
    """Adds the sum of `value` over the axes along which `like` would be broadcast to the shape of `value`."""
    builder = context.builder
    value = context.numeric(value)
    tensor, dtype = context.own_type(value)
    context.require(dtype, REDUCTIONS["sum"][1], "sum_to")
    like_tensor, like_dtype = context.strong(like)
    shape = builder.add("Shape", tensor, T=dtype, out_type=_INT32)
    wanted = builder.add("Shape", like_tensor, T=like_dtype, out_type=_INT32)
    axes = builder.add("BroadcastGradientArgs", wanted, shape, T=_INT32)
    total = builder.add("Sum", tensor, axes, T=dtype, Tidx=_INT32, keep_dims=False)
    # TensorFlow's error shows the name of the node, so the name describes the error.
    summed = builder.add("Reshape", total, wanted, name="sum_to_shape_of_like", T=dtype, Tshape=_INT32)
    return Value(dtype, summed, weak=value.weak, sources=like.sources)


def _softmax(context: Lowering, axes: Axes, value: Value, *, log: bool) -> Value:
    function = "log_softmax" if log else "softmax"
    value = context.numeric(value)
    tensor, dtype = context.own_type(value)
    context.require(dtype, Domain.FLOAT, function)
    value = Value(dtype, tensor, weak=value.weak, sources=value.sources)
    if axes == Axes("list", (-1,)):
        found = _softmax_along_last_axis(context.builder, "LogSoftmax" if log else "Softmax", tensor, dtype)
        return Value(dtype, found, weak=value.weak, sources=value.sources)
    # Subtracting the largest value does not change the result and keeps exp from overflowing.
    largest = _reduced(context, "Max", axes, value, tensor, dtype)
    shifted = context.elementwise(BINARY["-"], [value, largest], function)
    powers = context.elementwise(UNARY["exp"], [shifted], function)
    total = _reduced(context, "Sum", axes, powers, powers.tensor or "", dtype)
    if log:
        return context.elementwise(
            BINARY["-"], [shifted, context.elementwise(UNARY["log"], [total], function)], function
        )
    return context.elementwise(BINARY["/"], [powers, total], function)


def _softmax_along_last_axis(builder: GraphBuilder, op: str, tensor: str, dtype: int) -> str:
    """Adds TensorFlow's op. Its kernel for float32 on CPUs takes at most 5 axes, so it gets two."""
    if dtype == Dt.DT_DOUBLE:
        return builder.add(op, tensor, T=dtype)
    shape = builder.add("Shape", tensor, T=dtype, out_type=_INT64)
    one, all_others = builder.constant(1, _INT64), builder.constant(-1, _INT64)
    # An axis without elements would not say how many elements the other axes have.
    last = builder.add("Maximum", _dimension(builder, shape, -1), one, T=_INT64)
    rows = builder.add("Pack", all_others, last, T=_INT64, N=_int(2), axis=_int(0))
    matrix = builder.add("Reshape", tensor, rows, T=dtype, Tshape=_INT64)
    return builder.add("Reshape", builder.add(op, matrix, T=dtype), shape, T=dtype, Tshape=_INT64)


def _reduced(context: Lowering, op: str, axes: Axes, value: Value, tensor: str, dtype: int) -> Value:
    builder = context.builder
    types: dict[str, Any] = {} if dtype == Dt.DT_BOOL else {"T": dtype}
    if axes.kind == "all":
        # Flatten the tensor, so that the result has rank 0 for tensors of any rank.
        if value.sources:
            tensor = builder.add("Reshape", tensor, builder.constant([-1], _INT32), T=dtype, Tshape=_INT32)
            indices = builder.constant(0, _INT32)
        else:
            indices = builder.constant([], _INT32)
        return Value(dtype, builder.add(op, tensor, indices, Tidx=_INT32, keep_dims=False, **types), weak=value.weak)
    if axes.kind in _AXES_NODES:
        indices = _named_axes(builder, axes.kind, tensor, dtype)
    else:
        indices = builder.constant(list(axes.axes), _INT32)
    return Value(
        dtype,
        builder.add(op, tensor, indices, Tidx=_INT32, keep_dims=True, **types),
        weak=value.weak,
        sources=reduced_sources(value),
    )


def _named_axes(builder: GraphBuilder, kind: str, tensor: str, dtype: int) -> str:
    """Adds all axes but the first (`sample`) or the last (`channel`).

    A scalar is an error, because Range refuses to count from 1 to 0 or from 0 to -1.
    """
    rank = builder.add("Rank", tensor, T=dtype)
    zero, one = builder.constant(0, _INT32), builder.constant(1, _INT32)
    if kind == "sample":
        first, end = one, rank
    else:
        first, end = zero, builder.add("Sub", rank, one, T=_INT32)
    return builder.add("Range", first, end, one, name=_AXES_NODES[kind], Tidx=_INT32)


def _dimension(builder: GraphBuilder, shape: str, axis: int) -> str:
    """Adds one entry of a shape, counted from the end if negative; TensorFlow refuses an axis that does not exist."""
    begin = builder.constant([axis], _INT32)
    end = builder.constant([axis + 1], _INT32)
    no_mask, shrink = graph_pb2.AttrValue(i=0), graph_pb2.AttrValue(i=1)
    return builder.add(
        "StridedSlice",
        shape,
        begin,
        end,
        builder.constant([1], _INT32),
        T=_INT64,
        Index=_INT32,
        begin_mask=no_mask,
        end_mask=no_mask,
        ellipsis_mask=no_mask,
        new_axis_mask=no_mask,
        shrink_axis_mask=shrink,
    )


WITH_AXES: Mapping[str, Callable[[Lowering, Axes, Value], Value]] = {
    "norm": norm,
    "size": size,
    "softmax": softmax,
    "log_softmax": log_softmax,
}

EDGE_CASES: Mapping[str, Callable[[Lowering, Value], Value]] = {"erf": erf, "digamma": digamma}

SALT = "salt"

# TensorFlow's number of the Philox generator, which gives the same numbers on CPU and GPU.
_PHILOX = 1
# Odd, so that all multiples differ modulo 2**64; large, so that the numbers of different ops differ.
_STRIDE = 0x9E3779B97F4A7C15


def salt(builder: GraphBuilder) -> str:
    """Adds the placeholder for the number of the op."""
    return builder.placeholder(SALT, Dt.DT_INT64, scalar=True)


def draw(context: Lowering, op: str, like: Value, seed: Value, salted: str, draw_number: int) -> Value:
    """Adds random numbers of the shape and type of `like`.

    The seed is [seed, salt + draw_number * stride], modulo 2**64.

    The numbers are those of TensorFlow's `stateless_uniform` and `stateless_normal`. The older ops of these names give
    the same numbers, but XLA does not compile them.

    Args:
        context: The conversion.
        op: The op that draws the numbers.
        like: The value whose shape and type the numbers have.
        seed: The seed.
        salted: The placeholder of `salt`.
        draw_number: A number that differs for each draw of a rule.
    """
    builder = context.builder
    like = context.numeric(like)
    tensor, dtype = context.strong(like)
    context.require(dtype, FLOAT, "uniform" if "Uniform" in op else "normal")
    offset = (draw_number * _STRIDE + 2**63) % 2**64 - 2**63
    own = builder.add("AddV2", salted, builder.constant(offset, Dt.DT_INT64), T=Dt.DT_INT64) if offset else salted
    pair = builder.add("Pack", _seed_as_int64(builder, seed), own, T=Dt.DT_INT64, N=_int(2), axis=_int(0))
    key = builder.add("StatelessRandomGetKeyCounter", pair, Tseed=Dt.DT_INT64)
    shape = builder.add("Shape", tensor, T=dtype, out_type=Dt.DT_INT32)
    algorithm = builder.constant(_PHILOX, Dt.DT_INT32)
    drawn = builder.add(op, shape, key, f"{key}:1", algorithm, dtype=dtype, Tshape=Dt.DT_INT32)
    return Value(dtype, drawn, sources=like.sources)


def _seed_as_int64(builder: GraphBuilder, seed: Value) -> str:
    """Returns the seed as an int64 of rank 0. A param may be a tensor of one element."""
    if seed.constant is not None:
        return coerce(seed, Dt.DT_INT64, builder)
    given = builder.add("Cast", seed.tensor or "", SrcT=seed.dtype, DstT=Dt.DT_INT64, Truncate=False)
    return builder.add(
        "Reshape",
        given,
        builder.constant([], Dt.DT_INT32),
        name="seed_wants_one_number",
        T=Dt.DT_INT64,
        Tshape=Dt.DT_INT32,
    )


def _int(value: int) -> graph_pb2.AttrValue:
    return graph_pb2.AttrValue(i=value)
