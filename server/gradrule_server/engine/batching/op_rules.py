"""Lists the ops that keep examples apart, with the rule that computes their outputs when an input is per example.

An op type that is not listed may mix examples. A rule is correct only if row i of the output depends on row i of the
per-example inputs alone, for every number of examples, also for 1, and if the op fails for several examples only if it
fails for one of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradrule_server.engine.batching.layer_ops import (
    arg_reduction,
    back_to,
    batch_matmul,
    batch_norm,
    batch_norm_grad,
    bias_add,
    cross_entropy,
    cumulative,
    einsum,
    elementwise,
    images,
    last_axis,
    matmul,
    reduction,
    top_k,
    windows,
)
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
from gradrule_server.engine.batching.values import Rule
from gradrule_server.policy.op_traits import ops_with

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
