"""Rewrites the expanded graph before overrides are resolved: folds batch normalisations into linear ops."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gradrule.common.op_inference import type_attr
from gradrule.v1.graph_pb2 import AttrValue
from gradrule.v1.tensor_pb2 import Dt
from gradrule_server.errors import Findings, Reason, did_you_mean, quote
from gradrule_server.graphs import paths
from gradrule_server.graphs.copying import Copy
from gradrule_server.graphs.ir import (
    TRANSPOSED,
    Body,
    Node,
    Ref,
    bodies_of,
    constant_attrs,
    output_channels,
    static_shape,
)
from gradrule_server.graphs.selectors import GROUPS, PLAIN_ADDS, CandidateNode
from gradrule_server.policy.op_tables import ops_with

FOLD_BATCH_NORM = "fold_batch_norm"
_REWRITES = (FOLD_BATCH_NORM,)

_BATCH_NORMS = ops_with("batch_norm")
_LINEAR = GROUPS["@linear"] | TRANSPOSED
# Ops that move elements of the output of a convolution along its spatial axes.
_MOVES = frozenset({"BatchToSpaceND", "Squeeze"})


def check_rewrites(names: Sequence[str], findings: Findings) -> None:
    """Adds UNSUPPORTED for unknown rewrites."""
    for number, name in enumerate(names):
        if name not in _REWRITES:
            message = (
                f"There is no rewrite {quote(name)}.{did_you_mean(name, _REWRITES)} There is: {', '.join(_REWRITES)}."
            )
            findings.add(Reason.ERROR_REASON_UNSUPPORTED, message, field=f"spec.rewrites[{number}]")


def rewrite(copy: Copy, names: Sequence[str], xs: Collection[Ref]) -> list[str]:
    """Applies rewrites in place; returns the public names of the replaced nodes."""
    rewritten: list[str] = []
    if FOLD_BATCH_NORM in names:
        reached = paths.dependents(copy.body, copy.body, xs)
        for body in bodies_of(copy.body):
            rewritten += _Folding(copy, body, reached, xs if body is copy.body else ()).run()
    return rewritten


@dataclass(frozen=True, slots=True)
class _FoldableNorm:
    """A linear op, its bias add, and the normalisation `scale · v + shift` that follows.

    Attributes:
        linear: Index of the linear op.
        moves: Indices of the ops that move elements of its output, producers before consumers.
        bias: Index of the bias add; None: there is no bias add.
        last: Index of the node whose first output is the result.
        mul: Index of the multiplication by the scale; None: `last` is a batch-normalisation op.
    """

    linear: int
    bias: int | None
    last: int
    mul: int | None = None
    moves: tuple[int, ...] = ()


class _Folding:
    """Folds batch normalisations of one body into the linear ops before them.

    scale · (x W + b) + shift = x (W · scale) + (b · scale + shift), where scale and shift have one value for each
    output channel. The graph computes the new weights from the old ones, so gradients with respect to weights stay
    correct.
    """

    def __init__(self, copy: Copy, body: Body, reached: Collection[int], xs: Collection[Ref]) -> None:
        self._copy = copy
        self._body = body
        self._reached = reached
        self._xs = xs
        self._consumers = paths.consumers_of(body)
        requested = copy.tensors.values() if body is copy.body else ()
        self._kept = {ref[0] for ref in (*requested, *body.results)}
        self._moves: dict[Ref, Ref] = {}
        self._replaced: set[int] = set()

    def run(self) -> list[str]:
        """Folds all batch normalisations of the body; returns their public names."""
        nodes = self._body.nodes
        names = []
        candidates = {candidate.index: candidate for candidate in self._copy.candidates if candidate.body is self._body}
        for last in range(len(nodes)):
            found = self._find(last)
            if found is not None:
                names.append(candidates[last].name if last in candidates else nodes[last].name)
                self._fold(found, candidates)
        if self._moves:
            for node in nodes:
                node.inputs = [self._moves.get(ref, ref) for ref in node.inputs]
            self._body.results = [self._moves.get(ref, ref) for ref in self._body.results]
            if self._body is self._copy.body:
                tensors = self._copy.tensors
                self._copy.tensors = {ref: self._moves.get(target, target) for ref, target in tensors.items()}
            # Replaced nodes have no consumers, so selectors must not match them.
            self._copy.candidates = [
                candidate for candidate in self._copy.candidates if id(candidate) not in self._replaced
            ]
        return names

    def _find(self, last: int) -> _FoldableNorm | None:
        node = self._body.nodes[last]
        if node.op in _BATCH_NORMS and not node.attrs["is_training"].b:
            found = self._find_linear(node.inputs[0], last, None)
            return found if found is not None and self._has_format(found.linear, node.attrs["data_format"].s) else None
        if node.op in PLAIN_ADDS:
            # The form of tf.nn.batch_normalization: v · scale + shift.
            value = self._changing(node)
            if value is not None and self._body.nodes[value[0]].op == "Mul" and self._is_alone(value[0], last):
                inner = self._changing(self._body.nodes[value[0]])
                found = None if inner is None else self._find_linear(inner, last, value[0])
                if found is not None and all(self._is_per_channel(self._other(at), found) for at in (value[0], last)):
                    return found
        return None

    def _has_format(self, linear: int, data_format: bytes) -> bool:
        own = self._body.nodes[linear].attrs.get("data_format")
        return own is not None and own.s == data_format

    def _is_per_channel(self, ref: Ref, found: _FoldableNorm) -> bool:
        """Returns whether an operand certainly has exactly one number for each output channel of the linear op."""
        linear = self._body.nodes[found.linear]
        channels, shape = output_channels(self._body, linear, 1), static_shape(self._body, ref)
        data_format = linear.attrs.get("data_format")
        # Spatial axes follow the channel axis in NC formats.
        behind = len(data_format.s) - 2 if data_format is not None and data_format.s.startswith(b"NC") else 0
        if channels is None or shape is None or len(shape) <= behind:
            return False
        axis = len(shape) - 1 - behind
        return shape[axis] == channels and math.prod(shape) == channels

    def _find_linear(self, value: Ref, last: int, mul: int | None) -> _FoldableNorm | None:
        user = last if mul is None else mul
        producer = self._body.nodes[value[0]]
        bias = None
        if producer.op in ("BiasAdd", *PLAIN_ADDS):
            inner = producer.inputs[0] if producer.op == "BiasAdd" else self._changing(producer)
            if inner is None or not self._is_alone(value[0], user):
                return None
            bias, user = value[0], value[0]
            value = inner
        moves: list[int] = []
        while self._body.nodes[value[0]].op in _MOVES and self._is_alone(value[0], user):
            moves.insert(0, value[0])
            user, value = value[0], self._body.nodes[value[0]].inputs[0]
        linear = self._body.nodes[value[0]]
        if linear.op not in _LINEAR or not self._is_alone(value[0], user):
            return None
        found = _FoldableNorm(value[0], bias, last, mul, tuple(moves))
        if bias is not None and producer.op != "BiasAdd" and not self._is_per_channel(self._other(bias), found):
            return None
        if not self._keeps_channels(found) or id(self._body.nodes[linear.inputs[1][0]]) in self._reached:
            return None
        return found

    def _keeps_channels(self, found: _FoldableNorm) -> bool:
        """Returns whether output channels are along the last axis after each of the ops that move elements."""
        if not found.moves:
            return True
        linear = self._body.nodes[found.linear]
        data_format, channels = linear.attrs.get("data_format"), output_channels(self._body, linear, 1)
        if channels is None or (data_format is not None and data_format.s.startswith(b"NC")):
            return False
        rank = len(static_shape(self._body, linear.inputs[1]) or ())
        for index in found.moves:
            node = self._body.nodes[index]
            if node.op == "Squeeze":
                axes = node.attrs["squeeze_dims"].list.i
                if not axes or any(axis % rank == rank - 1 for axis in axes):
                    return False
                rank -= len(axes)
            else:
                blocks = static_shape(self._body, node.inputs[1])
                if blocks is None or blocks[0] >= rank - 1:
                    return False
        return True

    def _changing(self, node: Node) -> Ref | None:
        """Returns the operand that depends on the xs; None unless exactly one does."""
        live = [ref for ref in node.inputs if id(self._body.nodes[ref[0]]) in self._reached or ref in self._xs]
        return live[0] if len(live) == 1 else None

    def _is_alone(self, producer: int, consumer: int) -> bool:
        return self._consumers[producer] == [consumer] and producer not in self._kept

    def _fold(self, found: _FoldableNorm, candidates: dict[int, CandidateNode]) -> None:
        nodes = self._body.nodes
        linear = nodes[found.linear]
        dtype = (linear.outputs or ())[0]
        scale, shift = self._affine(found, dtype)
        if found.bias is not None:
            bias = self._flat(self._other(found.bias), dtype)
            shift = self._add("AddV2", [self._add("Mul", [bias, scale], dtype, "bias_scaled"), shift], dtype, "bias")
        weights = self._add("Mul", [linear.inputs[1], self._shaped(scale, linear)], dtype, "weights")
        folded = Node(
            self._copy.unique(self._body, f"{linear.name}/folded"),
            linear.op,
            [linear.inputs[0], weights, *linear.inputs[2:]],
            linear.controls,
            linear.attrs,
            linear.outputs,
            watched=linear.watched,
        )
        value = self._append(folded, found.linear, candidates)
        for index in found.moves:
            nodes[index].inputs = [value, *nodes[index].inputs[1:]]
            value = index, 0
        attrs = {"T": type_attr(dtype)}
        data_format = linear.attrs.get("data_format")
        spatial = data_format is not None and data_format.s.startswith(b"NC")
        attrs["data_format"] = AttrValue(s=b"NCHW" if spatial else b"NHWC")
        name = self._copy.unique(self._body, f"{nodes[found.last].name}/folded")
        added = Node(name, "BiasAdd", [value, shift], [], attrs, (dtype,), watched=linear.watched)
        self._moves[found.last, 0] = self._append(added, found.last, candidates)
        self._replaced |= {
            id(candidates[index]) for index in (found.bias, found.mul) if index is not None and index in candidates
        }

    def _affine(self, found: _FoldableNorm, dtype: int) -> tuple[Ref, Ref]:
        """Returns scale and shift per output channel, in the linear op's element type."""
        node = self._body.nodes[found.last]
        if found.mul is not None:
            return self._flat(self._other(found.mul), dtype), self._flat(self._other(found.last), dtype)
        _, gamma, beta, mean, variance = node.inputs
        own = (self._body.nodes[gamma[0]].outputs or ())[gamma[1]]
        epsilon = self._constant(node.attrs["epsilon"].f, own)
        root = self._add("Rsqrt", [self._add("AddV2", [variance, epsilon], own, "variance")], own, "rsqrt")
        scale = self._add("Mul", [gamma, root], own, "scale")
        shift = self._add("Sub", [beta, self._add("Mul", [mean, scale], own, "mean_scaled")], own, "shift")
        return self._cast(scale, own, dtype), self._cast(shift, own, dtype)

    def _other(self, position: int) -> Ref:
        """Returns the operand that does not depend on the xs."""
        node = self._body.nodes[position]
        if node.op == "BiasAdd":
            return node.inputs[1]
        changing = self._changing(node)
        return next(ref for ref in node.inputs if ref != changing)

    def _flat(self, ref: Ref, dtype: int) -> Ref:
        """Returns the operand as a vector with one entry per channel."""
        return self._add("Reshape", [ref, self._int_list([-1])], dtype, "flat", Tshape=Dt.DT_INT32)

    def _shaped(self, scale: Ref, linear: Node) -> Ref:
        """Returns the scale in a shape that broadcasts over the linear op's weights."""
        dtype = (linear.outputs or ())[0]
        transposed = linear.attrs.get("transpose_b") or linear.attrs.get("adj_y")
        if linear.op in TRANSPOSED or (transposed is not None and transposed.b):
            return self._add("Reshape", [scale, self._int_list([-1, 1])], dtype, "column", Tshape=Dt.DT_INT32)
        if linear.op != "DepthwiseConv2dNative":
            return scale
        # [height, width, channels, multiplier]: output channels run over the last two axes.
        weights = linear.inputs[1]
        shape = self._node(
            "Shape", [weights], {"T": type_attr(dtype), "out_type": type_attr(Dt.DT_INT32)}, Dt.DT_INT32, "shape"
        )
        ends = [self._int_list([value]) for value in (2, 4, 1)]
        masks = {f"{mask}_mask": AttrValue(i=0) for mask in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
        attrs = {"T": type_attr(Dt.DT_INT32), "Index": type_attr(Dt.DT_INT32), **masks}
        last_two = self._node("StridedSlice", [shape, *ends], attrs, Dt.DT_INT32, "channels")
        return self._add("Reshape", [scale, last_two], dtype, "channels_scale", Tshape=Dt.DT_INT32)

    def _cast(self, ref: Ref, dtype: int, wanted: int) -> Ref:
        if dtype == wanted:
            return ref
        attrs = {"SrcT": type_attr(dtype), "DstT": type_attr(wanted), "Truncate": AttrValue(b=False)}
        return self._node("Cast", [ref], attrs, wanted, "cast")

    def _constant(self, value: float, dtype: int) -> Ref:
        return self._node("Const", [], constant_attrs(value, dtype), dtype, "epsilon")

    def _int_list(self, values: Sequence[int]) -> Ref:
        return self._node("Const", [], constant_attrs(values, Dt.DT_INT32), Dt.DT_INT32, "sizes")

    def _add(self, op: str, inputs: list[Ref], dtype: int, name: str, **types: int) -> Ref:
        attrs = {"T": type_attr(dtype)} | {key: type_attr(value) for key, value in types.items()}
        return self._node(op, inputs, attrs, dtype, name)

    def _node(self, op: str, inputs: list[Ref], attrs: dict[str, AttrValue], dtype: int, name: str) -> Ref:
        full = self._copy.unique(self._body, f"{FOLD_BATCH_NORM}/{name}")
        return self._append(Node(full, op, inputs, [], attrs, (dtype,)), None, {})

    def _append(self, node: Node, replaces: int | None, candidates: dict[int, CandidateNode]) -> Ref:
        """Adds a node; with `replaces`, the new node gets the public name of that node."""
        self._body.nodes.append(node)
        index = len(self._body.nodes) - 1
        old = candidates.get(replaces) if replaces is not None else None
        if old is not None:
            old.index = index
        return index, 0
