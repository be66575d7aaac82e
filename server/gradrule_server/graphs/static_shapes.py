"""Infers shapes of weights and biases from constants and placeholders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.graphs.ir import PLACEHOLDERS, Body, Node, Ref
from gradrule_server.policy.op_tables import ops_with

_MAX_DEPTH = 12
_INTEGERS = {Dt.DT_INT32: np.int32, Dt.DT_INT64: np.int64}
# Transposed convolutions, whose weights are [..., outputs, inputs].
TRANSPOSED = frozenset({"Conv2DBackpropInput", "Conv3DBackpropInputV2"})
_LINEAR = ops_with("@linear") | TRANSPOSED
# Ops that compute the parameters of a normalisation.
_ELEMENTWISE = ops_with("batch_norm_param")


def output_channels(body: Body, linear: Node, operand: int) -> int | None:
    """Returns the number of output channels of a linear op whose weights are input number `operand`; None: unknown."""
    shape = static_shape(body, linear.inputs[operand])
    if shape is None or linear.op not in _LINEAR or len(shape) < 2:
        return None
    if linear.op.startswith("Batch") and len(shape) != 2:
        return None
    if linear.op == "DepthwiseConv2dNative":
        return shape[-1] * shape[-2]
    if linear.op in TRANSPOSED:
        return shape[-2]
    names = ("transpose_a", "adj_x") if operand == 0 else ("transpose_b", "adj_y")
    is_transposed = any(linear.attrs[name].b for name in names if name in linear.attrs)
    # A product sums over the last axis of the first operand and the last but one of the second.
    return shape[-1 if is_transposed == (operand == 0) else -2]


def is_per_axis(shape: Sequence[int]) -> bool:
    """Returns whether a tensor of this shape has one number, or numbers along one axis only."""
    return sum(size != 1 for size in shape) <= 1


def static_shape(body: Body, ref: Ref) -> tuple[int, ...] | None:
    """Infers the shape of a tensor from constants and placeholders, through few elementwise ops and reshapes.

    Returns None if the shape is unknown.
    """
    return _shape(body, ref, _MAX_DEPTH, {})


def _shape(body: Body, ref: Ref, depth: int, known: dict[Ref, tuple[int, ...] | None]) -> tuple[int, ...] | None:
    if ref not in known:
        known[ref] = _shape_of_op(body, ref, depth, known)
    return known[ref]


def _shape_of_op(body: Body, ref: Ref, depth: int, known: dict[Ref, tuple[int, ...] | None]) -> tuple[int, ...] | None:
    node = body.nodes[ref[0]]
    if node.op == "Const":
        return tuple(dim.size for dim in node.attrs["value"].tensor.tensor_shape.dim)
    if node.op in PLACEHOLDERS:
        shape = node.attrs["shape"].shape
        sizes = tuple(dim.size for dim in shape.dim)
        return None if shape.unknown_rank or any(size < 0 for size in sizes) else sizes
    if node.op in _ELEMENTWISE and depth and node.inputs:
        shapes = [_shape(body, operand, depth - 1, known) for operand in node.inputs]
        return None if any(shape is None for shape in shapes) else _broadcast([shape or () for shape in shapes])
    if node.op == "Reshape" and depth and len(node.inputs) == 2:
        before, wanted = _shape(body, node.inputs[0], depth - 1, known), _int_values(body, node.inputs[1])
        if before is not None and wanted is not None and wanted.count(-1) <= 1:
            rest = math.prod(size for size in wanted if size != -1)
            return tuple(math.prod(before) // max(rest, 1) if size == -1 else size for size in wanted)
    if node.op == "ExpandDims" and depth:
        before, axes = _shape(body, node.inputs[0], depth - 1, known), _int_values(body, node.inputs[1])
        if before is not None and axes is not None and len(axes) == 1 and -len(before) - 1 <= axes[0] <= len(before):
            axis = axes[0] % (len(before) + 1)
            return (*before[:axis], 1, *before[axis:])
    return None


def _int_values(body: Body, ref: Ref) -> list[int] | None:
    """Returns the numbers of a constant of integers; None for other tensors."""
    node = body.nodes[ref[0]]
    if node.op != "Const":
        return None
    tensor = node.attrs["value"].tensor
    dtype = _INTEGERS.get(tensor.dtype)
    if dtype is None:
        return None
    listed = list(tensor.int_val if tensor.dtype == Dt.DT_INT32 else tensor.int64_val)
    return listed or np.frombuffer(tensor.tensor_content, dtype).tolist()


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))
