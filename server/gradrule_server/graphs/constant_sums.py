"""Finds tensors whose elements have a constant sum, because they are the output of a softmax."""

from __future__ import annotations

from collections.abc import Collection

from gradrule_server.graphs.ir import Body, Node, Ref

# Ops of one data input that keep the sum of all elements, or divide it by a constant.
_KEEPS_SUM = frozenset(
    {"Cast", "EnsureShape", "ExpandDims", "Identity", "Mean", "Reshape", "Squeeze", "Sum", "Transpose"}
)


def softmax_before(body: Body, tensor: Ref, xs: Collection[Ref]) -> Node | None:
    """Returns the softmax whose elements the tensor has, possibly added up; None if there is none.

    Args:
        body: An expanded body.
        tensor: The tensor.
        xs: Tensors with respect to which the tensor is differentiated; behind one of these the sum is not constant.

    Overridden nodes are not passed: their gradients are those of their rules.
    """
    while tensor not in xs:
        node = body.nodes[tensor[0]]
        if node.mark is not None:
            return None
        if node.op == "Softmax":
            return node
        if node.op not in _KEEPS_SUM:
            return None
        tensor = node.inputs[0]
    return None
