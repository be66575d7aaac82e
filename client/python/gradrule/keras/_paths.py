"""What lies between the tensors that go into a layer and those that come out of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradrule._graph import Graph
from gradrule._layers import LayerCall
from gradrule._names import bare, split
from gradrule.v1.tensor_pb2 import Dt

_WITHOUT_GRADIENT = frozenset(
    {Dt.DT_BOOL, Dt.DT_STRING, Dt.DT_INT8, Dt.DT_INT16, Dt.DT_INT32, Dt.DT_INT64, Dt.DT_UINT8, Dt.DT_UINT16}
    | {Dt.DT_UINT32, Dt.DT_UINT64, Dt.DT_RESOURCE}
)
_CHANGEABLE = frozenset({"Placeholder", "PlaceholderWithDefault", "VarHandleOp", "VariableV2"})


@dataclass(frozen=True, slots=True)
class Site:
    """The subgraph of one call. nodes: those that gradients go through, in the graph's order.

    inputs: the layer's, then its weights in the order of their use. is_op: whether it is a single node with just these
    inputs.
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
        """The subgraph of a call; None for one that passes on what goes in."""
        border, ends = set(call.inputs), [name for name in call.outputs if name not in call.inputs]
        for only_gradients in (True, False):
            inside = self._between(border, ends, only_gradients)
            if inside:
                break
        else:
            return None
        nodes = [node for node in self._inputs if node in inside]
        entering = dict.fromkeys(name for node in nodes for name in self._inputs[node] if split(name)[0] not in inside)
        weights = [name for name in entering if name not in border and self._differs(name) and self._is_weight(name)]
        inputs = (*call.inputs, *weights)
        outputs = tuple(name for name in ends if split(name)[0] in inside)
        operands = {name for name in self._inputs[nodes[0]] if self._differs(name)}
        return Site(tuple(nodes), inputs, outputs, len(nodes) == 1 and operands <= set(inputs))

    def _between(self, border: set[str], ends: Iterable[str], only_gradients: bool) -> set[str]:
        """Nodes that something of the border leads to and that lead to an end, through tensors that have gradients."""
        reached: set[str] = set()
        pending = [user for tensor in border for user in self._users.get(tensor, ())]
        while pending:
            node = pending.pop()
            if node not in reached:
                reached.add(node)
                for handle in self._graph.outputs_of(node):
                    if not only_gradients or self._differs(bare(handle.name)):
                        pending += self._users.get(bare(handle.name), ())
        found: set[str] = set()
        pending = [split(name)[0] for name in ends if not only_gradients or self._differs(name)]
        while pending:
            node = pending.pop()
            if node in reached and node not in found:
                found.add(node)
                pending += [
                    split(name)[0]
                    for name in self._inputs[node]
                    if name not in border and (not only_gradients or self._differs(name))
                ]
        return found

    def _differs(self, tensor: str) -> bool:
        """Whether gradients are defined for a tensor."""
        node, index = split(tensor)
        handles = self._graph.outputs_of(node)
        return index < len(handles) and handles[index].number not in _WITHOUT_GRADIENT

    def _is_weight(self, tensor: str) -> bool:
        """Whether a tensor depends on something that a call may change."""
        pending, seen = [split(tensor)[0]], set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if self._graph.node(node).op_type in _CHANGEABLE:
                return True
            pending += [split(name)[0] for name in self._inputs[node]]
        return False
