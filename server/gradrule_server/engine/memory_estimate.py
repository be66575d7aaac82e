"""What a program takes at least while it runs, from shapes alone; what cannot fit is refused before it runs.

The estimate of a graph is: its inputs, its constants and what it returns, and at the worst moment all other tensors
that were made and are yet to be used, if ops run in the order in which the results need them (depth first, which
takes less than TensorFlow's own order). It errs on the low side: sizes that are not known count nothing; an op that
can write over an input that ends there, or hands on a part of it, takes nothing more; what is asked for its shape
alone is not made; a loop counts as one round of it, a branch as the least of its ways. So what is refused does not
fit, and what is not refused may still not fit: that ends at the engine's own limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import tensorflow as tf

from gradrule_server.engine import tf_private
from gradrule_server.engine.graph_import import IMPORT_SCOPE
from gradrule_server.policy.op_traits import ops_with, trait_values

_VIEWS: Mapping[str, int] = {op: int(value) for op, value in trait_values("view").items() if value != "each"}
_VIEWS_EACH = ops_with("view", "each")
_ASK_SHAPES = ops_with("reads_shape")
_STRING_BYTES = 24

# A tensor: number of its op, number among the op's outputs.
_Place: TypeAlias = tuple[int, int]


@dataclass(slots=True)
class MemoryNeed:
    """Bytes that a graph takes at least, and the largest tensor in it: its bytes and a text that names it."""

    size: int = 0
    largest: int = 0
    where: str = ""


@dataclass(slots=True)
class _Node:
    """One op. `views`: by output, the number of the input whose memory it is; none where all outputs are new.

    `extra`: bytes that a run of its functions takes besides its inputs and outputs.
    """

    inputs: list[_Place]
    controls: list[int]
    sizes: list[int]
    views: Sequence[int]
    asks_shapes: bool
    extra: int


@dataclass(slots=True)
class _Graph:
    nodes: list[_Node] = field(default_factory=list)
    # Numbers of the nodes that are there throughout.
    lasting: set[int] = field(default_factory=set)
    # Places of what comes out.
    results: list[_Place] = field(default_factory=list)


def estimate_need(graph: tf.Graph, results: Sequence[tf.Tensor], enough: int) -> MemoryNeed:
    """What running a graph takes. `enough`: up to this many bytes it does not matter how much."""
    return _Reader(enough).need(graph, results)


class _Reader:
    def __init__(self, enough: int) -> None:
        self._enough = enough
        self._functions: dict[tuple[str, str], MemoryNeed] = {}

    def need(self, graph: tf.Graph, results: Sequence[tf.Tensor]) -> MemoryNeed:
        need = MemoryNeed()
        ops = graph.get_operations()
        sizes, extras = self._sizes(ops, need)
        # All tensors together are more than there ever are at a time, and most graphs take less than is enough.
        need.size = sum(map(sum, sizes)) + sum(extras)
        if need.size > self._enough:
            need.size = _peak(_structure(ops, results, sizes, extras))
        return need

    def _sizes(self, ops: Sequence[tf.Operation], need: MemoryNeed) -> tuple[list[list[int]], list[int]]:
        """Returns the bytes of each op's outputs, and what each op's functions take besides."""
        all_sizes: list[list[int]] = []
        extras: list[int] = []
        for op in ops:
            sizes = [bytes_of(tensor) for tensor in op.outputs]
            largest = max(sizes, default=0)
            if largest > need.largest:
                need.largest, need.where = largest, _described(op, op.outputs[sizes.index(largest)])
            all_sizes.append(sizes)
            extras.append(self._inside(op, need) if tf_private.runs_functions(op.type) else 0)
        return all_sizes, extras

    def _inside(self, op: tf.Operation, need: MemoryNeed) -> int:
        """What an op's functions take besides what goes in and comes out: a loop's largest, branches' smallest."""
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
            taken.append(max(inside.size - sum(map(bytes_of, around)), 0))
        return (min if tf_private.is_branch(op) else max)(taken, default=0)


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
        asks_shapes = op.type in _ASK_SHAPES
        read.nodes.append(_Node(inputs, controls, sizes, _views(op.type, len(sizes)), asks_shapes, extra))
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
    nodes = graph.nodes
    roots = _roots(graph)
    order = _order(graph)
    # How often each piece of memory is yet to be read.
    uses: dict[_Place, int] = {}
    for number in order:
        node = nodes[number]
        if not node.asks_shapes:
            for ref in node.inputs:
                uses[roots[ref]] = uses.get(roots[ref], 0) + 1
    for ref in graph.results:
        uses[roots[ref]] = uses.get(roots[ref], 0) + 1
    now = most = sum(sum(nodes[number].sizes) for number in order if number in graph.lasting)
    for number in order:
        node = nodes[number]
        ending = [] if node.asks_shapes else [roots[ref] for ref in node.inputs]
        free = 0
        for root in ending:
            uses[root] -= 1
            if not uses[root] and root[0] not in graph.lasting:
                free += nodes[root[0]].sizes[root[1]]
        made = 0
        if number not in graph.lasting and not node.views:
            made = sum(size for index, size in enumerate(node.sizes) if uses.get((number, index)))
        # What ends here may be written over.
        most = max(most, now + node.extra + max(made - free, 0))
        now += made - free
    return most


def _roots(graph: _Graph) -> dict[_Place, _Place]:
    """Whose memory each tensor is: its own, or that of what it is a view of."""
    roots: dict[_Place, _Place] = {}
    for number in _visit(graph, range(len(graph.nodes)), with_controls=False):
        node = graph.nodes[number]
        for index in range(len(node.sizes)):
            place = (number, index)
            roots[place] = roots[node.inputs[node.views[index]]] if node.views else place
    return roots


def _order(graph: _Graph) -> list[int]:
    """Numbers of the nodes that run, each after what it needs, and that as late as can be."""
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


def bytes_of(tensor: tf.Tensor) -> int:
    """Bytes of a tensor of known shape; 0 where something is not known."""
    elements = tensor.shape.num_elements()
    if elements is None or tensor.dtype in (tf.variant, tf.resource):
        return 0
    return int(elements) * (_STRING_BYTES if tensor.dtype == tf.string else int(tensor.dtype.size))


def _described(op: tf.Operation, tensor: tf.Tensor) -> str:
    name, dtype = op.name.removeprefix(IMPORT_SCOPE), tensor.dtype.base_dtype.name
    return f"{name!r} ({op.type}), {dtype} of shape {list(tensor.shape)}"
