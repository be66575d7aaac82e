"""Defines the intermediate representation of graphs: bodies of nodes that refer to each other by index.

The top level of a graph and each function are a `Body`. Checking fills bodies in; copying creates new ones. Shapes of
weights and biases follow from constants and placeholders.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gradrule.common import tensor_codec
from gradrule.common.op_inference import type_attr
from gradrule.v1.graph_pb2 import AttrValue
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server import policy
from gradrule_server.policy.op_tables import ops_with, trait_values

Limits = policy.Limits

# A tensor: index of the node in its body, index among the node's outputs.
Ref = tuple[int, int]

ARG = "_Arg"

_TENSOR_NAME = re.compile(r"([^:^]+)(?::([0-9]{1,9}))?")

# Attribute with the name of the rule, or of a gradient registered in another process, for the node.
GRADIENT_ATTR = "_gradient_op_type"

OUTPUTS_ATTR = "_gradrule_outputs"
INPUTS_ATTR = "_gradrule_inputs"
REGION_ATTR = "_gradrule_region"

# Attribute of nodes that name a rule which may have no effect.
OPTIONAL_ATTR = "_gradrule_optional"

# Attribute of nodes that tracing added; overrides select them only by their exact names.
ADDED_ATTR = "_gradrule_added"

# Attribute of constants whose values are elsewhere: the SHA-256 of the values, hex; see `contents`.
CONTENT_ATTR = "_gradrule_content"

CUSTOM_GRADIENT_ATTRS = frozenset({OUTPUTS_ATTR, INPUTS_ATTR, REGION_ATTR})

CALLS = ops_with("call")

# Control-flow ops, with their attributes that hold functions.
CONTAINERS = {op: tuple(value.split(",")) for op, value in trait_values("bodies").items()}
LOOPS = ops_with("loop")
BRANCHES = ops_with("branch")

# Ops whose value every call must feed.
PLACEHOLDERS = ops_with("placeholder")
PLACEHOLDER_WITH_DEFAULT = "PlaceholderWithDefault"

# Element types through which gradients pass; resources and variants (TensorLists) carry floats inside.
DIFFERENTIABLE = frozenset(
    {Dt.DT_HALF, Dt.DT_BFLOAT16, Dt.DT_FLOAT, Dt.DT_DOUBLE, Dt.DT_COMPLEX64, Dt.DT_COMPLEX128}
    | {Dt.DT_RESOURCE, Dt.DT_VARIANT}
    | {Dt.DT_FLOAT8_E5M2, Dt.DT_FLOAT8_E4M3FN, Dt.DT_FLOAT8_E4M3FNUZ, Dt.DT_FLOAT8_E4M3B11FNUZ, Dt.DT_FLOAT8_E5M2FNUZ}
    | {Dt.DT_FLOAT4_E2M1FN}
)


@dataclass(slots=True)
class Node:
    """One operation.

    `outputs`: element types of the outputs (`Dt` numbers; 0: unknown); None if an error makes their number unknown.
    """

    name: str
    op: str
    # Nodes share equal values of these fields, so they must not be changed in place.
    inputs: Sequence[Ref]
    controls: Sequence[int]
    attrs: Mapping[str, AttrValue]
    outputs: tuple[int, ...] | None = None
    # Functions that the node calls: bodies per attribute (`f` for calls).
    functions: tuple[tuple[str, tuple[Body, ...]], ...] = ()
    # Why gradrule cannot run this node; empty: it can. Reported only if a result needs the node.
    unsupported: str = ""
    # In expanded bodies: index into the marks, and whether gradrule computes the node's gradient.
    mark: int | None = None
    watched: bool = False
    # In expanded bodies: the op type in the uploaded graph, if it was changed.
    uploaded_op: str = ""

    @property
    def op_type(self) -> str:
        """The op type in the uploaded graph, which selectors match."""
        return self.uploaded_op or self.op


@dataclass(slots=True)
class Body:
    """The top level (`name` is empty) or a function; its first nodes are the arguments, of op `_Arg`."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    arg_count: int = 0
    # Attributes of arguments (`_output_shapes`), in order.
    arg_notes: list[dict[str, AttrValue]] = field(default_factory=list)
    result_names: list[str] = field(default_factory=list)
    result_types: list[int] = field(default_factory=list)
    results: list[Ref] = field(default_factory=list)
    control_results: list[tuple[str, int]] = field(default_factory=list)
    # Indices of nodes in topological order.
    order: list[int] = field(default_factory=list)
    is_stateful: bool = False

    @property
    def arg_types(self) -> list[int]:
        """Element types of the arguments."""
        return [node.outputs[0] for node in self.nodes[: self.arg_count] if node.outputs]


def constant_attrs(value: float | Sequence[int], dtype: int) -> dict[str, AttrValue]:
    """Returns the attributes of a Const with one number or a vector of numbers."""
    tensor = tensor_codec.to_message(np.asarray(value, tensor_codec.numpy_dtype(dtype)))
    return {"dtype": type_attr(dtype), "value": AttrValue(tensor=tensor)}


def replaced(inputs: Sequence[Ref], number: int, by: Ref) -> Sequence[Ref]:
    """Returns the inputs with input `number` replaced."""
    return (*inputs[:number], by, *inputs[number + 1 :])


def is_call(node: Node) -> bool:
    """Returns whether the node is a function call, not a loop or branch."""
    return bool(node.functions) and node.op not in CONTAINERS


def prune(body: Body, roots: Iterable[int]) -> dict[int, int]:
    """Removes, in place, nodes that no root depends on; returns new indices by old."""
    nodes = body.nodes
    needed = bytearray(len(nodes))
    pending = list(roots)
    while pending:
        position = pending.pop()
        if not needed[position]:
            needed[position] = 1
            node = nodes[position]
            pending += [producer for producer, _ in node.inputs]
            pending += node.controls
    moved = {old: new for new, old in enumerate(old for old in range(len(nodes)) if needed[old])}
    body.nodes = [nodes[old] for old in moved]
    for node in body.nodes:
        node.inputs = tuple([(moved[producer], output) for producer, output in node.inputs])
        node.controls = [moved[control] for control in node.controls] if node.controls else ()
    return moved


def topological_order(needs: Sequence[Sequence[int]]) -> list[int]:
    """Returns items after the items that they need, given those of each item; omits cycles and all that needs them."""
    waits = [len(needed) for needed in needs]
    users: list[list[int]] = [[] for _ in needs]
    for item, needed in enumerate(needs):
        for other in needed:
            users[other].append(item)
    order = [item for item, count in enumerate(waits) if not count]
    for item in order:
        for user in users[item]:
            waits[user] -= 1
            if not waits[user]:
                order.append(user)
    return order


def bodies_of(top: Body) -> Iterator[Body]:
    """Yields the body and all functions that it uses, each once."""
    pending, seen = [top], set[int]()
    while pending:
        body = pending.pop()
        if id(body) not in seen:
            seen.add(id(body))
            yield body
            pending += [inner for node in body.nodes for _, bodies in node.functions for inner in bodies]


def nodes_of(top: Body) -> Iterator[tuple[Body, Node]]:
    """Yields all nodes except arguments, each with its body."""
    for body in bodies_of(top):
        for node in body.nodes[body.arg_count :]:
            yield body, node


@dataclass(frozen=True, slots=True)
class CustomGradientNode:
    """The input layout of a custom-gradient node: results of the region, inputs of the region, other tensors.

    Attributes:
        outputs: Number of results of the region.
        inputs: Number of inputs of the region.
        region: Name of the region; may be empty.
    """

    outputs: int
    inputs: int
    region: str

    @property
    def results(self) -> range:
        """Indices of the inputs that receive gradients if gradients flow through the region's nodes."""
        return range(self.outputs)

    @property
    def arguments(self) -> range:
        """Indices of the inputs that receive gradients from a rule for the region."""
        return range(self.outputs, self.outputs + self.inputs)


def read_custom_gradient(node: Node) -> CustomGradientNode | None:
    """Returns the input layout of a node; None for other nodes. Raises `ValueError` for invalid attributes."""
    if CUSTOM_GRADIENT_ATTRS.isdisjoint(node.attrs):
        return None
    if node.op != "IdentityN":
        raise ValueError(
            f"{', '.join(sorted(CUSTOM_GRADIENT_ATTRS & node.attrs.keys()))} can stand on an IdentityN only"
        )
    counts = []
    for note, least in ((OUTPUTS_ATTR, 1), (INPUTS_ATTR, 0)):
        value = node.attrs.get(note)
        if value is None or value.WhichOneof("value") != "i" or value.i < least:
            raise ValueError(f"{note} is a number from {least} on")
        counts.append(value.i)
    outputs, inputs = counts
    if outputs + inputs > len(node.inputs):
        raise ValueError(f"{OUTPUTS_ATTR} and {INPUTS_ATTR} count {outputs + inputs} inputs; it has {len(node.inputs)}")
    region = node.attrs.get(REGION_ATTR)
    return CustomGradientNode(outputs, inputs, "" if region is None else region.s.decode(errors="replace"))


def parse_tensor_name(text: str) -> tuple[str, int] | None:
    """Returns node and output of `node` or `node:output`; None for other text."""
    match = _TENSOR_NAME.fullmatch(text)
    return (match[1], int(match[2] or 0)) if match else None


def short_tensor_name(node: str, output: int) -> str:
    """Returns `y` for output 0, else `y:1`."""
    return f"{node}:{output}" if output else node


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
