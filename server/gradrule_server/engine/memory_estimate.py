"""Estimates from shapes the least memory that a program takes, and measures the memory of eager tensors.

The estimate of a graph is the sum of its inputs, constants and results, and of the other tensors that exist at the same
time, at the worst moment, if ops run depth first, which takes less memory than TensorFlow's own order. It is a lower
bound: unknown sizes count as 0; an op that can reuse the memory of an input takes none; a tensor of which only the
shape is used takes none; a loop counts as one iteration, a branch as its smallest function. A refused program
cannot fit. A program that is not refused may still not fit: then it ends at the engine's memory limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tensorflow as tf

from gradrule_server.engine import tf_private
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.policy.op_tables import ops_with, trait_values

_VIEWS: Mapping[str, int] = {op: int(value) for op, value in trait_values("view").items() if value != "each"}
_VIEWS_EACH = ops_with("view", "each")
_SHAPE_OPS = ops_with("reads_shape")
# Bytes of a string besides its characters.
_STRING_BYTES = 24
# Sizes beyond this are all too large for any memory.
_MOST_FOLDED = 1 << 62

# A tensor: number of its op, number among the op's outputs.
_Place: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class MemoryNeed:
    """The least bytes that a graph takes, and its largest tensor: its bytes and its description."""

    size: int = 0
    largest: int = 0
    where: str = ""


@dataclass(slots=True)
class _Node:
    """One op. `views`: for each output, the number of the input whose memory it shares; empty if outputs are new.

    `extra`: bytes that a run of its functions takes besides its inputs and outputs.
    """

    inputs: list[_Place]
    controls: list[int]
    sizes: list[int]
    views: Sequence[int]
    reads_shapes: bool
    extra: int


@dataclass(slots=True)
class _Graph:
    nodes: list[_Node] = field(default_factory=list)
    # Numbers of the nodes whose outputs take memory during the whole run.
    lasting: set[int] = field(default_factory=set)
    # Places of the results.
    results: list[_Place] = field(default_factory=list)


class Estimator:
    """Estimates a graph and, once for each set of argument shapes, its functions.

    `enough`: a need of at most this many bytes is only bounded.
    """

    def __init__(self, enough: int) -> None:
        self._enough = enough
        self._functions: dict[tuple[str, str], MemoryNeed] = {}
        self.by_unknown_sizes: Counter[int] = Counter()
        """Bytes of all tensors of the graph and its functions, by the number of their unknown sizes, each taken as 1.

        A tensor of unknown rank counts as one of two unknown sizes. An unknown size into which a Reshape has folded
        known sizes, as in `tf.reshape(x, [-1])`, is taken as their product.
        """

    def need(self, graph: tf.Graph, results: Sequence[tf.Tensor]) -> MemoryNeed:
        """Returns the memory that running the graph takes."""
        need = MemoryNeed()
        ops = graph.get_operations()
        sizes, extras = self._sizes(ops, need)
        # The sum of all tensors is an upper bound, and for most graphs it is below `enough`.
        need.size = sum(map(sum, sizes)) + sum(extras)
        if need.size > self._enough:
            need.size = _peak(_structure(ops, results, sizes, extras))
        return need

    def _sizes(self, ops: Sequence[tf.Operation], need: MemoryNeed) -> tuple[list[list[int]], list[int]]:
        """Returns the bytes of each op's outputs, and the additional bytes of each op's functions."""
        all_sizes: list[list[int]] = []
        extras: list[int] = []
        folded: dict[str, int] = {}
        for op in ops:
            scale = _folded_sizes(op, folded)
            sizes = [self._bytes(tensor, scale) for tensor in op.outputs]
            largest = max(sizes, default=0)
            if largest > need.largest:
                need.largest, need.where = largest, _describe(op, op.outputs[sizes.index(largest)])
            all_sizes.append(sizes)
            extras.append(self._function_bytes(op, need) if tf_private.runs_functions(op.type) else 0)
        return all_sizes, extras

    def _bytes(self, tensor: tf.Tensor, scale: int) -> int:
        """Returns the bytes of a tensor, 0 if unknown, and counts it. `scale`: what an unknown size is taken as."""
        dtype, shape = tensor.dtype, tensor.shape
        item = 0 if dtype in (tf.variant, tf.resource) else _STRING_BYTES if dtype == tf.string else int(dtype.size)
        if shape.rank is None:
            self.by_unknown_sizes[2] += item * scale**2
            return 0
        sizes = shape.as_list()
        unknown = sizes.count(None)
        size = item * math.prod(size for size in sizes if size is not None)
        self.by_unknown_sizes[unknown] += size * scale**unknown
        return 0 if unknown else size

    def _function_bytes(self, op: tf.Operation, need: MemoryNeed) -> int:
        """Returns the bytes inside an op's functions: the largest of a loop, the smallest of branches."""
        taken = []
        shapes = tf_private.argument_shapes(op)
        for name in tf_private.functions_named(op.node_def):
            key = (name, repr(shapes))
            if key not in self._functions:
                inner = tf_private.function_graph(name, shapes)
                self._functions[key] = MemoryNeed() if inner is None else self.need(inner, inner.outputs)
            inside = self._functions[key]
            if inside.largest > need.largest:
                need.largest, need.where = inside.largest, inside.where
            around = [*op.inputs, *op.outputs]
            taken.append(max(inside.size - sum(map(static_bytes, around)), 0))
        return (min if tf_private.is_branch(op) else max)(taken, default=0)


def _folded_sizes(op: tf.Operation, folded: dict[str, int]) -> int:
    """Returns the product of the known sizes that an unknown size of the outputs may contain, at least 1.

    `folded`: these products of earlier ops, by name, if they exceed 1; the op is added.
    """
    product = max((folded.get(tensor.op.name, 1) for tensor in op.inputs), default=1) if folded else 1
    if op.type == "Reshape":
        # A result with several unknown sizes splits what an earlier Reshape has folded.
        is_folded = op.outputs[0].shape.rank is not None and op.outputs[0].shape.as_list().count(None) == 1
        before, after = _known_elements(op.inputs[0]), _known_elements(op.outputs[0])
        product = min(max(-(-product * before // after), 1), _MOST_FOLDED) if is_folded else 1
    if product > 1 and not all(tensor.shape.is_fully_defined() for tensor in op.outputs):
        folded[op.name] = product
    return product


def _known_elements(tensor: tf.Tensor) -> int:
    """Returns the product of the known sizes of a tensor that are not 0."""
    return 1 if tensor.shape.rank is None else math.prod(size for size in tensor.shape.as_list() if size)


def _structure(
    ops: Sequence[tf.Operation], results: Sequence[tf.Tensor], all_sizes: list[list[int]], extras: list[int]
) -> _Graph:
    numbers = {op.name: number for number, op in enumerate(ops)}
    read = _Graph()

    def place(tensor: tf.Tensor) -> _Place:
        return numbers[tensor.op.name], tensor.value_index

    for number, (op, sizes, extra) in enumerate(zip(ops, all_sizes, extras, strict=True)):
        controls = [numbers[control.name] for control in op.control_inputs]
        inputs = [place(tensor) for tensor in op.inputs]
        reads_shapes = op.type in _SHAPE_OPS
        read.nodes.append(_Node(inputs, controls, sizes, _views(op.type, len(sizes)), reads_shapes, extra))
        if op.type in ("Placeholder", "Const"):
            read.lasting.add(number)
    read.results = [place(tensor) for tensor in results]
    return read


def _views(op_type: str, outputs: int) -> Sequence[int]:
    if op_type in _VIEWS_EACH:
        return range(outputs)
    viewed = _VIEWS.get(op_type)
    return () if viewed is None else [viewed] * outputs


def _peak(graph: _Graph) -> int:
    """Returns the most bytes that exist at one time if the nodes run depth first."""
    nodes = graph.nodes
    roots = _roots(graph)
    order = _order(graph)
    # Number of later reads of each piece of memory.
    uses: dict[_Place, int] = {}
    for number in order:
        node = nodes[number]
        if not node.reads_shapes:
            for ref in node.inputs:
                uses[roots[ref]] = uses.get(roots[ref], 0) + 1
    for ref in graph.results:
        uses[roots[ref]] = uses.get(roots[ref], 0) + 1
    now = most = sum(sum(nodes[number].sizes) for number in order if number in graph.lasting)
    for number in order:
        node = nodes[number]
        ending = [] if node.reads_shapes else [roots[ref] for ref in node.inputs]
        free = 0
        for root in ending:
            uses[root] -= 1
            if not uses[root] and root[0] not in graph.lasting:
                free += nodes[root[0]].sizes[root[1]]
        made = 0
        if number not in graph.lasting and not node.views:
            made = sum(size for index, size in enumerate(node.sizes) if uses.get((number, index)))
        # An output may reuse the memory of an input that is read here for the last time.
        most = max(most, now + node.extra + max(made - free, 0))
        now += made - free
    return most


def _roots(graph: _Graph) -> dict[_Place, _Place]:
    """Returns for each tensor the tensor whose memory it uses: itself, or the one of which it is a view."""
    roots: dict[_Place, _Place] = {}
    for number in _visit(graph, range(len(graph.nodes)), with_controls=False):
        node = graph.nodes[number]
        for index in range(len(node.sizes)):
            place = (number, index)
            roots[place] = roots[node.inputs[node.views[index]]] if node.views else place
    return roots


def _order(graph: _Graph) -> list[int]:
    """Returns the numbers of the nodes that run, each after its inputs, and inputs as late as possible."""
    return _visit(graph, [number for number, _ in graph.results], with_controls=True)


def _visit(graph: _Graph, starts: Sequence[int], *, with_controls: bool) -> list[int]:
    done: dict[int, None] = {}
    stack = [(number, False) for number in reversed(starts)]
    while stack:
        number, ready = stack.pop()
        if number in done:
            continue
        if ready:
            done[number] = None
            continue
        node = graph.nodes[number]
        stack.append((number, True))
        needed = [producer for producer, _ in node.inputs] + (node.controls if with_controls else [])
        stack += [(producer, False) for producer in reversed(needed) if producer not in done]
    return list(done)


def static_bytes(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor; 0 if its shape or type is not known."""
    elements = tensor.shape.num_elements()
    if elements is None or tensor.dtype in (tf.variant, tf.resource):
        return 0
    return int(elements) * (_STRING_BYTES if tensor.dtype == tf.string else int(tensor.dtype.size))


def _describe(op: tf.Operation, tensor: tf.Tensor) -> str:
    name, dtype = op.name.removeprefix(IMPORT_SCOPE), tensor.dtype.base_dtype.name
    return f"{name!r} ({op.type}), {dtype} of shape {list(tensor.shape)}"


# Types that TensorFlow saves, frequent ones first. A variant does not report the type of its items, so all are tried.
_VARIANT_ITEM_DTYPES = (
    tf.float32,
    tf.variant,
    tf.int32,
    tf.bool,
    tf.float64,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.complex64,
    tf.complex128,
    tf.int8,
    tf.uint8,
    tf.int16,
    tf.uint16,
    tf.uint32,
    tf.uint64,
)


def saved_bytes(saved: Sequence[tf.Tensor]) -> int:
    """Returns the bytes of eager tensors. A list counts as its first item times its length."""
    return sum(_eager_bytes(tensor) for tensor in saved)


def _eager_bytes(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.variant:
        return sum(_variant_bytes(tensor, index) for index in range(tensor.shape.num_elements()))
    size = int(tensor.shape.num_elements())
    if tensor.dtype == tf.string:
        return size * _STRING_BYTES + int(tf.reduce_sum(tf.strings.length(tensor)))
    return size * int(tensor.dtype.size)


def _variant_bytes(tensor: tf.Tensor, index: int) -> int:
    """Returns the bytes of one variant: a list or an optional; 0 for anything else."""
    variant = tf.reshape(tensor, [-1])[index] if tensor.shape.rank else tensor
    try:
        length = int(tf.raw_ops.TensorListLength(input_handle=variant))
    except tf.errors.InvalidArgumentError:
        return _optional_bytes(variant)
    if not length:
        return 0
    for dtype in _VARIANT_ITEM_DTYPES:
        try:
            first = tf.raw_ops.TensorListGetItem(input_handle=variant, index=0, element_shape=-1, element_dtype=dtype)
        except tf.errors.InvalidArgumentError:
            continue
        return length * _eager_bytes(first)
    return 0


def _optional_bytes(variant: tf.Tensor) -> int:
    try:
        if not tf.raw_ops.OptionalHasValue(optional=variant):
            return 0
    except tf.errors.InvalidArgumentError:
        return 0
    for dtype in _VARIANT_ITEM_DTYPES:
        try:
            (value,) = tf.raw_ops.OptionalGetValue(
                optional=variant, output_types=[dtype], output_shapes=[tf.TensorShape(None)]
            )
        except tf.errors.InvalidArgumentError:
            continue
        return _eager_bytes(value)
    return 0
