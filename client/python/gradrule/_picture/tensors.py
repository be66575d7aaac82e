"""Finds out what a graph and its explanation tell about tensors: element types and shapes, and which are constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gradrule._builder.names import split
from gradrule._picture.reading import Structure
from gradrule.common import op_definitions, op_inference
from gradrule.common.dtypes import dtype_name
from gradrule.common.tensor_codec import shape_tuple
from gradrule.v1.graph_pb2 import Node

if TYPE_CHECKING:
    from gradrule._builder.specs import TensorSpec
    from gradrule._results.call_results import Explanation

# Ops whose outputs are the same in every call of a program.
_CONSTANT_OPS = frozenset({"Const", "VarHandleOp", "Variable", "VariableV2", "ReadVariableOp"})

Shape = tuple[int | None, ...] | None


def tensor_text(dtype: str, shape: Shape) -> str:
    """Returns element type and shape as `float32 [?, 3]`; only the element type if the rank is unknown."""
    return dtype if shape is None else f"{dtype} [{', '.join('?' if size is None else str(size) for size in shape)}]"


def tensor_texts(structure: Structure, explanation: Explanation) -> dict[tuple[int, int], str]:
    """Returns element type, and shape if known, of tensors by leaf and output index.

    Shapes are those that the server reported and those in attributes. No shape is inferred here.
    """
    found: dict[tuple[int, int], str] = {}
    for index, leaf in enumerate(structure.leaves):
        dtypes = _dtypes(leaf.node)
        shapes = _shapes(leaf.node)
        for output, dtype in enumerate(dtypes):
            if dtype:
                found[index, output] = tensor_text(dtype, shapes[output] if output < len(shapes) else None)
    for spec in _reported(explanation):
        name, output = split(spec.name)
        place = structure.top.get(name)
        if place is not None and (spec.shape is not None or (place, output) not in found):
            found[place, output] = tensor_text(spec.dtype, spec.shape)
    return found


def _reported(explanation: Explanation) -> list[TensorSpec]:
    groups = (explanation.inputs, explanation.outputs, explanation.ys, explanation.xs)
    return [spec for group in groups for spec in group.values()]


def _dtypes(node: Node) -> list[str]:
    """Returns the element types of a node's outputs; empty where they cannot be inferred."""
    op = op_definitions.find(node.op)
    if op is None:
        return []
    given = {name: value for name, value in node.attr.items() if not name.startswith("_")}
    count = sum(not text.startswith("^") for text in node.input)
    try:
        outputs = op_inference.complete(op, given, [0] * count).outputs
    except op_inference.InferenceError:
        return []
    return [dtype_name(number) if number else "" for number in outputs]


def _shapes(node: Node) -> Sequence[Shape]:
    if "_output_shapes" in node.attr:
        return [shape_tuple(shape) for shape in node.attr["_output_shapes"].list.shape]
    if node.op == "Const":
        return [shape_tuple(node.attr["value"].tensor.tensor_shape)]
    if node.op in ("Placeholder", "PlaceholderWithDefault") and "shape" in node.attr:
        return [shape_tuple(node.attr["shape"].shape)]
    return []


def constant_leaves(structure: Structure) -> bytearray:
    """Returns a flag per leaf: whether it is computed from constants and variables only."""
    inputs: list[list[int]] = [[] for _ in structure.leaves]
    users: list[list[int]] = [[] for _ in structure.leaves]
    for wire in structure.wires:
        inputs[wire.target].append(wire.source)
        users[wire.source].append(wire.target)
    constant = bytearray(len(inputs))
    # Inputs that are not known to be constant; a leaf becomes constant with the last of them.
    missing = [len(sources) for sources in inputs]
    pending = [index for index, leaf in enumerate(structure.leaves) if leaf.node.op in _CONSTANT_OPS]
    while pending:
        index = pending.pop()
        if constant[index]:
            continue
        constant[index] = 1
        for user in users[index]:
            missing[user] -= 1
            # Random ops have constant inputs; a call is as interesting as what it calls.
            leaf = structure.leaves[user]
            if not missing[user] and not leaf.calls and not _is_random(leaf.node.op):
                pending.append(user)
    return constant


def _is_random(op: str) -> bool:
    return "Random" in op or op in ("Multinomial", "TruncatedNormal")


def input_lines(
    structure: Structure, leaf: int, texts: Mapping[tuple[int, int], str], names: Mapping[int, str], limit: int
) -> list[str]:
    """Returns a line for each data input of a node at the top level: its tensor, element type and shape."""
    found = structure.leaves[leaf]
    if found.function:
        return []
    lines = []
    inputs = [text for text in found.node.input if not text.startswith("^")]
    for number, text in enumerate(inputs[:limit]):
        name, output = split(text)
        place = structure.top.get(name)
        known = "" if place is None else texts.get((place, output), "")
        shown = names.get(place, text) if place is not None and not output else text
        lines.append(f"input {number}: {shown}{f', {known}' if known else ''}")
    return lines if len(inputs) <= limit else [*lines, f"… {len(inputs) - limit} more inputs"]
