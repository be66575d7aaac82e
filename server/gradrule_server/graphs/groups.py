"""Groups of op types: words that selectors and patterns take in the place of one op type."""

from __future__ import annotations

from collections.abc import Mapping

STEP = "@step"
BIAS = "@bias"
SUM = "@sum"

_CONVOLUTION = frozenset({"Conv2D", "Conv3D", "DepthwiseConv2dNative"})
_DENSE = frozenset({"MatMul", "BatchMatMul", "BatchMatMulV2"})

GROUPS: Mapping[str, frozenset[str]] = {
    "@activation": frozenset(
        {"Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Softmax"}
    ),
    "@convolution": _CONVOLUTION,
    "@dense": _DENSE,
    "@linear": _CONVOLUTION | _DENSE,
    "@pool": frozenset({"AvgPool", "AvgPool3D", "Mean"}),
    # An add counts only where all sides depend on the xs,
    SUM: frozenset({"Add", "AddV2", "AddN"}),
    # and here only where one side does not.
    BIAS: frozenset({"BiasAdd", "BiasAddV1", "Add", "AddV2"}),
    # The first op of a pattern: the comparison, whose truth values the Cast after it makes numbers of.
    STEP: frozenset({"Greater", "GreaterEqual"}),
}

PLAIN_ADDS = frozenset({"Add", "AddV2"})


def op_types_of(word: str) -> frozenset[str]:
    """The op types that a word of a selector means: those of a group, or the one it names."""
    return GROUPS.get(word) or frozenset({word})
