"""Element types of a graph's tensors, worked out when asked for."""

from __future__ import annotations

from collections.abc import Iterable

from gradrule._builder.names import split
from gradrule.common import op_definitions
from gradrule.common.op_inference import InferenceError, complete
from gradrule.v1 import graph_pb2

# Where nothing can be told of a node: one output of unknown type.
_UNKNOWN = (0,)


class GraphTypes:
    """Nodes of a graph by name, definitions of their ops, and the types of what they put out."""

    def __init__(self, message: graph_pb2.Graph) -> None:
        self._message = message
        self._nodes: dict[str, graph_pb2.Node] = {}
        for node in message.node:
            self._nodes.setdefault(node.name, node)
        self._functions = {
            function.signature.name: op_definitions.from_signature(function.signature)
            for function in message.library.function
        }
        self._outputs: dict[str, tuple[int, ...]] = {}

    def node(self, name: str) -> graph_pb2.Node | None:
        """The node of a name."""
        return self._nodes.get(name)

    def names(self) -> Iterable[str]:
        """Names of all nodes."""
        return self._nodes.keys()

    def functions(self) -> Iterable[str]:
        """Names of the graph's functions."""
        return self._functions.keys()

    def definition(self, op_type: str) -> op_definitions.OpDef | None:
        """The definition of an op type, or of a function of the graph."""
        return self._functions.get(op_type) or op_definitions.find(op_type)

    def added(self, node: graph_pb2.Node, outputs: tuple[int, ...]) -> None:
        """Takes note of a node whose types are known."""
        self._nodes[node.name] = node
        self._outputs[node.name] = outputs

    def outputs(self, name: str) -> tuple[int, ...]:
        """Types of a node's outputs, 0 where they cannot be told: unknown ops, broken inputs, cycles."""
        pending = [name]
        visited: set[str] = set()
        while pending:
            current = pending[-1]
            if current in self._outputs:
                pending.pop()
                continue
            node = self._nodes.get(current)
            if node is None:
                self._outputs[current] = _UNKNOWN
                continue
            inputs = [split(text) for text in node.input if not text.startswith("^")]
            if current not in visited:
                # A source that was visited and has no types yet is part of a cycle.
                visited.add(current)
                ahead = [source for source, _ in inputs if source not in self._outputs and source not in visited]
                if ahead:
                    pending.extend(ahead)
                    continue
            self._outputs[current] = self._infer(node, [self._type(source, index) for source, index in inputs])
        return self._outputs[name]

    def _type(self, node: str, index: int) -> int:
        outputs = self._outputs.get(node, _UNKNOWN)
        return outputs[index] if index < len(outputs) else 0

    def _infer(self, node: graph_pb2.Node, inputs: list[int]) -> tuple[int, ...]:
        definition = self.definition(node.op)
        if definition is None:
            return _UNKNOWN
        try:
            return complete(definition, node.attr, inputs).outputs
        except InferenceError:
            # The server tells what is wrong with the node; here only its types stay unknown.
            return _UNKNOWN
