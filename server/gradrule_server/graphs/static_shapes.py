"""Infers shapes of weights and biases from constants and placeholders."""

from __future__ import annotations

from collections.abc import Sequence

from gradrule_server.graphs.ir import PLACEHOLDERS, Body, Node, Ref
from gradrule_server.policy.op_tables import ops_with

_LINEAR = ops_with("@linear")
# Ops that compute the parameters of a normalisation.
_ELEMENTWISE = ops_with("batch_norm_param")


def output_channels(body: Body, linear: Node, weights: Ref) -> int | None:
    """Returns the number of output channels of a linear op; None if it is unknown."""
    shape = static_shape(body, weights)
    if shape is None or linear.op not in _LINEAR or (linear.op.startswith("Batch") and len(shape) != 2):
        return None
    if linear.op == "DepthwiseConv2dNative":
        return shape[-1] * shape[-2]
    transposed = linear.attrs.get("transpose_b") or linear.attrs.get("adj_y")
    return shape[-2 if transposed is not None and transposed.b else -1]


def static_shape(body: Body, ref: Ref, depth: int = 12) -> tuple[int, ...] | None:
    """Infers the shape of a tensor from constants and placeholders, through at most `depth` elementwise ops.

    Returns None if the shape is unknown.
    """
    node = body.nodes[ref[0]]
    if node.op == "Const":
        return tuple(dim.size for dim in node.attrs["value"].tensor.tensor_shape.dim)
    if node.op in PLACEHOLDERS:
        shape = node.attrs["shape"].shape
        sizes = tuple(dim.size for dim in shape.dim)
        return None if shape.unknown_rank or any(size < 0 for size in sizes) else sizes
    if node.op in _ELEMENTWISE and depth:
        shapes = [static_shape(body, operand, depth - 1) for operand in node.inputs]
        return None if any(shape is None for shape in shapes) else _broadcast([shape or () for shape in shapes])
    return None


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))
