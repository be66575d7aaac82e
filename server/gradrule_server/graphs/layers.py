"""Finds layers: groups of ops that together do what one layer of a framework does.

- `@linear`, `@convolution`, `@dense`: a linear op and the addition of its bias. Ops that only move elements (Reshape,
  Squeeze, BatchToSpaceND, …) may stand between them. The padding of a convolution's data is part of it, if a separate
  op does it: SpaceToBatchND, or a Pad in the convolution's name scope. The inputs are data, weights and bias.
- `@activation`: an elementwise function of one tensor: an op such as Relu, or several, as in x * sigmoid(x).
- `@batch_norm`: the multiplication and the addition of numbers per channel, or a batch-normalisation op.
- `@normalization`: a function of one tensor that divides it by, or subtracts, its own means or sums, such as layer
  normalization.

Inner tensors of a layer are used in the layer only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gradrule_server.graphs.ir import (
    ARG,
    DIFFERENTIABLE,
    Body,
    Node,
    Ref,
    is_per_axis,
    output_channels,
    read_custom_gradient,
    static_shape,
)
from gradrule_server.graphs.paths import consumers_of
from gradrule_server.graphs.resolution_context import ResolutionContext
from gradrule_server.graphs.selectors import GROUPS, PLAIN_ADDS, CandidateNode
from gradrule_server.graphs.subgraphs import Subgraph
from gradrule_server.policy.op_tables import input_numbers, ops_with

LINEAR, CONVOLUTION, DENSE = "@linear", "@convolution", "@dense"
ACTIVATION, BATCH_NORM, NORMALIZATION = "@activation", "@batch_norm", "@normalization"

_OPERANDS = input_numbers("linear_operands")
_MATRIX_PRODUCTS = ops_with("matrix_product")
_PARAMETERISED = frozenset(_OPERANDS) | ops_with("parameterised")
# Numbers of the inputs that hold the data of ops which only move elements.
_MOVES = input_numbers("moves_elements")
_PADS = frozenset({"SpaceToBatchND", "Pad"})
_READS_SHAPE = ops_with("reads_shape")
_ELEMENTWISE = ops_with("elementwise")
_REDUCTIONS = ops_with("reduction")
_BATCH_NORMS = ops_with("batch_norm")
# Affine in one operand if the other is a constant. A division is affine in its first operand only.
_AFFINE = PLAIN_ADDS | frozenset({"Sub", "Mul", "MulNoNan", "Neg", "BiasAdd", "Identity", "Snapshot"})
_DIVISIONS = frozenset({"RealDiv", "Div", "DivNoNan"})
_SCALES = _DIVISIONS | {"Mul", "MulNoNan"}
# Ops after a linear op that can be part of its layer.
_FOLLOWERS = frozenset(_MOVES) | PLAIN_ADDS | {"BiasAdd"}
_PASSES_ON = frozenset({"Identity", "Snapshot", "Cast", "Reshape", "ExpandDims", "Squeeze"})
# Most ops of a function of one tensor. It keeps the search linear in the size of the graph.
_MAX_OPS = 64
# Elementwise functions of their own that groups of op types do not count as activations.
_CLIPS = frozenset({"Maximum", "Minimum", "ClipByValue"})


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A layer of one body.

    Attributes:
        kinds: The words that select it.
        members: Indices of its nodes in the body, producers before consumers.
        inputs: Data, then weights and bias of a linear layer.
    """

    kinds: frozenset[str]
    body: Body
    members: tuple[int, ...]
    inputs: tuple[Ref, ...]

    @property
    def subgraph(self) -> Subgraph:
        """The nodes with their inputs and the first output of the last node."""
        return Subgraph(self.body, self.members, self.inputs, ((self.members[-1], 0),))


class Layers:
    """The layers of all bodies, by candidate number of their last node. A node belongs to one layer at most."""

    def __init__(self, context: ResolutionContext) -> None:
        self._count = len(context.candidates)
        self._by_end: dict[int, tuple[Layer, tuple[int, ...]]] = {}
        for body in {id(candidate.body): candidate.body for candidate in context.candidates}.values():
            for layer in _BodyLayers(body, context).find():
                members = tuple(context.number(body, member) for member in layer.members)
                self._by_end[members[-1]] = layer, members

    def ends(self, kind: str) -> NDArray[np.bool_]:
        """Returns a flag per candidate: whether a layer of this kind ends there."""
        flags = np.zeros(self._count, np.bool_)
        flags[[number for number, (layer, _) in self._by_end.items() if kind in layer.kinds]] = True
        return flags

    def members(self, end: int) -> tuple[int, ...]:
        """Returns the candidate numbers of the layer that ends at a candidate."""
        return self._by_end[end][1]

    def subgraph(self, end: int) -> Subgraph | None:
        """Returns the subgraph of the layer that ends at a candidate; None if it is a node with all its inputs."""
        layer, _ = self._by_end[end]
        node = layer.body.nodes[layer.members[0]]
        is_node = len(layer.members) == 1 and layer.inputs == tuple(node.inputs) and len(node.outputs or ()) == 1
        return None if is_node else layer.subgraph


class _BodyLayers:
    """Finds the layers of one body."""

    def __init__(self, body: Body, context: ResolutionContext) -> None:
        self.body = body
        self._context = context
        self.order = context.orders.get(body)
        self._position = {index: place for place, index in enumerate(self.order)}
        self._results = {producer for producer, _ in body.results}
        self._kept = {ref[0] for ref in context.kept(body)}
        self._consumers = self._gradient_consumers()
        self._taken: set[int] = set()

    def find(self) -> Iterator[Layer]:
        """Yields linear layers first, so that a bias is not part of a later layer."""
        for index in self.order:
            layer = self._linear(index) or self._batch_norm(index)
            if layer is not None:
                self._taken.update(layer.members)
                yield layer
        yield from _ElementwiseParts(self).find()

    # What both searches need.

    def changes(self, ref: Ref) -> bool:
        """Returns whether a tensor is one of the xs or depends on one."""
        return self._context.changes(self.body, ref)

    def consumers(self, index: int) -> Sequence[int]:
        """Returns the nodes that use more of a node than its shape, and that the ys depend on."""
        return self._consumers[index]

    def is_inner(self, index: int) -> bool:
        """Returns whether only nodes use the outputs of a node, and not the request or the caller of a function."""
        return index not in self._results and index not in self._kept and self.body.nodes[index].op != ARG

    def is_needed(self, index: int) -> bool:
        """Returns whether the ys depend on a node."""
        return id(self.body.nodes[index]) in self._context.before_ys

    def is_free(self, index: int) -> bool:
        """Returns whether a node can be part of a further layer."""
        return index not in self._taken and self._context.number(self.body, index) >= 0

    def sorted(self, members: set[int]) -> tuple[int, ...]:
        """Returns node indices in topological order."""
        return tuple(sorted(members, key=self._position.__getitem__))

    def _gradient_consumers(self) -> list[list[int]]:
        nodes, before_ys = self.body.nodes, self._context.before_ys
        return [
            [index for index in found if nodes[index].op not in _READS_SHAPE and id(nodes[index]) in before_ys]
            for found in consumers_of(self.body)
        ]

    # Linear layers.

    def _linear(self, index: int) -> Layer | None:
        node = self.body.nodes[index]
        if node.op not in _OPERANDS or not self.is_free(index):
            return None
        operands = [node.inputs[number] for number in _OPERANDS[node.op] if number < len(node.inputs)]
        if len(operands) != 2 or len(node.inputs) != max(_OPERANDS[node.op]) + 1:
            return None
        number = self._weights(operands)
        if number is None:
            return None
        data, weights = operands[1 - number], operands[number]
        channels = output_channels(self.body, node, _OPERANDS[node.op][number])
        members, bias = [index], None
        for last, user, place in self._moved_to(index):
            other = self._bias(user, place, channels)
            if other is not None:
                members, bias = [*last, user], other
                break
        kinds = {LINEAR, DENSE if node.op in _MATRIX_PRODUCTS else CONVOLUTION}
        if CONVOLUTION in kinds:
            paddings = self._paddings(index, data)
            if paddings:
                members, data = [*paddings, *members], self.body.nodes[paddings[0]].inputs[0]
        return Layer(frozenset(kinds), self.body, tuple(members), (data, weights, *([] if bias is None else [bias])))

    def _paddings(self, convolution: int, data: Ref) -> list[int]:
        """Returns the nodes that pad the data of a convolution, and the ops between them that only move elements.

        Producers come first.
        """
        nodes, user = self.body.nodes, convolution
        found: list[int] = []
        members: list[int] = []
        while data[1] == 0 and self.is_inner(data[0]) and self.is_free(data[0]):
            node = nodes[data[0]]
            is_pad = node.op in _PADS and (node.op != "Pad" or self._is_within(data[0], convolution))
            if not (is_pad or _MOVES.get(node.op) == (0,)) or list(self.consumers(data[0])) != [user]:
                break
            if any(self.changes(ref) for ref in node.inputs[1:]):
                break
            members.insert(0, data[0])
            if is_pad:
                found = list(members)
            user, data = data[0], node.inputs[0]
        return found

    def _is_within(self, index: int, convolution: int) -> bool:
        """Returns whether a node is in the name scope of a convolution."""
        scope, _, _ = self.body.nodes[index].name.rpartition("/")
        return bool(scope) and self.body.nodes[convolution].name.startswith(f"{scope}/")

    def _batch_norm(self, index: int) -> Layer | None:
        node = self.body.nodes[index]
        if node.op not in _BATCH_NORMS or not self.is_free(index) or not self.changes(node.inputs[0]):
            return None
        return Layer(frozenset({BATCH_NORM}), self.body, (index,), (node.inputs[0],))

    def _moved_to(self, index: int) -> Iterator[tuple[list[int], int, int]]:
        """Yields, from a node on, the nodes so far, their only consumer, and the number of its input.

        Goes on as long as the consumer only moves elements.
        """
        nodes, members = self.body.nodes, [index]
        while self.is_inner(members[-1]):
            users = self.consumers(members[-1])
            if len(users) != 1 or not self.is_free(users[0]):
                return
            user = users[0]
            if nodes[user].op not in _FOLLOWERS:
                return
            place = [ref[0] for ref in nodes[user].inputs].index(members[-1])
            yield members, user, place
            if _MOVES.get(nodes[user].op) != (place,):
                return
            members.append(user)

    def _bias(self, user: int, place: int, channels: int | None) -> Ref | None:
        """Returns the bias if a node adds one to its input number `place`. `channels`: None if unknown."""
        node = self.body.nodes[user]
        if node.op == "BiasAdd":
            return node.inputs[1] if place == 0 else None
        if node.op not in PLAIN_ADDS or len(node.inputs) != 2:
            return None
        other = node.inputs[1 - place]
        shape = static_shape(self.body, other)
        if self.changes(other):
            # Else it is data that is added, such as a skip connection.
            return other if self._is_x(other) and shape is not None and math.prod(shape) == channels else None
        # Else it has a number per position, such as an embedding of positions.
        if shape is not None and channels is not None:
            return other if math.prod(shape) in (1, channels) else None
        return other if shape is None or is_per_axis(shape) else None

    def _weights(self, operands: Sequence[Ref]) -> int | None:
        """Returns which of two operands of a product holds the weights; None if none does.

        Weights do not depend on the xs, or on other xs than the data.
        """
        changing = [self.changes(ref) for ref in operands]
        if not all(changing):
            return changing.index(False) if any(changing) else None
        first, second = (self._context.xs_behind(self.body, ref) for ref in operands)
        are_xs = [self._is_x(ref) for ref in operands]
        if are_xs[0] != are_xs[1]:
            number = are_xs.index(True)
            own, other = (second, first) if number else (first, second)
            return number if other & ~own else None
        return None if first & second else 1

    def _is_x(self, ref: Ref) -> bool:
        """Returns whether a tensor is one of the xs, as it is, cast, or in another shape."""
        for _ in range(_MAX_OPS):
            if self._context.is_x(self.body, ref):
                return True
            node = self.body.nodes[ref[0]]
            if node.op not in _PASSES_ON or not node.inputs:
                return False
            ref = node.inputs[0]
        return False


class _ElementwiseParts:
    """Finds the elementwise functions of one tensor, with and without means of that tensor.

    Every tensor has a dominator: the nearest tensor through which all paths to it run, as far as ops are elementwise or
    reductions that keep the axes. A function leads from the dominator of a node to the node.
    """

    def __init__(self, found: _BodyLayers) -> None:
        self._found = found
        self._nodes = found.body.nodes
        self._dominators: dict[int, Ref] = {}
        self._depths: dict[int, int] = {}

    def find(self) -> Iterator[Layer]:
        """Yields layers; a function that contains others is one layer."""
        steps = [step for step in map(self._step, self._found.order) if step is not None]
        taken: set[int] = set()
        functions: dict[int, tuple[Ref, set[int]]] = {}
        for end, source, members in reversed(steps):
            if taken.isdisjoint(members):
                taken |= members
                functions[end] = source, members
        for chain in self._chains(functions):
            layer = self._layer(chain, functions)
            if layer is not None:
                yield layer

    def _step(self, index: int) -> tuple[int, Ref, set[int]] | None:
        """Returns a node, its dominator, and the nodes after the dominator up to the node; None if there are none."""
        node = self._nodes[index]
        if not self._found.is_free(index) or not self._found.is_needed(index) or not self._is_function(node):
            return None
        operands = [ref for ref in self._operands(node) if self._found.changes(ref)]
        dominator = self._common(operands) if operands else None
        if dominator is None:
            return None
        self._dominators[index] = dominator
        self._depths[index] = self._depth(dominator) + 1
        members = self._between(index, dominator)
        return None if members is None else (index, dominator, members)

    def _is_function(self, node: Node) -> bool:
        if node.op in _ELEMENTWISE or node.op == "BiasAdd" or self._custom_gradient_outputs(node) == 1:
            return True
        keeps = node.attrs.get("keep_dims")
        return node.op in _REDUCTIONS and keeps is not None and keeps.b

    def _operands(self, node: Node) -> Sequence[Ref]:
        return node.inputs[:1] if node.op in _REDUCTIONS else node.inputs

    @staticmethod
    def _custom_gradient_outputs(node: Node) -> int:
        try:
            layout = read_custom_gradient(node)
        except ValueError:
            # Resolution reports the invalid attributes.
            return 0
        return 0 if layout is None else layout.outputs

    def _depth(self, ref: Ref) -> int:
        return self._depths.get(ref[0], 0) if ref[1] == 0 else 0

    def _common(self, refs: Sequence[Ref]) -> Ref | None:
        """Returns the nearest tensor through which all paths to the tensors run; None if there is none."""
        common, steps = refs[0], 0
        for ref in refs[1:]:
            while common != ref:
                steps += 1
                if steps > 2 * _MAX_OPS:
                    return None
                deeper, other = (common, ref) if self._depth(common) >= self._depth(ref) else (ref, common)
                if self._depth(deeper) == 0:
                    return None
                common, ref = self._dominators[deeper[0]], other
        return common

    def _between(self, end: int, source: Ref) -> set[int] | None:
        """Returns the nodes after a tensor up to a node; None if a node outside uses one of the others."""
        members, pending = {end}, [end]
        while pending:
            for ref in self._operands(self._nodes[pending.pop()]):
                if ref != source and ref[0] not in members and self._found.changes(ref):
                    members.add(ref[0])
                    pending.append(ref[0])
                    if len(members) > _MAX_OPS:
                        return None
        for member in members - {end}:
            if not self._found.is_inner(member) or not members.issuperset(self._found.consumers(member)):
                return None
        return members

    def _chains(self, functions: Mapping[int, tuple[Ref, set[int]]]) -> Iterator[list[int]]:
        """Yields functions, by their ends, each joined with the additions and scalings by numbers next to it.

        They are joined only within a name scope, where the framework made them of one layer.
        """
        done: set[int] = set()
        after: dict[Ref, list[int]] = {}
        for end, (source, _) in functions.items():
            after.setdefault(source, []).append(end)
        for end in sorted(functions):
            if end in done:
                continue
            chain = deque([end])
            curved = not self._is_affine(functions[end][1])
            while (before := functions[chain[0]][0][0]) in functions and before not in done and len(chain) < _MAX_OPS:
                is_curved = not self._is_affine(functions[before][1])
                if (curved and is_curved) or not self._joins(before, chain[0], functions):
                    break
                chain.appendleft(before)
                curved |= is_curved
            while len(following := after.get((chain[-1], 0), [])) == 1 and len(chain) < _MAX_OPS:
                is_curved = not self._is_affine(functions[following[0]][1])
                if (
                    following[0] in done
                    or (curved and is_curved)
                    or not self._joins(chain[-1], following[0], functions)
                ):
                    break
                chain.append(following[0])
                curved |= is_curved
            done.update(chain)
            yield list(chain)

    def _joins(self, first: int, second: int, functions: Mapping[int, tuple[Ref, set[int]]]) -> bool:
        """Returns whether two functions, one after the other, belong to one layer."""
        source, members = functions[second]
        if source != (first, 0) or not self._found.is_inner(first):
            return False
        if not members.issuperset(self._found.consumers(first)):
            return False
        names = [self._nodes[index].name for index in (first, second)]
        scopes = [name.rpartition("/")[0] for name in names]
        # The last node of a scope may have the name of the scope.
        if not scopes[0] or scopes[0] not in (scopes[1], names[1]):
            return False
        both = [functions[first][1], members]
        affine = [self._is_affine(item) for item in both]
        if all(affine):
            return True
        return any(is_affine and self._is_scalar(item) for is_affine, item in zip(affine, both, strict=True))

    def _layer(self, chain: Sequence[int], functions: Mapping[int, tuple[Ref, set[int]]]) -> Layer | None:
        members = set().union(*(functions[end][1] for end in chain))
        kind = self._kind(chain, functions)
        if kind is None:
            return None
        source = functions[chain[0]][0]
        return Layer(frozenset({kind}), self._found.body, self._found.sorted(members), (source,))

    def _kind(self, chain: Sequence[int], functions: Mapping[int, tuple[Ref, set[int]]]) -> str | None:
        parts = [functions[end][1] for end in chain]
        nodes = [self._nodes[index] for part in parts for index in part]
        if any(node.op in _REDUCTIONS for node in nodes):
            return NORMALIZATION if len(nodes) > 1 else None
        if all(self._is_affine(part) for part in parts):
            return BATCH_NORM if self._is_batch_norm(nodes) else None
        curved = [part for part in parts if not self._is_affine(part)]
        is_activation = any(
            len(part) > 1 or self._nodes[next(iter(part))].op in GROUPS[ACTIVATION] | _CLIPS for part in curved
        )
        return ACTIVATION if is_activation else None

    def _is_batch_norm(self, nodes: Sequence[Node]) -> bool:
        """Returns whether affine ops scale and shift by numbers per channel, as far as shapes are known."""
        scales = shifts = False
        for node in nodes:
            for ref in node.inputs:
                shape = None if self._found.changes(ref) else static_shape(self._found.body, ref)
                if shape is not None and not is_per_axis(shape):
                    return False
                if node.op in _SCALES and not self._found.changes(ref):
                    scales |= shape is None or math.prod(shape) > 1
            shifts |= node.op not in _SCALES and node.op != "Neg"
        return scales and shifts

    def _is_affine(self, members: set[int]) -> bool:
        """Returns whether a function is one op that is affine in the operand that depends on the xs."""
        if len(members) != 1:
            return False
        (node,) = (self._nodes[index] for index in members)
        return node.op in _AFFINE or (node.op in _DIVISIONS and not self._found.changes(node.inputs[1]))

    def _is_scalar(self, members: set[int]) -> bool:
        """Returns whether the operands of an affine op that do not depend on the xs are single numbers."""
        (node,) = (self._nodes[index] for index in members)
        shapes = (static_shape(self._found.body, ref) for ref in node.inputs if not self._found.changes(ref))
        return all(shape is not None and math.prod(shape) == 1 for shape in shapes)


def applies_parameters(candidate: CandidateNode, context: ResolutionContext) -> bool:
    """Returns whether a node on the path applies parameters, which do not depend on the xs, to what does."""
    node, body = candidate.node, candidate.body
    if node.op not in _PARAMETERISED or id(node) not in context.path:
        return False
    behind = [
        context.xs_behind(body, ref)
        for ref, dtype in zip(node.inputs, candidate.input_types, strict=True)
        if dtype in DIFFERENTIABLE
    ]
    return any(behind) and (not all(behind) or any(a & ~b for a in behind for b in behind))
