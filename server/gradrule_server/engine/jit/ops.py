"""Which programs XLA may compile: those of ops that it computes as TensorFlow's kernels do, up to rounding."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_MOST_OPS = 1000

# Left out are: ops that fail for some values (Assert, CheckNumerics, GatherV2, InvertPermutation, integer division),
# since XLA does not fail; random ops, since XLA draws other numbers; sorting and ArgMax, whose results differ where
# values are equal; convolutions and pooling, which were slower with XLA; loops and branches, which XLA compiles for
# fixed sizes only; ops of strings, resources and sets of values whose size depends on values; SqrtGrad, RsqrtGrad and
# ReciprocalGrad, whose kernels give 0 where the upstream gradient is 0, whatever the operand; and ClipByValue, which
# differs where the lower bound is above the upper one, or a bound is NaN.
_ELEMENTWISE = """
    Abs Add AddN AddV2 Atan Atan2 BiasAdd BiasAddGrad Cast Ceil Cos Cosh DivNoNan Elu EluGrad Equal Erf Exp Expm1
    Floor Greater GreaterEqual IsFinite IsInf IsNan LeakyRelu LeakyReluGrad Less LessEqual Log Log1p LogicalAnd
    LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg NotEqual OnesLike Pow RealDiv Reciprocal Relu Relu6
    Relu6Grad ReluGrad Rint Round Rsqrt Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus
    SoftplusGrad Softsign SoftsignGrad Sqrt Square SquaredDifference Sub Tan Tanh TanhGrad Xdivy Xlogy ZerosLike
"""
_OF_SEVERAL_ELEMENTS = """
    All Any BatchMatMul BatchMatMulV2 Einsum L2Loss LogSoftmax MatMul Max Mean Min Prod Softmax
    SoftmaxCrossEntropyWithLogits Sum
"""
_MOVES_AND_SHAPES = """
    BroadcastArgs BroadcastGradientArgs BroadcastTo ConcatOffset ConcatV2 Const Diag DiagPart ExpandDims Fill
    Identity IdentityN MirrorPad NoOp Pack Pad PadV2 Placeholder PreventGradient Range Rank Reshape ReverseV2 Shape
    ShapeN Size Slice Snapshot Split SplitV Squeeze StopGradient StridedSlice StridedSliceGrad Tile Transpose Unpack
"""
_KNOWN = frozenset(f"{_ELEMENTWISE} {_OF_SEVERAL_ELEMENTS} {_MOVES_AND_SHAPES}".split())
# Of integers: DivNoNan and Pow differ or fail for some values. Shapes are computed by other ops.
_FLOATS_ONLY = frozenset({"DivNoNan", "Pow", "RealDiv", "Reciprocal"})
# Of half precision XLA keeps intermediate results in float32.
_DTYPES = frozenset({tf.bool, tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.float32, tf.float64})


def why_not(function: Any) -> str:
    """Returns why XLA may not compile a function; empty: it may."""
    ops = function.graph.get_operations()
    if len(ops) > _MOST_OPS:
        return f"it has {len(ops)} ops; at most {_MOST_OPS} are compiled"
    for op in ops:
        if op.type not in _KNOWN:
            return f"its op {op.name!r} ({op.type}) is none of those that are compiled"
        dtype = next((tensor.dtype for tensor in (*op.inputs, *op.outputs) if tensor.dtype not in _DTYPES), None)
        if dtype is not None:
            return f"its op {op.name!r} ({op.type}) computes with {dtype.name}"
        # Where a float has no integer of the type, or a divisor is 0, kernels and XLA differ.
        if op.type == "Cast" and op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_integer:
            return f"its op {op.name!r} casts floats to integers"
        if op.type in _FLOATS_ONLY and not op.outputs[0].dtype.is_floating:
            return f"its op {op.name!r} ({op.type}) computes with integers"
    return ""
