"""Converts ONNX operations that normalise."""

from __future__ import annotations

import numpy as np

from gradrule._builder.handles import TensorHandle
from gradrule._models.model_graph import UnsupportedOpError, Value
from gradrule._models.onnx_calls import Converted, OpCall, converts

_HALVES = ("float16", "bfloat16")


def _wide(call: OpCall, x: TensorHandle) -> TensorHandle:
    """Returns a tensor in the type for statistics: float32 in place of 16 bits."""
    return call.cast(x, "float32") if Value(x, 0).dtype in _HALVES else x


@converts("BatchNormalization", nodes="BatchNormalization", refuses="training_mode=1")
def _batch_normalization(call: OpCall) -> Converted:
    if call.attr("training_mode", 0) or call.wants(1):
        raise UnsupportedOpError("in training mode; export the model for inference")
    call.attr("momentum")
    x = call.value(0)
    handle = call.model.channels_last(x)
    weights = [call.cast(call.x(index), x.dtype) for index in range(1, 5)]
    for index in (3, 4):
        if weight := call.tensor(index).weight:
            call.model.graph.non_trainable.add(weight)
    y = call.model.composite("BatchNormalization", handle, *weights, epsilon=float(call.attr("epsilon")))
    return Value(y, x.rank, channels_last=x.rank > 2)


@converts("InstanceNormalization", nodes="InstanceNormalization")
def _instance_normalization(call: OpCall) -> Converted:
    x = call.value(0)
    axes = [*range(1, x.rank - 1)]
    parts = [_wide(call, handle) for handle in (call.model.channels_last(x), call.x(1), call.x(2))]
    y = call.model.composite("InstanceNormalization", *parts, axes=axes, epsilon=float(call.attr("epsilon")))
    return Value(call.cast(y, x.dtype), x.rank, channels_last=x.rank > 2)


@converts("GroupNormalization", nodes="GroupNormalization", refuses="unknown sizes, but for the batch")
def _group_normalization(call: OpCall) -> Converted:
    call.attr("stash_type")
    groups, x = int(call.attr("num_groups")), call.value(0)
    batch, *sizes = call.shape()
    channels, *rest = (-1 if size is None else size for size in sizes)
    if -1 in (channels, *rest):
        raise UnsupportedOpError(f"of sizes {call.shape()}; those behind the batch must be known")
    weights = [_wide(call, call.x(index)) for index in (1, 2)]
    if call.since < 21:
        # Scale and bias belong to groups.
        places = call.const(np.arange(channels) // (channels // groups), "int32")
        weights = [call.op("GatherV2", weight, places, 0) for weight in weights]
    y = call.model.composite(
        "GroupNormalization",
        _wide(call, call.model.natural(x)),
        *weights,
        grouped=[-1 if batch is None else batch, groups, channels // groups, *rest],
        axes=[*range(2, x.rank + 1)],
        channels=[channels, *[1] * (x.rank - 2)],
        epsilon=float(call.attr("epsilon")),
    )
    return Value(call.cast(y, x.dtype), x.rank)


@converts("LayerNormalization", nodes="LayerNormalization")
def _layer_normalization(call: OpCall) -> Converted:
    call.attr("stash_type")
    rank, epsilon = call.rank(), float(call.attr("epsilon"))
    axes = [*range(call.axis(default=-1), rank)]
    x = _wide(call, call.x())
    scale = _wide(call, call.x(1))
    offset = _wide(call, call.x(2)) if call.has(2) else call.op("ZerosLike", scale)
    y = call.model.composite("LayerNormalization", x, scale, offset, axes=axes, epsilon=epsilon)
    results: list[Value | None] = [Value(call.cast(y, call.dtype()), rank), None, None]
    if call.wants(1) or call.wants(2):
        positions = call.model.int32(*axes)
        mean = call.op("Mean", x, positions, keep_dims=True)
        variance = call.op("Mean", call.op("Square", call.op("Sub", x, mean)), positions, keep_dims=True)
        shifted = call.op("AddV2", variance, call.const(epsilon, Value(x, 0).dtype))
        results[1:] = Value(mean, rank), Value(call.op("Rsqrt", shifted), rank)
    return results


@converts("RMSNormalization", nodes="RMSNormalization")
def _rms_normalization(call: OpCall) -> Converted:
    call.attr("stash_type")
    rank = call.rank()
    axes = [*range(call.axis(default=-1), rank)]
    parts = [_wide(call, call.x(index)) for index in (0, 1)]
    y = call.model.composite("RMSNormalization", *parts, axes=axes, epsilon=float(call.attr("epsilon")))
    return Value(call.cast(y, call.dtype()), rank)


@converts("LpNormalization", nodes="DivNoNan")
def _lp_normalization(call: OpCall) -> Converted:
    x, axis = call.x(), [call.axis(default=-1)]
    if call.attr("p") == 1:
        norm = call.op("Sum", call.op("Abs", x), axis, keep_dims=True)
    else:
        norm = call.op("Sqrt", call.op("Sum", call.op("Square", x), axis, keep_dims=True))
    return Value(call.op("DivNoNan", x, norm), call.rank())


@converts("LRN", nodes="LRN", refuses="an even size, tensors without two axes of sizes")
def _local_response_normalization(call: OpCall) -> Converted:
    size, x = int(call.attr("size")), call.value(0)
    if size % 2 == 0 or x.rank != 4 or x.dtype == "float64":
        raise UnsupportedOpError(f"with size {size} of {x.rank} axes of {x.dtype}; TensorFlow needs an odd size and 4")
    y = call.op(
        "LRN", call.model.channels_last(x), depth_radius=size // 2, bias=float(call.attr("bias")),
        alpha=float(call.attr("alpha")) / size, beta=float(call.attr("beta")),
    )  # fmt: skip
    return Value(y, 4, channels_last=True)


@converts("MeanVarianceNormalization", nodes="Mean, Square, Sqrt and RealDiv")
def _mean_variance_normalization(call: OpCall) -> Converted:
    axes, x = call.model.int32(*(axis % call.rank() for axis in call.attr("axes", [0, 2, 3]))), call.x()
    centred = call.op("Sub", x, call.op("Mean", x, axes, keep_dims=True))
    variance = call.op("Mean", call.op("Square", centred), axes, keep_dims=True)
    deviation = call.op("AddV2", call.op("Sqrt", variance), call.const(1e-9))
    return Value(call.op("RealDiv", centred, deviation), call.rank())
