"""Finds the nodes between the inputs and outputs of a layer's call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradrule._builder.graph import Graph
from gradrule._builder.layer_calls import LayerCall
from gradrule._builder.names import bare, split
from gradrule.v1.tensor_pb2 import Dt

_WITHOUT_GRADIENT = frozenset(
    {Dt.DT_BOOL, Dt.DT_STRING, Dt.DT_INT8, Dt.DT_INT16, Dt.DT_INT32, Dt.DT_INT64, Dt.DT_UINT8, Dt.DT_UINT16}
    | {Dt.DT_UINT32, Dt.DT_UINT64, Dt.DT_RESOURCE}
)
_VALUE_SOURCES = frozenset({"Placeholder", "PlaceholderWithDefault", "VarHandleOp", "VariableV2"})


@dataclass(frozen=True, slots=True)
class Site:
    """Describes the subgraph of one call.

    Attributes:
        nodes: names of the nodes through which gradients flow, in the graph's order.
        inputs: the layer's input tensors, then its weights in the order of their use.
        outputs: tensors that the layer returns.
        is_op: whether the subgraph is a single node with exactly these inputs.
    """

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_op: bool


class Paths:
    """Finds the subgraphs of calls in a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inputs = {
            node.name: [bare(name) for name in node.inputs if not name.startswith("^")] for node in graph.find()
        }
        self._users: dict[str, list[str]] = {}
        for node, inputs in self._inputs.items():
            for tensor in dict.fromkeys(inputs):
                self._users.setdefault(tensor, []).append(node)

    def site(self, call: LayerCall) -> Site | None:
        """Returns the subgraph of a call; None if the call returns its inputs."""
        border, ends = set(call.inputs), [name for name in call.outputs if name not in call.inputs]
        for only_gradients in (True, False):
            inside = self._between(border, ends, only_gradients)
            if inside:
                break
        else:
            return None
        nodes = [node for node in self._inputs if node in inside]
        entering = dict.fromkeys(name for node in nodes for name in self._inputs[node] if split(name)[0] not in inside)
        weights = [
            name for name in entering if name not in border and self._has_gradient(name) and self._is_weight(name)
        ]
        inputs = (*call.inputs, *weights)
        outputs = tuple(name for name in ends if split(name)[0] in inside)
        operands = {name for name in self._inputs[nodes[0]] if self._has_gradient(name)}
        return Site(tuple(nodes), inputs, outputs, len(nodes) == 1 and operands <= set(inputs))

    def _between(self, border: set[str], ends: Iterable[str], only_gradients: bool) -> set[str]:
        """Returns the nodes on paths from the border to the ends, optionally only on differentiable paths."""
        reached: set[str] = set()
        pending = [user for tensor in border for user in self._users.get(tensor, ())]
        while pending:
            node = pending.pop()
            if node not in reached:
                reached.add(node)
                for handle in self._graph.outputs_of(node):
                    if not only_gradients or self._has_gradient(bare(handle.name)):
                        pending += self._users.get(bare(handle.name), ())
        found: set[str] = set()
        pending = [split(name)[0] for name in ends if not only_gradients or self._has_gradient(name)]
        while pending:
            node = pending.pop()
            if node in reached and node not in found:
                found.add(node)
                pending += [
                    split(name)[0]
                    for name in self._inputs[node]
                    if name not in border and (not only_gradients or self._has_gradient(name))
                ]
        return found

    def _has_gradient(self, tensor: str) -> bool:
        """Returns whether gradients are defined for a tensor's element type."""
        node, index = split(tensor)
        handles = self._graph.outputs_of(node)
        return index < len(handles) and handles[index].number not in _WITHOUT_GRADIENT

    def _is_weight(self, tensor: str) -> bool:
        """Returns whether a tensor depends on a placeholder or variable."""
        pending, seen = [split(tensor)[0]], set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if self._graph.node(node).op_type in _VALUE_SOURCES:
                return True
            pending += [split(name)[0] for name in self._inputs[node]]
        return False
